// All threads of a block sort keys of 64 bits in ascending order. Their number is a power of two. Two levels of the
// bitonic network go through memory together, because a thread holds the four keys that they exchange.

FRAGMENT(functions) {
  DEVICE void ENTRY_order(u64& a, u64& b, bool ascending) {
    const u64 first = a, second = b;
    if ((first > second) == ascending) {
      a = second;
      b = first;
    }
  }
  DEVICE void ENTRY_sort(u64* keys, u32 number) {
    __syncthreads();
    for (u32 whole = 2u; whole <= number; whole *= 2u) {
      u32 step = whole / 2u;
      for (; step > 1u; step /= 4u) {
        const u32 half = step / 2u;
        for (u32 t = threadIdx.x; t < number / 4u; t += BLOCKu) {
          const u32 i = 4u * t - 3u * (t & (half - 1u));
          const bool ascending = (i & whole) == 0u;
          u64 a = keys[i], b = keys[i + half], c = keys[i + step], d = keys[i + step + half];
          ENTRY_order(a, c, ascending);
          ENTRY_order(b, d, ascending);
          ENTRY_order(a, b, ascending);
          ENTRY_order(c, d, ascending);
          keys[i] = a;
          keys[i + half] = b;
          keys[i + step] = c;
          keys[i + step + half] = d;
        }
        __syncthreads();
      }
      if (step == 1u) {
        for (u32 t = threadIdx.x; t < number / 2u; t += BLOCKu) {
          u64 a = keys[2u * t], b = keys[2u * t + 1u];
          ENTRY_order(a, b, (2u * t & whole) == 0u);
          keys[2u * t] = a;
          keys[2u * t + 1u] = b;
        }
        __syncthreads();
      }
    }
  }
}
