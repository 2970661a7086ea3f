// Convolution over few pixels: split_k_source.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 deep = warp / ACROSSu, side = warp % ACROSSu, block = blockIdx.x;
  BLOCK_COORDINATES
  const u32 first = group * FILTERSu;
  u8* patch = memory + 16;
  float* sums = (float*)(patch + PATCH_BYTES);
  BEGIN_CLUSTER

  // Issue the loads of the weights of a warp's first steps.
  const TYPE* weights[ROWS];
  #pragma unroll
  for (int m = 0; m < ROWS; ++m)
    weights[m] = WEIGHTS + ((ROW_GROUP * SPLITSu + part) * PART_WEIGHTSu + deep * 512u + lane * 8u);
  u32 w[AHEAD][ROWS][2][4];
  auto load = [&](int slot, int i) {
    if ((i + 1) * DEEP <= STEPS || deep + i * DEEPu < STEPSu) {
      #pragma unroll
      for (int m = 0; m < ROWS; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) load_words(w[slot][m][h], weights[m] + (i * (DEEP * 512) + h * 256));
    }
  };
  #pragma unroll
  for (int i = 0; i < AHEAD; ++i) load(i, i);
  __syncwarp();
  wait_for_launches();

  // Begin to copy the pixels that the tile reads into shared memory; past the image, zeros. Threads copy pixels of a row,
  // or of several rows.
  #pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const u32 place = threadIdx.x + turn * THREADSu;
    const u32 row = ROWS_TOGETHER > 1 ? place / SPANu : 0u, i = place - row * SPANu;
    const u32 c = i % PIXEL_OCTETSu, column = i / PIXEL_OCTETSu;
    const int y = (int)(down * TILE_DOWNu + row * STRIDE_DOWNu) - TOP;
    const int x = (int)(right * TILE_RIGHTu + column * STRIDE_RIGHTu) - LEFT;
    const TYPE* from = IMAGE + ((int)(n * IMAGE_STRIDEu) + y * ROW_STRIDE + x * COLUMN_STRIDE +
                                (int)(part * PART_CHANNELSu + c * 8u));
    u8* to = patch + ((row * PATCH_COLUMNSu + column) * PITCHu + c * 16u);
    #pragma unroll
    for (int r = 0; r < ROW_TURNS; ++r)
      if (IS_COPIED)
        copy_or_zeros_ahead(to + r * (ROWS_TOGETHER * PATCH_COLUMNS * PITCH), from + r * ROWS_STRIDE,
                            (u32)(y + r * ROWS_DOWN) < IMAGE_ROWSu && (u32)x < IMAGE_COLUMNSu);
  }
  copied();
  LOAD_OPERANDS
  next_may_begin();

  // Multiply. Shared memory then holds the sums of each of `deep` warps.
  const u8* own = patch + (g * PIXEL_STEPu + q * 16u);
  float acc[ROWS][TILES][4];
  #pragma unroll
  for (int m = 0; m < ROWS; ++m)
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
  wait_for_copies<0>();
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < OWN_STEPS; ++i) {
    if ((i + 1) * DEEP <= STEPS || deep + i * DEEPu < STEPSu) {
      const u32 s = deep + i * DEEPu, tap = s / CHUNKSu, chunk = s % CHUNKSu;
      const u32 from = (tap / WINDOW_COLUMNSu * TAP_ROWu + tap % WINDOW_COLUMNSu * TAP_COLUMNu) * PITCHu + chunk * 64u;
      #pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const int spot = (n * 8 / TILE_COLUMNS * RESULT_ROW + n * 8 % TILE_COLUMNS * RESULT_COLUMN) * PITCH;
        const Pack<u32, 4> x = load_pack<u32, 4>((const u32*)(own + from + spot));
        #pragma unroll
        for (int h = 0; h < 2; ++h)
          #pragma unroll
          for (int m = 0; m < ROWS; ++m) {
            const u32(&v)[4] = w[i % AHEAD][m][h];
            multiply_tile<TYPE>(acc[m][n], v[0], v[1], v[2], v[3], x.v[2 * h], x.v[2 * h + 1]);
          }
      }
    }
    if (i + AHEAD < OWN_STEPS) load(i % AHEAD, i + AHEAD);
  }
  #pragma unroll
  for (int m = 0; m < ROWS; ++m)
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[(deep * (TILES * 8u) + n * 8 + 2u * q + e % 2) * SUMS_PITCHu +
             (side * ROWSu + m) * 16u + e / 2 * 8 + g] = acc[m][n][e];
  __syncthreads();
  MERGE
}

// Tell the cluster how many bytes this block will receive: the sums of the pixels that it finishes.
FRAGMENT(begin_cluster) {
  float* box = sums + DEEP * TILES * 8 * SUMS_PITCH;
  u64* mbarrier = (u64*)memory;
  const u32 finished = (part + 1u) * ROWS_EACHu <= PIXELSu
                           ? ROWS_EACHu
                           : (part * ROWS_EACHu < PIXELSu ? PIXELSu - part * ROWS_EACHu : 0u);
  cluster_begins(mbarrier, finished * (SPLITS * FILTERS * 4u));
}

// Each block sends its sums to the blocks that finish these pixels.
FRAGMENT(merge_in_cluster) {
  cluster_is_there();
  for (u32 i = threadIdx.x; i < PIXELS * OCTETSu; i += THREADSu) {
    const u32 pixel = i / OCTETSu, octet = i % OCTETSu;
    SUM_WARPS
    send(box + ((part * ROWS_EACHu + pixel % ROWS_EACHu) * SUMS_PITCHu + octet * 8u), total, mbarrier, pixel / ROWS_EACHu);
  }
  wait_for_peers(mbarrier);
  FINISH
}

// The last block reads the sums of the others from scratch memory.
FRAGMENT(merge_in_scratch) {
  for (u32 i = threadIdx.x; i < PIXELS * OCTETSu; i += THREADSu) {
    const u32 pixel = i / OCTETSu, octet = i % OCTETSu;
    SUM_WARPS
    store_pack<float, 8>(SCRATCH + (block * SIZEu + i * 8u), total);
  }
  if (!last_of(COUNTERS + block / SPLITSu * COUNTER_STRIDE, SPLITSu)) return;
  FINISH
}

// Sum eight numbers over parts, in a fixed order.
FRAGMENT(sum_parts) {
  Pack<float, 8> total = READ((const Pack<float, 8>*)(FROM));
  #pragma unroll
  for (int k = 1; k < COUNT; ++k) {
    const Pack<float, 8> more = READ((const Pack<float, 8>*)(FROM + k * APART));
    #pragma unroll
    for (int j = 0; j < 8; ++j) total.v[j] += more.v[j];
  }
}

// The eight results of a pixel that a thread finishes in one turn. Threads without a result read another's operands.
FRAGMENT(result_place) {
  const u32 ITEM = threadIdx.x + FIRST_ITEMu;
  const u32 PIXEL = ITEM / OCTETSu + FIRST_PIXEL;
  const bool IS_RESULT = down * HIGHu + PIXEL / TILE_COLUMNSu < RESULT_ROWSu &&
                         right * TILE_COLUMNSu + PIXEL % TILE_COLUMNSu < RESULT_COLUMNSu && PIXEL < PIXELSu &&
                         ITEM < ROWS_EACH * OCTETSu && first + ITEM % OCTETSu * 8u < ALL_FILTERSu;
  const u32 PLACE = IS_RESULT ? PIXEL : 0u, FILTER = first + (IS_RESULT ? ITEM % OCTETSu * 8u : 0u);
  const u32 RESULT_Y = down * HIGHu + PLACE / TILE_COLUMNSu;
  const u32 RESULT_X = right * TILE_COLUMNSu + PLACE % TILE_COLUMNSu;
}

FRAGMENT(finish) {
  if (IS_RESULT) {
    const u32 item = ITEM, pixel = PIXEL, octet = item % OCTETSu;
    SUM
    EPILOGUE
  }
}
