// Products of few rows with constant weights of 16 bits: few_rows.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  u32 weights[VECTORS][PACKS][4];
  u32 group = blockIdx.x;
  LOAD_FIRST
  BEGIN
  LOAD_ROWS
  __shared__ float sums[2][WARPS][SIZE];
  #pragma unroll 1
  for (u32 turn = 0; group < GROUPSu; ++turn) {
    float sum[VECTORS][ROWS];
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        sum[v][r] = 0.0f;
        #pragma unroll
        for (int p = 0; p < PACKS; ++p)
          #pragma unroll
          for (int i = 0; i < 4; ++i) {
            MULTIPLY
          }
      }
    const u32 first = group * WIDTHu;
    group += BLOCKSu;
    if (group < GROUPSu) {
      LOAD_NEXT
    }
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        for (int s = 16; s > 0; s /= 2) sum[v][r] += __shfl_xor_sync(0xffffffffu, sum[v][r], s);
        if (threadIdx.x % 32u == 0) sums[turn % 2u][threadIdx.x / 32u][v * ROWS + r] = sum[v][r];
      }
    __syncthreads();
    for (u32 i = threadIdx.x; i < RESULTSu; i += THREADSu) {
      const u32 at = i / WIDTHu, column = first + i % WIDTHu;
      if (IS_PARTIAL && column >= COLUMNSu) continue;
      ADD_UP
      RESULT_COORDINATES
      EPILOGUE
    }
  }
}

// Request the weights of a group. Past the last column, those of the last one again: their sums are not stored.
FRAGMENT(load) {
  #pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const u32 pack = p * THREADSu + threadIdx.x;
    LOAD_COLUMNS
  }
}

FRAGMENT(load_column) {
  #pragma unroll
  for (int c = 0; c < WIDTH; ++c) {
    const u32 column = COLUMN;
    if (IS_WHOLE || pack < ALL_PACKSu) {
      load_words(weights[FIRST + c][p], POINTER + ((u64)column * DEPTHu + pack * 8u));
    } else {
      for (int i = 0; i < 4; ++i) weights[FIRST + c][p][i] = 0u;
    }
  }
}

FRAGMENT(multiply) {
  const Pair w = pair_of<TYPE>(weights[v][p][i]), y = pair_of<TYPE>(x[r][p].v[i]);
  sum[v][r] += w.low * y.low;
  sum[v][r] += w.high * y.high;
}

FRAGMENT(add_up) {
  float SUM = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; ++w) SUM += sums[turn % 2u][w][(FIRST + i % WIDTHu) * ROWSu + at];
}
