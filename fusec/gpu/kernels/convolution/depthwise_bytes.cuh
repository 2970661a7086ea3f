// Depthwise convolution of bytes: depthwise_bytes.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 i = blockIdx.x * BLOCKu + threadIdx.x;
  if (i >= COUNT) return;
  COORDINATES
  const u32 c1 = pack * VECTORu;
  u32 taps[WINDOW_ROWS][VECTOR][WORDS];
  LOAD_FILTERS
  i32 acc[ROWS][STRIP][VECTOR];
  #pragma unroll
  for (int r = 0; r < ROWS; ++r)
    for (int s = 0; s < STRIP; ++s) for (int j = 0; j < VECTOR; ++j) acc[r][s][j] = BEGIN;
  #pragma unroll
  for (int high = 0; high < HEIGHT; ++high) {
    const int p0 = (int)band * (ROWS * STRIDE_ROWS) - PAD_ROWS + high;
    if ((u32)p0 >= IMAGE_ROWSu) continue;
    Pack<u32, QUADS> columns[COLUMNS];
    LOAD_COLUMNS
    #pragma unroll
    for (int v = 0; v < QUADS; ++v) {
      u32 low[PAIRS], top[PAIRS];
      #pragma unroll
      for (int m = 0; m < PAIRS; ++m) {
        low[m] = low_bytes(columns[2 * m].v[v], columns[2 * m + 1].v[v]);
        top[m] = high_bytes(columns[2 * m].v[v], columns[2 * m + 1].v[v]);
      }
      MULTIPLY
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const u32 c2 = band * ROWSu + r;
    if (!ROWS_FIT && c2 >= RESULT_ROWSu) break;
    #pragma unroll
    for (int s = 0; s < STRIP; ++s) {
      const u32 c3 = strip * STRIPu + s;
      if (!STRIPS_FIT && c3 >= RESULT_COLUMNSu) break;
      EPILOGUE
    }
  }
}

// The taps of a row of the window, by fours, as bytes of a word for each channel.
FRAGMENT(load_filters) {
  #pragma unroll
  for (int h = 0; h < WINDOW_ROWS; ++h) {
    Pack<u32, QUADS> row[4 * WORDS];
    #pragma unroll
    for (int k = 0; k < 4 * WORDS; ++k) {
      for (int v = 0; v < QUADS; ++v) row[k].v[v] = 0u;
      if (k < WINDOW_COLUMNS) row[k] = load_pack<u32, QUADS>((const u32*)(FILTERS + (AT)));
    }
    #pragma unroll
    for (int n = 0; n < WORDS; ++n) {
      #pragma unroll
      for (int v = 0; v < QUADS; ++v) {
        const Pack<u32, QUADS>* four = row + 4 * n;
        const u32 a = low_bytes(four[0].v[v], four[1].v[v]), b = high_bytes(four[0].v[v], four[1].v[v]);
        const u32 c = low_bytes(four[2].v[v], four[3].v[v]), d = high_bytes(four[2].v[v], four[3].v[v]);
        taps[h][4 * v][n] = low_halves(a, c), taps[h][4 * v + 1][n] = high_halves(a, c);
        taps[h][4 * v + 2][n] = low_halves(b, d), taps[h][4 * v + 3][n] = high_halves(b, d);
      }
    }
  }
}

// The columns of the image under a strip; outside of the image, zeros.
FRAGMENT(load_columns) {
  #pragma unroll
  for (int q = 0; q < COLUMNS; ++q) {
    const int p1 = (int)strip * (STRIP * STRIDE) - PAD + q;
    for (int v = 0; v < QUADS; ++v) columns[q].v[v] = 0u;
    if (q < COLUMNS_READ && (u32)p1 < IMAGE_COLUMNSu)
      columns[q] = load_pack<u32, QUADS>((const u32*)(IMAGE + (AT)));
  }
}

// Four columns of a channel are multiplied at a time, from an even one on. A window that begins at an odd column has
// its taps one byte further on.
FRAGMENT(multiply) {
  #pragma unroll
  for (int m = 0; m + 1 < PAIRS; ++m) {
    const u32 four[4] = {low_halves(low[m], low[m + 1]), high_halves(low[m], low[m + 1]),
                         low_halves(top[m], top[m + 1]), high_halves(top[m], top[m + 1])};
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int h = high - r * STRIDE_ROWS;
      if (h < 0 || h % DILATION != 0 || h / DILATION >= WINDOW_ROWS) continue;
      #pragma unroll
      for (int s = 0; s < STRIP; ++s) {
        const int n = (m - s * STRIDE / 2) / 2;
        if (m < s * STRIDE / 2 || (m - s * STRIDE / 2) % 2 != 0 || n >= WORDS) continue;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const u32(&own)[WORDS] = taps[h / DILATION][4 * v + j];
          const u32 before = n > 0 ? own[n > 0 ? n - 1 : 0] >> 24 : 0u;
          const u32 word = s * STRIDE % 2 ? own[n] << 8 | before : own[n];
          acc[r][s][4 * v + j] = dot_bytes(four[j], word, acc[r][s][4 * v + j]);
        }
      }
    }
  }
}
