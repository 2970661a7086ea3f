// Gradients of attention: backward_source.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = number_of_warp(), g = lane / 4u, t = lane % 4u;
  const u32 first = warp / 4u * 64u, own = first + warp % 4u * 16u;  // rows of the warpgroup, and of the warp
  RESIDENT(memory);
  TYPE *changes = (TYPE*)memory, *queries = changes + CHANGES_SIZE, *losses = queries + QUERIES_SIZE;
  TYPE *keys = losses + QUERIES_SIZE, *next_values = keys + KEYS_SIZE, *values = next_values + SPARE_SIZE;
  float *offsets = (float*)(values + KEYS_SIZE), *along = offsets + QUERIES;
  Pack<u32, 4> results[TURNS];
  float logarithms[TURNS];
  {
    const u32 next = blockIdx.x;
    const bool is_there = true;
    HEAD_OF_NEXT
    COPY_QUERIES
    COPY_LOSSES
    COPY_VALUES
    copied();
    COPY_KEYS
    copied();
    LOAD_RESULTS
  }
  #pragma unroll 1
  for (u32 block = blockIdx.x; block < HEADSu; block += BLOCKSu) {
    const u32 next = block + BLOCKSu;
    const bool is_there = next < HEADSu;
    HEAD_OF_BLOCK
    TYPE* const free_values = values;
    values = next_values;
    next_values = free_values;
    u32 copied_parts = 0u;
    MEANS
    float of_keys[OCTETS][4], of_values[OCTETS][4];
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int e = 0; e < 4; ++e) of_keys[o][e] = of_values[o][e] = 0.0f;
    if (GROUPS_HAVE_KEYS || first < KEYSu) {
      VISIT_QUERIES
    }
    __syncthreads();  // all gradients of scores are stored, and nothing reads queries, losses or values any more
    if (is_there) {
      HEAD_OF_NEXT
      COPY_QUERIES
      COPY_LOSSES
    }
    STORE_OF_VALUES
    STORE_OF_KEYS
    if (!HAS_SPARE) __syncthreads();
    #pragma unroll 1
    for (; is_there && copied_parts < PARTSu; ++copied_parts) {
      HEAD_OF_NEXT
      COPY_PART
    }
    copied();
    {
      HEAD_OF_NEXT
      LOAD_RESULTS
    }
    float of_queries[OCTETS][4];
    if (GROUPS_HAVE_QUERIES || first < QUERIESu) {
      VISIT_KEYS
    }
    __syncthreads();  // nothing reads keys, or gradients of scores, any more
    if (is_there) {
      HEAD_OF_NEXT
      COPY_KEYS
    }
    copied();
    STORE_OF_QUERIES
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

// Copy a part of the values of the next head. Copies that wait for memory would hold up their threads, so that there is
// one before each visit. What they leave follows the last one.
FRAGMENT(copy_part) {
  {
    const u32 piece = threadIdx.x + copied_parts * THREADSu, row = piece / OCTETSu, octet = piece % OCTETSu;
    TYPE* to = SHARED + (octet * OCTET_SIZEu + row * 8u);
    if (piece < PIECESu) {
      if (ROWS_FIT || row < COUNTu) copy_ahead<16>(to, MEMORY + (row * STRIDEu + octet * 8u));
      else *(Pack<u32, 4>*)to = Pack<u32, 4>{{0u, 0u, 0u, 0u}};
    }
  }
}

// Load the results of a head, and the logarithms of its sums, long before they are needed.
FRAGMENT(load_results) {
  #pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const u32 row = (threadIdx.x + i * THREADSu) / 8u, octet = threadIdx.x % 8u;
    results[i] = Pack<u32, 4>{{0u, 0u, 0u, 0u}};
    logarithms[i] = 0.0f;
    if (is_there && row < QUERY_COUNTu) {
      if (octet < OCTETSu) results[i] = load_now<u32, 4>((const u32*)(RESULTS + (row * RESULT_STRIDEu + octet * 8u)));
      logarithms[i] = LOGARITHMS[row * LOGARITHM_STRIDEu];
    }
  }
}

// Compute the offset of a query's exponents, and the product of its result and its gradient. Keys may still be copied.
FRAGMENT(means) {
  wait_for_copies<1>();
  if (OCTETSu != 8u) __syncthreads();  // with eight octets, a thread reads what it has copied itself
  #pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const u32 row = (threadIdx.x + i * THREADSu) / 8u, octet = threadIdx.x % 8u;
    float total = 0.0f;
    if (row < QUERY_COUNTu && octet < OCTETSu) {
      const Pack<u32, 4> words = load_pack<u32, 4>((const u32*)(losses + (octet * QUERY_OCTETu + row * 8u)));
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Pair loss = pair_of<TYPE>(words.v[j]), result = pair_of<TYPE>(results[i].v[j]);
        total = fmaf(loss.low, result.low, fmaf(loss.high, result.high, total));
      }
    }
    #pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
    if (octet == 0u && row < QUERIESu) {
      along[row] = total;
      offsets[row] = logarithms[i] * LOG2_E;
    }
  }
  wait_for_copies<0>();
  seen_by_groups();
  __syncthreads();
}

// Let a warpgroup's keys visit all queries, 32 at a time: add to the gradients of keys and values, and store those of scores.
// Exponentials are computed while the gradients of weights are, and those of keys and values while other warps compute.
// ptxas waits for each product by itself if anything else writes what a product in flight writes, or if only some threads
// may get here. So scores and weights are different variables, and zeros are written before the first product begins.
FRAGMENT(visit_queries) {
  PIN_SUMS
  #pragma unroll 1
  for (u32 from = 0; from + 32u <= QUERIESu; from += 32u) {
    if (HAS_SPARE && is_there && copied_parts < PARTSu) {
      HEAD_OF_NEXT
      COPY_PART
      ++copied_parts;
    }
    VISIT
  }
  {
    const u32 from = QUERIESu / 32u * 32u;
    VISIT_REST
  }
}

FRAGMENT(visit) {
  float scores[PART_OCTETS][4], slopes[PART_OCTETS][4], weights[PART_OCTETS][4];
  group_begins();
  SCORE
  group_ends();
  SLOPE
  group_ends();
  wait_for_groups<1>();
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(scores[n][e]);
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n) {
    const Pack<float, 2> offset = load_pack<float, 2>(offsets + (from + n * 8u + 2u * t));
    #pragma unroll
    for (int e = 0; e < 4; ++e) weights[n][e] = quick_exp2(fmaf(scores[n][e], SCALE, -offset.v[e % 2]));
  }
  if (!QUERIES_FIT && from + PARTu > QUERY_COUNTu) {
    #pragma unroll
    for (int n = 0; n < PART_OCTETS; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (from + n * 8u + 2u * t + e % 2 >= QUERY_COUNTu) weights[n][e] = 0.0f;
  }
  u32 power[PART_OCTETS][2], change[PART_OCTETS][2];
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n)
    #pragma unroll
    for (int h = 0; h < 2; ++h) power[n][h] = word_of<TYPE>(weights[n][2 * h + 0], weights[n][2 * h + 1]);
  wait_for_groups<0>();
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n) {
    const Pack<float, 2> mean = load_pack<float, 2>(along + (from + n * 8u + 2u * t));
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      pin(slopes[n][e]);
      slopes[n][e] = weights[n][e] * (slopes[n][e] - mean.v[e % 2]);
    }
  }
  if (!QUERIES_FIT && from + PARTu > QUERY_COUNTu) {
    #pragma unroll
    for (int n = 0; n < PART_OCTETS; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (from + n * 8u + 2u * t + e % 2 >= QUERY_COUNTu) slopes[n][e] = 0.0f;
  }
  if (!KEYS_FIT && own + 16u > KEY_COUNTu) {  // the weight of a score of zero may be infinite
    #pragma unroll
    for (int n = 0; n < PART_OCTETS; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (own + e / 2 * 8u + g >= KEY_COUNTu) slopes[n][e] = 0.0f;
  }
  #pragma unroll
  for (int n = 0; n < PART_OCTETS; ++n)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      change[n][h] = word_of<TYPE>(slopes[n][2 * h + 0], slopes[n][2 * h + 1]);
      if (own < KEYSu)
        *(u32*)(changes + ((from / 8u + n) * CHANGE_OCTETu + (own + h * 8u + g) * 8u + 2u * t)) = change[n][h];
    }
  group_begins();
  #pragma unroll
  for (u32 n = 0; n < PART_OCTETSu; n += 2u) {
    const u32 words[4] = {power[n][0], power[n][1], power[n + 1][0], power[n + 1][1]};
    ENTRY_COLUMNS_by_rows(of_values, words, losses, (from + n * 8u) * 16u, 128u, 2u * QUERY_OCTETu, 1);
    const u32 more[4] = {change[n][0], change[n][1], change[n + 1][0], change[n + 1][1]};
    ENTRY_COLUMNS_by_rows(of_keys, more, queries, (from + n * 8u) * 16u, 128u, 2u * QUERY_OCTETu, 1);
  }
  group_ends();
  wait_for_groups<0>();
  PIN_SUMS
}

// Keep the compiler from moving what it does with sums over the products that add to them.
FRAGMENT(pin_sums) {
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      pin(of_keys[o][e]);
      pin(of_values[o][e]);
    }
}

// Issue the products of keys by some queries.
FRAGMENT(score) {
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; o += 2u)
    ENTRY_PART_of_tiles(scores, keys + first * 8u, o * KEY_OCTETu * 2u, 2u * KEY_OCTETu, queries,
                      (o * QUERY_OCTETu + from * 8u) * 2u, 2u * QUERY_OCTETu, o > 0u);
}

// Issue the products of values by the gradients of some results.
FRAGMENT(slope) {
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; o += 2u)
    ENTRY_PART_of_tiles(slopes, values + first * 8u, o * KEY_OCTETu * 2u, 2u * KEY_OCTETu, losses,
                      (o * QUERY_OCTETu + from * 8u) * 2u, 2u * QUERY_OCTETu, o > 0u);
}

// Let a warpgroup's queries visit all keys: multiply the gradients of scores, transposed, by keys.
FRAGMENT(visit_keys) {
  const TYPE* rows = changes + ((own / 8u + lane / 8u % 2u) * CHANGE_OCTETu + (lane / 16u * 8u + lane % 8u) * 8u);
  u32 words[KEY_TILES][4];
  #pragma unroll
  for (int half = 0; half < 2; ++half) {  // two halves take fewer registers
    const int from = half * KEY_TILES / 2, end = (half + 1) * KEY_TILES / 2;
    #pragma unroll
    for (int s = from; s < end; ++s) load_tiles<true>(words[s], rows + s * 128);
    group_begins();
    #pragma unroll
    for (int s = from; s < end; ++s)
      ENTRY_COLUMNS_by_rows(of_queries, words[s], keys, s * 256u, 128u, 2u * KEY_OCTETu, s > 0);
  }
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
