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

FRAGMENT(each_sample) {
  for (int SAMPLE = 0; SAMPLE < COUNT; ++SAMPLE) {
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

FRAGMENT(largest) {
  pooled[0] = nmax(pooled[0], INSIDE ? nmax(nmax(TAP_0, TAP_1), nmax(TAP_2, TAP_3)) : NUMBER(0));
}
