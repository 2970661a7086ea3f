// Products of few rows with weights of 4 or 8 bits: packed_product.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 first = blockIdx.x / PARTSu * TILESu;
  const u32 low_bits = in_register(LOW_BITSu, CODES), high_bits = in_register(HIGH_BITSu, CODES);
  float total[ALL_TILES][OCTETS][4];
  #pragma unroll
  for (int t = 0; t < ALL_TILES; ++t)
    for (int o = 0; o < OCTETS; ++o) for (int e = 0; e < 4; ++e) total[t][o][e] = 0.0f;
  ROW_COORDINATES
  u32 start = blockIdx.x % PARTSu * WARPSu + warp;  // the first chunk
  LOOPS
  SUMS
  #pragma unroll
  for (int t = 0; t < ALL_TILES; ++t)
    #pragma unroll
    for (int o = 0; o < OCTETS; ++o)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 row = o * 8u + q * 2u + e % 2u, place = t / TILES * SIZEu + row * WIDTHu + t % TILES * 16u + e / 2 * 8u + g;
        if (e % 2 < ROWS && row < ROWSu) sums[warp][place] = total[t][o][e];
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

FRAGMENT(sums) {
  __shared__ float sums[WARPS][ALL_SUMS];
}

// Sums that are larger than static shared memory take the place of the rings.
FRAGMENT(sums_in_rings) {
  __syncthreads();
  float (*const sums)[ALL_SUMS] = (float (*)[ALL_SUMS])memory;
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
      #pragma unroll
      for (int t = 0; t < TILES; ++t) {
        MULTIPLY
      }
    }
  }
}

// A warp reads its share of the weights of all tiles of its block as one stream of chunks. Copies to shared memory take no
// registers, so that the warp always waits for the next STAGES - 1 chunks. It needs each row once.
FRAGMENT(ring) {
  RESIDENT(memory);
  u8* const ring = memory + warp * (STAGES * STAGE_BYTESu) + lane * 16u;
  const u32 first_scales = (blockIdx.x * SCALE_STEPSu + warp * OWN_CHUNKSu / CHUNKS_OF_BLOCKu) * TILESu;
  STREAMS
  u32 next_chunk = warp * OWN_CHUNKSu, next_tile = 0;
  u32 left = OWN_CHUNKS * TILESu;
  for (u32 slot = 0; slot < STAGES - 1u; ++slot) {
    REQUEST
  }
  BEGIN
  NORMALISE
  Pack<u32, WORDS> x[AHEAD][OCTETS][GROUPS];
  #pragma unroll
  for (int u = 0; u < AHEAD; ++u) {
    const u32 chunk = warp * OWN_CHUNKSu + u;
    LOAD_ROWS
  }
  u32 here = 0;
  #pragma unroll 1
  for (u32 start = 0; start < OWN_CHUNKSu; start += AHEADu) {
    #pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      #pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        {
          const u32 slot = here == 0u ? STAGES - 1u : here - 1u;
          REQUEST
        }
        #pragma unroll
        for (int t = tile; t < ALL_TILES; t += TILES) {
          u32 codes[AHEAD][ALL_TILES][4];
          Pack<SCALE_TYPE, 2> scale[AHEAD][ALL_TILES][GROUPS];
          OFFSET_TYPE offset[AHEAD][ALL_TILES][GROUPS][2];
          const u8* const stage = ring + here * STAGE_BYTESu + t / TILES * CHUNK_BYTESu;
          const Pack<u32, 4> words = load_pack<u32, 4>((const u32*)stage);
          for (int i = 0; i < 4; ++i) codes[u][t][i] = words.v[i];
          const Pack<SCALE_TYPE, SCALES_OF_THREAD> scales =
              *(const Pack<SCALE_TYPE, SCALES_OF_THREAD>*)(stage - lane * 16u + 512u + g * sizeof(scales));
          STAGE_ZEROS
          #pragma unroll
          for (int j = 0; j < GROUPS; ++j) {
            const u32 part = j * GROUP_DEPTHu / BLOCKu * 2u, place = g * SCALES_OF_THREADu + part;
            for (int h = 0; h < 2; ++h) {
              scale[u][t][j].v[h] = scales.v[part + h];
              offset[u][t][j][h] = OFFSET;
            }
          }
          MULTIPLY
        }
        here = here == STAGES - 1u ? 0u : here + 1u;
      }
      const u32 chunk = warp * OWN_CHUNKSu + start + AHEADu + u;
      if (start + AHEADu + u < OWN_CHUNKSu) {
        LOAD_ROWS
      }
    }
  }
}

// An RMS norm of the rows, which warps then read from shared memory after their rings.
FRAGMENT(normalise) {
  TYPE* const normalised = (TYPE*)(memory + RING_BYTES);
  {
    NORMED_ROWS
  }
}

// What a warp requests next of one product.
FRAGMENT(stream) {
  const u8* MORE = (const u8*)CODES + ((u64)(blockIdx.x * WARPSu + warp) * (OWN_CHUNKS * TILESu * 512u) + lane * 16u);
  const u8* MORE_SCALES = (const u8*)SCALES + ((u64)first_scales * SCALE_BYTESu + lane * 16u);
  FIRST_ZEROS
}

// The next chunk of a warp, if any is left. Each thread waits for its own copies, and the warp then for all of them.
FRAGMENT(request) {
  if (left != 0u) {
    u8* const to = ring + slot * STAGE_BYTESu;
    i32 steps = 1;
    if (CHUNKS_OF_BLOCK > 1 && ++next_tile == TILESu) {
      next_tile = 0;
      if (++next_chunk % CHUNKS_OF_BLOCKu != 0u) steps = 1 - TILES;
    }
    COPIES
    --left;
  }
  copied();
}

FRAGMENT(copy) {
  copy_ahead<16>(to + PLACE, MORE);
  if (lane < SCALE_BYTESu / 16u) copy_ahead<16>(to + PLACE + 512, MORE_SCALES);
  MORE += 512, MORE_SCALES += steps * SCALE_BYTES;
  COPY_ZEROS
}

FRAGMENT(first_zeros) {
  const u8* MORE_ZEROS = (const u8*)ZEROS + ((u64)first_scales * ZERO_BYTESu + lane * 8u);
}

FRAGMENT(copy_zeros) {
  if (lane < ZERO_BYTESu / 8u) copy_ahead<8>(to + PLACE + 512 + SCALE_BYTES - lane * 8u, MORE_ZEROS);
  MORE_ZEROS += steps * ZERO_BYTES;
}

FRAGMENT(stage_zeros) {
  const ZERO_TYPE* const zeros = (const ZERO_TYPE*)(stage - lane * 16u + 512u + SCALE_BYTESu);
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

// Load neighbours of a row, for each group of depths. Past the last row, load that one again: its sums are not used.
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

FRAGMENT(load_normalised) {
  x[u][OCTET][j] = *(const Pack<u32, WORDS>*)(normalised + (ROW * ROW_DEPTHu + k));
}

FRAGMENT(load_elements) {
  for (int i = 0; i < WORDS; ++i) x[u][OCTET][j].v[i] = 0u;
  for (int i = 0; i < COUNT; ++i)
    x[u][OCTET][j].v[i / 2] |= (u32)element_bits(POINTER[(AT) + i * STRIDE]) << (i % 2 * 16);
}

// Integers are exact in 16 bits. Their sums are scaled once for each group of depths, in fp32.
FRAGMENT(multiply) {
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

FRAGMENT(add_warps) {
  for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
}

// Add up what warps have of the second product.
FRAGMENT(add_warps_of_two) {
  float second_sum = 0.0f;
  for (int w = 0; w < WARPS; ++w) sum += sums[w][i], second_sum += sums[w][SIZEu + i];
}

// The last block of a tile to finish adds the sums of all its parts, in order.
FRAGMENT(share) {
  for (u32 i = threadIdx.x; i < SIZEu; i += THREADSu) {
    float sum = 0.0f;
    ADD_WARPS
    SCRATCH[blockIdx.x * SIZEu + i] = sum;
  }
  if (!last_of(COUNTERS + blockIdx.x / PARTSu * COUNTER_STRIDE, PARTSu)) return;
}

FRAGMENT(add_parts) {
  for (u32 p = 0; p < PARTSu; ++p) sum += load_fresh(SCRATCH + ((blockIdx.x / PARTSu * PARTSu + p) * SIZEu + i));
}
