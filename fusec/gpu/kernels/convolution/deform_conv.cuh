// Deformable convolutions: deform_conv.py explains them and fills in the names in capitals. NUMBER is the type of sums.

FRAGMENT(kernel) {
  RESIDENT(memory);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const u32 side = blockIdx.x % SIDESu, tile = blockIdx.x / SIDESu;
  const u32 group = side / FILTER_BLOCKSu, first = side % FILTER_BLOCKSu * FILTERSu;
  // A thread reads runs of channels for one pixel; past the last pixel, those of the last.
  const u32 place = THREAD_PIXEL, own_run = THREAD_RUN;
  const u32 read_pixel = tile * PIXELSu + place < ALL_PIXELS ? tile * PIXELSu + place : ALL_PIXELS - 1u;
  READ_COORDINATES
  NUMBER acc[ROWS][COLUMNS][OWN_SUMS];
  #pragma unroll
  for (u32 m = 0; m < ROWSu; ++m)
    #pragma unroll
    for (u32 n = 0; n < COLUMNSu; ++n)
      #pragma unroll
      for (u32 e = 0; e < OWN_SUMSu; ++e) acc[m][n][e] = NUMBER(0);
  // Two stages take turns. One is multiplied while the other one is read.
  #pragma unroll 1
  for (u32 chunk = 0; chunk <= CHUNKSu; ++chunk) {
    wait_for_copies<0>();
    __syncthreads();
    if (chunk < CHUNKSu) {
      TYPE* const read = (TYPE*)memory + chunk % 2u * STAGE_SIZEu;
      TYPE* const filters = read + READ_SIZEu;
      COPY_FILTERS
      READ_IMAGE
    }
    if (chunk > 0u) {
      const TYPE* const read = (const TYPE*)memory + (chunk + 1u) % 2u * STAGE_SIZEu;
      const TYPE* const filters = read + READ_SIZEu;
      MULTIPLY
    }
  }
  // Sums go through shared memory, so that neighbouring threads store neighbouring results.
  NUMBER* const sums = (NUMBER*)memory;
  #pragma unroll 1
  for (u32 part = 0; part < ROWSu; ++part) {
    __syncthreads();
    #pragma unroll
    for (u32 m = 0; m < ROWSu; ++m)
      if (m == part) {
        #pragma unroll
        for (u32 n = 0; n < COLUMNSu; ++n)
          #pragma unroll
          for (u32 e = 0; e < OWN_SUMSu; ++e) sums[SUM_FILTER * SUMS_PITCHu + SUM_PIXEL] = acc[m][n][e];
      }
    __syncthreads();
    #pragma unroll 1
    for (u32 item = threadIdx.x; item < TURN_FILTERS * PIXELSu; item += THREADSu) {
      const u32 own = ITEM_FILTER, spot = ITEM_PIXEL;
      const u32 filter = first + part * TURN_FILTERSu + own, pixel = tile * PIXELSu + spot;
      if (filter < GROUP_FILTERSu && pixel < ALL_PIXELS) {
        const u32 c1 = group * GROUP_FILTERSu + filter;
        PIXEL_COORDINATES
        const NUMBER total = sums[own * SUMS_PITCHu + spot];
        EPILOGUE
      }
    }
  }
}

FRAGMENT(copy_filters) {
  for (u32 i = threadIdx.x; i < DEPTH * FILTERSu / PACKu; i += THREADSu) {
    const u32 at = i / (FILTERSu / PACKu), own = i % (FILTERSu / PACKu) * PACKu;
    const u32 deep = chunk * DEPTHu + at, filter = first + own;
    const u32 tap = deep / GROUP_CHANNELSu, channel = deep % GROUP_CHANNELSu, c0 = group * GROUP_FILTERSu + filter;
    const bool is_there = tap < TAPSu && filter < GROUP_FILTERSu;
    COPY
  }
  copied();
}

FRAGMENT(copy_pack) {
  copy_or_zeros_ahead(filters + at * FILTER_PITCHu + own, WEIGHTS + (is_there ? WEIGHTS_AT : 0u), is_there);
}

FRAGMENT(copy_one) {
  filters[at * FILTER_PITCHu + own] = is_there ? WEIGHTS[WEIGHTS_AT] : TYPE();
}

// Read runs of channels of one tap at its place in the image.
FRAGMENT(read_image) {
  #pragma unroll 1
  for (u32 turn = 0; turn < TURNSu; ++turn) {
    const u32 own = own_run + turn * 4u, deep = (chunk * RUNSu + own) * RUNu;
    NUMBER sampled[RUN];
    #pragma unroll
    for (u32 j = 0; j < RUNu; ++j) sampled[j] = NUMBER(0);
    if (deep < GROUP_DEPTHu) {
      const u32 tap = deep / GROUP_CHANNELSu, channel = group * GROUP_CHANNELSu + deep % GROUP_CHANNELSu;
      const u32 moved = channel / OFFSET_CHANNELSu * TAPSu + tap;
      const int start_y = (int)(down * STRIDE_DOWNu + tap / WINDOW_COLUMNSu * DILATION_DOWNu) - PAD_TOP;
      const int start_x = (int)(right * STRIDE_RIGHTu + tap % WINDOW_COLUMNSu * DILATION_RIGHTu) - PAD_LEFT;
      const NUMBER y = wide(OFFSETS[ROW_OFFSET]) + NUMBER(start_y), x = wide(OFFSETS[COLUMN_OFFSET]) + NUMBER(start_x);
      const NUMBER top = floor(y), left = floor(x);
      #pragma unroll
      for (u32 corner = 0; corner < 4u; ++corner) {
        const NUMBER row = top + NUMBER(corner / 2u), column = left + NUMBER(corner % 2u);
        const NUMBER weight = (corner / 2u ? y - top : NUMBER(1) - (y - top)) * (corner % 2u ? x - left : NUMBER(1) - (x - left));
        const bool is_inside = row >= NUMBER(0) && row <= LAST_ROW && column >= NUMBER(0) && column <= LAST_COLUMN;
        const u32 r = is_inside ? (u32)row : 0u, c = is_inside ? (u32)column : 0u;
        const TYPE* const from = IMAGE + (IMAGE_AT);
        ADD
      }
      MULTIPLY_BY_MASK
    }
    STORE
  }
}

FRAGMENT(add_pack) {
  const Pack<TYPE, RUN> pixel = load_pack_or_zeros<TYPE, RUN>(from, is_inside);
  #pragma unroll
  for (u32 j = 0; j < RUNu; ++j) sampled[j] += wide(pixel.v[j]) * weight;
}

FRAGMENT(add_each) {
  #pragma unroll
  for (u32 j = 0; j < RUNu; ++j)
    sampled[j] += wide(load_pack_or_zeros<TYPE, 1>(from + j * CHANNEL_STRIDE, is_inside).v[0]) * weight;
}

FRAGMENT(multiply_by_mask) {
  const NUMBER factor = wide(MASK[MASK_AT]);
  #pragma unroll
  for (u32 j = 0; j < RUNu; ++j) sampled[j] *= factor;
}

// The elements of a window of one pixel are contiguous.
FRAGMENT(store_run) {
  Pack<TYPE, RUN> packed;
  #pragma unroll
  for (u32 j = 0; j < RUNu; ++j) packed.v[j] = narrow<TYPE>(sampled[j]);
  *reinterpret_cast<Pack<TYPE, RUN>*>(read + place * READ_PITCHu + own * RUNu) = packed;
}

// Pixels are contiguous.
FRAGMENT(store_each) {
  #pragma unroll
  for (u32 j = 0; j < RUNu; ++j) read[(own * RUNu + j) * READ_PITCHu + place] = sampled[j];
}

// Products of a warp: filters are the rows, and pixels the columns. `pixels` has all the depth of a chunk.
FRAGMENT(multiply_tiles) {
  u32 pixels[COLUMNS][4];
  #pragma unroll
  for (u32 n = 0; n < COLUMNSu; ++n)
    load_tiles<false>(pixels[n], read + ((warp / DOWNu * COLUMNSu + n) * 8u + lane % 8u) * READ_PITCHu + lane / 8u * 8u);
  #pragma unroll
  for (u32 k = 0; k < 2u; ++k)
    #pragma unroll
    for (u32 m = 0; m < ROWSu; ++m) {
      u32 rows[4];
      load_tiles<true>(rows, filters + (k * 16u + lane / 16u * 8u + lane % 8u) * FILTER_PITCHu +
                                 (m * TURN_FILTERSu + warp % DOWNu * 16u + lane / 8u % 2u * 8u));
      #pragma unroll
      for (u32 n = 0; n < COLUMNSu; ++n)
        multiply_tile<TYPE>(acc[m][n], rows[0], rows[1], rows[2], rows[3], pixels[n][2u * k], pixels[n][2u * k + 1u]);
    }
}

FRAGMENT(multiply_numbers) {
  #pragma unroll 4
  for (u32 k = 0; k < DEPTHu; ++k) {
    const Pack<TYPE, 4> pixels =
        *reinterpret_cast<const Pack<TYPE, 4>*>(read + k * READ_PITCHu + threadIdx.x % (PIXELSu / 4u) * 4u);
    #pragma unroll
    for (u32 m = 0; m < ROWSu; ++m) {
      const Pack<TYPE, 4> own = *reinterpret_cast<const Pack<TYPE, 4>*>(
          filters + k * FILTER_PITCHu + m * TURN_FILTERSu + threadIdx.x / (PIXELSu / 4u) * 4u);
      #pragma unroll
      for (u32 n = 0; n < 4u; ++n)
        #pragma unroll
        for (u32 e = 0; e < 4u; ++e) acc[m][n][e] += own.v[n] * pixels.v[e];
    }
  }
}
