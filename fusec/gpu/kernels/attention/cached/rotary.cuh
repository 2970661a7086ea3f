// The rotary embedding: rotary.py explains it and fills in the names in capitals.

FRAGMENT(rotary) {
  const u32 i = blockIdx.x * BLOCKu + threadIdx.x;
  if (i >= COUNT) return;
  COORDINATES
  const u32 COLUMN = pack * VECTORu;
  ROTATE
}

// Neighbours of one row; COLUMN is that of the first.
FRAGMENT(rotate) {
  const bool in_first_half = COLUMN < HALFu;
  const u32 partner = in_first_half ? COLUMN + HALFu : COLUMN - HALFu;
  TYPE rotated[VECTOR];
  LOAD_PARTNERS
  RESULT
}
