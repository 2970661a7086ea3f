// Attention of one query over a cache that the same launch writes into, by warps that read keys and values as streams:
// streamed_attention.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, t = lane % 4u;
  TYPE* const ring = (TYPE*)memory + warp * (STAGES * STAGE_SIZE);
  TYPE *const queries = (TYPE*)memory + WARPS * STAGES * STAGE_SIZE, *const fresh = queries + 16u * PITCH;
  const u32 sequence = blockIdx.x, group = sequence % GROUPSu, image = sequence / GROUPSu, first_row = sequence * KEYSu;
  __shared__ u32 count, news[NEW], places[NEW], last_count, last[NEW], used;
  u32 turns = TURNSu;
  if (threadIdx.x == 0) count = 0u, last_count = 0u, used = 0u;
  COPY_EARLY
  __syncthreads();
  BEGIN
  COPY_LATE
  // Find the new rows of the sequence.
  for (u32 i = threadIdx.x; i < NEWu; i += THREADSu) {
    const i64 index = (i64)INDICES[i], place = (index < 0 ? index + ROWS : index) - first_row;
    if (place >= 0 && place < KEYS) {
      const u32 n = atomicAdd(&count, 1u);
      news[n] = i, places[n] = (u32)place;
      atomicMax(&used, (u32)place + 1u);
    }
  }
  FIND_LAST
  for (u32 i = threadIdx.x; i < QUERY_PACKSu; i += THREADSu) {
    const u32 own_head = i / PACKSu, column = i % PACKSu * VECTORu, head = group * SHARERSu + own_head;
    TYPE* const to = queries + (own_head * PITCHu + column);
    LOAD_QUERY
  }
  // Most often, the new row with the number of the sequence is its own.
  for (u32 i = threadIdx.x; sequence < NEWu && i < 2u * PACKSu; i += THREADSu) {
    const u32 row = sequence, column = i % PACKSu * VECTORu;
    TYPE* const to = fresh + (i / PACKSu * PITCHu + column);
    if (i < PACKSu) {
      NEW_KEY
    } else {
      NEW_VALUE
    }
  }
  __syncthreads();
  STOP_EARLY
  // Of rows with the same place, the last one stays.
  for (u32 n = threadIdx.x; n < count; n += THREADSu) {
    bool is_last = true;
    for (u32 m = 0; m < count; ++m) is_last &= places[m] != places[n] || news[m] <= news[n];
    if (is_last) last[atomicAdd(&last_count, 1u)] = n;
  }
  __syncthreads();
  u32 query[FEATURES / 16][4];
  #pragma unroll
  for (int d = 0; d < FEATURES / 16; ++d)
    #pragma unroll
    for (int j = 0; j < 4; ++j) query[d][j] = *(const u32*)(queries + ((g + j % 2 * 8u) * PITCHu + d * 16u + j / 2 * 8u + t * 2u));
  float sums[FEATURES / 8][4], most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, bias[2][4];
  #pragma unroll
  for (int n = 0; n < FEATURES / 8; ++n)
    for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
  {
    const u32 start = warp * 16u;
    LOAD_BIAS
  }
  u32 here = 0;
  #pragma unroll 1
  for (u32 turn = 0; turn < turns; ++turn) {
    const u32 start = (turn * WARPSu + warp) * 16u, own = start + 16u <= KEYSu ? 16u : start < KEYSu ? KEYSu - start : 0u;
    TYPE *const keys = ring + here * STAGE_SIZEu, *const values = keys + 16u * PITCHu;
    wait_for_copies<STAGES - 2>();
    __syncwarp();
    {
      const u32 slot = here == 0u ? STAGES - 1u : here - 1u, next = turn + STAGES - 1u;
      REQUEST
    }
    here = here == STAGES - 1u ? 0u : here + 1u;
    u32 news_here = 0;
    for (u32 n = 0; n < last_count; ++n) news_here += places[last[n]] / 16u == start / 16u;
    if (news_here) {
      for (u32 n = 0; n < last_count; ++n) {
        const u32 row = news[last[n]], place = places[last[n]], own_key = place - start;
        for (u32 i = lane; place / 16u == start / 16u && i < PACKSu; i += 32u) {
          WRITE_NEW
        }
      }
      __syncwarp();
    }
    COPY_ROWS
    float scores[2][4];
    #pragma unroll
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f;
    #pragma unroll
    for (int d = 0; d < FEATURES / 16; ++d) {
      u32 key[4];
      load_tiles<false>(key, keys + ((lane / 16u * 8u + lane % 8u) * PITCHu + d * 16u + lane / 8u % 2u * 8u));
      multiply_tile<TYPE>(scores[0], query[d][0], query[d][1], query[d][2], query[d][3], key[0], key[1]);
      multiply_tile<TYPE>(scores[1], query[d][0], query[d][1], query[d][2], query[d][3], key[2], key[3]);
    }
    // Powers of two, relative to the largest score of each head so far. A thread has heads g and g + 8.
    float shrink[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = most[r];
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        #pragma unroll
        for (int e = r * 2; e < r * 2 + 2; ++e) {
          float score = scores[n][e] * SCALE + bias[n][e] * 1.44269504f;
          if ((HIDES && bias[n][e] == -INFINITE) || n * 8u + t * 2u + e % 2 >= own) score = -INFINITE;
          scores[n][e] = score;
          largest = nmax(largest, score);
        }
      for (int s = 2; s > 0; s /= 2) largest = nmax(largest, __shfl_xor_sync(0xffffffffu, largest, s));
      const float base = largest == -INFINITE ? 0.0f : largest;
      shrink[r] = most[r] == -INFINITE ? 0.0f : quick_exp2(most[r] - base);
      most[r] = largest;
      total[r] *= shrink[r];
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        #pragma unroll
        for (int e = r * 2; e < r * 2 + 2; ++e) {
          scores[n][e] = quick_exp2(scores[n][e] - base);
          total[r] += scores[n][e];
        }
    }
    {
      const u32 start = ((turn + 1u) * WARPSu + warp) * 16u;
      LOAD_BIAS
    }
    u32 weight[4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) weight[j] = word_of<TYPE>(scores[j / 2][j % 2 * 2], scores[j / 2][j % 2 * 2 + 1]);
    #pragma unroll
    for (int f = 0; f < FEATURES / 16; ++f) {
      u32 value[4];
      load_tiles<true>(value, values + ((lane / 8u % 2u * 8u + lane % 8u) * PITCHu + f * 16u + lane / 16u * 8u));
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int e = 0; e < 4; ++e) sums[f * 2 + h][e] *= shrink[e / 2];
        multiply_tile<TYPE>(sums[f * 2 + h], weight[0], weight[1], weight[2], weight[3], value[h * 2], value[h * 2 + 1]);
      }
    }
  }
  wait_for_copies<0>();
  #pragma unroll
  for (int r = 0; r < 2; ++r)
    for (int s = 2; s > 0; s /= 2) total[r] += __shfl_xor_sync(0xffffffffu, total[r], s);
  __syncthreads();  // the sums of warps take the place of keys and values
  float *const parts = (float*)memory, *const records = parts + WARPS * RESULTSu;
  #pragma unroll
  for (int n = 0; n < FEATURES / 8; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 own_head = g + e / 2 * 8u, feature = n * 8u + t * 2u + e % 2;
      if (own_head < SHARERSu) parts[warp * RESULTSu + own_head * FEATURESu + feature] = sums[n][e];
    }
  #pragma unroll
  for (int r = 0; r < 2; ++r)
    if (t == 0u && g + r * 8u < SHARERSu) {
      const Pack<float, 2> record{{most[r], total[r]}};
      *(Pack<float, 2>*)(records + (warp * SHARERSu + g + r * 8u) * 2u) = record;
    }
  __syncthreads();
  for (u32 i = threadIdx.x; i < RESULTSu / 4u; i += THREADSu) {
    const u32 own_head = i / (FEATURESu / 4u), feature = i % (FEATURESu / 4u) * 4u;
    ADD_UP
  }
}

// Request the rows of keys and values of a turn; past the last key, store zeros.
FRAGMENT(request) {
  if (next < turns) {
    const u32 first = (next * WARPSu + warp) * 16u;
    TYPE* const to = ring + slot * STAGE_SIZEu;
    #pragma unroll
    for (u32 i = lane; i < 2u * FEATURESu; i += 32u) {
      const u32 key = i / (FEATURESu / 8u), octet = i % (FEATURESu / 8u);
      const bool is_there = ALL_THERE || first + key < KEYSu;
      const u32 at = (first_row + (is_there ? first + key : 0u)) * FEATURESu + octet * 8u;
      copy_or_zeros_ahead(to + (key * PITCHu + octet * 8u), OLD_KEYS + at, is_there);
      copy_or_zeros_ahead(to + ((16u + key) * PITCHu + octet * 8u), OLD_VALUES + at, is_there);
    }
  }
  copied();
}

FRAGMENT(first_requests) {
  #pragma unroll 1
  for (u32 next = 0; next < STAGES - 1u; ++next) {
    const u32 slot = next;
    REQUEST
  }
}

// The keys after the last one that the bias shows need not be read.
FRAGMENT(find_last) {
  u32 shown = 0;
  #pragma unroll 8
  for (u32 key = threadIdx.x; key < KEYSu; key += THREADSu) {
    const u32 head = group * SHARERSu;
    if (BIAS != -INFINITE) shown = key + 1u;
  }
  for (int s = 16; s > 0; s /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, shown, s);
    shown = shown > other ? shown : other;
  }
  if (lane == 0u) atomicMax(&used, shown);
}

// Turns end with the last key that is shown or new. Where the result has memory of its own, all rows are copied.
FRAGMENT(stop_early) {
  if (IN_PLACE) turns = used == 0u ? 1u : (used - 1u) / (WARPSu * 16u) + 1u;
}

FRAGMENT(load_bias) {
  #pragma unroll
  for (int n = 0; n < 2; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const u32 key_of_all = start + n * 8u + t * 2u + e % 2, key = key_of_all < KEYSu ? key_of_all : 0u;
      const u32 own_head = g + e / 2 * 8u, head = group * SHARERSu + (own_head < SHARERSu ? own_head : 0u);
      bias[n][e] = BIAS;
    }
}

// Copy all rows of the turn, where the result has memory of its own.
FRAGMENT(copy_rows) {
  if ((const void*)OLD != (const void*)RESULT) {
    for (u32 i = lane; i < own * (FEATURESu / 8u); i += 32u) {
      const u32 own_key = i / (FEATURESu / 8u), octet = i % (FEATURESu / 8u);
      store_pack<TYPE, 8>(RESULT + ((first_row + start + own_key) * FEATURESu + octet * 8u), *(const Pack<TYPE, 8>*)(SHARED + (own_key * PITCHu + octet * 8u)));
    }
  }
}

FRAGMENT(load_part) {
  record[j] = *(const Pack<float, 2>*)(records + (from * SHARERSu + own_head) * 2u);
  part_sum[j] = *(const Pack<float, 4>*)(parts + (from * RESULTSu + i * 4u));
}
