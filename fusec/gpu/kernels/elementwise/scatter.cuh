// Rows that are replaced or combined by index: scatter.py explains it and fills in the names in capitals.

FRAGMENT(functions) {
  DEVICE NUMBER ENTRY_combined(NUMBER x, NUMBER y) { return (NUMBER)(COMBINED); }
}

// Combine a number with one in memory by atomics, because other threads change it, too.
FRAGMENT(update_memory) {
  DEVICE void ENTRY_update(NUMBER* place, NUMBER y) {
    UPDATE
  }
}

FRAGMENT(update_by_add) {
  atomicAdd((ADDED*)place, (ADDED)y);
}

FRAGMENT(update_by_exchange) {
  union { NUMBER number; BITS bits; } seen, made;
  seen.number = *place;
  for (;;) {
    made.number = ENTRY_combined(seen.number, y);
    const BITS found = atomicCAS((BITS*)place, seen.bits, made.bits);
    if (found == seen.bits) break;
    seen.bits = found;
  }
}

// A thread combines an element with all updates of it, in their order. The block loads the rows of some updates at a
// time. Threads without an element compute the first one and store nothing.
FRAGMENT(by_place) {
  __shared__ i32 rows[BLOCK];
  const u32 number = blockIdx.x * BLOCKu + threadIdx.x;
  const bool is_there = number < ELEMENTS;
  const u32 i = is_there ? number : 0u;
  COORDINATES
  NUMBER value = wide(OLD[AT_OLD]);
  for (u32 first = 0; first < COUNT; first += BLOCKu) {
    __syncthreads();
    const u32 own = first + threadIdx.x;
    const i64 index = own < COUNT ? (i64)INDICES[own] : -(i64)ROWS - 1;
    const i64 place = index < 0 ? index + ROWS : index;
    rows[threadIdx.x] = place < ROWS ? (i32)place : -1;
    __syncthreads();
    const u32 count = COUNT - first < BLOCKu ? COUNT - first : BLOCKu;
    #pragma unroll 8
    for (u32 k = 0; k < count; ++k) {
      if (rows[k] != (i32)row) continue;
      const u32 n = first + k;
      value = ENTRY_combined(value, wide(NEW[AT_NEW]));
    }
  }
  if (is_there) RESULT[AT_RESULT] = narrow<TYPE>(value);
}

// Copy the operand, or hold it in numbers that threads can combine.
FRAGMENT(copy) {
  if ((const void*)OLD != (const void*)RESULT) RESULT[AT_RESULT] = OLD[AT_OLD];
}

FRAGMENT(copy_packs) {
  if ((const void*)OLD != (const void*)RESULT)
    store_pack<TYPE, VECTOR>(RESULT + i * (u64)VECTORu, load_pack<TYPE, VECTOR>(OLD + i * (u64)VECTORu));
}

FRAGMENT(hold) {
  HELD[i] = (NUMBER)wide(OLD[AT_OLD]);
}

// The place of an update; there is none for an index that the operand lacks.
FRAGMENT(place) {
  const i64 index = (i64)INDICES[n];
  const i64 place = index < 0 ? index + ROWS : index;
  if (place < 0 || place >= ROWS) return;
  const u32 row = (u32)place;
}

FRAGMENT(replace) {
  RESULT[AT_RESULT] = NEW[AT_NEW];
}

FRAGMENT(combine) {
  ENTRY_update(MEMORY, (NUMBER)wide(NEW[AT_NEW]));
}

FRAGMENT(store) {
  RESULT[AT_RESULT] = narrow<TYPE>((STORED)HELD[i]);
}
