// Shares of the elements of a reduction among threads: THREADS threads share a number, and LANES numbers a block.

FRAGMENT(chunk_of_block) {
  const u32 group = blockIdx.x % BLOCKSu * LANESu + lane;
  const u32 chunk = NUMBER, begin = chunk * EACHu;
  const u32 end = begin + EACHu < COUNTu ? begin + EACHu : COUNTu;
}

FRAGMENT(live_group) {
  const bool live = group < GROUPS;
  const u32 at = live ? group : LAST_GROUP;
}

FRAGMENT(each_turn) {
  UNROLL
  for (u32 turn = 0; turn < TURNSu; ++turn) {
    const u32 r = begin + t + turn * THREADSu;
    if (r >= end) continue;
    BODY
  }
}

// Only the last turn checks for the end, because loads of several turns are then issued together.
FRAGMENT(each_full_turn) {
  {
    const u32 full = (end - begin) / THREADSu;
    #pragma unroll UNROLLED
    for (u32 turn = 0; turn < full; ++turn) {
      const u32 r = begin + t + turn * THREADSu;
      BODY
    }
    LAST_TURN
  }
}

FRAGMENT(last_turn) {
  for (u32 r = begin + full * THREADSu + t; r < end; r = end) {
    BODY
  }
}

// The copies of a turn have arrived when those of at most LATER turns after it are under way.
FRAGMENT(each_copied_turn) {
  {
    RESIDENT(ring);
    const u32 turns = (end - begin + LAST_THREADu) / THREADSu;
    #pragma unroll
    for (u32 turn = 0; turn < DEPTHu; ++turn) {
      COPY
      copied();
    }
    #pragma unroll 2
    for (u32 now = 0; now < turns; ++now) {
      wait_for_copies<LATER>();
      {
        const u32 turn = now;
        USE
      }
      const u32 turn = now + DEPTHu;
      COPY
      copied();
    }
  }
}

FRAGMENT(turn_in_chunk) {
  {
    const u32 r = begin + t + turn * THREADSu;
    if (r < end) {
      BODY
    }
  }
}

FRAGMENT(merge_setup) {
  __shared__ KIND shared[BLOCK];
  const u32 t = threadIdx.x / LANESu, lane = threadIdx.x % LANESu;
  const u32 group = blockIdx.x * LANESu + lane;
  const bool live = group < COLUMNSu;
  const u32 c = live ? group : LAST_COLUMNu;
  KIND ZEROS;
}
