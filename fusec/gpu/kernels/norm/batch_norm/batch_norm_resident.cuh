// Batch norm in one launch. A block has OWN channels and every CHUNKS-th group of THREADS rows.

FRAGMENT(place) {
  __shared__ KIND sums[SUM_ROWS][OWN], centres[OWN];
  __shared__ KIND factors[FACTORS];
  RESIDENT(memory);
  const u32 t = threadIdx.x / LANESu, lane = threadIdx.x % LANESu;
  const u32 team = blockIdx.x % BLOCKSu, chunk = blockIdx.x / BLOCKSu, first = chunk * THREADSu + t;
  const u32 group = team * LANESu + lane;
  const bool live = group < GROUPSu;
  const u32 at = live ? group : LAST_GROUPu;
}

// Merge the sums of threads within warps, then of warps. Sums of neighbouring channels are neighbours, because neighbouring
// threads read them.
FRAGMENT(merge_warps) {
  #pragma unroll
  for (int s = 16; s >= LANES; s /= 2) {
    #pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      acc0[w] += __shfl_xor_sync(0xffffffffu, acc0[w], s);
      acc1[w] += __shfl_xor_sync(0xffffffffu, acc1[w], s);
    }
  }
  if (threadIdx.x % 32u < LANESu)
    for (int w = 0; w < WIDTH; ++w) {
      sums[0u + threadIdx.x / 32u][lane * WIDTHu + w] = acc0[w];
      sums[WARPSu + threadIdx.x / 32u][lane * WIDTHu + w] = acc1[w];
      if (threadIdx.x < 32u) centres[lane * WIDTHu + w] = around[w];
    }
  __syncthreads();
  for (u32 i = threadIdx.x; i < OWNu; i += BLOCKu) {
    KIND sum0 = KIND(0), sum1 = KIND(0);
    #pragma unroll
    for (u32 k = 0; k < WARPSu; ++k) { sum0 += sums[k][i]; sum1 += sums[WARPSu + k][i]; }
    STATISTICS
    const u32 c = team * OWNu + i;
    if (c < CHANNELSu) store_pack<KIND, 2>(SCRATCH + (chunk * CHANNELSu + c) * 2u, Pack<KIND, 2>{{sum0, sum1}});
  }
}

// Channel `c` of the block, number `place` of its channels, shared by EACH threads, of which this is number `s0`.
FRAGMENT(each_channel) {
  #pragma unroll
  for (u32 round = 0; round < ROUNDSu; ++round) {
    const u32 s0 = threadIdx.x / SPOTSu, spot = round * SPOTSu + threadIdx.x % SPOTSu;
    const u32 place = spot < OWNu ? spot : LAST_OWNu;
    const u32 wanted = team * OWNu + place;
    const bool real = spot < OWNu && wanted < CHANNELSu;
    const u32 c = real ? wanted : LAST_CHANNELu;
    BODY
  }
}

FRAGMENT(each_round) {
  #pragma unroll
  for (u32 round = 0; round < ROUNDSu; ++round) {
    BODY
  }
}

// A thread loads the sums of several chunks before it adds any, so that it waits for memory once.
FRAGMENT(merge_chunks) {
  KIND acc0[1] = {KIND(0)}, acc1[1] = {KIND(0)};
  CENTRE
  #pragma unroll 1
  for (u32 k0 = 0; k0 < PARTSu; k0 += TOGETHERu) {
    Pack<KIND, 2> pairs[TOGETHER];
    #pragma unroll
    for (u32 k = 0; k < TOGETHERu; ++k) {
      const u32 number = s0 + (k0 + k) * EACHu, s = number < CHUNKSu ? number : 0u;
      pairs[k] = PAIR;
    }
    MERGE
  }
  if (spot < OWNu) {
    sums[0u + s0][place] = acc0[0];
    sums[EACHu + s0][place] = acc1[0];
  }
  __syncthreads();
  if (s0 == 0u && spot < OWNu) {
    #pragma unroll
    for (u32 k = 1; k < EACHu; ++k) { acc0[0] += sums[k][place]; acc1[0] += sums[EACHu + k][place]; }
    FINISH
  }
}

FRAGMENT(turns) {
  #pragma unroll UNROLLED
  for (u32 NAME = FIRSTu; NAME < COUNTu; ++NAME)
    TURN
}
