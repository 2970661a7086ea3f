// All steps of a recurrent layer in one launch: recurrent.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  RESIDENT(memory);
  float* parts = reinterpret_cast<float*>(memory);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const u32 d = blockIdx.x / TEAMu, group = blockIdx.x / BLOCKSu % GROUPSu;
  const u32 first_unit = blockIdx.x % BLOCKSu * UNITSu, first_sequence = (FIRST_GROUP + group) * BATCHu;
  for (u32 i = blockIdx.x * THREADSu + threadIdx.x; i < ALL_WORDSu; i += GRID_THREADSu) WORDS[i] = 0ull;
  u64* const words = WORDS + (d * GROUPSu + group) * TWICEu;
  WEIGHTS
  float state[ITEMS], cell[ITEMS], gate[ITEMS][GATES];
  TYPE ahead[ITEMS][GATES];
  PARAMETERS
  ACTIVATIONS
  #pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    PLACE
    state[i] = live ? wide(FIRST_STATE) : 0.0f;
    cell[i] = 0.0f;
    BEGIN
    const u32 step = 0u;
    LOAD_INPUT
  }
  WAIT_FOR_BLOCKS
  for (u32 s = 0; s < MESSAGESu; ++s) {
    if (s > 0u) all_have_sent();
    float* const sums = parts + s % 2u * PARTSu;
    PRODUCT
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      PLACE
      float total[SLOTS];
      #pragma unroll
      for (int k = 0; k < SLOTS; ++k) total[k] = 0.0f;
      if (item < COUNTu) {
        #pragma unroll
        for (u32 w = 0; w < WARPSu; ++w) {
          const Pack<float, SLOTS> part =
              load_pack<float, SLOTS>(sums + (w * BATCHu + sequence) * STRIDEu + unit * SLOTSu);
          #pragma unroll
          for (int k = 0; k < SLOTS; ++k) total[k] += part.v[k];
        }
      }
      #pragma unroll
      for (u32 k = 0; k < GATESu; ++k) gate[i][k] = wide(ahead[i][k]);
      const u32 time = TIME;
      const bool runs = RUNS, ends = IS_LAST;
      float h = 0.0f, c = cell[i], sent = 0.0f;
      CELL
      if (ends) {
        if (runs) {
          cell[i] = c;
          state[i] = h;
        }
        sent = state[i];
      }
      SEND
      const u32 step = NEXT_STEP;
      if (ends && step < STEPSu) {
        LOAD_INPUT
      }
      if (live && ends) {
        STORE
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    PLACE
    if (live) {
      END
    }
  }
}

// Load the input of a step, one step ahead. It is converted at its use, so that no thread waits for it here.
FRAGMENT(load_input) {
  #pragma unroll
  for (u32 k = 0; k < GATESu; ++k) {
    const TYPE zero = {};
    ahead[i][k] = live ? INPUT : zero;
  }
}

// What a thread finishes: one state of one sequence. `s` counts what blocks send each other: the states of each step.
FRAGMENT(place) {
  const u32 item = threadIdx.x + i * THREADSu;
  const u32 unit = item % UNITSu, sequence = item / UNITSu;
  const u32 u = first_unit + unit, b = first_sequence + sequence;
  const bool live = item < COUNTu && u < SIZEu && b < SEQUENCESu;
}

// Sums of two products say which one is not rounded, so that variants agree to the last bit over many steps.
FRAGMENT(lstm) {
  const float enter = activate0(gate[i][0] + total[0] + PEEP_IN);
  const float forget = FORGET;
  c = fma(forget, c, enter * activate1(gate[i][3] + total[3]));
  h = activate0(gate[i][1] + total[1] + PEEP_OUT) * activate2(c);
}

FRAGMENT(gru) {
  const float update = activate0(gate[i][0] + total[0]), reset = activate0(gate[i][1] + total[1]);
  const float fresh = activate1(gate[i][2] + reset * (total[2] + BIAS));
  h = fma(update, state[i], (1.0f - update) * fresh);
}

// The product of the reset states needs a second exchange: steps have two halves.
FRAGMENT(gru_twice) {
  if (ends) {
    const float fresh = activate1(gate[i][2] + total[2]);
    h = fma(update[i], state[i], (1.0f - update[i]) * fresh);
  } else {
    update[i] = activate0(gate[i][0] + total[0]);
    sent = activate0(gate[i][1] + total[1]) * state[i];
  }
}

FRAGMENT(rnn) {
  h = activate0(gate[i][0] + total[0]);
}

// 16-bit floats, on tensor cores. The rows of a tile are the gates of its units; its columns are sequences.

// A pair of weights of the fragment: row g or g + 8, depth 2t or 2t + 8.
FRAGMENT(tile_weights) {
  auto weight = [&](u32 tile, u32 i, u32 part) -> u32 {
    const u32 row = tile * 16u + lane / 4u + part % 2u * 8u;
    const u32 k = (warp * DEPTHu + i) * 16u + lane % 4u * 2u + part / 2u * 8u;
    const u32 own = row / SLOTSu, number = row % SLOTSu, u = first_unit + own;
    if (own >= UNITSu || number >= GATESu || u >= SIZEu || k >= SIZEu) return 0u;
    const u32 low = element_bits(WEIGHT);
    return k + 1u < SIZEu ? low | (u32)element_bits(NEXT_WEIGHT) << 16 : low;
  };
}

FRAGMENT(tile_held) {
  u32 held[TILES][DEPTH][4];
  #pragma unroll
  for (u32 m = 0; m < TILESu; ++m)
    #pragma unroll
    for (u32 i = 0; i < DEPTHu; ++i)
      #pragma unroll
      for (u32 part = 0; part < 4u; ++part) held[m][i][part] = weight(m, i, part);
}

// A thread reads its own pairs of states as others send them: two words with their numbers, 16 bytes.
FRAGMENT(tile_product) {
  #pragma unroll
  for (u32 column = 0; column < COLUMNSu; column += LOADEDu) {
    u32 pairs[LOADED * DEPTH][4];
    u32 waiting = 0u;
    #pragma unroll
    for (u32 e = 0; e < ENTRIESu; ++e) {
      const u32 step = warp * DEPTHu + e % DEPTHu, pair = step * 8u + lane % 4u;
      pairs[e][0] = pairs[e][2] = 0u;
      if (step >= DEPTHSu || pair >= PAIRSu) continue;
      if (s > 0u) {
        waiting |= 1u << e;
        continue;
      }
      const u32 b = first_sequence + (column + e / DEPTHu) * 8u + lane / 4u;
      #pragma unroll
      for (u32 part = 0; part < 2u; ++part) {
        const u32 u = (pair + part * 4u) * 2u;
        if (b < SEQUENCESu && u < SIZEu) {
          pairs[e][part * 2u] = element_bits(FIRST_STATE);
          if (u + 1u < SIZEu) pairs[e][part * 2u] |= (u32)element_bits(SECOND_STATE) << 16;
        }
      }
    }
    while (waiting) {
      #pragma unroll
      for (u32 e = 0; e < ENTRIESu; ++e)
        if (waiting >> e & 1u) {
          const u32 step = warp * DEPTHu + e % DEPTHu;
          receive(pairs[e], words + s % 2u * SENTu + (((column + e / DEPTHu) * DEPTHSu + step) * 32u + lane) * 2u);
        }
      #pragma unroll
      for (u32 e = 0; e < ENTRIESu; ++e) {
        const u32 second = (warp * DEPTHu + e % DEPTHu) * 8u + lane % 4u + 4u;
        if (waiting >> e & 1u && is_sent(pairs[e][1], s) && (second >= PAIRSu || is_sent(pairs[e][3], s)))
          waiting &= ~(1u << e);
      }
    }
    __syncwarp();
    #pragma unroll
    for (u32 j = 0; j < LOADEDu; ++j) {
      float* const own = sums + (warp * BATCHu + (column + j) * 8u + lane % 4u * 2u) * STRIDEu + lane / 4u;
      #pragma unroll UNROLLED
      for (u32 m = 0; m < TILESu; ++m) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (u32 i = 0; i < DEPTHu; ++i)
          multiply_tile<TYPE>(acc, TAKEN_0, TAKEN_1, TAKEN_2, TAKEN_3, pairs[j * DEPTHu + i][0],
                              pairs[j * DEPTHu + i][2]);
        own[m * 16u] = acc[0], own[STRIDEu + m * 16u] = acc[1];
        own[m * 16u + 8u] = acc[2], own[STRIDEu + m * 16u + 8u] = acc[3];
      }
    }
  }
}

FRAGMENT(tile_send) {
  const float other = __shfl_xor_sync(0xffffffffu, sent, 1);
  const u32 pair = u / 2u, inside = pair % 8u;
  if (item < COUNTu && unit % 2u == 0u && pair < DEPTHSu * 8u && s + 1u < MESSAGESu)
    send_word(words + (s + 1u) % 2u * SENTu
                  + (((sequence / 8u * DEPTHSu + pair / 8u) * 32u + sequence % 8u * 4u + inside % 4u) * 2u + inside / 4u),
              word_of<TYPE>(sent, other), s + 1u);
}

// 32-bit floats. A warp has a part of the depth, and a lane some rows.

FRAGMENT(row_weights) {
  auto weight = [&](u32 turn, u32 i) -> float {
    const u32 row = turn * 32u + lane, k = warp * DEPTHu + i;
    const u32 own = row / SLOTSu, number = row % SLOTSu, u = first_unit + own;
    return own < UNITSu && number < GATESu && u < SIZEu && k < SIZEu ? WEIGHT : 0.0f;
  };
  float* const states = parts + STATES_ATu + warp * CHUNKu;
}

FRAGMENT(row_held) {
  float held[TILES][DEPTH];
  #pragma unroll
  for (u32 m = 0; m < TILESu; ++m)
    #pragma unroll
    for (u32 i = 0; i < DEPTHu; ++i) held[m][i] = weight(m, i);
}

FRAGMENT(row_product) {
  #pragma unroll 1
  for (u32 turn = 0; turn < TURNSu; turn += ENTRIESu) {
    u32 got[ENTRIES][4];
    u32 waiting = 0u;
    #pragma unroll
    for (u32 e = 0; e < ENTRIESu; ++e) {
      const u32 place = ((turn + e) * 32u + lane) * 2u, u = warp * DEPTHu + place / BATCHu;
      got[e][0] = got[e][2] = 0u;
      if (place >= CHUNKu || u >= SIZEu) continue;
      if (s > 0u) {
        waiting |= 1u << e;
        continue;
      }
      #pragma unroll
      for (u32 part = 0; part < 2u; ++part) {
        const u32 b = first_sequence + place % BATCHu + part;
        if (b < SEQUENCESu) got[e][part * 2u] = f32_to_bits(FIRST_STATE);
      }
    }
    while (waiting) {
      #pragma unroll
      for (u32 e = 0; e < ENTRIESu; ++e)
        if (waiting >> e & 1u)
          receive(got[e], words + s % 2u * SENTu + (warp * CHUNKu + ((turn + e) * 32u + lane) * 2u));
      #pragma unroll
      for (u32 e = 0; e < ENTRIESu; ++e)
        if (waiting >> e & 1u && is_sent(got[e][1], s) && is_sent(got[e][3], s)) waiting &= ~(1u << e);
    }
    #pragma unroll
    for (u32 e = 0; e < ENTRIESu; ++e) {
      const u32 place = ((turn + e) * 32u + lane) * 2u;
      if (place < CHUNKu) {
        states[place] = bits_to_f32(got[e][0]);
        states[place + 1u] = bits_to_f32(got[e][2]);
      }
    }
  }
  __syncthreads();
  {
    float acc[TILES][BATCH];
    #pragma unroll
    for (u32 m = 0; m < TILESu; ++m)
      #pragma unroll
      for (u32 n = 0; n < BATCHu; ++n) acc[m][n] = 0.0f;
    #pragma unroll UNROLLED
    for (u32 i = 0; i < DEPTHu; ++i) {
      const Pack<float, BATCH> now = load_pack<float, BATCH>(states + i * BATCHu);
      #pragma unroll
      for (u32 m = 0; m < TILESu; ++m) {
        const float own = TAKEN_ROW;
        #pragma unroll
        for (u32 n = 0; n < BATCHu; ++n) acc[m][n] += own * now.v[n];
      }
    }
    #pragma unroll
    for (u32 m = 0; m < TILESu; ++m)
      #pragma unroll
      for (u32 n = 0; n < BATCHu; ++n) sums[(warp * BATCHu + n) * STRIDEu + m * 32u + lane] = acc[m][n];
  }
}

FRAGMENT(row_send) {
  if (item < COUNTu && u < SIZEu && s + 1u < MESSAGESu)
    send_word(words + (s + 1u) % 2u * SENTu + (u * BATCHu + sequence), f32_to_bits(sent), s + 1u);
}
