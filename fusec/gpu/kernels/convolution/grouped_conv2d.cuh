// Grouped convolutions of images: grouped_conv2d.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(filters);
  const u32 lane = threadIdx.x % 32u, warp = number_of_warp(), eighth = lane / 4u, fourth = lane % 4u;
  const u32 side = blockIdx.x % SIDESu, start = blockIdx.x / SIDESu;
  u32 now = FILTER_BYTESu + warp / 4u * IMAGE_BYTESu;
  // Filters in the order that gives a thread neighbouring results, with zeros for channels of other groups.
  #pragma unroll 4
  for (u32 i = threadIdx.x; i < TAPS * BUNDLES * OCTETS * BUNDLEu; i += THREADSu) {
    FILTER_COORDINATES
    const u32 octet = high * 2u + low, n = pair * 2u + odd;
    const u32 f = n / 8u / HALFu * PART_FILTERSu + n % 8u / 2u * OWNu + n / 8u % HALFu * 2u + odd;
    const u32 filter = side * CHANNELSu + bundle * BUNDLEu + f;
    const TYPE* const from = FILTERS + (tap * ALL_CHANNELSu + filter) * GROUP_CHANNELSu;
    u8* const to = filters + (((tap * BUNDLESu + bundle) * OCTETSu + octet) * LEADu + n * 16u);
    COPY_FILTER
  }
  BEGIN
  {
    u8* const to = filters + now;
    const u32 tile = start * WARPGROUPSu + warp / 4u;
    COPY_IMAGE
  }
  #pragma unroll 1
  for (u32 step = start; step < STEPS; step += BLOCKS) {
    wait_for_copies<0>();
    seen_by_groups();
    __syncthreads();
    const u8* const own = filters + now;
    COPY_NEXT
    float acc[BUNDLES][OCTETS][4];
    group_begins();
    PRODUCTS
    group_ends();
    wait_for_groups<0>();
    #pragma unroll
    for (u32 k = 0; k < OWN_SUMSu; ++k) pin(acc[k / (OCTETS * 4u)][k / 4u % OCTETSu][k % 4u]);
    OWN_GROUP
    const u32 tile = step * WARPGROUPSu + warp / 4u;
    TILE_COORDINATES
    #pragma unroll
    for (u32 h = 0; h < 2u; ++h) {
      const u32 c2 = down * 8u + warp % 4u * 2u + h, c3 = right * 8u + eighth;
      if (tile < TILES && c2 < RESULT_ROWSu && c3 < RESULT_COLUMNSu) {
        #pragma unroll
        for (u32 bundle = 0; bundle < BUNDLESu; ++bundle)
          #pragma unroll
          for (u32 part = 0; part < PARTSu; ++part) {
            const u32 c1 = side * CHANNELSu + bundle * BUNDLEu + part * PART_FILTERSu + fourth * OWNu;
            if (ALL_FULL || c1 < ALL_CHANNELSu) {
              EPILOGUE
            }
          }
      }
    }
  }
}

FRAGMENT(copy_filter) {
  const u32 channel = octet * 8u;
  const bool is_own = channel / GROUP_CHANNELSu == f / GROUP_CHANNELSu && (ALL_FULL || filter < ALL_CHANNELSu);
  copy_or_zeros_ahead(to, is_own ? from + channel % GROUP_CHANNELSu : FILTERS, is_own);
}

// Two groups of four channels share an octet.
FRAGMENT(copy_half_filter) {
  for (u32 half = 0; half < 2u; ++half) {
    if (octet * 2u + half == f / 4u && (ALL_FULL || filter < ALL_CHANNELSu)) copy_ahead<8>(to + half * 8u, from);
    else *reinterpret_cast<Pack<u32, 2>*>(to + half * 8u) = Pack<u32, 2>();
  }
}

FRAGMENT(copy_image) {
  {
    TILE_COORDINATES
    #pragma unroll 4
    for (u32 i = threadIdx.x % 128u; i < PLACES * BUNDLES * OCTETSu; i += 128u) {
      const u32 octet = i % (BUNDLES * OCTETSu), place = i / (BUNDLES * OCTETSu);
      const int row = (int)(down * 8u + place / PITCHu) - PAD_TOP, column = (int)(right * 8u + place % PITCHu) - PAD_LEFT;
      const u32 channel = side * CHANNELSu + octet * 8u;
      const bool is_there = tile < TILES && (u32)row < ROWSu && (u32)column < COLUMNSu && (ALL_FULL || channel < ALL_CHANNELSu);
      const u32 at = is_there ? c0 * STRIDE_N + (u32)row * STRIDE_H + (u32)column * STRIDE_W + channel : 0u;
      copy_or_zeros_ahead(to + (octet * PLANEu + place * 16u), IMAGE_POINTER + at, is_there);
    }
    copied();
  }
}

// Two images take turns. All warpgroups have read the other one, because the barrier of this step follows their products.
FRAGMENT(copy_next) {
  now = 2u * (FILTER_BYTESu + warp / 4u * IMAGE_BYTESu) + WARPGROUPS * IMAGE_BYTESu - now;
  if (step + BLOCKS < STEPS) {
    u8* const to = filters + now;
    const u32 tile = (step + BLOCKS) * WARPGROUPSu + warp / 4u;
    COPY_IMAGE
  }
}

// Zeros times infinities of other groups are NaN. So a result that is NaN is computed again, from its own group alone. That
// is rare: one copy of the code serves all sums of a thread, and no other code is between the products and the stores.
FRAGMENT(own_group) {
  bool any = false;
  #pragma unroll
  for (u32 k = 0; k < OWN_SUMSu; ++k) {
    const float x = acc[k / (OCTETS * 4u)][k / 4u % OCTETSu][k % 4u];
    any = any || x != x;
  }
  #pragma unroll 1
  for (u32 k = 0; any && k < OWN_SUMSu; ++k) {
    const u32 bundle = k / (OCTETS * 4u), n = k / 4u % OCTETSu * 8u + fourth * 2u + k % 2u;
    const u32 f = n / 8u / HALFu * PART_FILTERSu + n % 8u / 2u * OWNu + n / 8u % HALFu * 2u + n % 2u;
    float sum = 0.0f;
    #pragma unroll 1
    for (u32 i = 0; i < TAPS * GROUP_CHANNELSu; ++i) {
      const u32 tap = i / GROUP_CHANNELSu, channel = f / GROUP_CHANNELSu * GROUP_CHANNELSu + i % GROUP_CHANNELSu;
      const u32 row = warp % 4u * 2u + k % 4u / 2u + tap / WINDOW_COLUMNSu;
      const u32 place = row * PITCHu + eighth + tap % WINDOW_COLUMNSu;
      const u8* const pixel = own + (bundle * OCTETSu + channel / 8u) * PLANEu + place * 16u;
      const u8* const filter = filters + ((tap * BUNDLESu + bundle) * OCTETSu + channel / 8u) * LEADu + n * 16u;
      sum += wide(((const TYPE*)pixel)[channel % 8u]) * wide(((const TYPE*)filter)[channel % 8u]);
    }
    #pragma unroll
    for (u32 j = 0; j < OWN_SUMSu; ++j) {
      float& x = acc[j / (OCTETS * 4u)][j / 4u % OCTETSu][j % 4u];
      if (j == k && x != x) x = sum;
    }
  }
}
