// Attention by products of single warps: mma_source.py explains them and fills in the names in capitals.

FRAGMENT(declare_warp) {
  RESIDENT(memory);
  TYPE *all_keys = (TYPE*)memory, *all_values = all_keys + STAGES * KEYS_SIZE;
  float sums[TILES][VALUE_OCTETS][4], weight[TILES][4];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int b = 0; b < VALUE_OCTETS; ++b)
      #pragma unroll
      for (int e = 0; e < 4; ++e) sums[a][b][e] = 0.0f;
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int e = 0; e < 4; ++e) weight[a][e] = 0.0f;
}

FRAGMENT(loop_of_warps) {
  COPY_FIRST
  bool fresh = true;
  #pragma unroll 1
  for (u32 round = 0; round < rounds; ++round) {
    BEFORE_WAIT
    // This round's keys and values are copied, and no thread reads those of the round before any more.
    wait_for_copies<0>();
    __syncthreads();
    const TYPE* own_keys = all_keys + round % STAGESu * KEYS_SIZEu;
    const TYPE* own_values = all_values + round % STAGESu * VALUES_SIZEu;
    if (round + 1u < rounds) {
      COPY_NEXT
    }
    #pragma unroll
    for (int s = 0; s < KEYS / STEP; ++s) {
      float scores[TILES][STEP / 8][4];
      #pragma unroll
      for (int a = 0; a < TILES; ++a)
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
          #pragma unroll
          for (int e = 0; e < 4; ++e) scores[a][n][e] = 0.0f;
      #pragma unroll
      for (int n = 0; n < STEP / 8; n += 2) {
        SCORE
      }
      WEIGH
      // Weights are multiplied by values, and by ones, which gives each thread the sums of its rows.
      #pragma unroll
      for (int n = 0; n < STEP / 8; n += 2) {
        #pragma unroll
        for (int a = 0; a < TILES; ++a)
          multiply_tile<TYPE>(weight[a], power[a][n][0], power[a][n][1], power[a][n + 1][0], power[a][n + 1][1], ONEu,
                              ONEu);
        ACCUMULATE
      }
    }
  }
}

// Begin to copy the keys, or values, of a round; past the end, store zeros.
FRAGMENT(copy) {
  #pragma unroll
  for (u32 i = 0; i < TURNSu; ++i) {
    const u32 piece = threadIdx.x + i * THREADSu, own = piece / OCTETSu;
    const u32 octet = piece % OCTETSu, place = own * PITCHu + octet * 8u;
    const u32 key = AT_ROUND * KEYSu + own;
    TYPE* to = SHARED + (AT_STAGE * SIZEu + place);
    if (PIECES_FIT || piece < PIECESu) {
      if (KEYS_FIT || key < KEY_COUNTu) copy_ahead<16>(to, MEMORY + (key * STRIDEu + octet * 8u));
      else *(Pack<u32, 4>*)to = Pack<u32, 4>{{0u, 0u, 0u, 0u}};
    }
  }
}

// Multiply queries by sixteen keys, two octets of features: those of keys 0 to 7 first, then of keys 8 to 15.
FRAGMENT(score_pair) {
  {
    u32 key[4];
    load_tiles<false>(key, own_keys + ((s * STEP + n * 8 + lane / 16u * 8u + lane % 8u) * PITCHu + OCTET * 8u +
                                       lane / 8u % 2u * 8u));
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_tile<TYPE>(scores[a][n + 0], query[a][OCTET][0], query[a][OCTET][1], query[a][OCTET + 1][0],
                          query[a][OCTET + 1][1], key[0], key[1]);
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_tile<TYPE>(scores[a][n + 1], query[a][OCTET][0], query[a][OCTET][1], query[a][OCTET + 1][0],
                          query[a][OCTET + 1][1], key[2], key[3]);
  }
}

// The same where only one octet is left.
FRAGMENT(score_last) {
  {
    u32 key[2];
    load_tiles<false>(key, own_keys + ((s * STEP + n * 8 + lane % 16u) * PITCHu + OCTET * 8u));
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_half_tile<TYPE>(scores[a][n + 0], query[a][OCTET][0], query[a][OCTET][1], key[0]);
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_half_tile<TYPE>(scores[a][n + 1], query[a][OCTET][0], query[a][OCTET][1], key[1]);
  }
}

FRAGMENT(accumulate_pair) {
  {
    u32 value[4];
    load_tiles<true>(value, own_values + ((s * STEP + n * 8 + lane % 16u) * PITCHu + OCTET * 8u + lane / 16u * 8u));
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_tile<TYPE>(sums[a][OCTET], power[a][n][0], power[a][n][1], power[a][n + 1][0], power[a][n + 1][1],
                          value[0], value[1]);
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_tile<TYPE>(sums[a][OCTET + 1], power[a][n][0], power[a][n][1], power[a][n + 1][0], power[a][n + 1][1],
                          value[2], value[3]);
  }
}

FRAGMENT(accumulate_last) {
  {
    u32 value[2];
    load_tiles<true>(value, own_values + ((s * STEP + n * 8 + lane % 16u) * PITCHu + OCTET * 8u));
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      multiply_tile<TYPE>(sums[a][OCTET], power[a][n][0], power[a][n][1], power[a][n + 1][0], power[a][n + 1][1],
                          value[0], value[1]);
  }
}
