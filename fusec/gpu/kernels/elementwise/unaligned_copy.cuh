// A block copies a part of a row, or some short rows, with LANES threads each, from and to places that 16 bytes do not divide. It stores whole words of 16 bytes. Each
// is cut from two neighbouring words of what is read, of which the neighbour thread reads one, too. Both have a byte that
// is wanted, so no load leaves the memory of the tensor.

FRAGMENT(functions) {
  DEVICE void ENTRY_cut(u32 (&word)[4], const u32 (&low)[4], const u32 (&high)[4], u32 shift) {
    u32 both[8];
    for (int i = 0; i < 4; ++i) {
      both[i] = low[i];
      both[4 + i] = high[i];
    }
    if (shift & 8u)
      for (int i = 0; i < 6; ++i) both[i] = both[i + 2];
    if (shift & 4u)
      for (int i = 0; i < 5; ++i) both[i] = both[i + 1];
    for (int i = 0; i < 4; ++i) word[i] = (u32)(((u64)both[i + 1] << 32 | both[i]) >> 8u * (shift & 3u));
  }
}

FRAGMENT(copy) {
  const TYPE* from = READ_PLACE;
  TYPE* to = WRITTEN_PLACE;
  const u32 before = (16u - (u32)((u64)to & 15ull)) & 15u;
  const u32 shift = (u32)((u64)from + before) & 15u;
  const u8* aligned = (const u8*)from + before - shift;
  u8* whole = (u8*)to + before;
  const INDEX words = (BYTESu - before) / 16u;
  const INDEX first = part * LANESu * TURNSu + lane;
  u32 low[TURNS][4], high[TURNS][4];
  #pragma unroll
  for (u32 turn = 0u; turn < TURNSu; ++turn) {
    const INDEX i = first + turn * LANESu;
    if (i >= words) continue;
    load_words(low[turn], aligned + 16ull * i);
    if (shift) load_words(high[turn], aligned + 16ull * i + 16ull);
  }
  #pragma unroll
  for (u32 turn = 0u; turn < TURNSu; ++turn) {
    const INDEX i = first + turn * LANESu;
    if (i >= words) continue;
    u32 word[4];
    ENTRY_cut(word, low[turn], high[turn], shift);
    store_words(whole + 16ull * i, word[0], word[1], word[2], word[3]);
  }
  if (part == 0u) {
    const INDEX done = (before + 16u * words) / WIDTHu;
    if (lane < before / WIDTHu) to[lane] = from[lane];
    if (done + lane < SIZEu) to[done + lane] = from[done + lane];
  }
}

FRAGMENT(short_rows) {
  const u32 lane = threadIdx.x % LANESu;
  const INDEX row = b * ROWSu + threadIdx.x / LANESu;
  if (row < COUNT) {
    const u32 part = 0u;
    COPY
  }
}
