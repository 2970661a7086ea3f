// Products of many rows with few weights: thin_product.py explains them and fills in the names in capitals.

FRAGMENT(kernel) {
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;
  const u32 first = blockIdx.x % COLUMN_BLOCKSu * BLOCK_COLUMNSu;
  __shared__ Pack<u32, 4> weights[WEIGHTS];
  LOAD_ONCE
  #pragma unroll 1
  for (u32 turn = 0; turn < TURNSu; ++turn) {
    const u32 tile = ((blockIdx.x / COLUMN_BLOCKSu + turn * ROW_BLOCKSu) * 8u + warp) * 16u + g;
    const u32 row0 = tile + 0u < ROWSu ? tile + 0u : LAST_ROWu;
    ROW0_COORDINATES
    const u32 row1 = tile + 8u < ROWSu ? tile + 8u : LAST_ROWu;
    ROW1_COORDINATES
    float acc[WIDTH][4][4];
    #pragma unroll
    for (int n = 0; n < WIDTH; ++n)
      for (int t = 0; t < 4; ++t) for (int e = 0; e < 4; ++e) acc[n][t][e] = 0;
    MULTIPLY
    STORE_ROW0
    STORE_ROW1
  }
}

// All weights of a block are in shared memory during all turns.
FRAGMENT(load_once) {
  const u32 start = 0;
  LOAD_WEIGHTS
  __syncthreads();
}

// Shared memory has room for the weights of some depths only.
FRAGMENT(multiply_in_phases) {
  #pragma unroll 1
  for (u32 start = 0; start < ALL_DEPTHSu; start += DEPTHSu) {
    __syncthreads();
    LOAD_WEIGHTS
    __syncthreads();
    MULTIPLY
  }
}

// Load the weights of the block's columns as fragments; past the end, zeros.
FRAGMENT(load_weights) {
  for (u32 i = threadIdx.x; i < WEIGHTSu; i += THREADSu) {
    const u32 c = i / 4u % 8u, group = i / (32u * DEPTHS);
    const u32 k = ((start + i / 32u % DEPTHSu) * 4u + i % 4u) * PACKu;
    const u32 o = first + group / 4u * 32u + c / 2u * 8u + group % 4u * 2u + c % 2u;
    Pack<u32, 4> w = {{0u, 0u, 0u, 0u}};
    if (o < COLUMNSu && k < DEPTHu)
      w = load_pack<u32, 4>((const u32*)(POINTER + (o * STRIDE + k)));
    weights[i] = w;
  }
}

FRAGMENT(multiply) {
  #pragma unroll
  for (int depth = 0; depth < DEPTHS; ++depth) {
    LOAD_ROW0
    LOAD_ROW1
    #pragma unroll
    for (int n = 0; n < WIDTH; ++n) {
      #pragma unroll
      for (int t = 0; t < 4; ++t) {
        const Pack<u32, 4> w = weights[((n * 4 + t) * DEPTHS + depth) * 32 + lane];
        multiply_tile<TYPE>(acc[n][t], x0.v[0], x1.v[0], x0.v[1], x1.v[1], w.v[0], w.v[1]);
        multiply_tile<TYPE>(acc[n][t], x0.v[2], x1.v[2], x0.v[3], x1.v[3], w.v[2], w.v[3]);
      }
    }
  }
}

// Load the neighbours of a row that a thread multiplies. The depth may end before them.
FRAGMENT(load_row) {
  const u32 INDEX = ((start + depth) * 4u + q) * PACKu;
  Pack<u32, 4> WORDS = {{0u, 0u, 0u, 0u}};
  if (IS_WHOLE || INDEX < DEPTHu) {
    LOAD
  }
}

FRAGMENT(load_words) {
  WORDS = load_pack<u32, 4>((const u32*)(POINTER + (AT)));
}

FRAGMENT(apply_prologue) {
  Pack<TYPE, 8> packed;
  PROLOGUE
  for (int i = 0; i < 4; ++i) WORDS.v[i] = word_of(packed, i);
}

FRAGMENT(store_row) {
  if (tile + OFFSETu < ROWSu) {
    #pragma unroll
    for (int n = 0; n < WIDTH; ++n) {
      const u32 INDEX = first + n * 32u + q * 8u;
      if (IS_PARTIAL && INDEX >= COLUMNSu) break;
      EPILOGUE
    }
  }
}
