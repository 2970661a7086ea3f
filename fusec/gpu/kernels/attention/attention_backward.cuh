// Gradients of attention: backward_source.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, t = lane % 4u, block = blockIdx.x;
  BLOCK_COORDINATES
  POINTERS
  RESIDENT(memory);
  TYPE *queries = (TYPE*)memory, *losses = queries + QUERIES * DEPTH_PITCH;
  TYPE *keys = losses + QUERIES * WIDTH_PITCH, *values = keys + KEYS * DEPTH_PITCH;
  float *offsets = (float*)(values + KEYS * WIDTH_PITCH), *along = offsets + QUERIES;
  COPY_ROWS
  copied();
  // The offset of a query's exponents, and the product of its result and its gradient. Past the end, weights are zero.
  #pragma unroll 1
  for (u32 row = threadIdx.x / 8u; row < QUERIESu; row += THREADSu / 8u) {
    const u32 octet = threadIdx.x % 8u;
    float total = 0.0f;
    if (row < QUERY_COUNTu && octet < WIDTH_OCTETSu) {
      const Pack<TYPE, 8> loss = load_pack<TYPE, 8>(dy + (row * DY_STRIDEu + octet * 8u));
      const Pack<TYPE, 8> result = load_pack<TYPE, 8>(y + (row * Y_STRIDEu + octet * 8u));
      #pragma unroll
      for (int j = 0; j < 8; ++j) total += wide(loss.v[j]) * wide(result.v[j]);
    }
    #pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
    if (octet == 0u) {
      along[row] = total;
      offsets[row] = row < QUERY_COUNTu ? sums[row * SUMS_STRIDEu] * LOG2_E : INFINITE;
    }
  }
  wait_for_copies<0>();
  __syncthreads();
  PARTS
}

// Begin to copy rows; past the end, store zeros.
FRAGMENT(copy) {
  #pragma unroll 4
  for (u32 piece = threadIdx.x; piece < PIECESu; piece += THREADSu) {
    const u32 own = piece / OCTETSu, octet = piece % OCTETSu;
    TYPE* to = SHARED + (own * PITCHu + octet * 8u);
    if (ROWS_FIT || own < COUNTu) copy_ahead<16>(to, MEMORY + (own * STRIDEu + octet * 8u));
    else *(Pack<u32, 4>*)to = Pack<u32, 4>{{0u, 0u, 0u, 0u}};
  }
}

// One half of the gradients. A warp has rows of one side, and visits all rows of the other: keys and their values visit
// queries and their losses, or the reverse. Scores and slopes have the warp's rows, and columns of the other side.
FRAGMENT(part) {
  #pragma unroll 1
  for (u32 part = warp; part < OWN_PARTSu; part += WARPSu) {
    const u32 first = part * (16u * TILES);
    u32 score_rows[TILES][DEPTH_OCTETS][2], slope_rows[TILES][WIDTH_OCTETS][2];
    #pragma unroll
    for (int a = 0; a < TILES; ++a) {
      LOAD_SCORE_ROWS
      LOAD_SLOPE_ROWS
    }
    DECLARE_OWN
    #pragma unroll 1
    for (u32 other = FIRST_OTHER; other < LAST_OTHER; ++other) {
      float scores[TILES][2][4], slopes[TILES][2][4];
      #pragma unroll
      for (int a = 0; a < TILES; ++a)
        #pragma unroll
        for (int n = 0; n < 2; ++n)
          #pragma unroll
          for (int e = 0; e < 4; ++e) scores[a][n][e] = slopes[a][n][e] = 0.0f;
      SCORE
      SLOPE
      WEIGH
      ACCUMULATE
    }
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 at = first + a * 16 + h * 8 + g;
        if (at < OWN_COUNTu) {
          STORE
        }
      }
  }
}

// Load sixteen rows as the left operand of products.
FRAGMENT(load_rows) {
  #pragma unroll
  for (int o = 0; o < OCTETS; o += 2) {
    u32 x[4];
    load_tiles<false>(x, SHARED + ((first + a * 16 + lane % 16u) * PITCHu + o * 8 + lane / 16u * 8u));
    ROWS[a][o][0] = x[0];
    ROWS[a][o][1] = x[1];
    ROWS[a][o + 1][0] = x[2];
    ROWS[a][o + 1][1] = x[3];
  }
}

FRAGMENT(declare_sums) {
  float NAME[TILES][OCTETS][4];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int e = 0; e < 4; ++e) NAME[a][o][e] = 0.0f;
}

// Multiply the warp's rows by sixteen rows of the other side: products of rows.
FRAGMENT(multiply_rows) {
  #pragma unroll
  for (int o = 0; o < OCTETS; o += 2) {
    u32 x[4];
    load_tiles<false>(x, SHARED + ((other * 16u + lane / 16u * 8u + lane % 8u) * PITCHu + o * 8 + lane / 8u % 2u * 8u));
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        multiply_tile<TYPE>(PRODUCTS[a][n], ROWS[a][o][0], ROWS[a][o][1], ROWS[a][o + 1][0], ROWS[a][o + 1][1], x[2 * n],
                            x[2 * n + 1]);
  }
}

// Compute weights from scores, and their gradients. The other side are queries: a column has an offset.
FRAGMENT(weigh_columns) {
  u32 power[TILES][2][2], change[TILES][2][2];
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    float offset[2], mean[2];
    #pragma unroll
    for (int e = 0; e < 2; ++e) {
      offset[e] = offsets[other * 16u + n * 8 + 2u * t + e];
      mean[e] = along[other * 16u + n * 8 + 2u * t + e];
    }
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weight[2], by[2];
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
          const u32 query = other * 16u + n * 8 + 2u * t + e;
          weight[e] = quick_exp2(fmaf(scores[a][n][h * 2 + e], SCALE, -offset[e]));
          if (IS_CAUSAL && first + a * 16 + h * 8 + g > query) weight[e] = 0.0f;
          by[e] = weight[e] * (slopes[a][n][h * 2 + e] - mean[e]);
          if (!QUERIES_FIT && query >= QUERY_COUNTu) by[e] = 0.0f;  // a product with an infinite value is NaN
        }
        power[a][n][h] = word_of<TYPE>(weight[0], weight[1]);
        change[a][n][h] = word_of<TYPE>(by[0], by[1]);
      }
  }
}

// The same where the warp's rows are queries, and the other side are keys. Keys past the end change nothing.
FRAGMENT(weigh_rows) {
  u32 change[TILES][2][2];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h)
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        float by[2];
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
          const u32 key = other * 16u + n * 8 + 2u * t + e;
          float weight = quick_exp2(fmaf(scores[a][n][h * 2 + e], SCALE, -offset[a][h]));
          if (IS_CAUSAL && key > first + a * 16 + h * 8 + g) weight = 0.0f;
          by[e] = weight * (slopes[a][n][h * 2 + e] - mean[a][h]);
          if (!KEYS_FIT && key >= KEY_COUNTu) by[e] = 0.0f;
        }
        change[a][n][h] = word_of<TYPE>(by[0], by[1]);
      }
}

FRAGMENT(load_offsets) {
  float offset[TILES][2], mean[TILES][2];
  #pragma unroll
  for (int a = 0; a < TILES; ++a)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      offset[a][h] = offsets[first + a * 16 + h * 8 + g];
      mean[a][h] = along[first + a * 16 + h * 8 + g];
    }
}

// Multiply weights, or their gradients, by sixteen rows of the other side, and add.
FRAGMENT(accumulate) {
  #pragma unroll
  for (int o = 0; o < OCTETS; o += 2) {
    u32 x[4];
    load_tiles<true>(x, SHARED + ((other * 16u + lane % 16u) * PITCHu + o * 8 + lane / 16u * 8u));
    #pragma unroll
    for (int a = 0; a < TILES; ++a)
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        multiply_tile<TYPE>(NAME[a][o + n], FACTORS[a][0][0], FACTORS[a][0][1], FACTORS[a][1][0], FACTORS[a][1][1],
                            x[2 * n], x[2 * n + 1]);
  }
}

FRAGMENT(store) {
  {
    TYPE* to = RESULT + (image * RESULT_IMAGE + head * RESULT_HEAD + at * RESULT_ROW + RESULT_START + 2u * t);
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      *(u32*)(to + 8 * o) = word_of<TYPE>(NAME[a][o][2 * h + 0] FACTOR, NAME[a][o][2 * h + 1] FACTOR);
  }
}
