// Rows of an image of three channels on their way to its tile in shared memory: staged_rows.py explains it and fills in the
// names in capitals.

// Copy the rows of a tile as they are stored, by 16 bytes. What is outside the image becomes zero.
FRAGMENT(copy) {
  {
    u32 thread = threadIdx.x;
    pin(thread);
    BLOCK_COORDINATES
    const int top = TOP, begin = (LEFT) * PIXEL_BYTES & ~15;
    #pragma unroll
    for (u32 turn = 0; turn < TURNSu; ++turn) {
      const u32 i = thread + turn * THREADSu;
      const int row = top + (int)(i / PIECESu), at = begin + (int)(i % PIECESu) * 16;
      const bool is_there = (u32)row < IMAGE_ROWSu && (u32)at < ROW_BYTESu;
      const u32 from = is_there ? IMAGE_START + (u32)row * ROW_STEP + (u32)at / 2u : 0u;
      if (i < COUNTu) copy_or_zeros_ahead(rows + i * 16u, IMAGE + from, is_there);
    }
  }
}

// Store the pixels of a tile by pairs of four channels, of which the last is zero.
FRAGMENT(unpack) {
  {
    u32 thread = threadIdx.x;
    pin(thread);
    BLOCK_COORDINATES
    const u32 shift = (u32)((LEFT) * PIXEL_BYTES & 15) / 4u;
    #pragma unroll
    for (u32 turn = 0; turn < TURNSu; ++turn) {
      const u32 at = thread + (FIRST + turn) * THREADSu < PAIRSu ? thread + (FIRST + turn) * THREADSu : LASTu;
      const u32* const raw = (const u32*)(rows + at / PLACESu * (PIECES * 16u)) + shift + at % PLACESu * 3u;
      const u32 first = raw[0], second = raw[1], third = raw[2];
      Pack<u32, 4> both = {{first, second & 0xffffu, second >> 16 | third << 16, third >> 16}};
      u8* const place = image + at / PLACESu * PITCHu + at % PLACESu * 16u;
      *reinterpret_cast<Pack<u32, 4>*>(place + PAIRS_AT) = both;
      // Without a tap the pixel is zero, because infinity times zero would be NaN.
      both.v[NO_TAP * 2] = both.v[NO_TAP * 2 + 1] = 0u;
      if (IS_ODD) *reinterpret_cast<Pack<u32, 4>*>(place + ALONE_AT) = both;
    }
  }
}
