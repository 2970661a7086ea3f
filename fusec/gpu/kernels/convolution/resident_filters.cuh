// Convolutions of 3 x 3 with few channels: resident_filters.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  u8* const filters = next_kilobyte(memory);
  u8* const ring = filters + FILTER_BYTES;
  u64* const gate = (u64*)(ring + RING_BYTES);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 start = blockIdx.x / ACROSSu * (STEPS * POSITIONSu), side = blockIdx.x % ACROSSu * FILTERSu;
  const u32 octet = threadIdx.x % OCTETSu, own = threadIdx.x / OCTETSu;
  const SwizzledRows<WIDE> ring_rows = rows_at<WIDE>(ring), filter_rows = rows_at<WIDE>(filters);
  BEGIN
  #pragma unroll 1
  for (u32 part = 0; part < AHEADu; ++part) {
    const u32 slot = part;
    COPY_PART
  }
  barrier_for(gate, THREADS / 32u);
  __syncthreads();
  ARRIVE_FIRST
  LOAD_FIXED
  SUM sums[FILTERS / 8][4], done[FILTERS / 8][4];
  // The slots of the parts that this step reads first, and that it copies to.
  u32 first = 0u, slot = AHEADu;
  #pragma unroll 1
  for (u32 step = 0; step < STEPSu; ++step) {
    wait_for_all(gate, step);
    {
      const u32 own_first = first * POSITIONSu + warp / 4u * 64u;
      group_begins();
      MULTIPLY
      group_ends();
    }
    ARRIVE_NEXT
    {
      const u32 part = step + AHEADu;
      COPY_PART
    }
    first = first + 1u < SLOTSu ? first + 1u : 0u;
    slot = slot + 1u < SLOTSu ? slot + 1u : 0u;
    if (step > 0u) {
      const u32 from = start + (step - 1u) * POSITIONSu;
      STORE
    }
    wait_for_groups<0>();
    #pragma unroll
    for (int n = 0; n < FILTERS / 8; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        pin(sums[n][e]);
        done[n][e] = sums[n][e];
        pin(done[n][e]);
      }
  }
  const u32 from = start + (STEPS - 1) * POSITIONSu;
  STORE
}

// Store filters as rows of channels. Their order gives a thread neighbours among the results.
FRAGMENT(load_filters) {
  for (u32 i = threadIdx.x; i < TAPS * OCTETS * FILTERSu; i += THREADSu) {
    const u32 o = i % OCTETSu, n = i / OCTETSu % FILTERSu, tap = i / (OCTETS * FILTERSu);
    const u32 f = n / 8u / PAIRSu * (8u * PAIRSu) + n % 8u / 2u * (2u * PAIRSu) + n / 8u % PAIRSu * 2u + n % 2u;
    const u32 row = (tap * PANELSu + o / PANEL_OCTETSu) * FILTERSu + n;
    const bool is_there = o < REAL_OCTETSu && side + f < ALL_FILTERSu;
    copy_or_zeros_ahead(filters + swizzled<WIDE>(row * WIDEu + o % PANEL_OCTETSu * 16u),
                        POINTER + (is_there ? (side + f) * STRIDE + tap * CHANNELSu + o * PACKu : 0u), is_there);
  }
}

// Store the filters of a convolution for the gradient of its image: channels become filters, and taps are in reverse order.
// A thread loads eight neighbours of eight filters at a time, and transposes them.
FRAGMENT(load_transposed) {
  for (u32 i = threadIdx.x; i < TAPS * OCTETS * FILTERSu / 8u; i += THREADSu) {
    const u32 from = i % (FILTERSu / 8u), o = i / (FILTERSu / 8u) % OCTETSu, tap = i / (OCTETS * FILTERSu / 8u);
    Pack<TYPE, 8> loaded[8];
    #pragma unroll
    for (u32 e = 0; e < 8u; ++e)
      loaded[e] = load_pack<TYPE, 8>(POINTER + ((o * 8u + e) * STRIDE + ((TAPS - 1u - tap) * ROWu + side + from * 8u)));
    #pragma unroll
    for (u32 j = 0; j < 8u; ++j) {
      const u32 n = from / PAIRSu * (8u * PAIRSu) + j / 2u * 8u + from % PAIRSu * 2u + j % 2u;
      const u32 row = (tap * PANELSu + o / PANEL_OCTETSu) * FILTERSu + n;
      Pack<TYPE, 8> octet;
      #pragma unroll
      for (u32 e = 0; e < 8u; ++e) octet.v[e] = loaded[e].v[j];
      *(Pack<TYPE, 8>*)(filters + swizzled<WIDE>(row * WIDEu + o % PANEL_OCTETSu * 16u)) = octet;
    }
  }
}

// Copy the positions of a part to its slot, if a step of this block reads it. The first positions of the ring are stored
// once more after its end, so that products may read over the end.
FRAGMENT(copy_part) {
  {
    #pragma unroll
    for (u32 i = 0; i < TURNSu; ++i) {
      const u32 at = own + i * EACHu;
      if (part < PARTSu && (PARTS_FIT || at < POSITIONSu)) {
        const u32 p = start + part * POSITIONSu + at;
        const u32 n = p / IMAGEu, rest = p % IMAGEu, row = rest / PITCHu, column = rest % PITCHu;
        const bool is_there = row > 0u && column > 0u && n < IMAGESu && octet < REAL_OCTETSu;
        const u32 place = is_there ? n * STRIDE_N + (row - 1u) * STRIDE_H + (column - 1u) * STRIDE_W : 0u;
        const TYPE* from = IMAGE_POINTER + (place + octet * PACKu);
        u8* to = ring + (octet / PANEL_OCTETSu * PANEL_BYTESu);
        to += swizzled<WIDE>((slot * POSITIONSu + at) * WIDEu + octet % PANEL_OCTETSu * 16u);
        copy_or_zeros_ahead(to, from, is_there);
        if (slot == 0u && at < 64u) copy_or_zeros_ahead(to + RING * WIDEu, from, is_there);
      }
    }
    copied();
  }
}

// Tell the other warps that this warp's copies of the parts of the next step have arrived, and that all its products but
// the last have read what they need.
FRAGMENT(arrive) {
  wait_for_copies<LEFT>();
  seen_by_groups();
  has_come(gate);
}

// Multiply the positions of a warpgroup by one tap of all filters.
FRAGMENT(multiply) {
  {
    const u32 place = own_first + SHIFTu, at = place < RINGu ? place : place - RINGu;
    const SwizzledRows<WIDE> here = later(ring_rows, at * PANEL_OCTETSu);
    #pragma unroll
    for (u32 k = 0; k < OCTETSu; k += 2u) {
      const u32 panel = k / PANEL_OCTETSu, within = k % PANEL_OCTETSu;
      PRODUCT(sums, later(here, panel * (PANEL_BYTES / 16u) + within),
              later(filter_rows, (TAP * PANELSu + panel) * (FILTERS * PANEL_OCTETSu) + within), IS_FIRST && k == 0u ? 0 : 1);
    }
  }
}

// Store the results of a position, unless it belongs to the padding.
FRAGMENT(store) {
  {
    const u32 p = from + warp * 16u + g + ROWu;
    const u32 c0 = p / IMAGEu, rest = p % IMAGEu, c2 = rest / PITCHu, c3 = rest % PITCHu;
    if (c0 < IMAGESu && c2 < ROWSu && c3 < COLUMNSu) {
      EPILOGUE
    }
  }
}

// The first of the neighbours that a thread handles together. Beyond the last filter, the last ones are loaded again.
FRAGMENT(channel) {
  const u32 PLACE = side + PART * (4u * OWNu) + q * OWNu;
  const u32 CHANNEL = FILTERS_FIT || PLACE < ALL_FILTERSu ? PLACE : ALL_FILTERSu - OWNu;
}

FRAGMENT(real_filters) {
  if (FILTERS_FIT || PLACE < ALL_FILTERSu) {
    RESULTS
  }
}
