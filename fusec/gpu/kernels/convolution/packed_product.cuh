// Products of few rows with weights of 4 or 8 bits: packed_product.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 first = blockIdx.x / PARTSu * TILESu;
  float total[TILES][OCTETS][4];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    for (int o = 0; o < OCTETS; ++o) for (int e = 0; e < 4; ++e) total[t][o][e] = 0.0f;
  ROW_COORDINATES
  u32 start = blockIdx.x % PARTSu * WARPSu + warp;
  LOOPS
  __shared__ float sums[WARPS][SIZE];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 row = o * 8u + q * 2u + e % 2u;
        if (row < ROWSu) sums[warp][row * WIDTHu + t * 16u + e / 2 * 8u + g] = total[t][o][e];
      }
  __syncthreads();
  SHARE
  for (u32 i = threadIdx.x; i < SIZEu; i += THREADSu) {
    const u32 at = i / WIDTHu, column = first * 16u + i % WIDTHu;
    if (IS_PARTIAL && column >= COLUMNSu) continue;
    float sum = 0.0f;
    ADD_UP
    RESULT_COORDINATES
    EPILOGUE
  }
}

// Request some chunks, then multiply them. Without a barrier, ptxas (13.0) moves each load to just before its use, and
// waits for each. An early launch requests its first weights, which are constant, before the launches before it end.
FRAGMENT(loop) {
  #pragma unroll 1
  for (; start + (AHEAD - 1) * STEPu < CHUNKSu; start += AHEADu * STEPu) {
    u32 codes[AHEAD][TILES][4];
    Pack<u32, WORDS> x[AHEAD][OCTETS][GROUPS];
    Pack<SCALE_TYPE, 2> scale[AHEAD][TILES][GROUPS];
    OFFSET_TYPE offset[AHEAD][TILES][GROUPS][2];
    #pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const u32 chunk = start + u * STEPu;
      LOAD
    }
    BEGIN
    #pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const u32 chunk = start + u * STEPu;
      LOAD_ROWS
    }
    __syncwarp();
    #pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      MULTIPLY
    }
  }
}

// The same, with the rows in shared memory. As soon as a chunk is multiplied, the thread requests the one AHEAD chunks
// later in its registers, so that a multiprocessor always waits for some.
FRAGMENT(loop_ahead) {
  u32 codes[AHEAD][TILES][4];
  Pack<SCALE_TYPE, 2> scale[AHEAD][TILES][GROUPS];
  OFFSET_TYPE offset[AHEAD][TILES][GROUPS][2];
  #pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    const u32 chunk = start + u * STEPu;
    LOAD
  }
  BEGIN
  __shared__ Pack<u32, 4> rows[ROWS * ROW_PACKS];
  for (u32 i = threadIdx.x; i < ROWSu * PACKSu; i += THREADSu) {
    const u32 row = i / PACKSu, k = i % PACKSu * 8u;
    COPIED_COORDINATES
    rows[row * ROW_PACKSu + i % PACKSu] = load_now<u32, 4>((const u32*)(POINTER + (COPIED_AT)));
  }
  __syncthreads();
  #pragma unroll 1
  for (; start < CHUNKSu; start += AHEADu * STEPu) {
    #pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      {
        const u32 chunk = start + u * STEPu;
        Pack<u32, WORDS> x[AHEAD][OCTETS][GROUPS];
        LOAD_ROWS
        MULTIPLY
      }
      const u32 chunk = start + (AHEAD + u) * STEPu;
      if (chunk < CHUNKSu) {
        LOAD
      }
    }
  }
}

FRAGMENT(load_shared) {
  x[u][OCTET][j] = *(const Pack<u32, WORDS>*)((const u32*)(rows + ROW * ROW_PACKSu) + k / 2u);
}

// The weights of a chunk, which come from memory; the rows come mostly from the cache.
FRAGMENT(load) {
  #pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const u32 tile = TILE;
    load_words(codes[u][t], (const u8*)CODES + ((u64)(tile * CHUNKSu + chunk) * 512u + lane * 16u));
  }
  #pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const u32 tile = TILE;
    #pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const u32 place = ((tile * BLOCKSu + (chunk * DEPTHu + j * GROUP_DEPTHu) / BLOCKu) * 8u + g) * 2u;
      scale[u][t][j] = load_now<SCALE_TYPE, 2>(SCALES + place);
      for (int h = 0; h < 2; ++h) offset[u][t][j][h] = OFFSET;
    }
  }
}

// Neighbours of a row, for each group of depths. Where there is no such row, the last one again: its sums are not used.
FRAGMENT(load_row) {
  #pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    const u32 k = chunk * DEPTHu + j * GROUP_DEPTHu + q * COUNTu;
    LOAD_NEIGHBOURS
  }
}

FRAGMENT(load_pack) {
  x[u][OCTET][j] = load_now<u32, WORDS>((const u32*)(POINTER + (AT)));
}

FRAGMENT(load_elements) {
  for (int i = 0; i < WORDS; ++i) x[u][OCTET][j].v[i] = 0u;
  for (int i = 0; i < COUNT; ++i)
    x[u][OCTET][j].v[i / 2] |= (u32)element_bits(POINTER[(AT) + i * STRIDE]) << (i % 2 * 16);
}

// Integers are exact in 16 bits. Their sums are scaled once for each group of depths, in fp32.
FRAGMENT(multiply) {
  #pragma unroll
  for (int t = 0; t < TILES; ++t) {
    #pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      float part[OCTETS][4];
      for (int o = 0; o < OCTETS; ++o) for (int e = 0; e < 4; ++e) part[o][e] = 0.0f;
      #pragma unroll
      for (int s = 0; s < PRODUCTS; ++s) {
        u32 a[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 word = WORD;
          const OFFSET_TYPE less = offset[u][t][j][i % 2];
          a[i] = UNPACK;
        }
        #pragma unroll
        for (int o = 0; o < OCTETS; ++o)
          multiply_tile<TYPE>(part[o], a[0], a[1], a[2], a[3], x[u][o][j].v[s * 2], x[u][o][j].v[s * 2 + 1]);
      }
      #pragma unroll
      for (int o = 0; o < OCTETS; ++o)
        for (int e = 0; e < 4; ++e) total[t][o][e] += part[o][e] * wide(scale[u][t][j].v[e / 2]);
    }
  }
}

FRAGMENT(add_warps) {
  for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
}

// The last block of a tile to finish adds the sums of all its parts, in order.
FRAGMENT(share) {
  for (u32 i = threadIdx.x; i < SIZEu; i += THREADSu) {
    float sum = 0.0f;
    ADD_WARPS
    SCRATCH[blockIdx.x * SIZEu + i] = sum;
  }
  if (!last_of(DOORS + blockIdx.x / PARTSu * DOOR, PARTSu)) return;
}

FRAGMENT(add_parts) {
  for (u32 p = 0; p < PARTSu; ++p) sum += across(SCRATCH + ((blockIdx.x / PARTSu * PARTSu + p) * SIZEu + i));
}
