// The place of the largest element of each long row: arg_max.py explains it and fills in the names in capitals.

// A number that is larger for larger elements, and for the first of equal ones. NaN wins.
FRAGMENT(functions) {
  DEVICE u64 ENTRY_key(float x, u32 place) {
    const u32 bits = f32_to_bits(x + 0.0f);
    return x != x ? ~0ull : (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~place;
  }
  DEVICE u64 ENTRY_largest(u64 best, u64* shared) {
    for (int s = 16; s > 0; s /= 2) {
      const u64 other = __shfl_xor_sync(0xffffffffu, best, s);
      best = other > best ? other : best;
    }
    if (threadIdx.x % 32u == 0) shared[threadIdx.x / 32u] = best;
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) best = shared[w] > best ? shared[w] : best;
    return best;
  }
}

FRAGMENT(kernel) {
  __shared__ u64 shared[WARPS];
  const u32 row = blockIdx.x / PARTSu, part = blockIdx.x % PARTSu;
  const u32 end = (part + 1u) * PARTu < SIZEu ? (part + 1u) * PARTu : SIZEu;
  u64 best = 0ull;
  for (u32 i = part * PARTu + threadIdx.x * VECTORu; i < end; i += BLOCKu * VECTORu) {
    const Pack<TYPE, VECTOR> x = load_pack<TYPE, VECTOR>(ELEMENTS + ((u64)row * SIZEu + i));
    for (int j = 0; j < VECTOR; ++j) {
      const u64 key = ENTRY_key(wide(x.v[j]), i + j);
      best = key > best ? key : best;
    }
  }
  best = ENTRY_largest(best, shared);
  __syncthreads();
  MERGE
  if (threadIdx.x == 0) PLACES[row] = (PLACE_TYPE)(best == ~0ull ? LASTu : ~(u32)best);
}

// The last block of a row to finish compares what the blocks have found.
FRAGMENT(merge) {
  if (threadIdx.x == 0) SCRATCH[blockIdx.x] = best;
  if (!last_of(COUNTERS + row * COUNTER_STRIDE, PARTSu)) return;
  best = 0ull;
  for (u32 p = threadIdx.x; p < PARTSu; p += BLOCKu) {
    const u64 found = load_fresh((const u64*)(SCRATCH + (row * PARTSu + p)));
    best = found > best ? found : best;
  }
  best = ENTRY_largest(best, shared);
}
