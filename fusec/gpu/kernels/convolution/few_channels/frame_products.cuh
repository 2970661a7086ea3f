// Convolution of videos of four channels by products of warpgroups (Hopper): frame_products.py explains it and fills in the
// names in capitals.

// A warpgroup loads one frame of its tile at a time. Products of the frames before it are under way then. Its warps wait for
// each other only, so that the others multiply while this one stores.
FRAGMENT(kernel) {
  RESIDENT(filters);
  u8* const rings = filters + FILTER_BYTES;
  u64* const gates = (u64*)(rings + GROUPS * RING_BYTES);
  const u32 number = number_of_warp(), group = number / 4u, warp = number % 4u;
  const u32 eighth = threadIdx.x % 32u / 4u, fourth = threadIdx.x % 4u;
  const u32 first_filter = blockIdx.x % SIDESu * FILTERSu;
  u8* const ring = rings + group * RING_BYTESu;
  u64* const gate = gates + group;
  LOADED
  for (u32 i = 0; i < GROUPSu; ++i) barrier_for(gates + i, 4u);
  LOAD_FILTERS
  seen_by_groups();
  __syncthreads();
  has_come(gate);
  const u32 units = UNITS, blocks = BLOCKS;
  u32 turn = 0;
  #pragma unroll 1
  for (u32 first = blockIdx.x / SIDESu * GROUPSu; first < units; first += blocks * GROUPSu) {
    const u32 unit = first + group;
    UNIT_COORDINATES
    u32 slot = 0;
    #pragma unroll 1
    for (u32 at = 0; at <= STEPSu; ++at, ++turn, slot = slot < EXTENTu ? slot + 1u : 0u) {
      wait_for_all(gate, turn);
      const u32 c2 = begin + (at - EXTENTu) / STRIDEu;
      const bool is_whole = at >= EXTENTu && (at - EXTENTu) % STRIDEu == 0u && c2 < RESULT_FRAMESu && unit < units;
      float acc[FILTER_OCTETS][4];
      if (is_whole) {
        FRAME_PLACES
        group_begins();
        PRODUCTS
        group_ends();
      }
      if (at < STEPSu && unit < units) {
        u8* const image = ring + slot * FRAME_BYTESu;
        LOAD
      }
      seen_by_groups();
      wait_for_groups<0>();
      has_come(gate);
      if (is_whole) STORE_RESULTS
    }
  }
}

FRAGMENT(store_results) {
  {
    #pragma unroll
    for (u32 h = 0; h < 2u; ++h) {
      const u32 c3 = down * 8u + warp * 2u + h, c4 = right * 8u + eighth;
      if ((ROWS_FIT || c3 < RESULT_ROWSu) && (COLUMNS_FIT || c4 < RESULT_COLUMNSu)) {
        #pragma unroll
        for (u32 part = 0; part < PARTSu; ++part) {
          const u32 c1 = first_filter + part * PART_FILTERSu + fourth * OWNu;
          EPILOGUE
        }
      }
    }
  }
}
