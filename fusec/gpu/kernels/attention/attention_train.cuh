// Attention in training over short sequences: attention_train.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, t = lane % 4u, block = blockIdx.x;
  BLOCK_COORDINATES
  POINTERS
  RESIDENT(memory);
  TYPE *keys = (TYPE*)memory, *values = keys + KEYS * DEPTH_PITCH;
  COPY_ROWS
  copied();
  const u32 first = (part * WARPSu + warp) * 16u;
  u32 query[DEPTH_OCTETS][2];
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 at = first + h * 8 + g;
    const u32* row = (const u32*)(q + (at < QUERY_COUNTu ? at : QUERY_COUNT - 1u) * QUERY_STRIDE);
    #pragma unroll
    for (int o = 0; o < DEPTH_OCTETS; ++o) query[o][h] = row[o * 4 + t];
  }
  wait_for_copies<0>();
  __syncthreads();
  if (first >= QUERY_COUNTu) return;
  float scores[KEY_TILES][2][4];
  #pragma unroll
  for (int k = 0; k < KEY_TILES; ++k) {
    #pragma unroll
    for (int n = 0; n < 2; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) scores[k][n][e] = 0.0f;
    #pragma unroll
    for (int o = 0; o < DEPTH_OCTETS; o += 2) {
      u32 x[4];
      load_tiles<false>(x, keys + ((k * 16 + lane / 16u * 8u + lane % 8u) * DEPTH_PITCHu + o * 8 + lane / 8u % 2u * 8u));
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        multiply_tile<TYPE>(scores[k][n], query[o][0], query[o][1], query[o + 1][0], query[o + 1][1], x[2 * n],
                            x[2 * n + 1]);
    }
  }
  // The largest score of each row, then weights and their sums.
  float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};
  #pragma unroll
  for (int k = 0; k < KEY_TILES; ++k)
    #pragma unroll
    for (int n = 0; n < 2; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 key = k * 16 + n * 8 + 2u * t + e % 2;
        scores[k][n][e] *= SCALE;
        if (!KEYS_FIT && key >= KEY_COUNTu) scores[k][n][e] = -INFINITE;
        if (IS_CAUSAL && key > first + e / 2 * 8 + g) scores[k][n][e] = -INFINITE;
        most[e / 2] = nmax(most[e / 2], scores[k][n][e]);
      }
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    most[h] = nmax(most[h], __shfl_xor_sync(0xffffffffu, most[h], 1));
    most[h] = nmax(most[h], __shfl_xor_sync(0xffffffffu, most[h], 2));
    most[h] = fabs(most[h]) == INFINITE ? 0.0f : most[h];
  }
  u32 power[KEY_TILES][2][2];
  #pragma unroll
  for (int k = 0; k < KEY_TILES; ++k)
    #pragma unroll
    for (int n = 0; n < 2; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = quick_exp2(scores[k][n][2 * h + 0] - most[h]);
        const float high = quick_exp2(scores[k][n][2 * h + 1] - most[h]);
        total[h] += low + high;
        power[k][n][h] = word_of<TYPE>(low, high);
      }
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
    total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
  }
  float of_values[WIDTH_OCTETS][4];
  #pragma unroll
  for (int o = 0; o < WIDTH_OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) of_values[o][e] = 0.0f;
  #pragma unroll
  for (int k = 0; k < KEY_TILES; ++k)
    #pragma unroll
    for (int o = 0; o < WIDTH_OCTETS; o += 2) {
      u32 x[4];
      load_tiles<true>(x, values + ((k * 16 + lane % 16u) * WIDTH_PITCHu + o * 8 + lane / 16u * 8u));
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        multiply_tile<TYPE>(of_values[o + n], power[k][0][0], power[k][0][1], power[k][1][0], power[k][1][1], x[2 * n],
                            x[2 * n + 1]);
    }
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 at = first + h * 8 + g;
    if (at < QUERY_COUNTu) {
      STORE
    }
  }
}

FRAGMENT(store_result) {
  TYPE* to = TO + 2u * t;
  #pragma unroll
  for (int o = 0; o < WIDTH_OCTETS; ++o)
    *(u32*)(to + 8 * o) = word_of<TYPE>(of_values[o][2 * h + 0] / total[h], of_values[o][2 * h + 1] / total[h]);
}

FRAGMENT(store_sums) {
  if (t == 0u) *(TO) = log(total[h]) + most[h] * LOG_2;
}
