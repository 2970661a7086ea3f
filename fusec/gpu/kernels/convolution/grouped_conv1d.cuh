// Grouped convolutions along one dim: grouped_conv1d.py explains them and fills in the names in capitals.

// While products of one stage of taps are under way, the filters of later stages are copied.
FRAGMENT(kernel) {
  RESIDENT(image);
  u8* const ring = image + IMAGE_BYTES;
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, eighth = lane / 4u, fourth = lane % 4u;
  const u32 block = blockIdx.x;
  BLOCK_COORDINATES
  const TYPE* const filters = FILTERS + group * (TAPS * TAP_NUMBERS);
  BEGIN
  #pragma unroll 4
  for (u32 i = threadIdx.x; i < ROWS * OCTETS; i += THREADSu) {
    const u32 row = i / OCTETSu, octet = i % OCTETSu;
    const int at = (int)(tile * POSITIONSu + row) - PAD;
    const bool is_there = (u32)at < LENGTHu;
    const TYPE* from = IMAGE_POINTER + (c0 * STRIDE_N + (is_there ? (u32)at : 0u) * STRIDE_L + (group * OCTETSu + octet) * 8u);
    copy_or_zeros_ahead(image + octet * PLANEu + row * 16u, from, is_there);
  }
  #pragma unroll 1
  for (u32 stage = 0; stage < AHEADu; ++stage) {
    COPY_STAGE
  }
  float acc[COLUMN_OCTETS][4];
  const u8* const own = image + warp / 4u * 1024u;
  #pragma unroll 1
  for (u32 now = 0; now < STAGESu; ++now) {
    wait_for_copies<AHEAD - 1>();
    seen_by_groups();
    __syncthreads();
    {
      const u32 stage = now + AHEADu;
      COPY_STAGE
    }
    {
      const u8* const taps = ring + now % SLOTSu * STAGE_BYTESu;
      const u8* const rows = own + now * (STAGE_TAPS * SHIFT);
      group_begins();
      PRODUCTS
      group_ends();
    }
    wait_for_groups<1>();
  }
  wait_for_groups<0>();
  #pragma unroll
  for (u32 o = 0; o < COLUMN_OCTETSu; ++o)
    #pragma unroll
    for (u32 e = 0; e < 4u; ++e) pin(acc[o][e]);
  #pragma unroll
  for (u32 h = 0; h < 2u; ++h) {
    const u32 c2 = tile * POSITIONSu + warp * 16u + h * 8u + eighth;
    if (c2 < RESULTSu) {
      #pragma unroll
      for (u32 part = 0; part < PARTSu; ++part) {
        const u32 c1 = group * GROUP_FILTERSu + part * PART_FILTERSu + fourth * OWNu;
        EPILOGUE
      }
    }
  }
}

// A group of copies without any is waited for, too. The slot is that of a stage whose products have ended.
FRAGMENT(copy_stage) {
  if (stage < STAGESu) {
    u8* const to = ring + stage % SLOTSu * STAGE_BYTESu;
    const TYPE* const from = filters + stage * (STAGE_BYTES / 2);
    for (u32 i = threadIdx.x; i < STAGE_BYTESu / 16u; i += THREADSu) copy_ahead<16>(to + i * 16u, from + i * 8u);
  }
  copied();
}
