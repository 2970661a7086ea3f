// Gradient of a batch norm, of the relu after it and of the max pool after that. A thread has VECTOR neighbouring channels.

// Sums of each channel over windows. Only the element that a window took has a gradient, so windows are visited.
FRAGMENT(sum_windows) {
  __shared__ float shared[VECTOR * BLOCK];
  const u32 lane = threadIdx.x % LANESu, at = lane;
  const u32 c1 = at * VECTORu;
  BEGIN
  for (u32 window = blockIdx.x * ROWSu + threadIdx.x / LANESu; window < WINDOWSu; window += STEPu) {
    COORDINATES
    FIND
    const Pack<TYPE, VECTOR> loss = load_pack<TYPE, VECTOR>(LOSS);
    Pack<u8, VECTOR> taps;
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const u32 p0 = o0 * STRIDE0u + where[j] / WIDTH - PAD0u, p1 = o1 * STRIDE1u + where[j] % WIDTH - PAD1u;
      const bool inside = p0 < SIZE0u && p1 < SIZE1u;  // where all are minus infinity, the first tap may be a pad
      const float d = (inside ? wide(ELEMENTS[(PLACE) + j]) : around[j]) - around[j];
      const bool open = inside && (OPEN);
      const float e = open ? wide(loss.v[j]) : 0.0f;
      acc0[j] += e;
      acc1[j] += e * d;
      taps.v[j] = open ? (u8)where[j] : CLOSED;
    }
    store_pack<u8, VECTOR>(TAPS, taps);
  }
  reduce_threads<BLOCK, ROWS, LANES, VECTOR>(acc0, shared, Add());
  reduce_threads<BLOCK, ROWS, LANES, VECTOR>(acc1, shared, Add());
  if (threadIdx.x < LANESu)
    for (int w = 0; w < VECTOR; ++w) {
      SCRATCH[blockIdx.x * CHANNELSu + c1 + w] = acc0[w];
      SCRATCH[(CHUNKSu + blockIdx.x) * CHANNELSu + c1 + w] = acc1[w];
    }
}

// Gradients of as many neighbouring elements as the strides are long.
FRAGMENT(write_tiles) {
  const u32 lane = threadIdx.x % LANESu, at = lane;
  const u32 c1 = at * VECTORu;
  const u32 tile = blockIdx.x * ROWSu + threadIdx.x / LANESu;
  if (tile >= TILESu) return;
  FACTORS
  COORDINATES
  BODY
}
