// Thin products of bytes: thin_bytes.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 first = blockIdx.x % COLUMN_BLOCKSu * BLOCK_COLUMNSu;
  __shared__ Pack<u32, 4> weights[WEIGHTS];
  LOAD_WEIGHTS
  __syncthreads();
  COLUMN_INDICES
  #pragma unroll 1
  for (u32 part = blockIdx.x / COLUMN_BLOCKSu; part < TILESu; part += ROW_BLOCKSu) {
    const u32 tile = (part * 8u + warp) * 16u;
    FETCH_NEXT
    Pack<u32, WORDS> x[2][DEPTHS];
    LOAD_ROWS
    COORDINATES
    LOAD_EARLY
    GROUPS
  }
}

// The weights of a warp's product are its first operand, and 8 rows its second. A thread gets the results of two
// neighbouring columns from each product.
FRAGMENT(load_weights) {
  for (u32 i = threadIdx.x; i < WEIGHTSu; i += THREADSu) {
    const u32 part = i / 32u % HALVESu, depth = i / (32u * HALVESu) % DEPTHSu, pair = i / (32u * HALVESu * DEPTHSu);
    const u32 k = (depth * 4u + i % 4u) * PACKu + part * 8u;
    const u32 o = first + pair / PAIRSu * GROUPu + i / 4u % 8u * VECTORu + pair % PAIRSu * 2u;
    Pack<u32, 4> w = {{0u, 0u, 0u, 0u}};
    if (o < COLUMNSu && k < DEPTHu) {
      for (u32 j = 0; j < 2u; ++j) {
        const Pack<u32, 2> own = load_pack<u32, 2>((const u32*)(POINTER + ((o + j) * STRIDE + k)));
        w.v[j] = own.v[0], w.v[2u + j] = own.v[1];
      }
    }
    weights[i] = w;
  }
}

FRAGMENT(column_index) {
  const bool LIVE = !IS_PARTIAL || first + NUMBER * GROUPu + g * VECTORu < COLUMNSu;
  const u32 INDEX = LIVE ? first + NUMBER * GROUPu + g * VECTORu : 0u;
}

// Bring what the warp's next tile reads to the cache, so that memory is busy while this tile is multiplied and stored.
FRAGMENT(fetch_next) {
  #pragma unroll
  for (u32 i = lane; i < 16u * LINESu; i += 32u) {
    const u32 place = tile + APARTu + i / LINESu;
    if (place < ROWSu) fetch_line(POINTER + (place * PITCHu + BEGIN + i % LINESu * LINEu));
  }
}

FRAGMENT(row_read) {
  {
    const u32 place = tile + NUMBER * 8u + g, row = ROWS_FIT || place < ROWSu ? place : LAST_ROWu;
    ROW_COORDINATES
    #pragma unroll
    for (int depth = 0; depth < DEPTHS; ++depth) {
      const u32 k = (depth * 4u + q) * PACKu;
      for (int i = 0; i < WORDS; ++i) x[NUMBER][depth].v[i] = 0u;
      if (IS_WHOLE || k < DEPTHu) x[NUMBER][depth] = load_now<u32, WORDS>((const u32*)(IMAGE + (AT)));
    }
  }
}

FRAGMENT(row_written) {
  const u32 PLACE = tile + FIRSTu + q * 2u;
  const u32 ROW = ROWS_FIT || PLACE < ROWSu ? PLACE : LAST_ROWu;
  ROW_COORDINATES
}

FRAGMENT(group) {
  {
    i32 acc[2][PAIRS][4];
    #pragma unroll
    for (int depth = 0; depth < DEPTHS; ++depth) {
      #pragma unroll
      for (int t = 0; t < PAIRS; ++t) {
        #pragma unroll
        for (int i = 0; i < WORDS; i += 2) {
          const Pack<u32, 4> w = weights[(((NUMBER * PAIRS + t) * DEPTHS + depth) * HALVES + i / 2) * 32 + lane];
          #pragma unroll
          for (int s = 0; s < 2; ++s) {
            const u32 low = x[s][depth].v[i], high = x[s][depth].v[i + 1];
            if (depth == 0 && i == 0) multiply_tile_onto(BEGIN, acc[s][t], w.v[0], w.v[1], w.v[2], w.v[3], low, high);
            else multiply_tile<i8>(acc[s][t], w.v[0], w.v[1], w.v[2], w.v[3], low, high);
          }
        }
      }
    }
    STORES
  }
}

FRAGMENT(store) {
  if (LIVE && (ROWS_FIT || PLACE < ROWSu))
  EPILOGUE
}
