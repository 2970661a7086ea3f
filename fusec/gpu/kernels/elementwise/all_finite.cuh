// A block checks CHUNK elements of a tensor of type TYPE, by vectors of VECTOR elements. NUMBER is the type that is
// computed in; only what is not finite gives something else than 0 when it is multiplied by 0.

FRAGMENT(check_chunk) {
  const TYPE* m;
  u64 size;
  u32 b = blockIdx.x;
  SELECT_TENSOR
  float bad[1] = {0.0f};
  const bool whole = ((u64)b + 1u) * CHUNKu <= size;
  // Loads of a whole chunk are issued together.
  if (whole) {
    #pragma unroll
    for (u32 n = 0; n < TURNSu; ++n) {
      const u64 at = (u64)b * CHUNKu + (n * BLOCKu + threadIdx.x) * VECTORu;
      CHECK_VECTOR
    }
  }
  for (u32 n = 0; !whole && n < TURNSu; ++n) {
    const u64 at = (u64)b * CHUNKu + (n * BLOCKu + threadIdx.x) * VECTORu;
    if (at + VECTORu <= size) {
      CHECK_VECTOR
    } else {
      for (u64 last = at; last < size; ++last)
        if (!(wide(m[last]) * NUMBER(0) == NUMBER(0))) bad[0] = 1.0f;
    }
  }
  __shared__ float shared[BLOCK];
  reduce_threads<BLOCK, BLOCK, 1>(bad, shared, Largest());
  if (threadIdx.x == 0) SCRATCH[DONEu + blockIdx.x] = bad[0];
}

FRAGMENT(check_vector) {
  const Pack<TYPE, VECTOR> pack = load_pack<TYPE, VECTOR>(m + at);
  for (int j = 0; j < VECTOR; ++j)
    if (!(wide(pack.v[j]) * NUMBER(0) == NUMBER(0))) bad[0] = 1.0f;
}

FRAGMENT(combine) {
  float bad[1] = {0.0f};
  for (u32 i = threadIdx.x; i < COUNTu; i += BLOCKu) bad[0] = nmax(bad[0], SCRATCH[i]);
  __shared__ float shared[BLOCK];
  reduce_threads<BLOCK, BLOCK, 1>(bad, shared, Largest());
  if (threadIdx.x == 0) RESULT[0] = bad[0] == 0.0f;
}
