// Attention of few features: attention_forward.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, g = lane / 4u, t = lane % 4u, block = blockIdx.x;
  BLOCK_COORDINATES
  const u32 group = head / SHARERSu;
  const u32 first = part * QUERIESu + threadIdx.x / 32u * (16u * TILES) + g;
  POINTERS
  DECLARE
  u32 query[TILES][QUERY_OCTETS][2];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 at = first + a * 16 + h * 8;
      const u32* row = (const u32*)(q + (at < QUERY_COUNTu ? at : QUERY_COUNT - 1u) * QUERY_STRIDE);
      #pragma unroll
      for (int o = 0; o < READ_OCTETS; ++o) query[a][o][h] = row[o * 4 + t];
    }
  if (READ_OCTETS < QUERY_OCTETS) query[0][QUERY_OCTETS - 1][0] = query[0][QUERY_OCTETS - 1][1] = 0u;
  float below[TILES][2];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) below[a][h] = 0.0f;
  // With a causal mask, keys after the last query of the block are left out.
  const u32 reach = (part * QUERIESu + (QUERIES - 1u)) / KEYSu + 1u;
  const u32 rounds = IS_CAUSAL && reach < ROUNDSu ? reach : ROUNDSu;
  LOOP
  // Divide sums of values by sums of weights, and store them.
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 at = first + a * 16 + h * 8;
      float share = 1.0f / WEIGHT[h * 2];
      if (IS_GUARDED && !(WEIGHT[h * 2] > 0.0f)) {
        // All weights of the row are zero. If they were NaN, only values that are not finite still matter.
        share = 0.0f;
        #pragma unroll
        for (int b = 0; b < VALUE_OCTETS; ++b)
          #pragma unroll
          for (int e = 0; e < 2; ++e)
            if (WEIGHT[h * 2] != WEIGHT[h * 2]) {
              sums[a][b][h * 2 + e] = 0.0f;
              #pragma unroll 1
              for (u32 key = 0u; key < KEY_COUNTu; ++key)
                sums[a][b][h * 2 + e] += 0.0f * wide(v[key * VALUE_STRIDEu + b * 8 + 2u * t + e]);
            }
      }
      RESULT_TYPE* row = RESULT + (image * RESULT_IMAGE + head * RESULT_HEAD + at * RESULT_QUERY + RESULT_START);
      STORE
    }
}

FRAGMENT(store_pairs) {
  if (at < QUERY_COUNTu) {
    #pragma unroll
    for (int b = 0; b < VALUE_OCTETS; ++b) {
      u32 pair;
      PAIR
      *(PAIR_TYPE*)(row + (8 * b + 2u * t)) = (PAIR_TYPE)pair;
    }
  }
}

// Four threads have pairs of each octet. They exchange words, and each stores 16 bytes: an octet in 16 bits, or two octets of
// bytes. Smaller stores fill only a part of a sector of the L2 cache.
FRAGMENT(store_octets) {
  #pragma unroll
  for (int octet = 0; octet < VALUE_OCTETS; octet += 4 * WORD_PAIRS) {
    u32 words[4] = {0u, 0u, 0u, 0u};
    #pragma unroll
    for (int b = octet; b < octet + 4 * WORD_PAIRS; ++b) {
      u32 pair;
      PAIR
      words[(b - octet) / WORD_PAIRS] |= pair << (b % WORD_PAIRS * 16);
    }
    #pragma unroll
    for (u32 step = 1u; step < 4u; step *= 2u)
      #pragma unroll
      for (u32 j = 0u; j < 4u; ++j)
        if (!(j & step)) {
          const bool upper = (t & step) != 0u;
          const u32 came = __shfl_xor_sync(0xffffffffu, upper ? words[j] : words[j + step], step);
          if (upper) words[j] = came; else words[j + step] = came;
        }
    const Pack<u32, 4> octets = OCTETS;
    if (at < QUERY_COUNTu) store_pack<u32, 4>((u32*)(row + (8 * octet + 8u * WORD_PAIRS * t)), octets);
  }
}

FRAGMENT(pair_of_halves) {
  pair = word_of<TYPE>(sums[a][b][2 * h + 0] * share, sums[a][b][2 * h + 1] * share);
}

FRAGMENT(pair_of_bytes) {
  Pack<RESULT_TYPE, 2> rounded;
  SCALES
  #pragma unroll
  for (int e = 0; e < 2; ++e) {
    ROUND
    rounded.v[e] = ROUNDED;
  }
  pair = (u32)*(const u16*)&rounded;
}

// Turn scores into weights, as words that products take. Scale sums again where scores grew.
FRAGMENT(weigh) {
  DECLARE_WHOLE
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        SCALE_PAIR
      }
  if (!KEYS_FIT && round == LAST_ROUNDu) {
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int n = 0; n < STEP / 8; ++n)
        #pragma unroll
        for (int h = 0; h < 2; ++h)
          #pragma unroll
          for (int e = 0; e < 2; ++e)
            if (round * KEYSu + s * STEP + n * 8 + 2u * t + e >= KEY_COUNTu) MEASURED[a][n][h * 2 + e] = -INFINITE;
  }
  if (IS_CAUSAL && round * KEYSu + (KEYS - 1u) > part * QUERIESu) {
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int n = 0; n < STEP / 8; ++n)
        #pragma unroll
        for (int h = 0; h < 2; ++h)
          #pragma unroll
          for (int e = 0; e < 2; ++e)
            if (round * KEYSu + s * STEP + n * 8 + 2u * t + e > first + a * 16 + h * 8)
              MEASURED[a][n][h * 2 + e] = -INFINITE;
  }
  MOVE_WHOLE
  u32 power[TILES][STEP / 8][2];
  u32 bits = 0u;
  if (!IS_ONE_STEP) {
    RAISE
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int n = 0; n < STEP / 8; ++n)
        #pragma unroll
        for (int h = 0; h < 2; ++h) bits |= power[a][n][h];
  }
  // Numbers from 2 on, and NaN, have the highest bit of the exponent, in either type.
  if (IS_ONE_STEP || any_of_warp(fresh || (bits & 0x40004000u) != 0u)) {
    bool nothing = false;
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Set a row's offset a little above its largest score, if that grew or is the first finite one. NaN counts as the
        // largest, so a row of NaN has begun and its warp does not look for a first score again.
        float most = MEASURED[a][0][h * 2];
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
          #pragma unroll
          for (int e = 0; e < 2; ++e) most = nmax(most, MEASURED[a][n][h * 2 + e]);
        most = nmax(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = nmax(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const bool none = most == -INFINITE, begins = !none && WEIGHT[h * 2] == 0.0f;
        nothing |= none;
        RAISE_OFFSET
        // A row that begins has no sums yet. A low first score may overflow, and zero times infinity would be NaN.
        const float less = begins ? 1.0f : quick_exp2(-more);
        if (!IS_ONE_STEP) {
          #pragma unroll
          for (int e = 0; e < 2; ++e) WEIGHT[h * 2 + e] *= less;
          #pragma unroll
          for (int b = 0; b < VALUE_OCTETS; ++b)
            #pragma unroll
            for (int e = 0; e < 2; ++e) sums[a][b][h * 2 + e] *= less;
        }
      }
    fresh = !IS_ONE_STEP && any_of_warp(nothing);
    RAISE
  }
}

FRAGMENT(raise_relative) {
  const float more = begins || most > 0.0f ? most + MARGIN : 0.0f;
  below[a][h] -= more;
  #pragma unroll
  for (int n = 0; n < STEP / 8; ++n)
    #pragma unroll
    for (int e = 0; e < 2; ++e) scores[a][n][h * 2 + e] -= more;
}

// Where a mask is added, whole scores are far apart. A difference from an earlier offset has lost their last digits.
FRAGMENT(raise_whole) {
  const float raised = begins || most + below[a][h] > 0.0f ? -(most + MARGIN) : below[a][h];
  const float more = below[a][h] - raised;
  below[a][h] = raised;
  #pragma unroll
  for (int n = 0; n < STEP / 8; ++n)
    #pragma unroll
    for (int e = 0; e < 2; ++e) scores[a][n][h * 2 + e] = whole[a][n][h * 2 + e] + raised;
}

FRAGMENT(scale) {
  #pragma unroll
  for (int e = 0; e < 2; ++e) scores[a][n][h * 2 + e] = fmaf(scores[a][n][h * 2 + e], SCALE, below[a][h]);
}

FRAGMENT(declare_whole) {
  float whole[TILES][STEP / 8][4];
}

FRAGMENT(move_whole) {
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) scores[a][n][e] = whole[a][n][e] + below[a][e / 2];
}

FRAGMENT(scale_and_add) {
  const Pair pair = pair_of<TYPE>(bias[a][s * (STEP / 8) + n][h]);
  #pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float own = e ? pair.high : pair.low;
    const float score = fmaf(scores[a][n][h * 2 + e], SCALE, ADDED);
    whole[a][n][h * 2 + e] = HIDES && own == -INFINITE ? own : score;
  }
}

// Load what is added to a round's scores. After the last query and key it does not matter.
FRAGMENT(load_bias) {
  u32 bias[TILES][KEYS / 8][2];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 at = first + a * 16 + h * 8;
      const u16* row = (const u16*)b + (at < QUERY_COUNTu ? at : QUERY_COUNT - 1u) * BIAS_QUERYu;
      #pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
        const u32 key = round * KEYSu + n * 8 + 2u * t;
        LOAD_PAIR
      }
    }
}

FRAGMENT(bias_pair) {
  bias[a][n][h] = key < KEY_COUNTu ? *(const u32*)(row + key) : 0u;
}

FRAGMENT(bias_singles) {
  const u32 low = key < KEY_COUNTu ? row[key * BIAS_KEYu] : 0u;
  const u32 high = key + 1u < KEY_COUNTu ? row[(key + 1u) * BIAS_KEYu] : 0u;
  bias[a][n][h] = low | high << 16;
}

FRAGMENT(raise) {
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        power[a][n][h] = word_of<TYPE>(quick_exp2(scores[a][n][h * 2 + 0]), quick_exp2(scores[a][n][h * 2 + 1]));
}
