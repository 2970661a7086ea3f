// The filters' gradient of a convolution of four channels by products of warpgroups (Hopper): filter_gradient.py explains it
// and fills in the names in capitals.

// While products of one tile are under way, the block copies a later tile. Each warpgroup sums over rows of its own.
FRAGMENT(kernel) {
  RESIDENT(memory);
  const u32 tiles = TILES, each = EACH, begin = blockIdx.x * each;
  const u32 own = begin + each < tiles ? each : tiles - begin;
  const u32 warp = number_of_warp(), group = warp / 4u, lane = threadIdx.x % 32u;
  float sums[PAIRS][WINDOW_ROWS][4];
  #pragma unroll
  for (int p = 0; p < PAIRS; ++p)
    for (int r = 0; r < WINDOW_ROWS; ++r)
      for (int e = 0; e < 4; ++e) sums[p][r][e] = 0.0f;
  #pragma unroll 1
  for (u32 tile = 0; tile < AHEADu; ++tile) {
    u8* const to = memory + tile * TILE_BYTESu;
    COPY_TILE
  }
  u32 slot = 0;
  #pragma unroll 1
  for (u32 now = 0; now < own; ++now) {
    wait_for_copies<AHEAD - 1>();
    seen_by_groups();
    __syncthreads();
    const u8* const image = memory + slot * TILE_BYTESu + group * IMAGE_STEPu;
    const u8* const loss = memory + slot * TILE_BYTESu + IMAGE_BYTESu + group * LOSS_STEPu;
    // Rows after the last one are not multiplied, because zero times infinity would be NaN.
    if ((begin + now) % DOWNu * ROWSu + group < LOSS_ROWSu) {
      const u32 pixel = lane / 16u * 8u + lane % 8u, octet = warp % 4u * 2u + lane / 8u % 2u;
      MULTIPLY
    }
    {
      const u32 tile = now + AHEADu;
      u8* const to = memory + (slot ? slot - 1u : AHEADu) * TILE_BYTESu;
      COPY_TILE
    }
    wait_for_groups<0>();
    slot = slot < AHEADu ? slot + 1u : 0u;
  }
  wait_for_copies<0>();
  __syncthreads();
  STORE_SUMS
}

// Multiply the pixels of a row. Registers that products read do not change until these have ended.
FRAGMENT(multiply) {
  {
    u32 words[DEPTHS][4];
    #pragma unroll
    for (u32 d = 0; d < DEPTHSu; ++d)
      load_tiles<true>(words[d], loss + (d * 16u + pixel) * PITCHu + octet * 16u);
    group_begins();
    PRODUCTS
    group_ends();
  }
}

// Pixels outside the image are zero, and so is what follows the last pixel of a row.
FRAGMENT(copy_tile) {
  if (tile < own) {
    const u32 n = (begin + tile) / DOWNu, down = (begin + tile) % DOWNu;
    #pragma unroll
    for (u32 turn = 0; turn < IMAGE_TURNSu; ++turn) {
      const u32 i = turn * THREADSu + threadIdx.x, r = i / PLACESu, place = i % PLACESu;
      const int row = (int)(down * IMAGE_STEP_ROWSu + r) - TOP, column = (int)(place * 2u) - LEFT;
      const bool is_there = place < USEDu && (u32)row < IMAGE_ROWSu && (u32)column < IMAGE_COLUMNSu;
      const u32 from = is_there ? n * IMAGE_N + (u32)row * IMAGE_H + (u32)column * 4u : 0u;
      if (i < IMAGE_PLACESu) copy_or_zeros_ahead(to + i * 16u, IMAGE + from, is_there);
    }
    #pragma unroll
    for (u32 turn = 0; turn < LOSS_TURNSu; ++turn) {
      const u32 i = turn * THREADSu + threadIdx.x, pixel = i / 8u % PIXELSu, octet = i % 8u;
      const u32 row = down * ROWSu + i / (8u * PIXELSu);
      const bool is_there = row < LOSS_ROWSu && pixel < LOSS_COLUMNSu && octet < FILTERSu / 8u;
      const u32 from = is_there ? n * LOSS_N + row * LOSS_H + pixel * LOSS_W + octet * 8u : 0u;
      if (i < LOSS_PLACESu)
        copy_or_zeros_ahead(to + IMAGE_BYTES + i / 8u * PITCHu + octet * 16u, LOSS + from, is_there);
    }
  }
  copied();
}

// Warpgroups send their sums to the first one through shared memory, one after the other.
FRAGMENT(store_sums) {
  float* const place = (float*)memory + threadIdx.x % 128u;
  #pragma unroll 1
  for (u32 other = 1; other < GROUPSu; ++other) {
    #pragma unroll
    for (int i = 0; i < PAIRS * WINDOW_ROWS * 4; ++i)
      if (group == other) place[i * 128] = sums[i / (WINDOW_ROWS * 4)][i / 4 % WINDOW_ROWS][i % 4];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < PAIRS * WINDOW_ROWS * 4; ++i)
      if (group == 0) sums[i / (WINDOW_ROWS * 4)][i / 4 % WINDOW_ROWS][i % 4] += place[i * 128];
    __syncthreads();
  }
  if (group == 0) {
    float* const to = PARTS + blockIdx.x * SIZEu;
    #pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      const int column = p * 2 + (int)(lane % 4u / 2u) - NO_TAPS;
      #pragma unroll
      for (int r = 0; r < WINDOW_ROWS; ++r)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 filter = warp * 16u + h * 8u + lane / 4u;
          const u32 at = ((filter * WINDOW_ROWS + r) * WINDOW_COLUMNSu + column) * 4u + lane % 2u * 2u;
          const Pack<float, 2> two = {{sums[p][r][2 * h], sums[p][r][2 * h + 1]}};
          if ((u32)column < WINDOW_COLUMNSu && filter < FILTERSu) store_pack<float, 2>(to + at, two);
        }
    }
  }
}

// A thread adds the sums of some blocks for the four channels of a tap; the first threads add these, always in one order.
FRAGMENT(add_parts) {
  __shared__ Pack<float, 4> shared[SLICES][32];
  const u32 slice = threadIdx.x / 32u, lane = threadIdx.x % 32u, tap = blockIdx.x * 32u + lane, parts = COUNT;
  Pack<float, 4> sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (tap < TAPSu) {
    #pragma unroll 8
    for (u32 part = slice; part < parts; part += SLICESu) {
      const Pack<float, 4> more = load_pack<float, 4>(PARTS + part * SIZEu + tap * 4u);
      for (int j = 0; j < 4; ++j) sum.v[j] += more.v[j];
    }
  }
  shared[slice][lane] = sum;
  __syncthreads();
  if (slice == 0 && tap < TAPSu) {
    for (u32 i = 1; i < SLICESu; ++i)
      for (int j = 0; j < 4; ++j) sum.v[j] += shared[i][lane].v[j];
    const u32 c0 = tap / (WINDOW_ROWS * WINDOW_COLUMNSu), c2 = tap / WINDOW_COLUMNSu % WINDOW_ROWS, c3 = tap % WINDOW_COLUMNSu;
    #pragma unroll
    for (u32 c1 = 0; c1 < CHANNELSu; ++c1) EPILOGUE
  }
}
