// Grouped convolutions of images: grouped_conv2d.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(filters);
  u8* const image = filters + FILTER_BYTES;
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, eighth = lane / 4u, fourth = lane % 4u;
  const u32 block = blockIdx.x;
  BLOCK_COORDINATES
  // Filters in the order that gives a thread neighbouring results, with zeros for channels of other groups.
  for (u32 i = threadIdx.x; i < TAPS * BUNDLES * OCTETS * BUNDLEu; i += THREADSu) {
    FILTER_COORDINATES
    const u32 f = n / 8u / HALFu * PART_FILTERSu + n % 8u / 2u * OWNu + n / 8u % HALFu * 2u + n % 2u;
    const TYPE* const from = FILTERS + (((side * BUNDLESu + bundle) * BUNDLEu + f) * TAPSu + tap) * GROUP_CHANNELSu;
    Pack<TYPE, 8> both;
    for (int j = 0; j < 8; ++j) both.v[j] = TYPE();
    #pragma unroll
    for (u32 part = 0; part < 8u / PIECEu; ++part) {
      const u32 channel = octet * 8u + part * PIECEu;
      if (channel / GROUP_CHANNELSu == f / GROUP_CHANNELSu) {
        const Pack<TYPE, PIECE> piece = load_pack<TYPE, PIECE>(from + channel % GROUP_CHANNELSu);
        for (u32 j = 0; j < PIECEu; ++j) both.v[part * PIECEu + j] = piece.v[j];
      }
    }
    *reinterpret_cast<Pack<TYPE, 8>*>(filters + i * 16u) = both;
  }
  BEGIN
  #pragma unroll 4
  for (u32 i = threadIdx.x; i < PLACES * BUNDLES * OCTETSu; i += THREADSu) {
    const u32 octet = i % (BUNDLES * OCTETSu), place = i / (BUNDLES * OCTETSu);
    const int row = (int)(down * HIGHu + place / PITCHu) - PAD_TOP, column = (int)(right * WIDEu + place % PITCHu) - PAD_LEFT;
    const bool is_there = (u32)row < ROWSu && (u32)column < COLUMNSu;
    const u32 at = is_there ? c0 * STRIDE_N + (u32)row * STRIDE_H + (u32)column * STRIDE_W : 0u;
    copy_or_zeros_ahead(image + octet * PLANEu + place * 16u, IMAGE_POINTER + (at + side * CHANNELSu + octet * 8u), is_there);
  }
  copied();
  wait_for_copies<0>();
  seen_by_groups();
  __syncthreads();
  float acc[BUNDLES][OWN_OCTETS][4];
  const u8* const own = image + (warp / 4u / ACROSSu * PITCHu + warp / 4u % ACROSSu) * 128u;
  group_begins();
  PRODUCTS
  group_ends();
  wait_for_groups<0>();
  #pragma unroll
  for (u32 bundle = 0; bundle < BUNDLESu; ++bundle)
    #pragma unroll
    for (u32 o = 0; o < OWN_OCTETSu; ++o)
      #pragma unroll
      for (u32 e = 0; e < 4u; ++e) {
        pin(acc[bundle][o][e]);
        OWN_GROUP
      }
  #pragma unroll
  for (u32 h = 0; h < 2u; ++h) {
    const u32 c2 = down * HIGHu + warp / 4u / ACROSSu * 8u + warp % 4u * 2u + h;
    const u32 c3 = right * WIDEu + warp / 4u % ACROSSu * 8u + eighth;
    if (c2 < RESULT_ROWSu && c3 < RESULT_COLUMNSu) {
      #pragma unroll
      for (u32 bundle = 0; bundle < BUNDLESu; ++bundle)
        #pragma unroll
        for (u32 part = 0; part < PARTSu; ++part) {
          const u32 c1 = side * CHANNELSu + bundle * BUNDLEu + part * PART_FILTERSu + fourth * OWNu;
          EPILOGUE
        }
    }
  }
}

// Zeros times infinities of other groups are NaN. So a result that is NaN is computed again, from its own group alone.
FRAGMENT(own_group) {
  if (acc[bundle][o][e] != acc[bundle][o][e]) {
    const u32 n = o * 8u + fourth * 2u + e % 2u;
    const u32 f = n / 8u / HALFu * PART_FILTERSu + n % 8u / 2u * OWNu + n / 8u % HALFu * 2u + n % 2u;
    float sum = 0.0f;
    #pragma unroll 1
    for (u32 i = 0; i < TAPS * GROUP_CHANNELSu; ++i) {
      const u32 tap = i / GROUP_CHANNELSu, channel = f / GROUP_CHANNELSu * GROUP_CHANNELSu + i % GROUP_CHANNELSu;
      const u32 place = (warp % 4u * 2u + e / 2u + tap / WINDOW_COLUMNSu) * PITCHu + eighth + tap % WINDOW_COLUMNSu;
      const u8* const pixel = own + (bundle * OCTETSu + channel / 8u) * PLANEu + place * 16u;
      const u8* const filter = filters + (((tap * BUNDLESu + bundle) * OCTETSu + channel / 8u) * BUNDLEu + n) * 16u;
      sum += wide(((const TYPE*)pixel)[channel % 8u]) * wide(((const TYPE*)filter)[channel % 8u]);
    }
    acc[bundle][o][e] = sum;
  }
}
