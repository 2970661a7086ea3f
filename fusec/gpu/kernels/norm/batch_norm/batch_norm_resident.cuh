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
      SHUFFLES
    }
  }
  if (threadIdx.x % 32u < LANESu)
    for (int w = 0; w < WIDTH; ++w) {
      STORES
      if (threadIdx.x < 32u) centres[lane * WIDTHu + w] = around[w];
    }
  __syncthreads();
  for (u32 i = threadIdx.x; i < OWNu; i += BLOCKu) {
    KIND ZEROS;
    #pragma unroll
    for (u32 k = 0; k < WARPSu; ++k) { ADDITIONS }
    STATISTICS
    const u32 c = team * OWNu + i;
    if (c < CHANNELSu) {
      store_pack<KIND, NUMBERS>(SCRATCH + (chunk * CHANNELSu + c) * NUMBERSu, Pack<KIND, NUMBERS>{{TOTALS}});
    }
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
  KIND ZEROS;
  CENTRE
  #pragma unroll 1
  for (u32 k0 = 0; k0 < PARTSu; k0 += TOGETHERu) {
    Pack<KIND, NUMBERS> pairs[TOGETHER];
    #pragma unroll
    for (u32 k = 0; k < TOGETHERu; ++k) {
      const u32 number = s0 + (k0 + k) * EACHu, s = number < CHUNKSu ? number : 0u;
      pairs[k] = PAIR;
    }
    MERGE
  }
  if (spot < OWNu) {
    STORES
  }
  __syncthreads();
  if (s0 == 0u && spot < OWNu) {
    #pragma unroll
    for (u32 k = 1; k < EACHu; ++k) { ADDITIONS }
    FINISH
  }
}

FRAGMENT(turns) {
  #pragma unroll UNROLLED
  for (u32 NAME = FIRSTu; NAME < COUNTu; ++NAME)
    TURN
}
