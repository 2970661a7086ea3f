// Convolution of four channels and a max pool by products of warpgroups (Hopper): pooled_products.py explains it and fills
// in the names in capitals.

// While products of a tile are under way, the block loads the image of its next tile.
FRAGMENT(kernel) {
  RESIDENT(images);
  const u32 warp = threadIdx.x / 32u, eighth = threadIdx.x % 32u / 4u, fourth = threadIdx.x % 4u;
  RAW loaded[TURNS][2][RAW_COUNT];
  {
    const u32 block = blockIdx.x;
    u8* const image = images;
    LOAD_FIRST
    REQUEST
    DELIVER
    REQUEST_LAST
    DELIVER_LAST
  }
  LOAD_FILTERS
  seen_by_groups();
  __syncthreads();
  const u32 tiles = TILES, blocks = BLOCKS;
  u32 half = 0;
  #pragma unroll 1
  for (u32 now = blockIdx.x; now < tiles; now += blocks, half ^= 1u) {
    const u8* const own = images + half * IMAGE_BYTES;
    const u32 block = now + blocks;
    u8* const image = images + (half ^ 1u) * IMAGE_BYTES;
    u32 carry[OCTETS][2];
    #pragma unroll
    for (u32 part = 0; part < 2u; ++part) {
      float acc[OCTETS][8][4];
      group_begins();
      PRODUCTS
      group_ends();
      if (part == 0 && block < tiles) {
        LOAD_FIRST
        REQUEST
      }
      if (part == 1u && block < tiles) {
        REQUEST_LAST
      }
      wait_for_groups<0>();
      if (part == 0 && block < tiles) {
        DELIVER
      }
      if (part == 1u) {
        if (block < tiles) {
          DELIVER_LAST
        }
        seen_by_groups();
        __syncthreads();
      }
      POOL
    }
  }
}

// Neighbouring filters are eight rows apart, so that a thread has their results.
FRAGMENT(load_filters) {
  u32 taps[STEPS][4];
  #pragma unroll
  for (u32 s = 0; s < STEPSu; ++s) {
    #pragma unroll
    for (u32 e = 0; e < 4u; ++e) {
      const u32 pair = s * 2u + e / 2u, column = pair % ROW_PAIRSu * 2u + fourth / 2u;
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

// A tile begins with the first row and column of a window of the pool. The two last rows of the first part belong to a
// window that ends in the second part.
FRAGMENT(pool) {
  OWN_COORDINATES
  const int top = TOP + (int)part * 8, left = LEFT;
  u32 words[OCTETS][2][8];
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; ++o) {
    #pragma unroll
    for (u32 e = 0; e < 2u; ++e) {
      const bool is_column = (u32)(left + (int)(o * 8u + fourth * 2u + e)) < ACROSSu;
      #pragma unroll
      for (u32 j = 0; j < 8u; ++j)
        words[o][e][j] = is_column && (u32)(top + (int)j) < HIGHu ? word_of<TYPE>(acc[o][j][e], acc[o][j][2 + e]) : LOWESTu;
    }
  }
  #pragma unroll
  for (u32 i = 1u - part; i < 4u; ++i) {
    u32 largest[OCTETS][2];
    #pragma unroll
    for (u32 o = 0; o < OCTETSu; ++o)
      #pragma unroll
      for (u32 e = 0; e < 2u; ++e) {
        const u32* const row = words[o][e] + (i ? 2u * i - 2u : 0u);
        largest[o][e] = i ? larger_pair<TYPE>(larger_pair<TYPE>(row[0], row[1]), row[2]) : larger_pair<TYPE>(carry[o][e], row[0]);
      }
    #pragma unroll
    for (u32 o = 0; o < OCTETSu; ++o) {
      // The first thread of four has the column after the last one's.
      const u32 sent = fourth == 0 && o + 1u < OCTETSu ? largest[o + 1u < OCTETSu ? o + 1u : o][0] : largest[o][0];
      const u32 next = word_from(sent, threadIdx.x % 32u / 4u * 4u + (fourth + 1u) % 4u);
      const u32 word = larger_pair<TYPE>(larger_pair<TYPE>(largest[o][0], largest[o][1]), next);
      const Pair pair = pair_of<TYPE>(word);
      const float pooled[2] = {pair.low, pair.high};
      const u32 c1 = warp * 16u + eighth * 2u, c2 = down * 7u + part * 4u + i - 1u;
      const u32 c3 = right * POOL_TILE_COLUMNSu + o * 4u + fourth;
      if (o * 4u + fourth < POOL_TILE_COLUMNSu && c2 < POOL_ROWSu && c3 < POOL_COLUMNSu)
      EPILOGUE
    }
  }
  if (part == 0) {
    #pragma unroll
    for (u32 o = 0; o < OCTETSu; ++o)
      #pragma unroll
      for (u32 e = 0; e < 2u; ++e) carry[o][e] = larger_pair<TYPE>(words[o][e][6], words[o][e][7]);
  }
}
