// Attention in training over short sequences: train_source.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, t = lane % 4u;
  const u32 first = warp / 4u * 64u, own = first + warp % 4u * 16u;  // rows of the warpgroup, and of the warp
  RESIDENT(memory);
  {
    const u32 next = blockIdx.x;
    TYPE *queries = (TYPE*)memory, *keys = queries + QUERIES_SIZE, *values = keys + KEYS_SIZE;
    HEAD_OF_NEXT
    COPY
  }
  u32 stage = 0u;
  #pragma unroll 1
  for (u32 block = blockIdx.x; block < HEADSu; block += BLOCKSu) {
    copied();
    wait_for_copies<0>();
    seen_by_groups();
    __syncthreads();
    const u32 next = block + BLOCKSu;
    if (next < HEADSu) {
      TYPE *queries = (TYPE*)memory + (1u - stage) * STAGE_SIZEu, *keys = queries + QUERIES_SIZE;
      TYPE* values = keys + KEYS_SIZE;
      HEAD_OF_NEXT
      COPY
    }
    if (first < QUERIESu) {
      HEAD_OF_BLOCK
      TYPE *queries = (TYPE*)memory + stage * STAGE_SIZEu, *keys = queries + QUERIES_SIZE, *values = keys + KEYS_SIZE;
      float most[2], total[2] = {0.0f, 0.0f}, base[2] = {0.0f, 0.0f};
      most[0] = most[1] = -INFINITE;
      float of_values[OCTETS][4];
      #pragma unroll
      for (int o = 0; o < OCTETS; ++o)
        #pragma unroll
        for (int e = 0; e < 4; ++e) of_values[o][e] = 0.0f;
      #pragma unroll 1
      for (u32 from = 0; from < KEYSu; from += PARTu) {
        VISIT
      }
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
      }
      STORE_SUMS
      const float share[2] = {1.0f / total[0], 1.0f / total[1]};
      STORE_RESULT
    }
    stage = 1u - stage;
  }
}

// Add the values of some keys, each times its weight. Where a larger score comes, scale the sums so far.
FRAGMENT(visit) {
  float scores[PART_OCTETS][4];
  group_begins();
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; o += 2u)
    ENTRY_PART_of_tiles(scores, queries + (o * QUERY_OCTETu + first * 8u), 2u * QUERY_OCTETu,
                        keys + (o * KEY_OCTETu + from * 8u), 2u * KEY_OCTETu, o > 0u);
  group_ends();
  wait_for_groups<0>();
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      pin(scores[n][e]);
      scores[n][e] *= SCALE;
    }
  if (!KEYS_FIT && from + PARTu > KEY_COUNTu) {
    #pragma unroll
    for (int n = 0; n < PART_OCTETS; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (from + n * 8u + 2u * t + e % 2 >= KEY_COUNTu) scores[n][e] = -INFINITE;
  }
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    float peak = most[h];
    #pragma unroll
    for (int n = 0; n < PART_OCTETS; ++n) peak = nmax(peak, nmax(scores[n][h * 2 + 0], scores[n][h * 2 + 1]));
    peak = nmax(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = nmax(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    const float now = fabs(peak) == INFINITE ? 0.0f : peak;
    // Sums without a finite score are zeros, which no factor may make NaN.
    const float factor = most[h] == -INFINITE ? 0.0f : quick_exp2(base[h] - now);
    total[h] *= factor;
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int e = 0; e < 2; ++e) of_values[o][h * 2 + e] *= factor;
    most[h] = peak;
    base[h] = now;
  }
  u32 power[PART_OCTETS][2];
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = quick_exp2(scores[n][h * 2 + 0] - base[h]), high = quick_exp2(scores[n][h * 2 + 1] - base[h]);
      total[h] += low + high;
      power[n][h] = word_of<TYPE>(low, high);
    }
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(of_values[o][e]);
  group_begins();
  #pragma unroll
  for (u32 n = 0; n < PART_OCTETSu; n += 2u) {
    const u32 words[4] = {power[n][0], power[n][1], power[n + 1][0], power[n + 1][1]};
    ENTRY_FEATURES_by_rows(of_values, words, values, (from + n * 8u) * 16u, 128u, 2u * KEY_OCTETu, 1);
  }
  group_ends();
  wait_for_groups<0>();
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(of_values[o][e]);
}

FRAGMENT(store_sums) {
  #pragma unroll
  for (int h = 0; h < 2; ++h)
    if (t == 0u && own + h * 8u + g < QUERY_COUNTu)
      (RESULT)[(own + h * 8u + g) * RESULT_ROWu] = log(total[h]) + base[h] * LOG_2;
}
