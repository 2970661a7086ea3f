// A few rows in the registers of a block, and their RMS norm: row_norm.py fills in the names in capitals.

FRAGMENT(load) {
  Pack<u32, 4> x[ROWS][PACKS];
  #pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const u32 pack = p * THREADSu + threadIdx.x;
    LOAD_ROWS
  }
}

FRAGMENT(load_row) {
  if (IS_WHOLE || pack < ALL_PACKSu) x[ROW][p] = load_now<u32, 4>((const u32*)(POINTER + (OFFSETu + pack * 8u)));
  else x[ROW][p] = {{0u, 0u, 0u, 0u}};
}

// Divide each row by the root of the mean of its squares, and multiply it by the scale.
FRAGMENT(normalise) {
  __shared__ float squares[WARPS][ROWS];
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float square = 0.0f;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p)
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pair pair = pair_of<TYPE>(x[r][p].v[i]);
        square += pair.low * pair.low + pair.high * pair.high;
      }
    for (int s = 16; s > 0; s /= 2) square += __shfl_xor_sync(0xffffffffu, square, s);
    if (threadIdx.x % 32u == 0) squares[threadIdx.x / 32u][r] = square;
  }
  __syncthreads();
  float factor[ROWS];
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    factor[r] = 0.0f;
    for (int w = 0; w < WARPS; ++w) factor[r] += squares[w][r];
    factor[r] = 1.0f / sqrt(factor[r] / DEPTH.0f + EPSILON);
  }
  #pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const u32 pack = p * THREADSu + threadIdx.x;
    if (IS_WHOLE || pack < ALL_PACKSu) {
      const Pack<TYPE, 8> scale = load_pack<TYPE, 8>(SCALE + pack * 8u);
      #pragma unroll
      for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Pair pair = pair_of<TYPE>(x[r][p].v[i]);
          x[r][p].v[i] = word_of<TYPE>(pair.low * factor[r] * wide(scale.v[2 * i]),
                                       pair.high * factor[r] * wide(scale.v[2 * i + 1]));
        }
    }
  }
}

// Leave the rows in shared memory, one after the other.
FRAGMENT(share) {
  #pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const u32 pack = p * THREADSu + threadIdx.x;
    if (IS_WHOLE || pack < ALL_PACKSu)
      for (int r = 0; r < ROWS; ++r) *(Pack<u32, 4>*)(SHARED + (r * DEPTHu + pack * 8u)) = x[r][p];
  }
  __syncthreads();
}
