// Products of many rows of 8-bit integers: dense_bytes.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  u8* const ring = (u8*)((u64)memory + 1023ull & ~1023ull);
  u64 *full = (u64*)(ring + STAGES * STAGE_BYTES), *empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGESu; ++s) {
      phases_of(full + s, 129u);
      phases_of(empty + s, READERSu);
    }
    phases_are_set();
  }
  __syncthreads();
  const u32 rows = ROWS, blocks = BLOCKS, row_blocks = (rows + LAST_ROWu) / TILE_ROWSu, tiles = row_blocks * COLUMN_BLOCKSu;
  u32 stage = 0, phase = 0;
  if (threadIdx.x >= MULTIPLYINGu) {
    COPY
  } else {
    MULTIPLY
  }
}

// Four warps copy octets of 16 bytes of the rows, and one thread the columns. Weights for the first stages do not wait for
// the launches before.
FRAGMENT(copy) {
  keep_registers<FEW>();
  const u32 own = threadIdx.x % 128u, octet = own % 8u, first = own / 8u;
  const u32 place = first * 128u + (octet ^ first % 8u) * 16u;
  u32 early = 0;
  if (own == 0) {
    const i8* columns = WEIGHTS + (u64)(blockIdx.x / row_blocks) * (PARTS * COLUMN_BYTES);
    #pragma unroll 1
    for (u32 part = 0; part < EARLYu; ++part) {
      const u32 stage = part;
      COPY_COLUMNS
    }
  }
  BEGIN
  #pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += blocks) {
    const u32 row = tile % row_blocks * TILE_ROWSu + first;
    const i8* from = IMAGE + ((u64)row * DEPTH + octet * 16u);
    const i8* columns = WEIGHTS + (u64)(tile / row_blocks) * (PARTS * COLUMN_BYTES);
    #pragma unroll 1
    for (u32 part = 0; part < PARTSu; ++part) {
      wait_for_phase(empty + stage, phase ^ 1u);
      if (early < EARLYu) ++early;
      else if (own == 0) {
        COPY_COLUMNS
      }
      u8* to = ring + (stage * STAGE_BYTESu + place);
      #pragma unroll
      for (u32 i = 0; i < TURNSu; ++i) {
        const bool is_there = row + i * 16u < rows;
        copy_or_zeros_ahead(to + i * 2048u, is_there ? from + i * (16u * DEPTH) : IMAGE, is_there);
      }
      arrive_with_copies(full + stage);
      from += 128;
      if (++stage == STAGESu) stage = 0, phase ^= 1u;
    }
  }
  copied();
  wait_for_copies<0>();
}

FRAGMENT(copy_columns) {
  arrive_and_expect(full + stage, COLUMN_BYTESu);
  copy_bytes_ahead(ring + (stage * STAGE_BYTESu + ROW_BYTESu), columns + part * COLUMN_BYTESu, COLUMN_BYTESu, full + stage);
}

FRAGMENT(multiply) {
  BEGIN
  take_registers<MANY>();
  const u32 group = threadIdx.x / 128u, q = threadIdx.x % 4u, lane = threadIdx.x % 32u;
  const u32 own_row = group * 64u + threadIdx.x / 32u % 4u * 16u + lane / 4u;
  i32 sums[COLUMNS / 8][4];
  #pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += blocks) {
    u64* used = empty;
    #pragma unroll 1
    for (u32 part = 0; part < PARTSu; ++part) {
      wait_for_phase(full + stage, phase);
      seen_by_groups();
      const u8* from = ring + stage * STAGE_BYTESu;
      group_begins();
      #pragma unroll
      for (u32 step = 0; step < 4u; ++step) PRODUCT(sums, from + group * 8192u, from + ROW_BYTESu, step, part | step);
      group_ends();
      if (part) {
        wait_for_groups<1>();
        __syncwarp();
        if (lane == 0) arrive(used);
      }
      used = empty + stage;
      if (++stage == STAGESu) stage = 0, phase ^= 1u;
    }
    wait_for_groups<0>();
    __syncwarp();
    if (lane == 0) arrive(used);
    #pragma unroll
    for (u32 n = 0; n < COLUMNS / 8; ++n)
      #pragma unroll
      for (u32 e = 0; e < 4u; ++e) pin(sums[n][e]);
    const u32 column = tile / row_blocks * COLUMNSu + q * VECTORu;
    STORES
  }
}

// After the last row a thread loads that row again, and stores nothing. No branch keeps loads from being issued early.
FRAGMENT(own_row) {
  const u32 WANTED = tile % row_blocks * TILE_ROWSu + own_row + PLACEu;
  const bool IS_THERE = WANTED < rows;
  const u32 ROW = IS_THERE ? WANTED : rows - 1u;
}

FRAGMENT(own_column) {
  const u32 COLUMN = column + PLACEu;
}
