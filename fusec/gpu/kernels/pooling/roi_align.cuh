// Pooling of regions between pixels. A thread has one bin of one channel; NUMBER is the type that pixels are computed in,
// COORDINATE that of regions.


FRAGMENT(adaptive) {
  const COORDINATE WANTED = ceil(LENGTH / BINS);
  const int COUNT = WANTED == WANTED ? (int)clipped(WANTED, COORDINATE(0), COORDINATE(MOST)) : 0;
}

FRAGMENT(start) {
  const COORDINATE START = wide(LOW) * SCALE - SHIFT;
  COORDINATE LENGTH = (wide(HIGH) * SCALE - SHIFT) - START;
}

// Samples before FIRST and from END on are outside of the image. An enormous region has so many that the thread skips
// them. ROUNDING is more than the relative error of a place.
FRAGMENT(inside) {
  int FIRST = 0, END = COUNT;
  if (COUNT > 8) {
    const COORDINATE TOTAL = COORDINATE(BINS) * COUNT, SHARE = TOTAL / LENGTH;
    const COORDINATE SLACK = COORDINATE(2) + COORDINATE(ROUNDING) * (fabs(START) * SHARE + TOTAL);
    const COORDINATE EARLIER = COORDINATE(BIN) * COUNT, MOST = COORDINATE(COUNT);
    if (LENGTH < INFINITE) {
      FIRST = (int)clipped((COORDINATE(-1) - START) * SHARE - SLACK - EARLIER, COORDINATE(0), MOST);
      END = (int)clipped(ceil((COORDINATE(SIZE) - START) * SHARE + SLACK - EARLIER), COORDINATE(FIRST), MOST);
    } else {
      END = 0;
    }
  }
}

FRAGMENT(each_sample) {
  for (int SAMPLE = FIRST; SAMPLE < END; ++SAMPLE) {
    COORDINATE AT = START + LENGTH * ((COORDINATE(BIN) * COUNT + SAMPLE + HALF) / (BINS * COUNT));
    const bool INSIDE = AT >= COORDINATE(-1) && AT <= COORDINATE(SIZE);
    AT = INSIDE ? clipped(AT, COORDINATE(0), COORDINATE(SIZE) - COORDINATE(1)) : COORDINATE(0);
    const u32 BEFORE = (u32)AT, AFTER = BEFORE + 1u < SIZEu ? BEFORE + 1u : BEFORE;
    const COORDINATE WEIGHT = AT - COORDINATE(BEFORE);
    BODY
  }
}

FRAGMENT(average) {
  if (INSIDE) pooled[0] += TAP_0 + TAP_1 + TAP_2 + TAP_3;
}

// Samples that were skipped are zero.
FRAGMENT(skipped) {
  if (FIRST_0 > 0 || END_0 < COUNT_0 || FIRST_1 > 0 || END_1 < COUNT_1) pooled[0] = nmax(pooled[0], NUMBER(0));
}

// The first pixel of a bin, and the one after its last. `round` takes halves away from zero.
FRAGMENT(edges) {
  const COORDINATE START = round(wide(LOW) * SCALE);
  const COORDINATE LENGTH = nmax(round(wide(HIGH) * SCALE) - START + COORDINATE(1), COORDINATE(1)) / COORDINATE(BINS);
  const COORDINATE LEAST = floor(COORDINATE(BIN) * LENGTH) + START;
  const COORDINATE MOST = ceil((COORDINATE(BIN) + COORDINATE(1)) * LENGTH) + START;
  const u32 FIRST = LEAST == LEAST ? (u32)clipped(LEAST, COORDINATE(0), COORDINATE(SIZE)) : 0u;
  const u32 END = MOST == MOST ? (u32)clipped(MOST, COORDINATE(0), COORDINATE(SIZE)) : 0u;
}

FRAGMENT(each_pixel) {
  for (u32 AT_0 = FIRST_0; AT_0 < END_0; ++AT_0)
    for (u32 AT_1 = FIRST_1; AT_1 < END_1; ++AT_1) pooled[0] = nmax(pooled[0], wide(PIXEL));
}

FRAGMENT(largest) {
  pooled[0] = nmax(pooled[0], INSIDE ? nmax(nmax(TAP_0, TAP_1), nmax(TAP_2, TAP_3)) : NUMBER(0));
}
