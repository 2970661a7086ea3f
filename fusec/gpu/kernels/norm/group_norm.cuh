// Group norm for channels last, whose threads keep their elements in registers. A thread has VECTOR neighbouring channels
// (`lane` counts such vectors) and every ROWS-th pixel. Its channels belong to at most PARTS groups of MEMBERS channels.
// Blocks that share groups are a team.

FRAGMENT(place) {
  SHARED
  __shared__ float parts[2][PARTS][BLOCK];
  __shared__ Pack<float, VECTOR> means[LANES], factors[LANES], shifts[LANES];
  const u32 lane = threadIdx.x % LANESu, row = threadIdx.x / LANESu;
  const u32 team = blockIdx.x / BLOCKSu, chunk = blockIdx.x % BLOCKSu;
  const u32 image = team / COLUMNSu, own = lane * VECTORu;
  const u32 channel = team % COLUMNSu * OWNu + own;
  const u32 begin = chunk * EACHu;
  END
}

FRAGMENT(cluster_memory) {
  RESIDENT(memory);
  u64* mbarrier = reinterpret_cast<u64*>(memory);
  float* statistics = reinterpret_cast<float*>(memory + MBARRIER_BYTES);
}

FRAGMENT(load_elements) {
  Pack<KIND, VECTOR> taken[TURNS];
  #pragma unroll
  for (u32 i = 0; i < TURNSu; ++i) {
    PLACE
    LOAD
  }
}

// For each group of a thread, the mean of its elements and squares around it. Both come from sums around one of them.
FRAGMENT(thread_statistics) {
  float sums[VECTOR], squares[VECTOR], around[VECTOR], mean_of[PARTS], squares_of[PARTS];
  const u32 first = own / MEMBERSu;
  const float turns = float(ROW_TURNS);
  SPLIT
  const PACK start = taken[0u];
  #pragma unroll
  for (int k = 0; k < PARTS; ++k) {
    mean_of[k] = wide(start.v[k == 0 ? 0 : LAST_CHANNEL]);
    INNER_PARTS
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (IN_PART) around[j] = mean_of[k];
    }
  }
  #pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    sums[j] = squares[j] = 0.0f;
  }
  #pragma unroll
  for (u32 i = 0; i < TURNSu; ++i) {
    const bool live = LIVE;
    const PACK pack = taken[i];
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float e = wide(pack.v[j]);
      const float d = live ? e - around[j] : 0.0f;
      sums[j] += d;
      squares[j] += d * d;
    }
  }
  #pragma unroll
  for (int k = 0; k < PARTS; ++k) {
    COUNT_ELEMENTS
    float sum = 0.0f, square = 0.0f;
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (IN_PART) { sum += sums[j]; square += squares[j]; }
    }
    const float mean = quick_div(sum, count), spread = less(square, sum * mean);
    mean_of[k] = count > 0.0f ? mean_of[k] + mean : 0.0f;
    squares_of[k] = count > 0.0f ? spread : 0.0f;
  }
}

// Where a vector has channels of three groups or more, those between begin within it.
FRAGMENT(inner_parts) {
  #pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    if (0 < k && k < LAST_PART && IN_PART) mean_of[k] = wide(start.v[j]);
  }
}

FRAGMENT(count_part) {
  const int low = k == 0 ? 0 : split + (k - 1) * MEMBERS, high = k == LAST_PART ? VECTOR : split + k * MEMBERS;
  const float count = turns * float((high < VECTOR ? high : VECTOR) - (low < VECTOR ? low : VECTOR));
}

FRAGMENT(store_statistics) {
  #pragma unroll
  for (int k = 0; k < PARTS; ++k) {
    parts[0][k][threadIdx.x] = mean_of[k];
    parts[1][k][threadIdx.x] = squares_of[k];
  }
  __syncthreads();
}

// One warp merges each group of a block. `mean` and `spread` come from sums around the first thread's mean.
FRAGMENT(merge_block) {
  for (u32 g = threadIdx.x / WARPu; g < GROUPSu; g += WARPSu) {
    const u32 at = threadIdx.x % WARPu, low = g * MEMBERSu / VECTORu, high = (g * MEMBERSu + LAST_MEMBERu) / VECTORu;
    const float near = parts[0][g - low * VECTORu / MEMBERSu][low];
    float sum = 0.0f, square = 0.0f;
    #pragma unroll
    for (u32 s = 0; s < VECTORSu; ++s) IF_INSIDE {
      const u32 l = (low + s) * VECTORu, k = g - l / MEMBERSu, h = l + VECTORu, o = g * MEMBERSu;
      const float channels = float((h < o + MEMBERSu ? h : o + MEMBERSu) - (l > o ? l : o));
      #pragma unroll
      for (u32 r = at; r < ROWSu; r += WARPu) {
        const float d = parts[0][k][r * LANESu + low + s] - near, weight = float(R_TURNS) * channels;
        sum += weight * d; square += parts[1][k][r * LANESu + low + s] + weight * d * d;
      }
    }
    #pragma unroll
    for (int s = 16; s > 0; s /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, s);
      square += __shfl_xor_sync(0xffffffffu, square, s);
    }
    const float far = sum * (PER_ELEMENT), mean = near + far, spread = less(square, sum * far);
    STORE
  }
}

// One thread merges the statistics of the team's blocks for each channel.
FRAGMENT(merge_team) {
  if (threadIdx.x < OWNu) {
    const u32 g = threadIdx.x / MEMBERSu;
    float mean_of_block[BLOCKS], squares_of_block[BLOCKS], sum = 0.0f, spread = 0.0f;
    #pragma unroll
    for (int c = 0; c < BLOCKS; ++c) {
      mean_of_block[c] = MEAN;
      squares_of_block[c] = SQUARES;
    }
    #pragma unroll
    for (int c = 0; c < BLOCKS; ++c) {
      sum += COUNT * (mean_of_block[c] - mean_of_block[0]);
    }
    const float mean = mean_of_block[0] + sum * (1.0f / SIZE.0f);
    #pragma unroll
    for (int c = 0; c < BLOCKS; ++c) {
      const float d = mean_of_block[c] - mean;
      spread += squares_of_block[c] + COUNT * d * d;
    }
    const float variance = spread * (1.0f / SIZE.0f);
    const u32 of = threadIdx.x / VECTORu, j = threadIdx.x % VECTORu;
    means[of].v[j] = mean;
    factors[of].v[j] = scale / sqrt(variance + EPSILON);
    shifts[of].v[j] = shift;
  }
  __syncthreads();
}

FRAGMENT(write_elements) {
  const Pack<float, VECTOR> mean = means[lane];
  const Pack<float, VECTOR> factor = factors[lane];
  const Pack<float, VECTOR> shift_of = shifts[lane];
  #pragma unroll
  for (u32 i = 0; i < TURNSu; ++i) {
    const u32 p = PIXEL;
    STORE
  }
}
