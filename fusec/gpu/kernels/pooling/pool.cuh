// Pooling, forward and backward. A thread has VECTOR neighbouring channels of type TYPE, which have the same windows; NUMBER
// is the type that is computed in. Loops over dims are nested, the outermost dim first.

FRAGMENT(each_tap) {
  UNROLL
  for (int TAP = 0; TAP < TAPS; ++TAP) {
    const int PIXEL = PLACE;
    if (OUTSIDE) continue;
    BODY
  }
}

FRAGMENT(pool_window) {
  NUMBER pooled[VECTOR];
  for (int j = 0; j < VECTOR; ++j) pooled[j] = START;
  EACH_TAP
  COUNT_TAPS
  for (int j = 0; j < VECTOR; ++j) pooled[j] = RESULT;
}

FRAGMENT(largest_tap) {
  const Pack<TYPE, VECTOR> taken = load_pack<TYPE, VECTOR>(ELEMENTS);
  for (int j = 0; j < VECTOR; ++j) pooled[j] = nmax(pooled[j], wide(taken.v[j]));
}

// Without branches, all loads of a window may start before the first sum. A tap outside adds zero.
FRAGMENT(every_tap) {
  UNROLL
  for (int TAP = 0; TAP < TAPS; ++TAP) {
    const int PIXEL = PLACE;
    BODY
  }
}

FRAGMENT(sum_tap) {
  const Pack<TYPE, VECTOR> taken = load_pack_or_zeros<TYPE, VECTOR>(ELEMENTS, IS_INSIDE);
  for (int j = 0; j < VECTOR; ++j) pooled[j] += wide(taken.v[j]);
}

// The taps of a dim that count.
FRAGMENT(count_taps) {
  int COUNT = 0;
  UNROLL
  for (int TAP = 0; TAP < TAPS; ++TAP) {
    const int PIXEL = PLACE;
    COUNT += !(OUTSIDE);
  }
}

// Of bytes, as pairs of 16-bit integers: a byte is the upper half of one, and what is below it decides among equal bytes only.
FRAGMENT(pool_bytes) {
  u32 odd[WORDS], even[WORDS];
  for (int w = 0; w < WORDS; ++w) odd[w] = even[w] = 0x80008000u;
  EACH_TAP
  Pack<u32, WORDS> largest;
  for (int w = 0; w < WORDS; ++w) largest.v[w] = (odd[w] & 0xff00ff00u) | (even[w] >> 8 & 0x00ff00ffu);
  store_pack<u32, WORDS>((u32*)(STORED), largest);
}

FRAGMENT(pool_tap_of_bytes) {
  const Pack<u32, WORDS> taken = load_pack<u32, WORDS>((const u32*)(ELEMENTS));
  for (int w = 0; w < WORDS; ++w) {
    odd[w] = larger_halves(odd[w], taken.v[w]);
    even[w] = larger_halves(even[w], taken.v[w] << 8);
  }
}

// The first of the largest taps of a window, as `where`. NaN is the largest of all, and what is outside the smallest.
FRAGMENT(find_largest) {
  NUMBER best[VECTOR]; int where[VECTOR];
  for (int j = 0; j < VECTOR; ++j) { best[j] = NUMBER(-INFINITE); where[j] = 0; }
  EACH_TAP
}

FRAGMENT(compare_tap) {
  const Pack<TYPE, VECTOR> taken = load_pack<TYPE, VECTOR>(ELEMENTS);
  #pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const NUMBER e = wide(taken.v[j]);
    if (!(e <= best[j]) && best[j] == best[j]) {
      best[j] = e; where[j] = TAP_NUMBER;
    }
  }
}

// The same for pairs of 16-bit floats, which are compared together. NaN has no place until all taps are seen, because it is
// rare.
FRAGMENT(find_largest_of_pairs) {
  u32 largest[WORDS], places[WORDS], nans = 0;
  for (int w = 0; w < WORDS; ++w) { largest[w] = LOWEST * 0x10001u; places[w] = 0; }
  EACH_TAP
  for (int w = 0; w < WORDS; ++w) nans |= where_nan<TYPE>(largest[w]);
  if (nans) {
    u32 found[WORDS];
    for (int w = 0; w < WORDS; ++w) found[w] = 0;
    EACH_TAP_AGAIN
  }
}

FRAGMENT(compare_pairs) {
  const Pack<u32, WORDS> taken = load_pack<u32, WORDS>((const u32*)(ELEMENTS));
  #pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const u32 larger = where_larger<TYPE>(taken.v[w], largest[w]);
    places[w] = (places[w] & ~larger) | ((TAP_NUMBER) * 0x10001u & larger);
    largest[w] = larger_pair<TYPE>(largest[w], taken.v[w]);
  }
}

FRAGMENT(find_nan_in_pairs) {
  const Pack<u32, WORDS> taken = load_pack<u32, WORDS>((const u32*)(ELEMENTS));
  #pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const u32 first = where_nan<TYPE>(taken.v[w]) & ~found[w];
    places[w] = (places[w] & ~first) | ((TAP_NUMBER) * 0x10001u & first);
    found[w] |= first;
  }
}

FRAGMENT(store_maxima_of_pairs) {
  Pack<u32, WORDS> maxima;
  for (int w = 0; w < WORDS; ++w) maxima.v[w] = largest[w];
  store_pack<u32, WORDS>((u32*)(STORED), maxima);
}

FRAGMENT(store_places_of_pairs) {
  Pack<u8, VECTOR> bytes;
  for (int j = 0; j < VECTOR; ++j) bytes.v[j] = (u8)(places[j / 2] >> 16 * (j % 2));
  store_pack<u8, VECTOR>(STORED, bytes);
}

FRAGMENT(store_maximum) {
  Pack<TYPE, VECTOR> largest;
  for (int j = 0; j < VECTOR; ++j) largest.v[j] = narrow<TYPE>(best[j]);
  store_pack<TYPE, VECTOR>(STORED, largest);
}

FRAGMENT(store_largest) {
  Pack<INDEX, VECTOR> places;
  for (int j = 0; j < VECTOR; ++j) places.v[j] = (INDEX)where[j];
  store_pack<INDEX, VECTOR>(STORED, places);
}

// The gradient of each window goes to the first of its largest taps.
FRAGMENT(sum_gradients) {
  NUMBER sums[TILE][VECTOR];
  for (int q = 0; q < TILE; ++q) for (int j = 0; j < VECTOR; ++j) sums[q][j] = NUMBER(0);
  EACH_WINDOW
}

FRAGMENT(each_window) {
  UNROLL
  for (int WINDOW = 0; WINDOW < WINDOWS; ++WINDOW) {
    const int OUTPUT = (int)TILE_NUMBER - WINDOW;
    if ((u32)OUTPUT >= OUTPUTSu) continue;
    BODY
  }
}

// The elements of a thread that a window overlaps, and by which tap.
FRAGMENT(each_overlap) {
  UNROLL
  for (int ELEMENT = 0; ELEMENT < STRIDE; ++ELEMENT) {
    const int GAP = WINDOW * STRIDE + ELEMENT, TAP = GAP / DILATION;
    if (GAP % DILATION || TAP >= TAPS) continue;
    BODY
  }
}

FRAGMENT(add_gradient) {
  #pragma unroll
  for (int j = 0; j < VECTOR; ++j)
    if (WHERE == TAP_NUMBER) sums[ELEMENT_NUMBER][j] += wide(loss.v[j]);
}

// Coordinates before the first element wrap to large numbers.
FRAGMENT(each_element) {
  UNROLL
  for (int ELEMENT = 0; ELEMENT < STRIDE; ++ELEMENT) {
    const u32 COORDINATE = TILE_NUMBER * STRIDEu + ELEMENT - PADu;
    if (COORDINATE >= SIZEu) continue;
    BODY
  }
}
