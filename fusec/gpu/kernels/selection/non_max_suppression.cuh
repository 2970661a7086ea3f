// A block chooses the boxes of one class of an image. It sorts keys of 64 bits, a score above the number of its box, so
// that of equal scores the first is better. Then it goes through the boxes by blocks of 64: one thread finds which of
// them stay, and all threads remove what these overlap from the rest. All is rounded as onnxruntime rounds it.
//
// REGION words of scratch memory of a block: how many boxes it chose, a gap, their numbers, and the keys where shared
// memory does not hold them all.

FRAGMENT(functions) {
  // Larger scores have smaller keys, zeros of both signs have one, and NaN has the largest.
  DEVICE u32 ENTRY_key(float score) {
    u32 bits = f32_to_bits(score);
    if (bits << 1 == 0u) bits = 0u;
    if (bits << 1 > 0xff000000u) return 0xffffffffu;
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
  }
  // A box is its lower corner, its upper corner and its area.
  DEVICE Pack<float, 8> ENTRY_box(const CORNER* corners) {
    Pack<float, 8> box;
    for (int d = 0; d < 2; ++d) {
      const float first = wide(corners[d * STEPu]), second = wide(corners[(d + 2) * STEPu]);
      SIDE
    }
    box.v[4] = __fmul_rn(__fsub_rn(box.v[3], box.v[1]), __fsub_rn(box.v[2], box.v[0]));
    return box;
  }
  DEVICE bool ENTRY_overlap(const Pack<float, 8>& a, const Pack<float, 8>& b) {
    float sides[2];
    for (int d = 0; d < 2; ++d) {
      const float low = a.v[d] < b.v[d] ? b.v[d] : a.v[d];
      const float high = b.v[2 + d] < a.v[2 + d] ? b.v[2 + d] : a.v[2 + d];
      if (high <= low) return false;
      sides[d] = __fsub_rn(high, low);
    }
    const float shared = __fmul_rn(sides[0], sides[1]);
    const float united = __fsub_rn(__fadd_rn(a.v[4], b.v[4]), shared);
    if (shared <= 0.0f || a.v[4] <= 0.0f || b.v[4] <= 0.0f || united <= 0.0f) return false;
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
  for (u32 i = threadIdx.x; i < BOXESu; i += BLOCKu) keys[i] = (u64)ENTRY_key(wide(scores[(u64)i * SCORE_STEPu])) << 32 | i;
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

FRAGMENT(suppress) {
  RESIDENT(memory);
  __shared__ u32 found[2];
  __shared__ u64 close[64], best[1];
  __shared__ u8 present[64];
  __shared__ Pack<float, 8> block[64];
  const u64 gone = ~0ull;
  const u32 image = blockIdx.x / CLASSESu;
  const SCORE* scores = SCORES + (u64)image * SCORES_OF_IMAGEu + blockIdx.x % CLASSESu * SCORES_OF_CLASSu;
  const CORNER* boxes = BOXES_READ + (u64)image * BOXES_OF_IMAGEu;
  u32* own = SCRATCH + (u64)blockIdx.x * REGIONu;
  FIND_KEYS
  FIND_BOXES
  __syncthreads();
  FEW_TO_SHARED
  u32 padded = 1u;
  while (padded < count) padded *= 2u;
  for (u32 i = count + threadIdx.x; i < padded; i += BLOCKu) keys[i] = gone;
  __syncthreads();
  for (u32 whole = 2u; whole <= padded; whole *= 2u)
    for (u32 step = whole / 2u; step > 0u; step /= 2u) {
      for (u32 t = threadIdx.x; t < padded / 2u; t += BLOCKu) {
        const u32 i = 2u * t - (t & (step - 1u));
        const u64 a = keys[i], b = keys[i + step];
        if ((a > b) == ((i & whole) == 0u)) {
          keys[i] = b;
          keys[i + step] = a;
        }
      }
      __syncthreads();
    }
  u32 chosen = 0u;
  for (u32 first = 0u; first < count && chosen < MOSTu; first += 64u) {
    if (threadIdx.x < 64u) {
      const u64 key = first + threadIdx.x < count ? keys[first + threadIdx.x] : gone;
      present[threadIdx.x] = key != gone;
      if (key != gone) block[threadIdx.x] = ENTRY_box(boxes + (u64)(u32)key * BOX_STEPu);
    }
    __syncthreads();
    for (u32 t = threadIdx.x; t < 512u; t += BLOCKu) {
      const u32 row = t / 8u;
      u8 bits = 0;
      for (u32 j = 0u; j < 8u; ++j) {
        const u32 other = t % 8u * 8u + j;
        if (other > row && present[row] && present[other] && ENTRY_overlap(block[row], block[other])) bits |= 1 << j;
      }
      ((u8*)close)[t] = bits;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 stay = 0ull, removed = 0ull;
      u32 place = chosen;
      for (u32 i = 0u; i < 64u && place < MOSTu; ++i)
        if (present[i] && !(removed >> i & 1ull)) {
          stay |= 1ull << i;
          removed |= close[i];
          own[2u + place++] = (u32)keys[first + i];
        }
      best[0] = stay;
      found[1] = place;
    }
    __syncthreads();
    chosen = found[1];
    const u64 stay = best[0];
    for (u32 i = first + 64u + threadIdx.x; i < count && chosen < MOSTu; i += BLOCKu) {
      const u64 key = keys[i];
      if (key == gone) continue;
      const Pack<float, 8> box = ENTRY_box(boxes + (u64)(u32)key * BOX_STEPu);
      for (u32 j = 0u; j < 64u; ++j)
        if (stay >> j & 1ull && ENTRY_overlap(block[j], box)) {
          keys[i] = gone;
          break;
        }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) own[0] = chosen;
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
