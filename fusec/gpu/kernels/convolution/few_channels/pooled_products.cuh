// Convolution of four channels and a max pool by products of warpgroups (Hopper): pooled_products.py explains it and fills
// in the names in capitals.

// The block visits neighbouring tiles. While products of one quarter of a tile are under way, it pools the quarter before,
// and loads the image of its next tile.
FRAGMENT(kernel) {
  RESIDENT(images);
  const u32 warp = threadIdx.x / 32u, eighth = threadIdx.x % 32u / 4u, fourth = threadIdx.x % 4u;
  const u32 tiles = TILES, each = EACH, begin = blockIdx.x * each, end = begin + each < tiles ? begin + each : tiles;
  // The last column of the tile to the left is computed again, if another block has it.
  const u32 first = WALKS && begin % RIGHTu ? begin - 1u : begin;
  LOADED
  {
    u8* const image = images;
    LOAD_FIRST
  }
  LOAD_FILTERS
  seen_by_groups();
  __syncthreads();
  float upper[8][4], lower[7][4];
  u32 last_words[2][7], above[2], before[7], half = 0;
  #pragma unroll
  for (u32 i = 0; i < 7u; ++i) {
    before[i] = LOWESTu;
    for (u32 e = 0; e < 2u; ++e) last_words[e][i] = LOWESTu;
  }
  above[0] = above[1] = LOWESTu;
  #pragma unroll 1
  for (u32 now = first; now < end; ++now, half ^= 1u) {
    const u8* const own = images + half * IMAGE_BYTES;
    u8* const image = images + (half ^ 1u) * IMAGE_BYTES;
    MULTIPLY_0
    {
      const u32 tile = now - 1u;
      POOL_3
    }
    const u32 tile = now;
    u32 words[2][8];
    if (WALKS && now % RIGHTu == 0u) {
      #pragma unroll
      for (u32 i = 0; i < 7u; ++i) before[i] = LOWESTu;
    }
    MULTIPLY_1
    LOAD_0
    wait_for_groups<1>();
    ROUND_0
    POOL_0
    MULTIPLY_2
    LOAD_1
    wait_for_groups<1>();
    ROUND_1
    POOL_1
    MULTIPLY_3
    LOAD_2
    wait_for_groups<1>();
    ROUND_2
    POOL_2
    LOAD_3
    wait_for_copies<0>();
    seen_by_groups();
    wait_for_groups<0>();
    __syncthreads();
    ROUND_3
  }
  const u32 tile = end - 1u;
  POOL_3
}

// Load the first image, and then, while products are under way, always the next one.
FRAGMENT(load_first) {
  const u32 block = first;
  LOAD
}

FRAGMENT(load_next) {
  if (now + 1u < end) {
    const u32 block = now + 1u;
    LOAD
  }
}

// The same by copies of rows, which begin one tile earlier.
FRAGMENT(copy_first) {
  #pragma unroll
  for (u32 later = 0; later < 2u; ++later) {
    const u32 block = first + later;
    u8* const rows = images + 2 * IMAGE_BYTES + later * ROWS_BYTESu;
    if (block < end) {
      COPY
    }
    copied();
  }
  wait_for_copies<0>();
  __syncthreads();
  const u32 block = first;
  const u8* const rows = images + 2 * IMAGE_BYTES;
  UNPACK
}

FRAGMENT(copy_next) {
  if (now + 2u < end) {
    const u32 block = now + 2u;
    u8* const rows = images + 2 * IMAGE_BYTES + half * ROWS_BYTESu;
    COPY
  }
  copied();
}

FRAGMENT(unpack_next) {
  if (now + 1u < end) {
    const u32 block = now + 1u;
    const u8* const rows = images + 2 * IMAGE_BYTES + (half ^ 1u) * ROWS_BYTESu;
    UNPACK
  }
}

FRAGMENT(multiply) {
  group_begins();
  PRODUCTS
  group_ends();
}

// Neighbouring filters are eight rows apart, so that a thread has their results.
FRAGMENT(load_filters) {
  u32 taps[STEPS][4];
  #pragma unroll
  for (u32 s = 0; s < STEPSu; ++s) {
    #pragma unroll
    for (u32 e = 0; e < 4u; ++e) {
      const u32 pair = s * 2u + e / 2u, column = pair % ROW_PAIRSu * 2u + fourth / 2u - NO_TAPS;
      const bool is_tap = column < WINDOW_COLUMNSu;
      const u32 from = (warp * 16u + eighth * 2u + e % 2u) * FILTER_STRIDE + pair / ROW_PAIRSu * ROW_STRIDE +
                       (is_tap ? column : 0u) * COLUMN_STRIDE + fourth % 2u * 2u * CHANNEL_STRIDE;
      Pack<TYPE, 2> channels;
      if (CONTIGUOUS) channels = load_pack<TYPE, 2>(FILTERS + from);
      else for (int j = 0; j < 2; ++j) channels.v[j] = FILTERS[from + j * CHANNEL_STRIDE];
      taps[s][e] = is_tap ? element_bits(channels.v[0]) | (u32)element_bits(channels.v[1]) << 16 : 0u;
    }
  }
}

// The results of a quarter of a tile, and the lowest number for pixels outside the image. An upper quarter has results of 8 x
// 8 pixels, and a lower one of 7 x 8.
FRAGMENT(round) {
  {
    OWN_COORDINATES
    const int top = TOP, left = LEFT;
    #pragma unroll
    for (u32 j = 0; j < ROWSu; ++j)
      #pragma unroll
      for (u32 e = 0; e < 4u; ++e) pin(SUMS[j][e]);
    #pragma unroll
    for (u32 e = 0; e < 2u; ++e)
      #pragma unroll
      for (u32 j = 0; j < ROWSu; ++j) WORDS[e][j] = word_of<TYPE>(SUMS[j][e], SUMS[j][2 + e]);
    const int from = top + PART * 8;
    if (from < 0 || from + ROWS > HIGH) {
      #pragma unroll
      for (u32 e = 0; e < 2u; ++e)
        #pragma unroll
        for (u32 j = 0; j < ROWSu; ++j) WORDS[e][j] = (u32)(from + (int)j) < HIGHu ? WORDS[e][j] : LOWESTu;
    }
    if (!COLUMNS_FIT) {
      #pragma unroll
      for (u32 e = 0; e < 2u; ++e) {
        const bool is_column = (u32)(left + (int)(OCTET * 8u + fourth * 2u + e)) < ACROSSu;
        #pragma unroll
        for (u32 j = 0; j < ROWSu; ++j) WORDS[e][j] = is_column ? WORDS[e][j] : LOWESTu;
      }
    }
  }
}

// A tile begins with the first row of a window of the pool, and with the second column of one. The two last rows of an upper
// quarter belong to a window that ends in the lower one. The first column of a window is the last one of the thread before,
// or, for the first thread of four, of the quarter to the left.
FRAGMENT(pool) {
  {
    OWN_COORDINATES
    #pragma unroll
    for (u32 i = 1u - PART; i < 4u; ++i) {
      u32 largest[2];
      #pragma unroll
      for (u32 e = 0; e < 2u; ++e) {
        const u32* const row = WORDS[e] + (i ? 2u * i - 2u : 0u);
        largest[e] = i ? larger_pair<TYPE>(larger_pair<TYPE>(row[0], row[1]), row[2]) : larger_pair<TYPE>(above[e], row[0]);
      }
      u32& last = before[PART * 4u + i - 1u];
      const u32 sent = fourth == 3u ? last : largest[1];
      last = largest[1];
      const u32 previous = word_from(sent, threadIdx.x % 32u / 4u * 4u + (fourth + 3u) % 4u);
      const u32 word = larger_pair<TYPE>(larger_pair<TYPE>(largest[0], largest[1]), previous);
      const Pair pair = pair_of<TYPE>(word);
      const float pooled[2] = {pair.low, pair.high};
      const u32 c1 = warp * 16u + eighth * 2u, c2 = down * 7u + PART * 4u + i - 1u;
      const u32 c3 = right * POOL_TILE_COLUMNSu + OCTET * 4u + fourth - SKIPPEDu;
      const bool is_result = (POOL_ROWS_FIT || c2 < POOL_ROWSu) && (POOL_COLUMNS_FIT || c3 < POOL_COLUMNSu);
      if (is_result && (int)tile >= (int)begin && OCTET * 4u + fourth >= SKIPPEDu)
      EPILOGUE
    }
    if (PART == 0) {
      #pragma unroll
      for (u32 e = 0; e < 2u; ++e) above[e] = larger_pair<TYPE>(WORDS[e][6], WORDS[e][7]);
    }
  }
}
