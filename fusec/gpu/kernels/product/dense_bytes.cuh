// Products of many rows of 8-bit integers: dense_bytes.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  u8* const ring = (u8*)((u64)memory + 1023ull & ~1023ull);
  u64 *full = (u64*)(ring + STAGES * STAGE_BYTES), *empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGESu; ++s) {
      phases_of(full + s, 128u);
      phases_of(empty + s, 8u);
    }
    phases_are_set();
  }
  __syncthreads();
  const u32 rows = ROWS, blocks = BLOCKS, down = (rows + 127u) / 128u, tiles = down * ACROSSu;
  u32 stage = 0, phase = 0;
  if (threadIdx.x >= 256u) {
    COPY
  } else {
    MULTIPLY
  }
}

// Four warps copy octets of 16 bytes. The columns of a block are in the order in which a thread gets 16 neighbours of a
// result, two from each product of eight columns. Weights for the first stages do not wait for the launches before.
FRAGMENT(copy) {
  keep_registers<56>();
  const u32 own = threadIdx.x % 128u, octet = own % 8u, first = own / 8u;
  const u32 own_column = first % 8u / 2u * 16u + first / 8u * 2u + first % 2u;
  const u32 place = first * 128u + (octet ^ first % 8u) * 16u;
  {
    const i8* from_columns = WEIGHTS + ((u64)(blockIdx.x / down * COLUMNSu + own_column) * DEPTH + octet * 16u);
    #pragma unroll 1
    for (u32 part = 0; part < EARLYu; ++part) {
      u8* to = ring + (part * STAGE_BYTESu + place);
      COPY_COLUMNS
      from_columns += 128;
    }
  }
  BEGIN
  u32 early = EARLY;
  #pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles; tile += blocks) {
    const u32 row = tile % down * 128u + first, column = tile / down * COLUMNSu + own_column;
    const i8* from_rows = IMAGE + ((u64)row * DEPTH + octet * 16u);
    const i8* from_columns = WEIGHTS + ((u64)column * DEPTH + octet * 16u);
    #pragma unroll 1
    for (u32 part = 0; part < PARTSu; ++part) {
      wait_for_phase(empty + stage, phase ^ 1u);
      u8* to = ring + (stage * STAGE_BYTESu + place);
      #pragma unroll
      for (u32 i = 0; i < 8u; ++i) {
        const bool is_there = row + i * 16u < rows;
        copy_or_zeros_ahead(to + i * 2048u, is_there ? from_rows + i * (16u * DEPTH) : IMAGE, is_there);
      }
      if (early) {
        --early;
      } else {
        COPY_COLUMNS
      }
      arrive_with_copies(full + stage);
      from_rows += 128, from_columns += 128;
      if (++stage == STAGESu) stage = 0, phase ^= 1u;
    }
  }
  copied();
  wait_for_copies<0>();
}

FRAGMENT(copy_columns) {
  #pragma unroll
  for (u32 i = 0; i < COLUMNS / 16; ++i)
    copy_ahead<16>(to + (16384u + i * 2048u), from_columns + (i / 4u * 64u + i % 4u * 4u) * DEPTH);
}

FRAGMENT(multiply) {
  BEGIN
  take_registers<224>();
  const u32 lane = threadIdx.x % 32u, half = threadIdx.x / 128u, q = lane % 4u;
  const u32 own_row = half * 64u + threadIdx.x / 32u % 4u * 16u + lane / 4u;
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
      for (u32 step = 0; step < 4u; ++step) PRODUCT(sums, from + half * 8192u, from + 16384u, step, part | step);
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
    const u32 row0 = tile % down * 128u + own_row, row1 = row0 + 8u, column = tile / down * COLUMNSu + q * 16u;
    GROUPS
  }
}

FRAGMENT(group) {
  {
    const u32 COLUMN = column + GROUP * 64u;
    if (row0 < rows)
    STORE_ROW0
    if (row1 < rows)
    STORE_ROW1
  }
}
