// Each thread visits vectors of its block's tensor; the last ones of the tensor one by one.
FRAGMENT(visit_tensor) {
  DECLARE_POINTERS
  u32 b = blockIdx.x, size;
  SELECT_TENSOR
  for (u32 n = 0; n < TURNSu; ++n) {
    const u32 at = b * CHUNKu + (n * BLOCKu + threadIdx.x) * VECTORu;
    if (at >= size) return;
    if (at + VECTORu <= size) {
      WHOLE_VECTOR
    } else {
      for (u32 last = at; last < size; ++last) {
        const u32 at = last;
        ONE_ELEMENT
      }
    }
  }
}
