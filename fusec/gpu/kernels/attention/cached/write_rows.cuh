// Rows that are written into a tensor: write_rows.py explains it and fills in the names in capitals.

// The blocks of one part of the work, from FIRST on; i is the number of a pack of neighbours.
FRAGMENT(part) {
  if (blockIdx.x >= FIRST && blockIdx.x < END) {
    const u32 i = (blockIdx.x - FIRST) * BLOCKu + threadIdx.x;
    if (i < COUNT) {
      WORK
    }
  }
}

// Compute neighbours of the result of an embedding.
FRAGMENT(embed) {
  const u32 element = i * VECTORu;
  COORDINATES
  ROTATE
}

// Write neighbours of a new row, unless it has no place.
FRAGMENT(write) {
  const u32 row = i / PACKSu, column = i % PACKSu * VECTORu;
  const i64 index = (i64)INDICES[row], place = index < 0 ? index + ROWS : index;
  if (place >= 0 && place < ROWS) {
    NEIGHBOURS
  }
}

FRAGMENT(copy) {
  store_pack<TYPE, VECTOR>(RESULT + (place * WIDTH + column), load_pack<TYPE, VECTOR>(NEW + (row * WIDTHu + column)));
}

// Compute the rotary embedding for the same neighbours.
FRAGMENT(embed_row) {
  const u32 element = STARTu + row * WIDTHu + column;
  COORDINATES
  ROTATE
}

// Copy the other rows, where the result has memory of its own. A warp copies a row.
FRAGMENT(copy_rows) {
  if ((const void*)OLD != (const void*)RESULT) {
    const u32 lane = threadIdx.x % 32u;
    for (i64 row = blockIdx.x * WARPSu + threadIdx.x / 32u; row < ROWS; row += BLOCKS * WARPSu) {
      bool is_new = false;
      for (u32 n = lane; n < COUNT; n += 32u) {
        const i64 index = (i64)INDICES[n];
        is_new |= row == (index < 0 ? index + ROWS : index);
      }
      if (any_of_warp(is_new)) continue;
      for (u32 i = lane; i < PACKSu; i += 32u) {
        const i64 at = row * WIDTH + i * VECTORu;
        store_pack<TYPE, VECTOR>(RESULT + at, load_pack<TYPE, VECTOR>(OLD + at));
      }
    }
  }
}
