// Convolution of four channels: warp_products.py explains it and fills in the names in capitals.

// A block loads its filters once, for all its tiles.
FRAGMENT(kernel) {
  __shared__ Pack<TYPE, 4> image[TILE_PIXELS];
  const u32 warp = threadIdx.x / 32u, lane = threadIdx.x % 32u, eighth = lane / 4u, fourth = lane % 4u;
  LOAD_FILTERS
  #pragma unroll 1
  for (u32 block = blockIdx.x; block < TILES; block += BLOCKS) {
    BLOCK_COORDINATES
    const int top = TOP;
    const int left = LEFT;
    // Loads are not conditional, so that those of a batch are issued together.
    #pragma unroll 1
    for (u32 begin = threadIdx.x; begin < HIGH * ACROSSu; begin += BATCH * THREADSu) {
      #pragma unroll
      for (u32 turn = 0; turn < BATCHu; ++turn) {
        const u32 i = begin + turn * THREADSu < HIGH * ACROSSu ? begin + turn * THREADSu : HIGH * ACROSSu - 1u;
        const int image_row = top + (int)(i / ACROSSu), image_column = left + (int)(i % ACROSSu);
        const bool is_inside = (u32)image_row < IMAGE_ROWSu && (u32)image_column < IMAGE_COLUMNSu;
        const int row = is_inside ? image_row : 0, column = is_inside ? image_column : 0;
        Pack<TYPE, 4> pixel;
        for (int j = 0; j < 4; ++j) pixel.v[j] = TYPE();
        LOAD_PIXEL
        if (!is_inside)
          for (int j = 0; j < 4; ++j) pixel.v[j] = TYPE();
        image[i / ACROSSu * PITCHu + i % ACROSSu] = pixel;
      }
    }
    __syncthreads();

    #pragma unroll 1
    for (u32 turn = 0; turn < TURNSu; ++turn) {
      float acc[2][TILES_OF_FILTERS][4];
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        #pragma unroll
        for (int c = 0; c < TILES_OF_FILTERS; ++c)
          for (int d = 0; d < 4; ++d) acc[h][c][d] = 0.0f;
      const u32 first = (turn * PIXEL_WARPSu + warp / GROUPSu) * 16u;
      u32 at[2];
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 p = first + h * 8u + eighth < PIXELSu ? first + h * 8u + eighth : 0u;
        // A constant distance is part of the instruction that loads.
        at[h] = h == 1 && SHARE_ROW ? at[0] + 8u * STRIDE_COLUMNSu
                                    : (p / COLUMNSu * STRIDE_ROWSu) * PITCHu + p % COLUMNSu * STRIDE_COLUMNSu;
      }
      #pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          Pack<u32, 2> own = load_pack<u32, 2>(reinterpret_cast<const u32*>(image + at[h] + offset[s]));
          // Without a tap the pixel is zero, because infinity times zero would be NaN.
          if (s == STEPS - 1 && fourth >= LAST_TAPSu) own.v[0] = own.v[1] = 0;
          #pragma unroll
          for (int c = 0; c < TILES_OF_FILTERS; ++c) {
            const Pack<u32, 2> low = tap[s][2 * c], high = tap[s][2 * c + 1];
            multiply_tile<TYPE>(acc[h][c], low.v[0], high.v[0], low.v[1], high.v[1], own.v[0], own.v[1]);
          }
        }
      }
      #pragma unroll
      for (int h = 0; h < 4; ++h) {
        const u32 beyond = h / 2u * 8u + fourth * 2u + h % 2u, pixel = first + beyond;
        const u32 c2 = down * ROWSu + (SHARE_ROW ? first : pixel) / COLUMNSu;
        const u32 c3 = right * COLUMNSu + (SHARE_ROW ? first % COLUMNSu + beyond : pixel % COLUMNSu);
        const u32 c1 = warp % GROUPSu * GROUP_FILTERSu + eighth * OWNu;
        const bool is_result = (ROWS_FIT || c2 < RESULT_ROWSu) && (COLUMNS_FIT || c3 < RESULT_COLUMNSu);
        if ((PIXELS_FIT || pixel < PIXELSu) && is_result)
        EPILOGUE
      }
    }
    __syncthreads();
  }
}

// Load the warp's filters, and the offset of a thread's tap of each step. Filters are the first operand of a product,
// because pixels then need no moves between registers. A thread gets results of two of its sixteen filters, so filters
// are distributed such that these are neighbours.
FRAGMENT(load_filters) {
  u32 offset[STEPS];
  Pack<u32, 2> tap[STEPS][WIDE];
  #pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const u32 k = s * 4 + fourth < TAPS ? s * 4 + fourth : 0;
    offset[s] = k / WINDOW_COLUMNSu * OFFSET_ROWSu + k % WINDOW_COLUMNSu * OFFSET_COLUMNSu;
    #pragma unroll
    for (int c = 0; c < WIDE; ++c) {
      const u32 filter = warp % GROUPSu * GROUP_FILTERSu + eighth * OWNu + c;
      const u32 from = filter * FILTER_STRIDE + k / WINDOW_COLUMNSu * ROW_STRIDE + k % WINDOW_COLUMNSu * COLUMN_STRIDE;
      Pack<TYPE, 4> words;
      if (CONTIGUOUS) words = load_pack<TYPE, 4>(FILTERS + from);
      else for (int j = 0; j < 4; ++j) words.v[j] = FILTERS[from + j * CHANNEL_STRIDE];
      if (s * 4 + fourth >= TAPS)
        for (int j = 0; j < 4; ++j) words.v[j] = TYPE();
      tap[s][c] = *reinterpret_cast<const Pack<u32, 2>*>(&words);
    }
  }
}
