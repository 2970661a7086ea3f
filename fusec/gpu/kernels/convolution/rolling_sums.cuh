// Depthwise convolution with rolling sums: rolling_sums.py explains it and fills in the names in capitals.

// Compute the results of a strip of columns, for a band of rows. They are complete in the last of `acc`.
FRAGMENT(loop) {
  const int left = (int)strip * (STRIP * STRIDE) - PAD_LEFT, top = (int)band * (BAND * ROW_STRIDE) - PAD_TOP;
  const STORED* const image = IMAGE + (AT) + (i64)left * COLUMN_STEP;
  STORED ahead[ROW_STRIDE][WIDTH_READ];
  const int first = band ? 0 : FIRST;
  LOAD_FIRST
  TYPE acc[OPEN][STRIP];
  for (int d = 0; d < OPEN; ++d) for (int s = 0; s < STRIP; ++s) acc[d][s] = 0;
  #pragma unroll 1
  for (int step = first; step < BAND + OPEN - 1; ++step) {
    if (top + step * ROW_STRIDE < (int)IMAGE_ROWSu) {
      TYPE pixel[ROW_STRIDE][WIDTH_READ];
      for (int p = 0; p < ROW_STRIDE; ++p)
        for (int q = 0; q < WIDTH_READ; ++q) pixel[p][q] = wide(ahead[p][q]);
      LOAD_NEXT
      // The oldest row of results comes first, because each row takes the sums of the one before.
      #pragma unroll
      for (int d = OPEN - 1; d >= 0; --d) {
        #pragma unroll
        for (int s = 0; s < STRIP; ++s) {
          TYPE sum = d ? acc[d ? d - 1 : 0][s] : TYPE(0);
          #pragma unroll
          for (int p = 0; p < ROW_STRIDE; ++p) {
            if (d * ROW_STRIDE + p >= TAP_ROWS) continue;
            #pragma unroll
            for (int k = 0; k < TAPS; ++k) sum += pixel[p][s * STRIDE + k] * weight[d * ROW_STRIDE + p][k][0];
          }
          acc[d][s] = sum;
        }
      }
    } else {
      for (int d = OPEN - 1; d > 0; --d)
        for (int s = 0; s < STRIP; ++s) acc[d][s] = acc[d - 1][s];
    }
    const u32 ROW = band * BANDu + (u32)(step - (OPEN - 1));
    if (step < OPEN - 1 || ROW >= HEIGHTu) continue;
    #pragma unroll
    for (int s = 0; s < STRIP; ++s) {
      const u32 COLUMN = strip * STRIPu + s;
      if (!STRIPS_FIT && COLUMN >= WIDTHu) break;
      EPILOGUE
    }
  }
}

// Load the rows of the image under a step. Those of padding are zeros.
FRAGMENT(load_rows) {
  #pragma unroll
  for (int p = 0; p < ROW_STRIDE; ++p) {
    const int row = top + (STEP) * ROW_STRIDE + p;
    const bool is_there = (u32)row < IMAGE_ROWSu && (WANTED);
    #pragma unroll
    for (int q = 0; q < WIDTH_READ; ++q) {
      const STORED* from = image + (i64)row * ROW_STEP + q * COLUMN_STEP;
      ahead[p][q] = load_pack_or_zeros<STORED, 1>(from, is_there && (u32)(left + q) < IMAGE_COLUMNSu).v[0];
    }
  }
}
