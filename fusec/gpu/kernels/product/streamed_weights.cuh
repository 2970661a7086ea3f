// Products of some rows with constant weights of 16 bits: streamed_weights.py explains them and fills in the names in
// capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  u64 *full = (u64*)(memory + RING_BYTES), *empty = full + STAGES;
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 part = blockIdx.x % PARTSu, first_column = blockIdx.x / PARTSu * WIDTHu;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGESu; ++s) {
      phases_of(full + s, 1u);
      phases_of(empty + s, WARPSu);
    }
    phases_are_set();
  }
  BEGIN_CLUSTER
  __syncthreads();
  float total[OWN][OCTETS][4];
  #pragma unroll
  for (int t = 0; t < OWN; ++t)
    for (int o = 0; o < OCTETS; ++o) for (int e = 0; e < 4; ++e) total[t][o][e] = 0.0f;
  u32 stage = 0, phase = 0;
  if (warp == WARPSu && lane == 0) {
    #pragma unroll 1
    for (u32 n = 0; n < EARLYu; ++n) {
      const u32 stage = n;
      COPY_WEIGHTS
    }
  }
  BEGIN
  NORMALISE
  if (warp == WARPSu) {
    COPY
  } else {
    MULTIPLY
  }
  __syncthreads();  // the sums take the place of the stages
  float* const sums = (float*)memory;
  if (warp < WARPSu) {
    #pragma unroll
    for (int t = 0; t < OWN; ++t) {
      const u32 tile = t * WARPSu + warp, place = tile / TILESu * SIZEu + tile % TILESu * 16u + g;
      #pragma unroll
      for (int o = 0; o < OCTETS; ++o)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const u32 row = o * 8u + q * 2u + e % 2u;
          if (tile < ALL_TILESu && row < ROWSu) sums[place + row * WIDTHu + e / 2 * 8u] = total[t][o][e];
        }
    }
  }
  __syncthreads();
  STORE
}

// One warp requests weights, and the rows at the same depth. Weights are constant, so that the first of them do not wait
// for the launches before.
FRAGMENT(copy) {
  const u32 row = lane < ROWSu ? lane : ROWSu - 1u, k = part * PART_DEPTHu;
  ROW_COORDINATES
  const TYPE* from = INPUT + (INPUT_PLACE);
  FROM_SCALE
  #pragma unroll 1
  for (u32 n = 0; n < TURNSu; ++n) {
    if (n >= EARLYu) {
      wait_for_phase(empty + stage, phase ^ 1u);
      if (lane == 0) {
        COPY_WEIGHTS
      }
    }
    if (lane < COPIED_ROWSu) {
      u8* const to = memory + (stage * STAGE_BYTESu + WEIGHT_BYTESu + lane * ROW_PITCHu);
      copy_bytes_ahead(to, from + n * STAGE_DEPTHu, STAGE_DEPTH * 2u, full + stage);
    }
    if (++stage == STAGESu) stage = 0, phase ^= 1u;
  }
}

// The scale of the norm is copied like one row more.
FRAGMENT(from_scale) {
  if (lane == ROWSu) from = NORM_SCALE + k;
}

FRAGMENT(expect) {
  arrive_and_expect(full + stage, STAGE_DEPTH * 2u * COPIED_ROWSu + WEIGHT_BYTESu);
}

FRAGMENT(copy_product) {
  copy_bytes_ahead(memory + (stage * STAGE_BYTESu + PLACE), (const u8*)WEIGHTS + ((u64)blockIdx.x * TURNSu + n) * PRODUCT_BYTESu,
                   PRODUCT_BYTESu, full + stage);
}

// A warp multiplies its tiles of 16 columns by all rows. The weights are the first operand. A thread reads 8 neighbours of
// a row at a time, and weights are stored in the same order.
FRAGMENT(multiply) {
  FACTORS_OF_ROWS
  #pragma unroll 1
  for (u32 n = 0; n < TURNSu; ++n) {
    wait_for_phase(full + stage, phase);
    const u8* const from = memory + stage * STAGE_BYTESu;
    #pragma unroll
    for (int j = 0; j < STAGE_DEPTH / 32; ++j) {
      Pack<u32, 4> x[OCTETS];
      LOAD_SCALE
      #pragma unroll
      for (int o = 0; o < OCTETS; ++o) {
        const u32 row = o * 8u + g < ROWSu ? o * 8u + g : ROWSu - 1u;  // the sums of the last one again are not used
        x[o] = load_pack<u32, 4>((const u32*)(from + (WEIGHT_BYTESu + row * ROW_PITCHu + j * 64u + q * 16u)));
        NORMALISE_ROW
      }
      #pragma unroll
      for (int t = 0; t < OWN; ++t) {
        const u32 tile = t * WARPSu + warp;
        if (tile < ALL_TILESu) {
          const u32 place = tile / TILESu * PRODUCT_BYTESu + (j * TILESu + tile % TILESu) * 1024u + lane * 16u;
          #pragma unroll
          for (int s = 0; s < 2; ++s) {
            const Pack<u32, 4> w = load_pack<u32, 4>((const u32*)(from + (place + s * 512u)));
            #pragma unroll
            for (int o = 0; o < OCTETS; ++o)
              multiply_tile<TYPE>(total[t][o], w.v[0], w.v[1], w.v[2], w.v[3], x[o].v[s * 2], x[o].v[s * 2 + 1]);
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(empty + stage);
    if (++stage == STAGESu) stage = 0, phase ^= 1u;
  }
}

// Find what each row is multiplied by, from the squares of all of it, which mostly come from the L2 cache.
FRAGMENT(normalise) {
  __shared__ float factors[ROWS];
  for (u32 row = warp; row < ROWSu; row += WARPSu + 1u) {
    const u32 k = lane * 8u;
    ROW_COORDINATES
    const TYPE* const from = INPUT + (INPUT_PLACE);
    float square = 0.0f;
    for (u32 first = 0; first < DEPTHu; first += BATCH * 256u) {
      Pack<u32, 4> some[BATCH];
      #pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (first + i * 256u + k < DEPTHu) some[i] = load_now<u32, 4>((const u32*)(from + (first + i * 256u)));
        else some[i] = {{0u, 0u, 0u, 0u}};
      #pragma unroll
      for (int i = 0; i < BATCH; ++i)
        for (int w = 0; w < 4; ++w) {
          const Pair pair = pair_of<TYPE>(some[i].v[w]);
          square += pair.low * pair.low + pair.high * pair.high;
        }
    }
    for (int s = 16; s > 0; s /= 2) square += __shfl_xor_sync(0xffffffffu, square, s);
    if (lane == 0) factors[row] = 1.0f / sqrt(square / DEPTH.0f + EPSILON);
  }
  __syncthreads();
}

FRAGMENT(factors_of_rows) {
  float factor[OCTETS];
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o) factor[o] = factors[o * 8u + g < ROWSu ? o * 8u + g : ROWSu - 1u];
}

FRAGMENT(load_scale) {
  const Pack<TYPE, 8> scale = load_pack<TYPE, 8>((const TYPE*)(from + (WEIGHT_BYTESu + ROWSu * ROW_PITCHu + j * 64u + q * 16u)));
}

FRAGMENT(normalise_row) {
  #pragma unroll
  for (int w = 0; w < 4; ++w) {
    const Pair pair = pair_of<TYPE>(x[o].v[w]);
    x[o].v[w] = word_of<TYPE>(pair.low * factor[o] * wide(scale.v[2 * w]), pair.high * factor[o] * wide(scale.v[2 * w + 1]));
  }
}

FRAGMENT(store) {
  for (u32 i = threadIdx.x; i < SIZEu; i += THREADSu) {
    const u32 at = i / WIDTHu, column = first_column + i % WIDTHu;
    ADD_UP
    RESULT_COORDINATES
    EPILOGUE
  }
}

FRAGMENT(take_sum) {
  const float SUM = sums[NUMBER * SIZEu + i];
}

FRAGMENT(begin_cluster) {
  u64* const door = empty + STAGES;
  float* const boxes = (float*)(memory + BOX_AT);
  cluster_begins(door, PRODUCTS * SIZEu * 4u);
}

// Each block of a cluster has a part of the depth. It adds up, and stores, a part of the results.
FRAGMENT(store_in_cluster) {
  cluster_is_there();
  for (u32 i = threadIdx.x * 4u; i < PRODUCTS * SIZEu; i += THREADSu * 4u)
    send(boxes + ((part * PRODUCTSu + i / SIZEu) * EACHu + i % EACHu), *(const Pack<float, 4>*)(sums + i), door, i % SIZEu / EACHu);
  wait_for_peers(door);
  for (u32 i = threadIdx.x; i < EACHu; i += THREADSu) {
    const u32 at = (part * EACHu + i) / WIDTHu, column = first_column + (part * EACHu + i) % WIDTHu;
    ADD_UP
    RESULT_COORDINATES
    EPILOGUE
  }
}

FRAGMENT(add_parts) {
  float SUM = 0.0f;
  #pragma unroll
  for (u32 p = 0; p < PARTSu; ++p) SUM += boxes[(p * PRODUCTSu + NUMBER) * EACHu + i];
}
