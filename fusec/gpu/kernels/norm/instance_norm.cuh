// Instance norm for channels last. A thread has VECTOR neighbouring channels (`lane` counts such vectors) and every
// THREADS-th pixel. A unit is a pixel, or the TAPS pixels of one window of a pool.

FRAGMENT(place) {
  const u32 lane = threadIdx.x % LANESu, t = threadIdx.x / LANESu;
  const u32 place = blockIdx.x / COLUMNSu, chunk = place % NUMBERu;
  const u32 image = FROM_LAST place / NUMBERu;
  const u32 first_channel = blockIdx.x % COLUMNSu * OWNu;
  const u32 channel = first_channel + lane * VECTORu;
  const u32 begin = chunk * EACHu;
  const u32 end = begin + EACHu < COUNTu ? begin + EACHu : COUNTu;
}

// The number that squares are summed around is the first element, if that is finite.
FRAGMENT(load_centre) {
  float around[VECTOR], acc0[VECTOR], acc1[VECTOR];
  const PACK first = LOAD;
  #pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const float e = wide(first.v[j]);
    around[j] = fabs(e) < INFINITE ? e : 0.0f;
    acc0[j] = acc1[j] = 0.0f;
  }
}

// Past the end, a thread loads the first pixel again.
FRAGMENT(sum_chunk) {
  for (u32 pixel = begin + t; pixel < end; pixel += STEPu) {
    PACK taken[TURNS];
    #pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const u32 at = pixel + i * THREADSu, p = at < end ? at : begin;
      taken[i] = LOAD;
    }
    #pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const bool live = pixel + i * THREADSu < end;
      #pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const float d = live ? wide(taken[i].v[j]) - around[j] : 0.0f;
        acc0[j] += d;
        acc1[j] += d * d;
      }
    }
  }
}

FRAGMENT(declare_units) {
  PACK taken[UNITS][TAPS];
  u32 unit = begin + t;
}

FRAGMENT(load_units) {
  #pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const u32 at = unit + i * THREADSu, u = at < end ? at : begin;
    #pragma unroll
    for (u32 k = 0; k < TAPSu; ++k) {
      const u32 p = PIXEL;
      taken[i][k] = LOAD;
    }
  }
}

// Merge the sums of threads within warps, then for each channel by one thread.
FRAGMENT(merge_warps) {
  #pragma unroll
  for (int s = 16; s >= LANES; s /= 2) {
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      acc0[j] += __shfl_xor_sync(0xffffffffu, acc0[j], s);
      acc1[j] += __shfl_xor_sync(0xffffffffu, acc1[j], s);
    }
  }
  if (threadIdx.x % 32u < LANESu) {
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      sums[threadIdx.x / 32u][0][lane * VECTORu + j] = acc0[j];
      sums[threadIdx.x / 32u][1][lane * VECTORu + j] = acc1[j];
      if (threadIdx.x < 32u) centres[lane * VECTORu + j] = around[j];
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < OWNu; i += BLOCKu) {
    float sum0 = 0.0f, sum1 = 0.0f;
    #pragma unroll
    for (u32 w = 0; w < WARPSu; ++w) { sum0 += sums[w][0][i]; sum1 += sums[w][1][i]; }
    STORE
  }
}

// The mean of a chunk, and squares around it, for other blocks.
FRAGMENT(store_chunk) {
  const float mean = sum0 / COUNT;
  const u32 at = (image * CHUNKSu + chunk) * NUMBERSu + first_channel + i;
  SCRATCH[at] = centres[i] + mean;
  SCRATCH[at + CHANNELSu] = sum1 - sum0 * mean;
}

// The chunks of the image, around the first chunk's mean.
FRAGMENT(merge_chunks) {
  const u32 mine = threadIdx.x % OWNu, slice = threadIdx.x / OWNu;
  const u32 from = image * FROM_IMAGEu + COLUMN * OWNu + mine;
  const float first_mean = FIRST_MEAN;
  float part0 = 0.0f, part1 = 0.0f;
  #pragma unroll 8
  for (u32 c = slice; c < CHUNKSu; c += SLICESu) {
    const float d = CHUNK_MEAN - first_mean;
    const float count = c == LASTu ? REST.0f : EACH.0f;
    part0 += count * d;
    part1 += CHUNK_SQUARES + count * d * d;
  }
  merging[0][slice][mine] = part0;
  merging[1][slice][mine] = part1;
  __syncthreads();
  if (threadIdx.x < OWNu) {
    const u32 i = threadIdx.x;
    float sum0 = 0.0f, sum1 = 0.0f;
    #pragma unroll
    for (u32 w = 0; w < SLICESu; ++w) { sum0 += merging[0][w][i]; sum1 += merging[1][w][i]; }
    STATISTICS
  }
  __syncthreads();
}

// Mean and factor of channel `i`. Rounding may have left a negative sum of squares; NaN stays NaN.
FRAGMENT(channel_statistics) {
  const float mean = sum0 / PIXELS.0f;
  const float squares = sum1 - sum0 * mean, spread = squares < 0.0f ? 0.0f : squares;
  means[i] = AROUND + mean;
  const float variance = spread / PIXELS.0f;
  factors[i] = 1.0f / sqrt(variance + EPSILON);
}

FRAGMENT(load_parameters) {
  float mean[VECTOR], factor[VECTOR], bias[VECTOR];
  #pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    mean[j] = means[lane * VECTORu + j];
    factor[j] = factors[lane * VECTORu + j] * wide(SCALES[channel + j]);
    bias[j] = wide(BIASES[channel + j]);
  }
}

FRAGMENT(write_units) {
  while (unit < end) {
    #pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      const u32 at = unit + i * THREADSu;
      if (at < end) {
        STORE_UNIT
      }
    }
    unit += STEPu;
    LOAD_NEXT
  }
}

FRAGMENT(store_pooled) {
  float largest[VECTOR];
  #pragma unroll
  for (u32 k = 0; k < TAPSu; ++k) {
    const u32 p = PIXEL;
    LARGEST
  }
  STORE
}

FRAGMENT(store_copies) {
  const u32 p = at, k = 0;
  PACK copied;
  COPIED
  #pragma unroll
  for (u32 copy = 0; copy < COPIESu; ++copy) {
    const u32 row = at / ACROSSu * HIGHu + copy / WIDEu;
    const u32 column = at % ACROSSu * WIDEu + copy % WIDEu;
    STORE
  }
}
