// The image of a tile in shared memory: image_tile.py explains it and fills in the names in capitals.

// Each place of a row holds two pixels. Loads are not conditional, so that those of a batch are issued together.
FRAGMENT(load_image) {
  BLOCK_COORDINATES
  const int top = TOP, left = LEFT;
  #pragma unroll 1
  for (u32 begin = threadIdx.x; begin < HIGH * PLACESu; begin += BATCH * THREADSu) {
    #pragma unroll
    for (u32 turn = 0; turn < BATCHu; ++turn) {
      const u32 i = begin + turn * THREADSu < HIGH * PLACESu ? begin + turn * THREADSu : HIGH * PLACESu - 1u;
      const int image_row = top + (int)(i / PLACESu);
      Pack<TYPE, 8> both;
      #pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int image_column = left + (int)(i % PLACESu) * STRIDE_COLUMNS + p;
        const bool is_inside = (u32)image_row < IMAGE_ROWSu && (u32)image_column < IMAGE_COLUMNSu;
        const int row = is_inside ? image_row : 0, column = is_inside ? image_column : 0;
        Pack<TYPE, 4> pixel;
        for (int j = 0; j < 4; ++j) pixel.v[j] = TYPE();
        LOAD_PIXEL
        for (int j = 0; j < 4; ++j) both.v[p * 4 + j] = is_inside ? pixel.v[j] : TYPE();
      }
      u8* const place = image + i / PLACESu * PITCHu + i % PLACESu * 16u;
      *reinterpret_cast<Pack<TYPE, 8>*>(place) = both;
      // Without a tap the pixel is zero, because infinity times zero would be NaN.
      for (int j = 4; j < 8; ++j) both.v[j] = TYPE();
      if (IS_ODD) *reinterpret_cast<Pack<TYPE, 8>*>(place + PLACESu * 16u) = both;
    }
  }
}
