// Depthwise convolution: depthwise.py and depthwise_source.py explain it and fill in the names in capitals.

// A thread computes one strip of results.
FRAGMENT(strips) {
  const u32 i = blockIdx.x * BLOCKu + threadIdx.x;
  if (i >= COUNT) return;
  COORDINATES
  const u32 c1 = pack * VECTORu;
  WINDOW
  #pragma unroll
  for (int s = 0; s < STRIP; ++s) {
    const u32 COLUMN = strip * STRIPu + s;
    if (COLUMN >= WIDTHu) break;
    EPILOGUE
  }
}

// A thread computes a strip of columns for a band of rows.
FRAGMENT(bands) {
  const u32 i = blockIdx.x * BLOCKu + threadIdx.x;
  if (i >= COUNT) return;
  COORDINATES
  FILTERS
  ROLLING
}

// A block computes some channels of one image, or a chunk of them, and their sums.
FRAGMENT(blocks) {
  const u32 lane = threadIdx.x % LANESu, t = threadIdx.x / LANESu;
  const u32 block = blockIdx.x;
  BLOCK_COORDINATES
  const u32 pack = group * LANESu + lane;
  const bool live = LANES_FIT || pack < PACKSu;
  const u32 c1 = (live ? pack : PACKS - 1u) * VECTORu;
  __shared__ TYPE shared[LANES * THREADS * VECTOR];
  TYPE sum[VECTOR];
  for (int j = 0; j < VECTOR; ++j) sum[j] = 0;
  FILTERS
  const u32 begin = chunk * EACHu;
  const u32 end = begin + EACHu < ITEMSu ? begin + EACHu : ITEMSu;
  #pragma unroll 1
  for (u32 item = begin + t; item < end; item += THREADSu) {
    ITEM_COORDINATES
    RESULTS
  }
  reduce_threads<LANES * THREADS, THREADS, LANES, VECTOR>(sum, shared, Add());
  if (live && t == 0)
    for (int j = 0; j < VECTOR; ++j) SUMS[(chunk * SAMPLESu + c0) * CHANNELSu + c1 + j] = sum[j];
}

// Compute a tile, and apply the epilogue to each result.
FRAGMENT(tile) {
  WINDOW
  #pragma unroll
  for (int s = 0; s < STRIP; ++s) {
    const u32 COLUMN = strip * STRIPu + s;
    if (!STRIPS_FIT && COLUMN >= WIDTHu) break;
    EPILOGUE
  }
}

// Merge the sums of blocks, and turn them into the result of the reduction.
FRAGMENT(merge_sums) {
  SETUP
  #pragma unroll 4
  for (u32 s = t; s < CHUNKSu; s += THREADSu)
    acc0[0] += SUMS[s * COLUMNSu + c];
  REDUCE
  COORDINATES
  if (live && t == 0) {
    RESULT
  }
}

FRAGMENT(sums) {
  TYPE acc[STRIP][VECTOR];
  for (int s = 0; s < STRIP; ++s) for (int j = 0; j < VECTOR; ++j) acc[s][j] = 0;
  ADD_PRODUCTS
}

// Loop over a dim of the window other than its last.
FRAGMENT(outer_taps) {
  #pragma UNROLL
  for (int TAP = 0; TAP < TAPS; ++TAP) {
    const int PLACE = (int)COORDINATE * STRIDE - PAD + TAP * DILATION;
    if ((u32)PLACE >= SIZEu) continue;
    BODY
  }
}

FRAGMENT(load_filters) {
  TYPE WEIGHT_SIZES[VECTOR];
  LOOPS
  {
    if (CONTIGUOUS) {
      const Pack<STORED, VECTOR> loaded = load_pack<STORED, VECTOR>(FILTERS + (AT));
      for (int j = 0; j < VECTOR; ++j) WEIGHT[j] = wide(loaded.v[j]);
    } else {
      for (int j = 0; j < VECTOR; ++j) WEIGHT[j] = wide(FILTERS[AT + j * CHANNEL_STRIDE]);
    }
  }
}

// A column of the image is read once for all results whose windows contain it.
FRAGMENT(image_columns) {
  #pragma unroll
  for (int q = 0; q < WIDTH_READ; ++q) {
    const int PLACE = (int)strip * (STRIP * STRIDE) - PAD + q;
    if ((u32)PLACE >= SIZEu) continue;
    const Pack<STORED, VECTOR> loaded = load_pack<STORED, VECTOR>(IMAGE + (AT));
    #pragma unroll
    for (int s = 0; s < STRIP; ++s) {
      const int k = q - s * STRIDE;
      if (k < 0 || k % DILATION != 0 || k / DILATION >= TAPS) continue;
      for (int j = 0; j < VECTOR; ++j) acc[s][j] += wide(loaded.v[j]) * WEIGHT[k / DILATION][j];
    }
  }
}
