// Products of 8-bit integers by warpgroups: warpgroup_product.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  const u32 lane = threadIdx.x % 32u, g = lane / 4u, q = lane % 4u, group = threadIdx.x / 128u;
  const u32 first = blockIdx.x % ACROSSu * WIDTHu, top = blockIdx.x / ACROSSu * HEIGHTu;
  const u32 own = threadIdx.x / PIECESu, piece = threadIdx.x % PIECESu * 16u;
  const u32 place = piece / 16u * ROW_LEADu + own * 16u;
  ROWS_TO_COPY
  i32 sums[OCTETS][4];
  #pragma unroll
  for (int n = 0; n < OCTETS; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[n][e] = 0;
      pin(sums[n][e]);
    }
  COPY_FIRST
  u32 stage = 0u;
  #pragma unroll 1
  for (u32 round = 0; round < ROUNDSu; ++round) {
    wait_for_copies<AHEAD - 1>();
    seen_by_groups();
    __syncthreads();
    const u8* rows = memory + (stage * STAGE_BYTESu + group * 1024u);
    const u8* columns = memory + (stage * STAGE_BYTESu + ROWS_BYTESu);
    group_begins();
    #pragma unroll
    for (int d = 0; d < DEPTH / 32; ++d)
      PRODUCT(sums, rows + d * (2 * ROW_LEAD), ROW_LEADu, columns + d * (2 * COLUMN_LEAD), COLUMN_LEADu);
    group_ends();
    const u32 later = round + AHEADu, to_stage = stage < STAGESu - AHEADu ? stage + AHEADu : stage - (STAGESu - AHEADu);
    if (later < ROUNDSu) {
      COPY_LATER
    }
    copied();
    // The next round writes over the integers of the products before these.
    wait_for_groups<1>();
    stage = stage + 1u < STAGESu ? stage + 1u : 0u;
  }
  wait_for_groups<0>();
  #pragma unroll
  for (int n = 0; n < OCTETS; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(sums[n][e]);
  const u32 last = top + (threadIdx.x / 32u * 16u + g);
  STORE_ROW0
  STORE_ROW1
}

// Where the rows begin that a thread copies. Past the end that is the last row again, whose results are not stored.
FRAGMENT(rows_to_copy) {
  i32 from[ROW_PASSES];
  #pragma unroll
  for (int u = 0; u < ROW_PASSES; ++u) {
    const u32 wanted = top + (own + u * PASSu), row = wanted < ROWSu ? wanted : LAST_ROWu;
    ROW_COORDINATES
    from[u] = (i32)(AT);
    WINDOW
  }
}

// Begin to copy the bytes of a round: of rows,
FRAGMENT(copy_rows) {
  {
    u8* to = memory + (TO_STAGE * STAGE_BYTESu + place);
    const u32 k = ROUND % CHUNKSu * DEPTHu + piece;
    const bool is_there = IS_WHOLE || k < CHANNELSu;
    TAP
    #pragma unroll
    for (int u = 0; u < ROW_PASSES; ++u) {
      const bool has_row = is_there && (IS_INSIDE);
      copy_or_zeros_ahead(to + u * (PASS * 16), ROW_POINTER + (has_row ? from[u] + (i32)k + SHIFT : 0), has_row);
    }
  }
}

// and of columns, in the order in which a thread gets eight neighbours.
FRAGMENT(copy_columns) {
  {
    const u32 tap = ROUND / CHUNKSu, k = ROUND % CHUNKSu * DEPTHu + piece;
    const bool is_there = IS_WHOLE || k < CHANNELSu;
    #pragma unroll
    for (int u = 0; u < COLUMN_PASSES; ++u) {
      const u32 column = own + u * PASSu, in_tile = column % 32u;
      const u32 at = column - in_tile + in_tile % 8u / 2u * 8u + in_tile / 8u * 2u + in_tile % 2u;
      const bool has_column = is_there && (IS_FULL || first + column < COLUMNSu);
      u8* there = memory + (TO_STAGE * STAGE_BYTESu + ROWS_BYTESu + piece / 16u * COLUMN_LEADu + at * 16u);
      copy_or_zeros_ahead(there, COLUMN_POINTER + (has_column ? COLUMN_AT : 0u), has_column);
    }
  }
}

// A round has bytes of one tap of a window.
FRAGMENT(tap) {
  const i32 tap = ROUND / CHUNKSu, y = tap / ACROSS_WINDOW * DOWN_STEP, x = tap % ACROSS_WINDOW * ACROSS_STEP;
}

FRAGMENT(store_row) {
  const u32 INDEX = last + OFFSETu;
  if (INDEX < ROWSu) {
    RESULT_COORDINATES
    #pragma unroll
    for (int n = 0; n < OCTETS / 4; ++n) {
      const u32 o = first + (n * 32u + q * 8u);
      if (!IS_FULL && o >= COLUMNSu) break;
      EPILOGUE
    }
  }
}
