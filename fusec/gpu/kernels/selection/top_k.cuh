// A block finds the K best elements of a row. A key is an element, as an integer whose order is that of elements, above
// its place, so that keys differ and of equal elements the first is better. Digits of 11 bits of the K-th key are found
// one by one, until all keys with these digits are wanted. Those are collected, and sorted. Of a long row, a block finds
// the K best keys of each part first, and another one those of all parts.

FRAGMENT(functions) {
  DEVICE u64 ENTRY_key(TYPE element, u32 place) {
    KEY
    return (u64)ORDERED << PLACE_BITSu | place;
  }
}

// Smaller floats have smaller keys, zeros of both signs have one, and NaN has the largest.
FRAGMENT(of_floats) {
  u32 bits = f32_to_bits(wide(element));
  if (bits << 1 == 0u) bits = 0u;
  const u32 key = bits << 1 > 0xff000000u ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

FRAGMENT(of_integers) {
  const u32 key = (u32)element ^ 0x80000000u;
}

// Find the digits of the last of NUMBER keys that are wanted of `count`, and a mask of the digits that matter.
FRAGMENT(find_digits) {
  __shared__ u32 parts[64], found[3];
  u32* bins = (u32*)memory;
  u64 digits = 0ull, mask = 0ull;
  u32 wanted = NUMBERu, there = count;
  for (u32 shift = FIRST_SHIFTu; there > wanted; shift -= 11u) {
    for (u32 i = threadIdx.x; i < 2048u; i += BLOCKu) bins[i] = 0u;
    __syncthreads();
    #pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += BLOCKu) {
      const u64 key = READ_KEY;
      if ((key & mask) == digits) atomicAdd(bins + (u32)(key >> shift & 2047ull), 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 64u; i += BLOCKu) {
      u32 sum = 0u;
      for (u32 j = 0u; j < 32u; ++j) sum += bins[32u * i + j];
      parts[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 left = wanted, part = 0u;
      while (parts[part] < left) left -= parts[part++];
      u32 bin = 32u * part;
      while (bins[bin] < left) left -= bins[bin++];
      found[0] = bin;
      found[1] = left;
      found[2] = bins[bin];
    }
    __syncthreads();
    digits |= (u64)found[0] << shift;
    mask |= 2047ull << shift;
    wanted = found[1];
    there = found[2];
    __syncthreads();
  }
  if (threadIdx.x == 0) found[0] = 0u;
  __syncthreads();
  #pragma unroll 4
  for (u32 i = threadIdx.x; i < count; i += BLOCKu) {
    const u64 key = READ_KEY;
    if ((key & mask) <= digits) KEYS[atomicAdd(found, 1u)] = key;
  }
}

// A part may have fewer elements than are wanted: the keys that it lacks are larger than any.
FRAGMENT(select_of_part) {
  RESIDENT(memory);
  const u32 first = blockIdx.x % PARTSu * PARTu, count = SIZEu - first < PARTu ? SIZEu - first : PARTu;
  const TYPE* row = ELEMENTS + (u64)(blockIdx.x / PARTSu) * SIZEu;
  u64* best = SCRATCH + (u64)blockIdx.x * NUMBERu;
  FIND_DIGITS
  for (u32 i = count + threadIdx.x; i < NUMBERu; i += BLOCKu) best[i] = ~0ull;
}

FRAGMENT(select) {
  RESIDENT(memory);
  u64* keys = (u64*)(memory + BINS_BYTESu);
  const TYPE* row = ELEMENTS + (u64)blockIdx.x * SIZEu;
  const u32 count = COUNTu;
  BEST_OF_PARTS
  FIND_DIGITS
  for (u32 i = NUMBERu + threadIdx.x; i < PADDEDu; i += BLOCKu) keys[i] = ~0ull;
  ENTRY_sort(keys, PADDEDu);
  for (u32 i = threadIdx.x; i < NUMBERu; i += BLOCKu) {
    const u32 place = (u32)keys[i] & PLACESu;
    const u64 to = (u64)blockIdx.x * NUMBERu + i;
    STORE
  }
}
