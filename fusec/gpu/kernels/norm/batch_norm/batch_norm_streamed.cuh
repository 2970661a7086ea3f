// Batch norm in one launch whose elements come to shared memory by asynchronous copies, DEPTH turns ahead of their use.

FRAGMENT(begin) {
  #pragma unroll
  for (u32 ahead = 0; ahead < DEPTHu; ++ahead) {
    COPY
    copied();
  }
}

// The copies of a turn have arrived when those of at most DEPTH - 1 later turns are under way.
FRAGMENT(stream) {
  #pragma unroll 2
  for (u32 step = 0; step < TURNSu; ++step) {
    wait_for_copies<LATER>();
    BODY
    if (step + DEPTHu < TURNSu) {
      const u32 ahead = step + DEPTHu;
      COPY
    }
    copied();
  }
}

FRAGMENT(turn) {
  {
    const u32 turn = TURN, r = (LAST_TURNu - turn) * STRIDEu + first;
    if (r < COUNTu) {
      const u32 slot = SLOT;
      COORDINATES
      BODY
    }
  }
}
