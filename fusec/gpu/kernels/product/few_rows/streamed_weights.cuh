// Products of some rows with constant weights of 16 bits: streamed_weights.py explains them and fills in the names in
// capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  u64 *full = (u64*)(memory + RING_BYTES), *empty = full + STAGES;
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 part = blockIdx.x % PARTSu, first_column = blockIdx.x / PARTSu * WIDTHu;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGESu; ++s) {
      phases_of(full + s, 33u);
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
  SQUARES
  if (warp == WARPSu) {
    COPY
  } else {
    MULTIPLY
  }
  __syncthreads();  // the sums take the place of the stages
  float* const sums = (float*)memory;
  ADD_SQUARES
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
// for the launches before. Rows take many copies of 16 bytes, because a bulk copy of a short piece takes as long as a long one.
FRAGMENT(copy) {
  #pragma unroll 1
  for (u32 n = 0; n < TURNSu; ++n) {
    if (n >= EARLYu) {
      wait_for_phase(empty + stage, phase ^ 1u);
      if (lane == 0) {
        COPY_WEIGHTS
      }
    }
    u8* const to = memory + (stage * STAGE_BYTESu + WEIGHT_BYTESu);
    const u32 first = part * PART_DEPTHu + n * STAGE_DEPTHu;
    #pragma unroll
    for (u32 i = lane; i < COPIED_ROWSu * (STAGE_DEPTHu / 8u); i += 32u) {
      const u32 row = i / (STAGE_DEPTHu / 8u), octet = i % (STAGE_DEPTHu / 8u), k = first + octet * 8u;
      const TYPE* from;
      COPIED_PIECE
      copy_ahead<16>(to + (row * ROW_PITCHu + octet * 16u), from);
    }
    arrive_with_copies(full + stage);
    if (++stage == STAGESu) stage = 0, phase ^= 1u;
  }
  copied();
  wait_for_copies<0>();
}

FRAGMENT(copied_piece) {
  ROW_COORDINATES
  from = INPUT + (INPUT_PLACE);
}

// The scale of the norm is copied like one row more.
FRAGMENT(copied_piece_or_scale) {
  if (row == ROWSu) {
    from = NORM_SCALE + k;
  } else {
    ROW_COORDINATES
    from = INPUT + (INPUT_PLACE);
  }
}

FRAGMENT(expect) {
  arrive_and_expect(full + stage, WEIGHT_BYTESu);
}

FRAGMENT(copy_product) {
  copy_bytes_ahead(memory + (stage * STAGE_BYTESu + PLACE), (const u8*)WEIGHTS + ((u64)blockIdx.x * TURNSu + n) * PRODUCT_BYTESu,
                   PRODUCT_BYTESu, full + stage);
}

// A warp multiplies its tiles of 16 columns by all rows. The weights are the first operand. A thread reads 8 neighbours of
// a row at a time, and weights are stored in the same order.
FRAGMENT(multiply) {
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
  STORE_SQUARES
}

// The norm of a row: its elements times the scale are multiplied, and sums are divided by the root of the mean square at the
// end. So no element is read twice. A power of two makes the scale at most one, so that no product leaves the range.
FRAGMENT(squares) {
  __shared__ float squares[WARPS][ROWS];
  const u32 down = word_of<TYPE>(DOWN, DOWN);
  float own_square[OCTETS];
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o) own_square[o] = 0.0f;
}

FRAGMENT(load_scale) {
  Pack<u32, 4> scale = load_pack<u32, 4>((const u32*)(from + (WEIGHT_BYTESu + ROWSu * ROW_PITCHu + j * 64u + q * 16u)));
  #pragma unroll
  for (int w = 0; w < 4; ++w) scale.v[w] = multiply_pair<TYPE>(scale.v[w], down);
}

// Each warp adds up the squares of another stage.
FRAGMENT(normalise_row) {
  if (n % WARPSu == warp) {
    #pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Pair pair = pair_of<TYPE>(x[o].v[w]);
      own_square[o] += pair.low * pair.low + pair.high * pair.high;
    }
  }
  #pragma unroll
  for (int w = 0; w < 4; ++w) x[o].v[w] = multiply_pair<TYPE>(x[o].v[w], scale.v[w]);
}

FRAGMENT(store_squares) {
  #pragma unroll
  for (int o = 0; o < OCTETS; ++o) {
    for (int s = 2; s > 0; s /= 2) own_square[o] += __shfl_xor_sync(0xffffffffu, own_square[o], s);
    if (q == 0u && o * 8u + g < ROWSu) squares[warp][o * 8u + g] = own_square[o];
  }
}

FRAGMENT(add_squares) {
  float* const square = sums + PRODUCTS * SIZEu;
  for (u32 row = threadIdx.x; row < SQUARE_PACKS * 4u; row += THREADSu) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += row < ROWSu ? squares[w][row] : 0.0f;
    square[row] = sum;
  }
}

FRAGMENT(send_squares) {
  for (u32 i = threadIdx.x; i < SQUARE_PACKS * PARTSu; i += THREADSu)
    send(square_boxes + (part * SQUARE_PACKSu + i / PARTSu) * 4u, *(const Pack<float, 4>*)(square + i / PARTSu * 4u), mbarrier, i % PARTSu);
}

FRAGMENT(divide) {
  const float factor = UP / sqrt(square[at] / DEPTH.0f + EPSILON);
}

FRAGMENT(divide_in_cluster) {
  float all_squares = 0.0f;
  #pragma unroll
  for (u32 p = 0; p < PARTSu; ++p) all_squares += square_boxes[p * (SQUARE_PACKSu * 4u) + at];
  const float factor = UP / sqrt(all_squares / DEPTH.0f + EPSILON);
}

FRAGMENT(store) {
  for (u32 i = threadIdx.x; i < SIZEu; i += THREADSu) {
    const u32 at = i / WIDTHu, column = first_column + i % WIDTHu;
    DIVIDE
    ADD_UP
    RESULT_COORDINATES
    EPILOGUE
  }
}

FRAGMENT(take_sum) {
  const float SUM = sums[NUMBER * SIZEu + i] * FACTOR;
}

FRAGMENT(begin_cluster) {
  u64* const mbarrier = empty + STAGES;
  float *const boxes = (float*)(memory + BOX_AT), *const square_boxes = boxes + PRODUCTS * SIZEu;
  cluster_begins(mbarrier, (PRODUCTS * SIZEu + PARTS * SQUARES_SENTu) * 4u);
}

// Each block of a cluster has a part of the depth. It adds up, and stores, a part of the results.
FRAGMENT(store_in_cluster) {
  cluster_is_there();
  for (u32 i = threadIdx.x * 4u; i < PRODUCTS * SIZEu; i += THREADSu * 4u)
    send(boxes + ((part * PRODUCTSu + i / SIZEu) * EACHu + i % EACHu), *(const Pack<float, 4>*)(sums + i), mbarrier, i % SIZEu / EACHu);
  SEND_SQUARES
  wait_for_peers(mbarrier);
  for (u32 i = threadIdx.x; i < EACHu; i += THREADSu) {
    const u32 at = (part * EACHu + i) / WIDTHu, column = first_column + (part * EACHu + i) % WIDTHu;
    DIVIDE
    ADD_UP
    RESULT_COORDINATES
    EPILOGUE
  }
}

FRAGMENT(add_parts) {
  float SUM = 0.0f;
  #pragma unroll
  for (u32 p = 0; p < PARTSu; ++p) SUM += boxes[(p * PRODUCTSu + NUMBER) * EACHu + i];
  SUM *= FACTOR;
}
