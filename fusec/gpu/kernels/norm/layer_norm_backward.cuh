// The gradients of layer norm and RMS norm. THREADS threads share a row and keep it in registers, by vectors of VECTOR
// elements. Numbers are of type KIND; each row has SIZE elements.

FRAGMENT(find_row) {
  const u32 group = (ROUND * GRIDu + blockIdx.x) * LANESu + lane;
  const bool live = group < ROWSu;
  const u32 at = live ? group : LAST_ROWu;
}

FRAGMENT(fetch_ahead) {
  RESIDENT(rows);
  const auto fetch = [&](u32 now) {
    if (now < ROUNDSu) {
      COPY
    }
    copied();
  };
  for (u32 now = 0; now < AHEADu; ++now) fetch(now);
}

FRAGMENT(wait_for_row) {
  fetch(now + AHEADu);
  wait_for_copies<AHEAD>();
}

FRAGMENT(rows) {
  __shared__ KIND shared[SHARED];
  const u32 t = threadIdx.x % THREADSu, lane = threadIdx.x / THREADSu;
  DECLARE_COLUMN_SUMS
  for (int turn = 0; turn < TURNS; ++turn) for (int j = 0; j < VECTOR; ++j) { ZERO_COLUMN_SUMS }
  FETCH
  for (u32 now = 0; now < ROUNDSu; ++now) {
    FIND_ROW
    KIND e[TURNS][VECTOR], loss[TURNS][VECTOR], sum[1] = {KIND(0)};
    LOAD
    KIND sums[SUMS] = {ZEROS};
    SUM
    reduce_threads<BLOCK, THREADS, 1, SUMS>(sums, shared, Add());
    const KIND inverse = KIND(1) / sqrt(sums[0] / KIND(SIZE) + EPSILON);
    const KIND along = sums[1] * inverse / KIND(SIZE);
    if (live) {
      WRITE
    }
  }
}

FRAGMENT(subtract_mean) {
  reduce_threads<BLOCK, THREADS, 1, 1>(sum, shared, Add());
  const KIND mean = sum[0] / KIND(SIZE);
}

FRAGMENT(each_vector) {
  #pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const u32 r = t + turn * THREADSu;
    SKIP
    BODY
  }
}

// The sums of the columns over the rows that a thread has visited.
FRAGMENT(keep_columns) {
  #pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const u32 r = t + turn * THREADSu;
    if (r < COUNTu)
      for (int j = 0; j < VECTOR; ++j) PLACE = COLUMN_SUM[turn][j];
  }
}

// Lanes are added in their order.
FRAGMENT(add_lanes) {
  for (u32 c = threadIdx.x; c < SIZEu; c += BLOCKu) {
    KIND sum = LANE_SUMS[c];
    #pragma unroll
    for (u32 l = 1; l < LANESu; ++l) sum += LANE_SUMS[l * SIZEu + c];
    SUMS[c] = sum;
  }
}

FRAGMENT(add_blocks) {
  #pragma unroll 4
  for (u32 s = t; s < GRIDu; s += MERGINGu) {
    ADD
  }
}
