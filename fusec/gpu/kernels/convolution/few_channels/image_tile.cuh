// The image of a tile in shared memory: image_tile.py explains it and fills in the names in capitals.

// Each place of a row holds two pixels. Loads are not conditional, so that all are issued together. Without a pin of the
// thread's number, the compiler computes places before the loop and holds them in registers.
FRAGMENT(request) {
  {
    u32 thread = THREAD;
    pin(thread);
    BLOCK_COORDINATES
    const int top = TOP, left = LEFT;
    #pragma unroll
    for (u32 turn = 0; turn < TURNSu; ++turn) {
      #pragma unroll
      for (int p = 0; p < 2; ++p) {
        AT_PIXEL
        RAW (&raw)[COUNT] = loaded[turn][p];
        REQUEST_PIXEL
        #pragma unroll
        for (int j = 0; j < COUNT; ++j) pin(raw[j]);
      }
    }
  }
}

// By pins the compiler neither loads later nor converts earlier. A conversion waits for the loads.
FRAGMENT(deliver) {
  {
    u32 thread = THREAD;
    pin(thread);
    BLOCK_COORDINATES
    const int top = TOP, left = LEFT;
    #pragma unroll
    for (u32 turn = 0; turn < TURNSu; ++turn) {
      Pack<TYPE, 8> both;
      #pragma unroll
      for (int p = 0; p < 2; ++p) {
        AT_PIXEL
        RAW (&raw)[COUNT] = loaded[turn][p];
        #pragma unroll
        for (int j = 0; j < COUNT; ++j) pin(raw[j]);
        Pack<TYPE, 4> pixel;
        for (int j = 0; j < 4; ++j) pixel.v[j] = TYPE();
        DELIVER_PIXEL
        for (int j = 0; j < 4; ++j) both.v[p * 4 + j] = is_inside ? pixel.v[j] : TYPE();
      }
      const u32 i = thread + (FIRST + turn) * THREADSu < PAIRSu ? thread + (FIRST + turn) * THREADSu : LASTu;
      u8* const place = image + i / PLACESu * PITCHu + i % PLACESu * 16u;
      *reinterpret_cast<Pack<TYPE, 8>*>(place + PAIRS_AT) = both;
      // Without a tap the pixel is zero, because infinity times zero would be NaN.
      for (int j = NO_TAP * 4; j < NO_TAP * 4 + 4; ++j) both.v[j] = TYPE();
      if (IS_ODD) *reinterpret_cast<Pack<TYPE, 8>*>(place + ALONE_AT) = both;
    }
  }
}

FRAGMENT(at_pixel) {
  const u32 at = thread + (FIRST + turn) * THREADSu < PAIRSu ? thread + (FIRST + turn) * THREADSu : LASTu;
  const int image_row = top + (int)(at / PLACESu), image_column = left + (int)(at % PLACESu) * STRIDE_COLUMNS + p;
  const bool is_inside = (u32)image_row < IMAGE_ROWSu && (u32)image_column < IMAGE_COLUMNSu;
  const int row = is_inside ? image_row : 0, column = is_inside ? image_column : 0;
}
