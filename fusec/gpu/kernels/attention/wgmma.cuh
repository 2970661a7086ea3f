// Attention by products of warpgroups (Hopper): wgmma_source.py explains them and fills in the names in capitals.

FRAGMENT(declare_group) {
  RESIDENT(memory);
  TYPE *all_keys = (TYPE*)memory, *all_values = all_keys + STAGES * KEYS_SIZE;
  u64* come = (u64*)(memory + BARRIER);
  barrier_for(come, WARPSu);
  __syncthreads();
  // The octet of ones after the values, and that of zeros after an odd number of octets of a key.
  for (u32 i = threadIdx.x; i < STAGES * KEYSu; i += THREADSu) {
    const u32 stage = i / KEYSu, own = i % KEYSu;
    *(Pack<u32, 4>*)(all_values + stage * VALUES_SIZEu + ONES_ATu + own * 8u) = Pack<u32, 4>{ONEu, ONEu, ONEu, ONEu};
    if (IS_PADDED)
      *(Pack<u32, 4>*)(all_keys + stage * KEYS_SIZEu + ZEROS_ATu + own * 8u) = Pack<u32, 4>{0x0u, 0x0u, 0x0u, 0x0u};
  }
  float sums[1][WIDTH][4];
  #pragma unroll
  for (int b = 0; b < WIDTH; ++b)
    #pragma unroll
    for (int e = 0; e < 4; ++e) sums[0][b][e] = 0.0f;
}

FRAGMENT(loop_of_groups) {
  // Blocks begin at different keys, because they then read from more of the cache.
  const u32 begin = IS_CAUSAL ? 0u : part * rounds / BLOCKSu;
  const u32 second = begin + 1u < rounds ? begin + 1u : 0u;
  const u32 k_own = threadIdx.x / KEY_OCTETSu, k_octet = threadIdx.x % KEY_OCTETSu;
  const TYPE* k_from = k + (k_own * KEY_STRIDEu + k_octet * 8u);
  const u32 k_place = k_octet * KEY_OCTET_SIZEu + k_own * 8u;
  const u32 v_own = threadIdx.x / VALUE_OCTETSu, v_octet = threadIdx.x % VALUE_OCTETSu;
  const TYPE* v_from = v + (v_own * VALUE_STRIDEu + v_octet * 8u);
  const u32 v_place = v_octet * VALUE_OCTET_SIZEu + v_own * 8u;
  COPY_FIRST
  if (1u < rounds) {
    COPY_SECOND
  } else copied();
  wait_for_copies<1>();
  seen_by_groups();
  has_come(come);
  wait_for_all(come, 0u);
  float scores[1][STEP / 8][4];
  // The sums are zero before products run.
  #pragma unroll
  for (int b = 0; b < WIDTH; ++b)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(sums[0][b][e]);
  group_begins();
  FIRST_SCORES
  group_ends();
  bool fresh = true;
  u32 stage = 0u, round = begin;
  #pragma unroll 1
  for (u32 turn = 0; turn < rounds; ++turn) {
    wait_for_copies<0>();
    seen_by_groups();
    has_come(come);
    const u32 following = round + 1u < rounds ? round + 1u : 0u;
    const u32 next = stage + 1u < STAGESu ? stage + 1u : 0u;
    if (turn + 2u < rounds) {
      const u32 last = following + 1u < rounds ? following + 1u : 0u;
      const u32 later = next + 1u < STAGESu ? next + 1u : 0u;
      COPY_LATER
    } else copied();
    const TYPE* own_keys = all_keys + stage * KEYS_SIZEu;
    const TYPE* next_keys = all_keys + next * KEYS_SIZEu;
    const TYPE* own_values = all_values + stage * VALUES_SIZEu;
    #pragma unroll
    for (int s = 0; s < KEYS / STEP; ++s) {
      WAIT
      WEIGH
      if (s + 1 == KEYS / STEP) wait_for_all(come, turn + 1u);
      group_begins();
      NEXT_SCORES
      SUMS
      group_ends();
    }
    stage = next;
    round = following;
  }
  WAIT
}

// Begin to copy the keys and values of a round.
FRAGMENT(copy_round) {
  {
    const TYPE* from = k_from + (u64)AT_ROUND * (KEYSu * KEY_STRIDEu);
    TYPE* to = all_keys + (AT_STAGE * KEYS_SIZEu + k_place);
    COPY_KEYS
  }
  {
    const TYPE* from = v_from + (u64)AT_ROUND * (KEYSu * VALUE_STRIDEu);
    TYPE* to = all_values + (AT_STAGE * VALUES_SIZEu + v_place);
    COPY_VALUES
  }
  copied();
}

// Copy an octet of a key, or value, if this thread has one and it exists; past the end, store zeros.
FRAGMENT(copy_octet) {
  if (IS_OWN) {
    if (KEYS_FIT || AT_ROUND * KEYSu + FIRSTu + OWN < KEY_COUNTu)
      copy_ahead<16>(to + FIRST * 8, from + FIRST * STRIDE);
    else
      *(Pack<u32, 4>*)(to + FIRST * 8) = Pack<u32, 4>{{0u, 0u, 0u, 0u}};
  }
}

// Wait until products have written scores and sums.
FRAGMENT(wait) {
  wait_for_groups<0>();
  #pragma unroll
  for (int b = 0; b < STEP / 8; ++b)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(scores[0][b][e]);
  #pragma unroll
  for (int b = 0; b < WIDTH; ++b)
    #pragma unroll
    for (int e = 0; e < 4; ++e) pin(sums[0][b][e]);
}

// Issue the product of two octets of queries by those of the keys.
FRAGMENT(issue_score) {
  {
    const u32 words[4] = {query[0][OCTET][0], query[0][OCTET][1], query[0][OCTET + 1][0], query[0][OCTET + 1][1]};
    PRODUCT(scores[0], words, KEYS_AT, OFFSET + OCTET_OFFSET, 2u * KEY_OCTET_SIZE, 128u, ONTO);
  }
}

// Issue the product of the weights of sixteen keys by their values.
FRAGMENT(issue_sum) {
  {
    const u32 words[4] = {power[0][OCTET][0], power[0][OCTET][1], power[0][OCTET + 1][0], power[0][OCTET + 1][1]};
    PRODUCT(sums[0], words, own_values, (s * STEP + OCTET * 8) * 16, 128u, 2u * VALUE_OCTET_SIZE, 1);
  }
}
