// Rows that are replaced or combined by index: scatter.py explains it and fills in the names in capitals.

FRAGMENT(functions) {
  DEVICE NUMBER ENTRY_combined(NUMBER x, NUMBER y) { return (NUMBER)(COMBINED); }
}

// Combine a number with one in memory, which other threads change, too.
FRAGMENT(meet) {
  DEVICE void ENTRY_meet(NUMBER* place, NUMBER y) {
    MEET
  }
}

FRAGMENT(meet_by_add) {
  atomicAdd((ADDED*)place, (ADDED)y);
}

FRAGMENT(meet_by_exchange) {
  union { NUMBER number; BITS bits; } seen, made;
  seen.number = *place;
  for (;;) {
    made.number = ENTRY_combined(seen.number, y);
    const BITS found = atomicCAS((BITS*)place, seen.bits, made.bits);
    if (found == seen.bits) break;
    seen.bits = found;
  }
}

// A thread combines an element with all updates of it, in their order.
FRAGMENT(by_place) {
  NUMBER value = wide(OLD[AT_OLD]);
  for (u32 n = 0; n < COUNT; ++n) {
    const i64 index = (i64)INDICES[n];
    if ((index < 0 ? index + ROWS : index) == (i64)row) value = ENTRY_combined(value, wide(NEW[AT_NEW]));
  }
  RESULT[AT_RESULT] = narrow<TYPE>(value);
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
  ENTRY_meet(MEMORY, (NUMBER)wide(NEW[AT_NEW]));
}

FRAGMENT(store) {
  RESULT[AT_RESULT] = narrow<TYPE>((STORED)HELD[i]);
}
