// Batch norm in training and its backward. Forward, a chunk stores its mean and squares around it. Backward, it stores the
// sums of dy and of dy * (x - mean). A thread has WIDTH neighbouring channels, and numbers of type KIND.

FRAGMENT(declare_sums) {
  KIND acc0[WIDTH], acc1[WIDTH], around[WIDTH];
  for (int w = 0; w < WIDTH; ++w) acc0[w] = acc1[w] = KIND(0);
}

FRAGMENT(first_element) {
  {
    const u32 r = FIRST_ROW;
    COORDINATES
    LOAD
  }
}

FRAGMENT(add_forward) {
  const KIND d = ELEMENT - around[PLACE];
  acc0[PLACE] += d;
  acc1[PLACE] += d * d;
}

FRAGMENT(add_backward) {
  const KIND loss = LOSS;
  acc0[PLACE] += loss;
  acc1[PLACE] += loss * d;
}

// Of another norm with the same gradient: its sum of dy * (x - mean).
FRAGMENT(declare_second) {
  KIND acc2[WIDTH], around2[WIDTH];
  for (int w = 0; w < WIDTH; ++w) acc2[w] = KIND(0);
}

FRAGMENT(add_second) {
  acc2[PLACE] += loss * (ELEMENT - around2[PLACE]);
}

FRAGMENT(store_chunk) {
  if (live && t == 0)
    for (int w = 0; w < WIDTH; ++w) {
      STATISTICS
      STORES
    }
}

// From sums around a number to the mean of `size` elements and squares around it.
FRAGMENT(chunk_statistics) {
  const KIND size = SIZE;
  const KIND squares = SQUARES - TOTAL * TOTAL / size;
  TOTAL = AROUND + TOTAL / size;
  SQUARES = nmax(squares, KIND(0));
}

FRAGMENT(merge_centre) {
  KIND around = AROUND;
  if (!(fabs(around) < KIND(INFINITE))) around = KIND(0);
}

FRAGMENT(merge_forward) {
  #pragma unroll UNROLLED
  TURNS {
    const KIND size = SIZE;
    const KIND d = MEAN - around;
    acc0[0] += size * d; acc1[0] += size * d * d + SQUARES;
  }
}

FRAGMENT(merge_backward) {
  #pragma unroll UNROLLED
  TURNS {
    ADDITIONS
  }
}

// From given sums, in double because subtracting squares costs digits.
FRAGMENT(statistics_of_sums) {
  constexpr double share = 1.0 / COUNT.0;  // because each thread would divide for all its channels
  const double middle = double(TOTAL) * share;
  const KIND spread = KIND(double(SQUARES) * share - middle * middle);
  const KIND mean = KIND(middle);
  const KIND inverse = KIND(1) / sqrt(nmax(spread, KIND(0)) + EPSILON);
}

FRAGMENT(store_statistics) {
  if (STORES)
    for (int w = 0; w < WIDTH; ++w) {
      const u32 c = at * WIDTHu + w;
      STORE
    }
}
