// Running sums and products: cumulate.py explains it and fills in the names in capitals. READ stands for
// statements that compute VALUE, the element `at` of a line, and STORE for those that store the result from `running`.

// A thread computes a line, element after element.
FRAGMENT(by_thread) {
  NUMBER running = NUMBER(START);
  #pragma unroll LOADED
  for (u32 at = 0; at < SIZEu; ++at) {
    NUMBER next;
    {
      READ
      next = VALUE;
    }
    running = (NUMBER)(running OP next);
    STORE
  }
}

// The part of a line that THREADS threads of a block compute. These threads are STRIDE apart. Threads without a line
// compute the first one again and store nothing, because all threads of a block wait at its barriers.
FRAGMENT(place) {
  const u32 lane = threadIdx.x / STRIDEu % THREADSu;
  const u32 number = blockIdx.x * TOGETHERu + threadIdx.x / (STRIDEu * THREADSu) + threadIdx.x % STRIDEu;
  const bool is_there = number < COUNT;
  const u32 piece = is_there ? number : 0u;
  const u32 i = piece % LINES, part = piece / LINES;
  const u32 begin = part * PARTu, end = begin + PARTu < SIZEu ? begin + PARTu : SIZEu;
}

// Add up what the threads of a line hold: `before` is the sum of those of earlier threads, and `whole` of all.
FRAGMENT(scan) {
  __shared__ NUMBER held[2][BLOCK];
  u32 now = 0u;
  held[0][threadIdx.x] = total;
  __syncthreads();
  for (u32 step = 1u; step < THREADSu; step *= 2u) {
    const NUMBER own = held[now][threadIdx.x];
    held[1u - now][threadIdx.x] = lane >= step ? (NUMBER)(held[now][threadIdx.x - step * STRIDEu] + own) : own;
    now = 1u - now;
    __syncthreads();
  }
  const NUMBER before = lane ? held[now][threadIdx.x - STRIDEu] : NUMBER(0);
  const NUMBER whole = held[now][threadIdx.x + (THREADSu - 1u - lane) * STRIDEu];
  __syncthreads();
}

// The sum of a part of a long line, for the launch after this one.
FRAGMENT(part_sum) {
  NUMBER total = NUMBER(0);
  for (u32 at = begin + lane; at < end; at += THREADSu) {
    READ
    total = (NUMBER)(total + VALUE);
  }
  SCAN
  if (is_there && lane == 0u) SUMS[piece] = whole;
}

// The sum of all parts before this one.
FRAGMENT(earlier_parts) {
  {
    NUMBER total = NUMBER(0);
    for (u32 other = lane; other < part; other += THREADSu) total = (NUMBER)(total + SUMS[other * LINES + i]);
    SCAN
    carry = whole;
  }
}

// Running sums: each thread adds ITEMS neighbours, then the threads of the line add up their sums.
FRAGMENT(by_threads) {
  NUMBER carry = NUMBER(0);
  EARLIER
  for (u32 base = begin; base < end; base += THREADSu * ITEMSu) {
    const u32 first = base + lane * ITEMSu;
    NUMBER sums[ITEMS], total = NUMBER(0);
    #pragma unroll
    for (u32 k = 0; k < ITEMSu; ++k) {
      const u32 at = first + k;
      if (at < end) {
        READ
        total = (NUMBER)(total + VALUE);
      }
      sums[k] = total;
    }
    SCAN
    #pragma unroll
    for (u32 k = 0; k < ITEMSu; ++k) {
      const u32 at = first + k;
      if (is_there && at < end) {
        const NUMBER running = (NUMBER)(carry + (NUMBER)(before + sums[k]));
        STORE
      }
    }
    carry = (NUMBER)(carry + whole);
  }
}
