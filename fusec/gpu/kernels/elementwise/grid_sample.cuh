// Reading images between their pixels. PLACE is a coordinate of type NUMBER along one dim, which may be outside.

FRAGMENT(reflect) {
  {
    const NUMBER rest = fmod(PLACE < LOW ? LOW - PLACE : PLACE - LOW, PERIOD);
    PLACE = SPAN - (rest < SPAN ? SPAN - rest : rest - SPAN) + LOW;
  }
}

FRAGMENT(limit) {
  PLACE = PLACE == PLACE ? clipped(PLACE, NUMBER(0), LAST) : NUMBER(0);
}

FRAGMENT(index) {
  const bool INSIDE = PLACE >= NUMBER(0) && PLACE <= LAST;
  const u32 INDEX = (u32)(PLACE == PLACE ? clipped(PLACE, NUMBER(0), LAST) : NUMBER(0));
}

FRAGMENT(weight) {
  NUMBER WEIGHT = FIRST;
  {
    const NUMBER d = FRACTION < OFFSET ? OFFSET - FRACTION : FRACTION - OFFSET;
    WEIGHT = WEIGHT * d + SECOND;
    WEIGHT = WEIGHT * d + THIRD;
    WEIGHT = WEIGHT * d + FOURTH;
  }
}
