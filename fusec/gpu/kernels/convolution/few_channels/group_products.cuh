// Convolution of four channels by products of warpgroups (Hopper): group_products.py explains it and fills in the
// names in capitals.

// While products of a tile are under way, the block loads the image of its next tile.
FRAGMENT(kernel) {
  RESIDENT(filters);
  u8* const images = filters + FILTER_BYTES;
  const u32 warp = threadIdx.x / 32u, eighth = threadIdx.x % 32u / 4u, fourth = threadIdx.x % 4u;
  LOADED
  {
    const u32 block = blockIdx.x;
    u8* const image = images;
    LOAD_FIRST
    REQUEST
    LOAD_FILTERS
    DELIVER
  }
  seen_by_groups();
  __syncthreads();
  const u32 tiles = TILES, blocks = BLOCKS;
  u32 half = 0;
  #pragma unroll 1
  for (u32 now = blockIdx.x; now < tiles; now += blocks, half ^= 1u) {
    const u8* const own = images + half * IMAGE_BYTES;
    const u32 block = now + blocks;
    u8* const image = images + (half ^ 1u) * IMAGE_BYTES;
    float acc[OCTETS][FILTER_OCTETS][4];
    group_begins();
    PRODUCTS
    group_ends();
    if (block < tiles) {
      LOAD_FIRST
      REQUEST
      DELIVER
    }
    seen_by_groups();
    wait_for_groups<0>();
    __syncthreads();
    STORE_RESULTS
  }
}

// Filters are distributed such that a thread gets neighbouring results.
FRAGMENT(load_filters) {
  #pragma unroll 4
  for (u32 i = threadIdx.x; i < PAIRS * COUNTu; i += THREADSu) {
    const u32 octet = i % COUNTu / 8u, pair = i / COUNTu;
    const u32 filter = FIRST_FILTER + octet / HALFu * PART_FILTERSu + i % 8u / 2u * OWNu + octet % HALFu * 2u + i % 2u;
    const u32 first = pair % ROW_PAIRSu * 2u;
    Pack<TYPE, 8> both;
    #pragma unroll
    for (u32 p = 0; p < 2u; ++p) {
      const bool is_tap = first + p - NO_TAPS < WINDOW_COLUMNSu;
      const u32 column = is_tap ? first + p - NO_TAPS : 0u;
      const u32 from = filter * FILTER_STRIDE + ROW_AT + column * COLUMN_STRIDE;
      Pack<TYPE, 4> tap;
      if (CONTIGUOUS) tap = load_pack<TYPE, 4>(FILTERS + from);
      else for (int j = 0; j < 4; ++j) tap.v[j] = j < CHANNELS ? FILTERS[from + j * CHANNEL_STRIDE] : TYPE();
      for (int j = 0; j < 4; ++j) both.v[p * 4 + j] = is_tap ? tap.v[j] : TYPE();
    }
    *reinterpret_cast<Pack<TYPE, 8>*>(filters + i * 16u) = both;
  }
}

FRAGMENT(store_results) {
  OWN_COORDINATES
  #pragma unroll
  for (u32 o = 0; o < OCTETSu; ++o) {
    #pragma unroll
    for (u32 h = 0; h < 2u; ++h) {
      const u32 c2 = down * 8u + warp * 2u + h, c3 = (right * OCTETSu + o) * 8u + eighth;
      if ((ROWS_FIT || c2 < RESULT_ROWSu) && (COLUMNS_FIT || c3 < RESULT_COLUMNSu)) {
        #pragma unroll
        for (u32 part = 0; part < PARTSu; ++part) {
          const u32 c1 = part * PART_FILTERSu + fourth * OWNu;
          EPILOGUE
        }
      }
    }
  }
}
