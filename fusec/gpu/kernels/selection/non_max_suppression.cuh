// First a block sorts the boxes of one class of an image. Keys have 64 bits, a score above the number of its box, so
// that of equal scores the first is better. Panels of PANEL sorted boxes follow, with two launches each. `compare` asks
// in many blocks which boxes of a panel overlap each other, and which overlap a box that was chosen before. `choose`
// goes through the answers in one block for each class. Last, the rows of all classes are joined.
//
// REGION words of scratch memory of a class: how many boxes are chosen, how many can be, the numbers of the chosen
// ones, those of all in order, the answers for a panel, and the keys where shared memory does not hold them all.
// Answers are tiles of 64 x 64 bits. All tiles of a column of 64 boxes come together, so fewer boxes have fewer tiles.

FRAGMENT(key) {
  // Larger scores have smaller keys, zeros of both signs have one, and NaN has the largest.
  DEVICE u32 ENTRY_key(float score) {
    u32 bits = f32_to_bits(score);
    if (bits << 1 == 0u) bits = 0u;
    if (bits << 1 > 0xff000000u) return 0xffffffffu;
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
  }
}

FRAGMENT(overlap) {
  // A box is its lower corner, its upper corner and its area. A box without an area overlaps none, also if a corner is
  // NaN, for then its area is NaN. Such a box is all zeros, so no corner that is compared is NaN.
  DEVICE Pack<float, 8> ENTRY_box(const CORNER* corners) {
    Pack<float, 8> box;
    for (int d = 0; d < 2; ++d) {
      const float first = wide(corners[d * STEPu]), second = wide(corners[(d + 2) * STEPu]);
      SIDE
    }
    box.v[4] = __fmul_rn(__fsub_rn(box.v[3], box.v[1]), __fsub_rn(box.v[2], box.v[0]));
    if (!(box.v[4] > 0.0f)) box.v[0] = box.v[1] = box.v[2] = box.v[3] = box.v[4] = 0.0f;
    return box;
  }
  // The quotient of two areas is rounded as onnxruntime rounds it. Products tell if it is below the limit, or above the
  // next number, because rounding keeps the order of numbers. Only what is between needs the division.
  DEVICE bool ENTRY_overlap(const Pack<float, 8>& a, const Pack<float, 8>& b) {
    const float width = fmaxf(__fsub_rn(fminf(a.v[2], b.v[2]), fmaxf(a.v[0], b.v[0])), 0.0f);
    const float height = fmaxf(__fsub_rn(fminf(a.v[3], b.v[3]), fmaxf(a.v[1], b.v[1])), 0.0f);
    const float shared = __fmul_rn(width, height);
    const float united = __fsub_rn(__fadd_rn(a.v[4], b.v[4]), shared);
    if (shared > __fmul_rn(ABOVE, united)) return true;
    if (shared <= 0.0f || shared < __fmul_rn(IOU, united)) return false;
    return __fdiv_rn(shared, united) > IOU;
  }
}

FRAGMENT(opposite) {
  const bool swapped = first >= second;
  box.v[d] = swapped ? second : first;
  box.v[2 + d] = swapped ? first : second;
}

FRAGMENT(centred) {
  box.v[d] = __fsub_rn(first, second / 2.0f);
  box.v[2 + d] = __fadd_rn(first, second / 2.0f);
}

FRAGMENT(keys_in_shared_memory) {
  u64* keys = (u64*)memory;
}

FRAGMENT(keys_in_scratch_memory) {
  u64* keys = (u64*)(own + KEYSu);
}

FRAGMENT(few_to_shared_memory) {
  if (count <= SHAREDu) {
    for (u32 i = threadIdx.x; i < count; i += BLOCKu) ((u64*)memory)[i] = keys[i];
    keys = (u64*)memory;
    __syncthreads();
  }
}

FRAGMENT(all_boxes) {
  for (u32 i = threadIdx.x; i < BOXESu; i += BLOCKu)
    keys[i] = (u64)ENTRY_key(wide(scores[(u64)i * SCORE_STEPu])) << 32 | i;
  const u32 count = BOXESu;
}

FRAGMENT(better_boxes) {
  if (threadIdx.x == 0) found[0] = 0u;
  __syncthreads();
  for (u32 i = threadIdx.x; i < BOXESu; i += BLOCKu) {
    const u32 key = ENTRY_key(wide(scores[(u64)i * SCORE_STEPu]));
    if (key < ENTRY_key(LEAST)) keys[atomicAdd(found, 1u)] = (u64)key << 32 | i;
  }
  __syncthreads();
  const u32 count = found[0];
}

FRAGMENT(sort) {
  RESIDENT(memory);
  __shared__ u32 found[1];
  const u32 image = blockIdx.x / CLASSESu;
  const SCORE* scores = SCORES + (u64)image * SCORES_OF_IMAGEu + blockIdx.x % CLASSESu * SCORES_OF_CLASSu;
  u32* own = SCRATCH + (u64)blockIdx.x * REGIONu;
  FIND_KEYS
  FIND_BOXES
  __syncthreads();
  FEW_TO_SHARED
  u32 padded = 1u;
  while (padded < count) padded *= 2u;
  for (u32 i = count + threadIdx.x; i < padded; i += BLOCKu) keys[i] = ~0ull;
  ENTRY_sort(keys, padded);
  for (u32 i = threadIdx.x; i < count; i += BLOCKu) own[ORDERu + i] = (u32)keys[i];
  if (threadIdx.x == 0) {
    own[0] = 0u;
    own[1] = count;
  }
}

// What both launches of a panel begin with. Nothing is left to do after the last box, or after MOST chosen ones.
FRAGMENT(panel) {
  u32* own = SCRATCH + (u64)region * REGIONu;
  const u32 before = own[0], count = own[1], first = NUMBER * PANELu;
  if (first >= count || before >= MOSTu) return;
  const u32 there = count - first < PANELu ? count - first : PANELu;
  const u32 columns = (there + 63u) / 64u, tiles = columns * (columns + 1u) / 2u;
  const u32* order = own + ORDERu + first;
  u64* answers = (u64*)(own + ANSWERSu);
}

// A job is a tile, or a column of 64 boxes that is compared with all that were chosen before. A thread compares its row
// of the tile, or its box of the column, with a quarter of the others.
FRAGMENT(compare) {
  __shared__ Pack<float, 8> rows[64], others[64];
  __shared__ u64 words[64];
  const u32 blocks = BLOCKS, region = blockIdx.x / blocks, own_row = threadIdx.x % 64u, quarter = threadIdx.x / 64u;
  PANEL_BEGINS
  const CORNER* boxes = BOXES_READ + (u64)(region / CLASSESu) * BOXES_OF_IMAGEu;
  Pack<float, 8> none;
  for (int i = 0; i < 5; ++i) none.v[i] = 0.0f;
  for (u32 job = blockIdx.x % blocks; job < tiles; job += blocks) {
    u32 column = 0u;
    while ((column + 1u) * (column + 2u) / 2u <= job) ++column;
    const u32 row = job - column * (column + 1u) / 2u;
    if (threadIdx.x < 128u) {
      const u32 place = 64u * (threadIdx.x < 64u ? row : column) + own_row;
      const Pack<float, 8> box = place < there ? ENTRY_box(boxes + (u64)order[place] * BOX_STEPu) : none;
      (threadIdx.x < 64u ? rows : others)[own_row] = box;
    }
    __syncthreads();
    const Pack<float, 8> box = rows[own_row];
    u32 bits = 0u;
    for (u32 j = 0u; j < 16u; ++j) {
      const u32 other = 16u * quarter + j;
      if ((row < column || own_row < other) && ENTRY_overlap(box, others[other])) bits |= 1u << j;
    }
    ((u16*)words)[4u * own_row + quarter] = (u16)bits;
    __syncthreads();
    if (threadIdx.x < 64u) answers[64u * job + own_row] = words[own_row];
  }
  CHOSEN_BEFORE
}

FRAGMENT(chosen_before) {
  __shared__ u8 gone[64];
  for (u32 column = (blockIdx.x + tiles) % blocks; column < columns; column += blocks) {
    const u32 place = 64u * column + own_row;
    const Pack<float, 8> box = place < there ? ENTRY_box(boxes + (u64)order[place] * BOX_STEPu) : none;
    if (threadIdx.x < 64u) gone[own_row] = 0;
    bool overlaps = false;
    for (u32 start = 0u; start < before; start += 64u) {
      __syncthreads();
      if (threadIdx.x < 64u) {
        const u32 at = start + own_row;
        others[own_row] = at < before ? ENTRY_box(boxes + (u64)own[2u + at] * BOX_STEPu) : none;
      }
      __syncthreads();
      for (u32 j = 0u; j < 16u && !overlaps; ++j) overlaps = ENTRY_overlap(others[16u * quarter + j], box);
    }
    __syncthreads();
    if (overlaps) gone[own_row] = 1;
    __syncthreads();
    if (threadIdx.x < 2u) {
      u32 word = 0u;
      for (u32 j = 0u; j < 32u; ++j) word |= (u32)gone[32u * threadIdx.x + j] << j;
      own[GONEu + 2u * column + threadIdx.x] = word;
    }
    __syncthreads();
  }
}

// One warp goes through the boxes that are left. All its threads know what a chosen box removes of its own column; each
// also notes what it removes of one later column.
FRAGMENT(choose) {
  RESIDENT(memory);
  __shared__ u64 gone[COLUMNS], stays[COLUMNS];
  __shared__ u32 taken[2];
  const u32 region = blockIdx.x;
  PANEL_BEGINS
  u64* close = (u64*)memory;
  for (u32 i = threadIdx.x; i < 64u * tiles; i += BLOCKu) close[i] = answers[i];
  if (threadIdx.x < columns) {
    gone[threadIdx.x] = GONE_BEFORE;
    stays[threadIdx.x] = 0ull;
  }
  __syncthreads();
  u32 place = before;
  for (u32 column = 0u; column < columns && place < MOSTu; ++column) {
    if (threadIdx.x < 32u) {
      const u32 later = column + threadIdx.x, left = there - 64u * column;
      const bool notes = threadIdx.x > 0u && later < columns;
      const u64* inside = close + 64u * (column * (column + 3u) / 2u);
      const u64* across = close + (notes ? 64u * (later * (later + 1u) / 2u + column) : 0u);
      u64 waiting = ~gone[column] & (left < 64u ? (1ull << left) - 1ull : ~0ull), stay = 0ull, removed = 0ull;
      while (waiting && place < MOSTu) {
        const u32 i = __ffsll(waiting) - 1;
        stay |= 1ull << i;
        waiting &= ~(1ull << i | inside[i]);
        removed |= across[i];
        ++place;
      }
      if (notes) gone[later] |= removed;
      if (threadIdx.x == 0) {
        stays[column] = stay;
        taken[column % 2u] = place;
      }
    }
    __syncthreads();
    place = taken[column % 2u];
  }
  for (u32 i = threadIdx.x; i < there; i += BLOCKu) {
    const u64 stay = stays[i / 64u];
    if (!(stay >> i % 64u & 1ull)) continue;
    u32 to = before + __popcll(stay & ((1ull << i % 64u) - 1ull));
    for (u32 column = 0u; column < i / 64u; ++column) to += __popcll(stays[column]);
    own[2u + to] = order[i];
  }
  if (threadIdx.x == 0) own[0] = place;
}

// A block writes the rows of one class after those of all classes before it, and its share of the zeros after them.
FRAGMENT(rows) {
  __shared__ u32 shared[2 * BLOCK];
  u32 sums[2] = {0u, 0u};
  for (u32 i = threadIdx.x; i < REGIONS; i += BLOCKu) {
    const u32 count = SCRATCH[(u64)i * REGIONu];
    if (i < blockIdx.x) sums[0] += count;
    sums[1] += count;
  }
  reduce_threads<BLOCK, BLOCK, 1>(sums, shared, Add());
  const u32* own = SCRATCH + (u64)blockIdx.x * REGIONu;
  const u32 count = own[0];
  for (u32 i = threadIdx.x; i < count; i += BLOCKu) {
    i64* row = ROWS + 3ull * (sums[0] + i);
    row[0] = blockIdx.x / CLASSESu;
    row[1] = blockIdx.x % CLASSESu;
    row[2] = own[2u + i];
  }
  const u64 end = 3ull * MOSTu * REGIONS;
  for (u64 i = 3ull * sums[1] + blockIdx.x * BLOCKu + threadIdx.x; i < end; i += REGIONS * BLOCKu) ROWS[i] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) COUNT[0] = sums[1];
}
