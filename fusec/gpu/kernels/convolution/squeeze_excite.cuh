// Sequences of small products: squeeze_excite.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 c0 = blockIdx.x / SPLITSu;
  SPLIT
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  VECTORS
  for (u32 c1 = threadIdx.x; c1 < SIZEu; c1 += THREADSu) {
    MEAN
    FIRST_LAYER
  }
  LAYERS
}

// The mean over space, from the sums of the blocks of the depthwise convolution.
FRAGMENT(merge_sums) {
  TYPE sum = 0;
  #pragma unroll 8
  for (u32 s = 0; s < CHUNKSu; ++s) sum += SUMS[(s * SAMPLESu + c0) * SIZEu + c1];
}

// Multiply by rows: a warp computes a result, and some others at the same time.
FRAGMENT(by_rows) {
  __syncthreads();
  {
    const u32 limit = LIMIT;
    for (u32 turn = 0; turn < TURNSu; ++turn) {
      const u32 first = BEGIN + turn * (WARPSu * EACH) + warp;
      TYPE acc[EACH];
      for (int u = 0; u < EACH; ++u) acc[u] = 0;
      #pragma unroll 4
      for (u32 k = lane * VECTORu; k < DEPTHu; k += STEPu) {
        #pragma unroll
        for (int u = 0; u < EACH; ++u) {
          const u32 o = first + u * WARPSu < limit ? first + u * WARPSu : limit - 1;
          const Pack<STORED, VECTOR> w = load_pack<STORED, VECTOR>(WEIGHTS + (o * RESULT_STRIDE + k * DEPTH_STRIDE));
          for (int j = 0; j < VECTOR; ++j) acc[u] += wide(w.v[j]) * INPUT[k + j];
        }
      }
      reduce_threads<THREADS, 32, 1, EACH>(acc, (TYPE*)0, Add());
      #pragma unroll
      for (int u = 0; u < EACH; ++u) {
        const u32 c1 = first + u * WARPSu;
        if (lane != 0 || c1 >= limit) continue;
        FINISH
      }
    }
  }
}

// Multiply by columns: a thread computes some neighbouring results.
FRAGMENT(by_columns) {
  __syncthreads();
  {
    const u32 limit = LIMIT;
    for (u32 pack = BEGIN + threadIdx.x; pack < limit; pack += THREADSu) {
      const u32 c1 = pack * VECTORu;
      TYPE acc[VECTOR];
      for (int j = 0; j < VECTOR; ++j) acc[j] = 0;
      #pragma unroll 16
      for (u32 k = 0; k < DEPTHu; ++k) {
        const Pack<STORED, VECTOR> w = load_pack<STORED, VECTOR>(WEIGHTS + (c1 * RESULT_STRIDE + k * DEPTH_STRIDE));
        for (int j = 0; j < VECTOR; ++j) acc[j] += wide(w.v[j]) * INPUT[k];
      }
      FINISH
    }
  }
}
