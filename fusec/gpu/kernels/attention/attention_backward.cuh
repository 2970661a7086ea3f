// Gradients of attention: backward_source.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, t = lane % 4u;
  const u32 first = warp / 4u * 64u, own = first + warp % 4u * 16u;  // rows of the warpgroup, and of the warp
  RESIDENT(memory);
  TYPE *changes = (TYPE*)memory, *queries = changes + CHANGES_SIZE, *losses = queries + QUERIES_SIZE;
  TYPE *keys = losses + QUERIES_SIZE, *values = keys + KEYS_SIZE;
  float *offsets = (float*)(values + KEYS_SIZE), *along = offsets + QUERIES;
  {
    const u32 next = blockIdx.x;
    HEAD_OF_NEXT
    COPY_QUERIES
    COPY_LOSSES
    COPY_VALUES
    COPY_KEYS
  }
  #pragma unroll 1
  for (u32 block = blockIdx.x; block < HEADSu; block += BLOCKSu) {
    const u32 next = block + BLOCKSu;
    HEAD_OF_BLOCK
    MEANS
    float of_keys[OCTETS][4], of_values[OCTETS][4];
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int e = 0; e < 4; ++e) of_keys[o][e] = of_values[o][e] = 0.0f;
    if (first < KEYSu) {
      VISIT_QUERIES
    }
    __syncthreads();  // all gradients of scores are stored, and nothing reads queries, losses or values any more
    if (next < HEADSu) {
      HEAD_OF_NEXT
      COPY_QUERIES
      COPY_LOSSES
    }
    STORE_OF_VALUES
    STORE_OF_KEYS
    __syncthreads();
    if (next < HEADSu) {
      HEAD_OF_NEXT
      COPY_VALUES
    }
    if (first < QUERIESu) {
      VISIT_KEYS
      STORE_OF_QUERIES
    }
    __syncthreads();
    if (next < HEADSu) {
      HEAD_OF_NEXT
      COPY_KEYS
    }
  }
}

// Begin to copy rows, as tiles of 8 x 8; past the end, store zeros.
FRAGMENT(copy) {
  #pragma unroll
  for (u32 piece = threadIdx.x; piece < PIECESu; piece += THREADSu) {
    const u32 row = piece / OCTETSu, octet = piece % OCTETSu;
    TYPE* to = SHARED + (octet * OCTET_SIZEu + row * 8u);
    if (ROWS_FIT || row < COUNTu) copy_ahead<16>(to, MEMORY + (row * STRIDEu + octet * 8u));
    else *(Pack<u32, 4>*)to = Pack<u32, 4>{{0u, 0u, 0u, 0u}};
  }
}

// Compute the offset of a query's exponents, and the product of its result and its gradient.
FRAGMENT(means) {
  Pack<TYPE, 8> results[TURNS];
  float logarithms[TURNS];
  #pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const u32 row = (threadIdx.x + i * THREADSu) / 8u, octet = threadIdx.x % 8u;
    if (row < QUERY_COUNTu) {
      if (octet < OCTETSu) results[i] = load_now<TYPE, 8>(RESULTS + (row * RESULT_STRIDEu + octet * 8u));
      logarithms[i] = LOGARITHMS[row * LOGARITHM_STRIDEu];
    }
  }
  copied();
  wait_for_copies<0>();
  seen_by_groups();
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const u32 row = (threadIdx.x + i * THREADSu) / 8u, octet = threadIdx.x % 8u;
    float total = 0.0f;
    if (row < QUERY_COUNTu && octet < OCTETSu) {
      const Pack<TYPE, 8> loss = load_pack<TYPE, 8>(losses + (octet * QUERY_OCTETu + row * 8u));
      #pragma unroll
      for (int j = 0; j < 8; ++j) total += wide(loss.v[j]) * wide(results[i].v[j]);
    }
    #pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
    if (octet == 0u && row < QUERIESu) {
      along[row] = total;
      offsets[row] = row < QUERY_COUNTu ? logarithms[i] * LOG2_E : 0.0f;
    }
  }
  __syncthreads();
}

// Let a warpgroup's keys visit all queries, 32 at a time: add to the gradients of keys and values, and store those of scores.
// Exponentials are computed while the gradients of weights are, and the next scores while those of keys and values are.
FRAGMENT(visit_queries) {
  float scores[4][4];
  {
    const u32 coming = 0u;
    group_begins();
    SCORE
    group_ends();
  }
  #pragma unroll 1
  for (u32 from = 0; from < QUERIESu; from += 32u) {
    float slopes[4][4];
    WAIT
    group_begins();
    SLOPE
    group_ends();
    u32 power[4][2], change[4][2];
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 query = from + n * 8u + 2u * t;
      const Pack<float, 2> offset = load_pack<float, 2>(offsets + query);
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = quick_exp2(fmaf(scores[n][e], SCALE, -offset.v[e % 2]));
        if (!QUERIES_FIT && query + e % 2 >= QUERY_COUNTu) scores[n][e] = 0.0f;
      }
      #pragma unroll
      for (int h = 0; h < 2; ++h) power[n][h] = word_of<TYPE>(scores[n][2 * h + 0], scores[n][2 * h + 1]);
    }
    wait_for_groups<0>();
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 query = from + n * 8u + 2u * t;
      const Pack<float, 2> mean = load_pack<float, 2>(along + query);
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 key = own + h * 8u + g;
        float by[2];
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
          pin(slopes[n][h * 2 + e]);
          by[e] = scores[n][h * 2 + e] * (slopes[n][h * 2 + e] - mean.v[e]);
          if (!QUERIES_FIT && query + e >= QUERY_COUNTu) by[e] = 0.0f;
          if (!KEYS_FIT && key >= KEY_COUNTu) by[e] = 0.0f;  // the weight of a score of zero may be infinite
        }
        change[n][h] = word_of<TYPE>(by[0], by[1]);
        if (key < KEYSu) *(u32*)(changes + ((from / 8u + n) * CHANGE_OCTETu + key * 8u + 2u * t)) = change[n][h];
      }
    }
    group_begins();
    #pragma unroll
    for (u32 n = 0; n < 4u; n += 2u) {
      const u32 weights[4] = {power[n][0], power[n][1], power[n + 1][0], power[n + 1][1]};
      ENTRY_COLUMNS_by_rows(of_values, weights, losses, (from + n * 8u) * 16u, 128u, 2u * QUERY_OCTETu, 1);
      const u32 words[4] = {change[n][0], change[n][1], change[n + 1][0], change[n + 1][1]};
      ENTRY_COLUMNS_by_rows(of_keys, words, queries, (from + n * 8u) * 16u, 128u, 2u * QUERY_OCTETu, 1);
    }
    if (from + 32u < QUERIESu) {
      const u32 coming = from + 32u;
      SCORE
    }
    group_ends();
  }
  WAIT
}

// Issue the products of keys by 32 queries.
FRAGMENT(score) {
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; o += 2u)
    ENTRY_32_of_tiles(scores, keys + (o * KEY_OCTETu + first * 8u), 2u * KEY_OCTETu,
                      queries + (o * QUERY_OCTETu + coming * 8u), 2u * QUERY_OCTETu, o > 0u);
}

// Issue the products of values by the gradients of 32 results.
FRAGMENT(slope) {
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; o += 2u)
    ENTRY_32_of_tiles(slopes, values + (o * KEY_OCTETu + first * 8u), 2u * KEY_OCTETu,
                      losses + (o * QUERY_OCTETu + from * 8u), 2u * QUERY_OCTETu, o > 0u);
}

// Wait until products have written scores and gradients.
FRAGMENT(wait) {
  wait_for_groups<0>();
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      pin(of_keys[o][e]);
      pin(of_values[o][e]);
    }
  #pragma unroll
  for (int n = 0; n < 4; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(scores[n][e]);
}

// Let a warpgroup's queries visit all keys: multiply the gradients of scores, transposed, by keys.
FRAGMENT(visit_keys) {
  float of_queries[OCTETS][4];
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) of_queries[o][e] = 0.0f;
  const TYPE* rows = changes + ((own / 8u + lane / 8u % 2u) * CHANGE_OCTETu + (lane / 16u * 8u + lane % 8u) * 8u);
  u32 words[KEY_TILES][4];
  #pragma unroll
  for (int s = 0; s < KEY_TILES; ++s) load_tiles<true>(words[s], rows + s * 128);
  group_begins();
  #pragma unroll
  for (int s = 0; s < KEY_TILES; ++s)
    ENTRY_COLUMNS_by_rows(of_queries, words[s], keys, s * 256u, 128u, 2u * KEY_OCTETu, 1);
  group_ends();
  wait_for_groups<0>();
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(of_queries[o][e]);
}

// Store sixteen rows of a warp by whole rows, through shared memory that no other warp uses meanwhile.
FRAGMENT(store) {
  if (own < ROWSu) {
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        *(u32*)(STAGE + (o * STAGE_OCTETu + (h * 8u + g) * 8u + 2u * t)) =
            word_of<TYPE>(NAME[o][h * 2 + 0] FACTOR, NAME[o][h * 2 + 1] FACTOR);
    __syncwarp();
    #pragma unroll
    for (u32 piece = lane; piece < 16u * OCTETS; piece += 32u) {
      const u32 row = piece / OCTETSu, octet = piece % OCTETSu;
      if (own + row < COUNTu)
        store_pack<u32, 4>((u32*)(RESULT + ((own + row) * RESULT_ROWu + octet * 8u)),
                           load_pack<u32, 4>((const u32*)(STAGE + (octet * STAGE_OCTETu + row * 8u))));
    }
    __syncwarp();
  }
}
