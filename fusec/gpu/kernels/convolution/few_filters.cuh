// Convolution with few filters: few_filters.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  alignas(16) __shared__ TYPE filters[HIGH * CHUNKS * COLUMNS * 4 * EACH];
  RESIDENT(row_sums);
  const u32 warp = threadIdx.x / 32u, lane = threadIdx.x % 32u, eighth = lane / 4u, fourth = lane % 4u;
  const u32 block = blockIdx.x;
  BLOCK_COORDINATES
  const int first = (int)(strip * STRIP_ROWSu + phase), top = first - PAD_TOP;
  const int begin = (int)part * OUT, left = LEFT;

  // The filters as threads read them: by row, chunk of channels, column of the product, channels.
  for (u32 i = threadIdx.x; i < HIGH * CHUNKS * COLUMNS * 4u; i += THREADSu) {
    FILTER_COORDINATES
    Pack<TYPE, EACH> tap;
    for (int j = 0; j < EACH; ++j) tap.v[j] = TYPE();
    if (column < TAP_COLUMNSu) {
      const u32 tap_column = column / FILTERSu, filter = column % FILTERSu;
      const u32 from = filter * FILTER_STRIDE + k * TAP_ROW_STRIDE + tap_column * TAP_COLUMN_STRIDE +
                       (chunk * (4u * EACH) + quarter * EACHu) * CHANNEL_STRIDE;
      if (CONTIGUOUS) tap = load_pack<TYPE, EACH>(TAPS + from);
      else for (int j = 0; j < EACH; ++j) tap.v[j] = TAPS[from + j * CHANNEL_STRIDE];
    }
    *reinterpret_cast<Pack<TYPE, EACH>*>(filters + i * EACH) = tap;
  }

  float acc[HIGH][TILES][NUMBERS][4];
  #pragma unroll
  for (int a = 0; a < HIGH; ++a)
    #pragma unroll
    for (int b = 0; b < TILES; ++b)
      #pragma unroll
      for (int c = 0; c < NUMBERS; ++c)
        #pragma unroll
        for (int d = 0; d < 4; ++d) acc[a][b][c][d] = 0.0f;

  // `next` is loaded while `current` is multiplied.
  Pack<u32, WORDS> next[TILES][2];
  auto load = [&](int step, int chunk) {
    const int row = top + step * DILATION_ROWS;
    #pragma unroll
    for (int b = 0; b < TILES; ++b)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 pixel = (warp * TILESu + b) * 16u + h * 8u + eighth;
        const int column = left + (int)pixel;
        for (int j = 0; j < WORDS; ++j) next[b][h].v[j] = 0;
        if ((u32)row < IMAGE_ROWSu && (u32)column < IMAGE_COLUMNSu)
          next[b][h] = load_pack<u32, WORDS>(reinterpret_cast<const u32*>(
              IMAGE + (c0 * BATCH_STRIDEu + (u32)row * ROW_STRIDEu + (u32)column * COLUMN_STRIDEu +
                       chunk * (4 * EACH) + fourth * EACHu)));
      }
  };
  load(0, 0);
  __syncthreads();
  STEPS
}

// All steps are unrolled.
FRAGMENT(short_strip) {
  #pragma unroll
  for (int p = 0; p < COUNT; ++p) {
    const int s = p;
    STEP
  }
}

// As many steps are unrolled as the window has rows, because `acc` has to be indexed by constants.
FRAGMENT(long_strip) {
  #pragma unroll 1
  for (int base = 0; base < COUNT; base += HIGH) {
    #pragma unroll
    for (int p = 0; p < HIGH; ++p) {
      const int s = base + p;
      if (s >= COUNT) break;
      STEP
    }
  }
}

// Step `s` multiplies a row of the image by all rows of the window, and finishes one row of results.
FRAGMENT(step) {
  #pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    Pack<u32, WORDS> current[TILES][2];
    #pragma unroll
    for (int b = 0; b < TILES; ++b)
      #pragma unroll
      for (int h = 0; h < 2; ++h) current[b][h] = next[b][h];
    if (chunk + 1 < CHUNKS) load(s, chunk + 1);
    else if (s + 1 < COUNT) load(s + 1, 0);
    #pragma unroll
    for (int k = 0; k < HIGH; ++k) {
      if (IS_SHORT && (k > s || s - k >= STRIP)) continue;  // the row of results is not in the strip
      #pragma unroll
      for (int c = 0; c < NUMBERS; ++c) {
        const u32 at = ((k * CHUNKS + chunk) * NUMBERS + c) * 32 * EACH + lane * EACH;
        const Pack<u32, WORDS> tap = *reinterpret_cast<const Pack<u32, WORDS>*>(filters + at);
        #pragma unroll
        for (int b = 0; b < TILES; ++b) {
          const Pack<u32, WORDS>(&x)[2] = current[b];
          float(&sums)[4] = acc[(p + HIGH - k) % HIGH][b][c];
          multiply_tile<TYPE>(sums, x[0].v[0], x[1].v[0], x[0].v[1], x[1].v[1], tap.v[0], tap.v[1]);
          if (WORDS == 4) multiply_tile<TYPE>(sums, x[0].v[LAST - 1], x[1].v[LAST - 1], x[0].v[LAST], x[1].v[LAST],
                                              tap.v[LAST - 1], tap.v[LAST]);
        }
      }
    }
  }
  if (s >= HIGH - 1) {
    // Two rows of sums alternate: a fast warp multiplies the next row while others still sum this one.
    float* sums = reinterpret_cast<float*>(row_sums) + s % 2 * PITCH * COLUMNS;
    #pragma unroll
    for (int b = 0; b < TILES; ++b)
      #pragma unroll
      for (int c = 0; c < NUMBERS; ++c)
        #pragma unroll
        for (int h = 0; h < 2; ++h)
          #pragma unroll
          for (int d = 0; d < 2; ++d)
            sums[(c * 8 + fourth * 2 + d) * PITCH + (warp * TILES + b) * 16 + h * 8 + eighth] =
                acc[(p + 1) % HIGH][b][c][h * 2 + d];
    __syncthreads();
    const u32 c2 = (u32)(first + (s - (HIGH - 1)) * DILATION_ROWS);
    if (c2 < RESULT_ROWSu)
      for (u32 column = threadIdx.x; column < OUTu; column += THREADSu) {
        const u32 c3 = (u32)begin + column;
        if (c3 >= RESULT_COLUMNSu) break;
        #pragma unroll
        for (u32 c1 = 0; c1 < FILTERSu; ++c1) {
          float total = 0.0f;
          #pragma unroll
          for (int k = 0; k < WIDE; ++k) {
            const int at = (int)column + k * DILATION_COLUMNS - PAD_WHOLE;
            if (!IS_WHOLE || (u32)at < SPANu) total += sums[(k * FILTERS + c1) * PITCH + at];
          }
          EPILOGUE
        }
      }
  }
  // Also in the first steps, whose products belong to rows before the strip.
  #pragma unroll
  for (int b = 0; b < TILES; ++b)
    #pragma unroll
    for (int c = 0; c < NUMBERS; ++c)
      #pragma unroll
      for (int d = 0; d < 4; ++d) acc[(p + 1) % HIGH][b][c][d] = 0.0f;
}
