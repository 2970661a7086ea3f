// Products of many rows with resident weights: resident_weights.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  u8* const weights = next_kilobyte(memory);
  u64* const gates = (u64*)(weights + WEIGHT_BYTES + TEAMS * RING_BYTES);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, team = warp / (4u * WIDTHu), side = warp / 4u % WIDTHu;
  const u32 first = blockIdx.x % COLUMN_BLOCKSu * BLOCK_COLUMNSu;
  u8* const ring = weights + WEIGHT_BYTES + team * RING_BYTESu;
  u64* const gate = gates + team;
  const u32 own = threadIdx.x % TEAM_THREADSu, octet = own % OCTETSu, own_row = own / OCTETSu;
  const SwizzledRows<ROW_BYTES> ring_rows = rows_at<ROW_BYTES>(ring), weight_rows = rows_at<ROW_BYTES>(weights);
  const u32 rows = ROWS, begin = blockIdx.x / COLUMN_BLOCKSu * TEAMSu + team;
  LOAD_WEIGHTS
  BEGIN
  // The part that is copied next, of a tile, and where to.
  u32 later_tile = begin, later_part = 0u, later_slot = 0u;
  #pragma unroll 1
  for (u32 i = 0; i < AHEADu; ++i) {
    COPY_PART
  }
  for (u32 t = 0; t < TEAMSu; ++t) barrier_for(gates + t, 4u * WIDTHu);
  wait_for_copies<AHEAD - 1>();
  seen_by_groups();
  __syncthreads();
  has_come(gate);
  u32 step = 0u, slot = 0u;
  i32 sums[COLUMNS / 8][4];
  #pragma unroll 1
  for (u32 tile = begin, turn = 0; turn < TURNSu && (!ROWS_FIT || tile < TILESu); ++turn, tile += APARTu) {
    COORDINATES
    LOAD_EARLY
    FETCH_NEXT
    #pragma unroll 1
    for (u32 part = 0; part < PARTSu - 1u; ++part) {
      STEP
      wait_for_groups<1>();
      ARRIVE
    }
    {
      const u32 part = PARTSu - 1u;
      STEP
      wait_for_groups<0>();
      ARRIVE
      #pragma unroll
      for (u32 n = 0; n < COLUMNS / 8; ++n)
        #pragma unroll
        for (u32 e = 0; e < 4u; ++e) pin(sums[n][e]);
      STORES
    }
  }
  wait_for_copies<0>();
}

// Store weights as rows of the depth. Their order gives a thread neighbours among the results.
FRAGMENT(load_weights) {
  for (u32 i = threadIdx.x; i < BLOCK_COLUMNS * PARTS * OCTETSu; i += THREADSu) {
    const u32 o = i % (PARTS * OCTETSu), n = i / (PARTS * OCTETSu);
    const u32 f = n / 8u / PAIRSu * (8u * PAIRSu) + n % 8u / 2u * (2u * PAIRSu) + n / 8u % PAIRSu * 2u + n % 2u;
    const u32 row = o / OCTETSu * BLOCK_COLUMNSu + n;
    copy_ahead<16>(weights + swizzled<ROW_BYTES>(row * ROW_BYTESu + o % OCTETSu * 16u), POINTER + ((first + f) * STRIDE + o * 16u));
  }
}

// Copy a part of the rows of a tile to its slot of the ring.
FRAGMENT(copy_part) {
  {
    #pragma unroll
    for (u32 i = 0; i < COPIESu; ++i) {
      const u32 at = own_row + i * EACHu, place = later_tile * 64u + at;
      const u32 row = place < rows ? place : 0u, k = later_part * ROW_BYTESu + octet * 16u;
      ROW_COORDINATES
      u8* const to = ring + (later_slot * STAGE_BYTESu + swizzled<ROW_BYTES>(at * ROW_BYTESu + octet * 16u));
      if (COPIES_FIT || at < 64u) copy_or_zeros_ahead(to, IMAGE + (AT), place < rows);
    }
    copied();
    if (++later_part == PARTSu) later_part = 0u, later_tile += APARTu;
    if (++later_slot == SLOTSu) later_slot = 0u;
  }
}

// Multiply a part of a tile, and copy another one, whose slot all warps of the team have read.
FRAGMENT(step) {
  wait_for_all(gate, step++);
  {
    const SwizzledRows<ROW_BYTES> here = later(ring_rows, slot * (STAGE_BYTES / 16u));
    const SwizzledRows<ROW_BYTES> there = later(weight_rows, (part * BLOCK_COLUMNSu + side * COLUMNSu) * OCTETSu);
    group_begins();
    #pragma unroll
    for (u32 k = 0; k < OCTETSu; k += 2u) PRODUCT(sums, later(here, k), later(there, k), part | k);
    group_ends();
  }
  if (++slot == SLOTSu) slot = 0u;
  COPY_PART
}

// Tell the other warps of the team that this warp's copies of the next part have arrived, and which products have read.
FRAGMENT(arrive) {
  wait_for_copies<AHEAD - 1>();
  seen_by_groups();
  has_come(gate);
}

// Bring what the epilogue of the team's next tile reads to the cache, so that memory is busy while this one is finished.
FRAGMENT(fetch_next) {
  for (u32 i = own; i < 64u * LINESu; i += TEAM_THREADSu) {
    const u32 place = (tile + APARTu) * 64u + i / LINESu;
    if (place < rows) fetch_line(POINTER + (place * PITCHu + first + i % LINESu * LINEu));
  }
}

FRAGMENT(row_written) {
  const u32 PLACE = tile * 64u + warp % 4u * 16u + lane / 4u + FIRSTu;
  const u32 ROW = ROWS_FIT || PLACE < rows ? PLACE : rows - 1u;
}

FRAGMENT(store) {
  if (ROWS_FIT || PLACE < rows)
  EPILOGUE
}
