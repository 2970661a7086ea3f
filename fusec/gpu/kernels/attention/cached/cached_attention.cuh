// Attention of one query over a cache that the same launch writes into: cached_attention.py explains it and fills in the
// names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  TYPE *keys = (TYPE*)memory, *values = keys + SHARE * PITCH, *queries = values + SHARE * PITCH;
  TYPE *weights = queries + HEADS * PITCH, *fresh = weights + HEADS * WEIGHT_PITCH;
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, t = lane % 4u;
  const u32 part = blockIdx.x % PARTSu, sequence = blockIdx.x / PARTSu, group = sequence % GROUPSu, image = sequence / GROUPSu;
  const u32 start = part * SHAREu, own = start + SHAREu < KEYSu ? SHAREu : KEYSu - start;
  const u32 first_row = sequence * KEYSu + start;
  BEGIN_CLUSTER
  __shared__ u32 count, news[NEW], places[NEW];
  __shared__ float most[WARPS][HEADS], totals[WARPS][HEADS];
  if (threadIdx.x == 0) count = 0u;
  COPY_EARLY
  __syncthreads();
  BEGIN
  COPY_LATE
  // Find the new rows that are among this block's.
  for (u32 i = threadIdx.x; i < NEWu; i += THREADSu) {
    const i64 index = (i64)INDICES[i], place = (index < 0 ? index + ROWS : index) - first_row;
    if (place >= 0 && place < own) {
      const u32 n = atomicAdd(&count, 1u);
      news[n] = i, places[n] = (u32)place;
    }
  }
  float bias[TILES][OCTETS][4];
  #pragma unroll
  for (int m = 0; m < TILES; ++m)
    #pragma unroll
    for (int h = 0; h < OCTETS; ++h)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 own_key = (m * WARPS + warp) * 16u + g + e / 2 * 8u, key = start + (own_key < own ? own_key : 0u);
        const u32 own_head = h * 8u + t * 2u + e % 2, head = group * SHARERSu + (own_head < SHARERSu ? own_head : 0u);
        bias[m][h][e] = BIAS;
      }
  for (u32 i = threadIdx.x; i < QUERY_PACKSu; i += THREADSu) {
    const u32 own_head = i / PACKSu, column = i % PACKSu * VECTORu, head = group * SHARERSu + own_head;
    TYPE* const to = queries + (own_head * PITCHu + column);
    LOAD_QUERY
  }
  // Most often, the new row with the number of the block's sequence is its own. Warps that have no queries compute it.
  if (sequence < NEWu && warp + 2u >= WARPSu) {
    for (u32 i = lane; i < PACKSu; i += 32u) {
      const u32 row = sequence, column = i * VECTORu;
      if (warp + 1u == WARPSu) {
        TYPE* const to = fresh + column;
        NEW_KEY
      } else {
        TYPE* const to = fresh + (PITCHu + column);
        NEW_VALUE
      }
    }
  }
  wait_for_copies<0>();
  __syncthreads();
  for (u32 n = warp; n < count; n += WARPSu) {
    const u32 row = news[n], place = places[n];
    bool is_last = true;  // of the rows with this place
    for (u32 m = 0; m < count; ++m) is_last &= places[m] != place || news[m] <= row;
    for (u32 i = lane; is_last && i < PACKSu; i += 32u) {
      WRITE_NEW
    }
  }
  __syncthreads();
  COPY_ROWS
  // Scores of keys and queries: a warp has tiles of 16 keys.
  float scores[TILES][OCTETS][4];
  #pragma unroll
  for (int m = 0; m < TILES; ++m)
    #pragma unroll
    for (int h = 0; h < OCTETS; ++h)
      #pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][h][e] = 0.0f;
  #pragma unroll
  for (int d = 0; d < FEATURES; d += 16) {
    u32 query[OCTETS][2];
    #pragma unroll
    for (int h = 0; h < OCTETS; ++h)
      #pragma unroll
      for (int j = 0; j < 2; ++j) query[h][j] = *(const u32*)(queries + ((h * 8u + g) * PITCHu + d + j * 8u + t * 2u));
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
      u32 key[4];
      load_tiles<false>(key, keys + (((m * WARPS + warp) * 16u + lane % 16u) * PITCHu + d + lane / 16u * 8u));
      #pragma unroll
      for (int h = 0; h < OCTETS; ++h)
        multiply_tile<TYPE>(scores[m][h], key[0], key[1], key[2], key[3], query[h][0], query[h][1]);
    }
  }
  // Powers of two, relative to the largest score of the block.
  #pragma unroll
  for (int h = 0; h < OCTETS; ++h)
    #pragma unroll
    for (int b = 0; b < 2; ++b) {
      float largest = -INFINITE;
      #pragma unroll
      for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int e = b; e < 4; e += 2) {
          const u32 own_key = (m * WARPS + warp) * 16u + g + e / 2 * 8u;
          float score = scores[m][h][e] * SCALE + bias[m][h][e] * 1.44269504f;
          if ((HIDES && bias[m][h][e] == -INFINITE) || own_key >= own) score = -INFINITE;
          scores[m][h][e] = score;
          largest = nmax(largest, score);
        }
      for (int s = 16; s > 2; s /= 2) largest = nmax(largest, __shfl_xor_sync(0xffffffffu, largest, s));
      if (g == 0u) most[warp][h * 8u + t * 2u + b] = largest;
    }
  __syncthreads();
  #pragma unroll
  for (int h = 0; h < OCTETS; ++h)
    #pragma unroll
    for (int b = 0; b < 2; ++b) {
      const u32 head = h * 8u + t * 2u + b;
      float largest = -INFINITE, total = 0.0f;
      #pragma unroll
      for (int w = 0; w < WARPS; ++w) largest = nmax(largest, most[w][head]);
      const float base = largest == -INFINITE ? 0.0f : largest;
      #pragma unroll
      for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int e = b; e < 4; e += 2) {
          const float power = quick_exp2(scores[m][h][e] - base);
          weights[head * WEIGHT_PITCHu + ((m * WARPS + warp) * 16u + g + e / 2 * 8u)] = narrow<TYPE>(power);
          total += power;
        }
      for (int s = 16; s > 2; s /= 2) total += __shfl_xor_sync(0xffffffffu, total, s);
      if (g == 0u) totals[warp][head] = total;
    }
  __syncthreads();
  // Sums of values: a warp has tiles of 16 features.
  #pragma unroll
  for (u32 f = warp; f < FEATURESu / 16u; f += WARPSu) {
    float sums[OCTETS][4];
    #pragma unroll
    for (int h = 0; h < OCTETS; ++h)
      #pragma unroll
      for (int e = 0; e < 4; ++e) sums[h][e] = 0.0f;
    #pragma unroll
    for (int k = 0; k < SHARE; k += 16) {
      u32 value[4];
      load_tiles<true>(value, values + ((k + lane / 16u * 8u + lane % 8u) * PITCHu + f * 16u + lane / 8u % 2u * 8u));
      #pragma unroll
      for (int h = 0; h < OCTETS; ++h) {
        const u32* weight = (const u32*)(weights + ((h * 8u + g) * WEIGHT_PITCHu + k + t * 2u));
        multiply_tile<TYPE>(sums[h], value[0], value[1], value[2], value[3], weight[0], weight[4]);
      }
    }
    #pragma unroll
    for (int h = 0; h < OCTETS; ++h)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 own_head = h * 8u + t * 2u + e % 2, feature = f * 16u + g + e / 2 * 8u;
        if (own_head < SHARERSu) {
          STORE
        }
      }
  }
  ADD_PARTS
}

// Begin to copy the block's rows of keys or values; past the last key, store zeros.
FRAGMENT(copy) {
  #pragma unroll 8
  for (u32 turn = 0; turn < TURNSu; ++turn) {
    const u32 i = turn * THREADSu + threadIdx.x, key = i / (FEATURESu / 8u), octet = i % (FEATURESu / 8u);
    const bool is_there = ALL_THERE || key < own;
    if (PIECES_FIT || key < SHAREu)
      copy_or_zeros_ahead(SHARED + (key * PITCHu + octet * 8u),
                          OLD + ((first_row + (is_there ? key : 0u)) * FEATURESu + octet * 8u), is_there);
  }
}

// Put neighbours of a new key and value among the rows in shared memory, and store them.
FRAGMENT(write_new) {
  const u32 column = i * VECTORu;
  TYPE *const key = keys + (OWN_ROW * PITCHu + column), *const value = values + (OWN_ROW * PITCHu + column);
  if (row == sequence) {
    *(PACK*)key = *(const PACK*)(fresh + column);
    *(PACK*)value = *(const PACK*)(fresh + (PITCHu + column));
  } else {
    { TYPE* const to = key; NEW_KEY }
    { TYPE* const to = value; NEW_VALUE }
  }
  STORE_NEW
}

FRAGMENT(load) {
  *(PACK*)to = load_pack<TYPE, VECTOR>(FROM + (AT));
}

// Compute the rotary embedding for the same neighbours.
FRAGMENT(embed) {
  const u32 element = AT;
  COORDINATES
  ROTATE
}

FRAGMENT(store_new) {
  store_pack<TYPE, VECTOR>(RESULT + ((first_row + place) * FEATURESu + column), *(const PACK*)SHARED_ROW);
}

// Copy all rows of the block, where the result has memory of its own.
FRAGMENT(copy_rows) {
  if ((const void*)OLD != (const void*)RESULT) {
    for (u32 i = threadIdx.x; i < own * (FEATURESu / 8u); i += THREADSu) {
      const u32 key = i / (FEATURESu / 8u), octet = i % (FEATURESu / 8u);
      store_pack<TYPE, 8>(RESULT + ((first_row + key) * FEATURESu + octet * 8u), *(const Pack<TYPE, 8>*)(SHARED + (key * PITCHu + octet * 8u)));
    }
  }
}

FRAGMENT(store_result) {
  float total = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; ++w) total += totals[w][own_head];
  ATTENDED[image * Y_IMAGEu + (group * SHARERSu + own_head) * Y_HEADu + feature] = narrow<TYPE>(sums[h][e] / total);
}

FRAGMENT(store_part) {
  SCRATCH[(blockIdx.x * SHARERSu + own_head) * FEATURESu + feature] = sums[h][e];
}

FRAGMENT(store_staged) {
  staged[own_head * FEATURESu + feature] = sums[h][e];
}

// The largest score of each head in this block, and the sum of its weights.
FRAGMENT(record) {
  for (u32 head = threadIdx.x; head < SHARERSu; head += THREADSu) {
    float largest = -INFINITE, total = 0.0f;
    for (int w = 0; w < WARPS; ++w) largest = nmax(largest, most[w][head]), total += totals[w][head];
    Pack<float, 2> record{{largest, total}};
    *(Pack<float, 2>*)(RECORDS + head * 2u) = record;
  }
}

// The last block of a sequence to finish adds up the sums of all parts.
FRAGMENT(add_parts) {
  float* records = SCRATCH + BLOCKS * SHARERSu * FEATURESu;
  RECORD
  if (!last_of(COUNTERS + sequence * COUNTER_STRIDE, PARTSu)) return;
  for (u32 i = threadIdx.x; i < RESULTSu / 4u; i += THREADSu) {
    const u32 own_head = i / (FEATURESu / 4u), feature = i % (FEATURESu / 4u) * 4u;
    ADD_UP
  }
}

FRAGMENT(load_part) {
  const u32 at = (sequence * PARTSu + from) * SHARERSu + own_head;
  record[j] = load_fresh((const Pack<float, 2>*)(records + at * 2u));
  part_sum[j] = load_fresh((const Pack<float, 4>*)(SCRATCH + (at * FEATURESu + feature)));
}

// The blocks of a sequence are a cluster. Each adds up a share of the results, which all send to it.
FRAGMENT(begin_cluster) {
  float *staged = (float*)keys, *box = (float*)(memory + BOX_AT);
  u64* mbarrier = (u64*)(memory + MBARRIER_AT);
  cluster_begins(mbarrier, PARTSu * SENTu * 4u);
}

FRAGMENT(merge_in_cluster) {
  RECORD
  __syncthreads();
  cluster_is_there();
  for (u32 i = threadIdx.x * 4u; i < RESULTSu; i += THREADSu * 4u)
    send(box + (part * BOX_SIZEu + i % EACHu), *(const Pack<float, 4>*)(staged + i), mbarrier, i / EACHu);
  for (u32 i = threadIdx.x; i < SHARERSu * PARTSu; i += THREADSu)
    send(box + (part * BOX_SIZEu + EACHu + i % SHARERSu * 2u),
         *(const Pack<float, 2>*)(staged + (RESULTSu + i % SHARERSu * 2u)), mbarrier, i / SHARERSu);
  wait_for_peers(mbarrier);
  for (u32 i = threadIdx.x; i < EACHu / 4u; i += THREADSu) {
    const u32 result = part * EACHu + i * 4u, own_head = result / FEATURESu, feature = result % FEATURESu;
    ADD_UP
  }
}

FRAGMENT(load_sent) {
  record[j] = *(const Pack<float, 2>*)(box + (from * BOX_SIZEu + EACHu + own_head * 2u));
  part_sum[j] = *(const Pack<float, 4>*)(box + (from * BOX_SIZEu + i * 4u));
}

// Add up neighbours of a result, relative to the largest score so far.
FRAGMENT(add_up) {
  float largest = -INFINITE, total = 0.0f, sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  #pragma unroll 1
  for (u32 p = 0; p < PARTSu; p += BATCHu) {
    Pack<float, 2> record[BATCH];
    Pack<float, 4> part_sum[BATCH];
    #pragma unroll
    for (u32 j = 0; j < BATCHu; ++j) {
      const bool is_there = PARTS % BATCH == 0 || p + j < PARTSu;
      const u32 from = is_there ? p + j : 0u;
      LOAD_PART
      if (!is_there) record[j] = Pack<float, 2>{{-INFINITE, 0.0f}}, part_sum[j] = Pack<float, 4>{{0.0f, 0.0f, 0.0f, 0.0f}};
    }
    float next = largest;
    #pragma unroll
    for (u32 j = 0; j < BATCHu; ++j) next = nmax(next, record[j].v[0]);
    const float shrink = largest == -INFINITE ? 0.0f : quick_exp2(largest - next);
    total *= shrink;
    for (int e = 0; e < 4; ++e) sum[e] *= shrink;
    #pragma unroll
    for (u32 j = 0; j < BATCHu; ++j) {
      const float factor = record[j].v[0] == -INFINITE ? 0.0f : quick_exp2(record[j].v[0] - next);
      total += factor * record[j].v[1];
      for (int e = 0; e < 4; ++e) sum[e] += factor * part_sum[j].v[e];
    }
    largest = next;
  }
  Pack<TYPE, 4> y;
  for (int e = 0; e < 4; ++e) y.v[e] = narrow<TYPE>(sum[e] / total);
  store_pack<TYPE, 4>(ATTENDED + (image * Y_IMAGEu + (group * SHARERSu + own_head) * Y_HEADu + feature), y);
}
