// Attention of one query for each head: one_query.py explains it and fills in the names in capitals.

FRAGMENT(kernel) {
  BEGIN
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, octet = lane % LANESu;
  const u32 part = blockIdx.x % PARTSu, group = blockIdx.x / PARTSu % GROUPSu, image = blockIdx.x / (PARTSu * GROUPSu);
  const u32 start = part * SHAREu, own = warp * (32u / LANESu) + lane / LANESu;
  Pack<TYPE, 8> keys[ROUNDS], values[ROUNDS];
  #pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const u32 key = start + i * STEPu + own;
    if (key < KEYSu) keys[i] = load_pack<TYPE, 8>(KEY_POINTER + (image * K_IMAGEu + group * K_GROUPu + key * K_KEYu + octet * 8u));
    else keys[i] = {};
  }
  #pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const u32 key = start + i * STEPu + own;
    if (key < KEYSu) values[i] = load_pack<TYPE, 8>(VALUE_POINTER + (image * V_IMAGEu + group * V_GROUPu + key * V_KEYu + octet * 8u));
    else values[i] = {};
  }
  __shared__ float scores[SHARERS][SHARE], most[SHARERS], weight[SHARERS], sums[WARPS][SHARERS][FEATURES];
  float query[SHARERS][8];
  #pragma unroll
  for (int h = 0; h < SHARERS; ++h) {
    const Pack<TYPE, 8> q =
        load_pack<TYPE, 8>(QUERY_POINTER + (image * Q_IMAGEu + (group * SHARERSu + h) * Q_HEADu + octet * 8u));
    for (int j = 0; j < 8; ++j) query[h][j] = wide(q.v[j]) * SCALE;
  }
  #pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const u32 at = i * STEPu + own, key = start + at;
    #pragma unroll
    for (int h = 0; h < SHARERS; ++h) {
      float score = 0.0f;
      #pragma unroll
      for (int j = 0; j < 8; ++j) score += query[h][j] * wide(keys[i].v[j]);
      for (int s = LANES / 2; s > 0; s /= 2) score += __shfl_xor_sync(0xffffffffu, score, s);
      if (octet == h % LANESu && key < KEYSu) {
        ADD_BIAS
        scores[h][at] = score;
      }
    }
  }
  __syncthreads();
  const u32 count = start + SHAREu < KEYSu ? SHAREu : KEYSu - start;
  for (u32 h = warp; h < SHARERSu; h += WARPSu) {
    float largest = -INFINITE, sum = 0.0f;
    for (u32 i = lane; i < count; i += 32u) largest = nmax(largest, scores[h][i]);
    for (int s = 16; s > 0; s /= 2) largest = nmax(largest, __shfl_xor_sync(0xffffffffu, largest, s));
    for (u32 i = lane; i < SHAREu; i += 32u) {
      const float power = i < count && largest != -INFINITE ? quick_exp2((scores[h][i] - largest) * 1.44269504f) : 0.0f;
      scores[h][i] = IS_GUARDED && power != power ? 0.0f : power;
      sum += power;
    }
    for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, s);
    if (lane == 0) most[h] = largest, weight[h] = sum;
  }
  __syncthreads();
  #pragma unroll
  for (int h = 0; h < SHARERS; ++h) {
    float sum[8];
    for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
    #pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const float power = scores[h][i * STEPu + own];
      #pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += power * wide(values[i].v[j]);
    }
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      for (int s = 16; s >= LANES; s /= 2) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], s);
      if (lane < LANESu) sums[warp][h][octet * 8u + j] = sum[j];
    }
  }
  __syncthreads();
  SHARE_SUMS
  for (u32 i = threadIdx.x; i < RESULTSu / 8u; i += THREADSu) {
    const u32 h = i / LANESu, feature = i % LANESu * 8u;
    float sum[8], unscaled[8];
    for (int j = 0; j < 8; ++j) sum[j] = unscaled[j] = 0.0f;
    ADD_UP
    Pack<TYPE, 8> y;
    for (int j = 0; j < 8; ++j) {  // weights that are NaN become zeros in guarded attention
      const float result = IS_GUARDED && !(weight[h] > 0.0f) ? 0.0f * unscaled[j] : sum[j] / weight[h];
      y.v[j] = narrow<TYPE>(result);
    }
    store_pack<TYPE, 8>(RESULT + (image * Y_IMAGEu + (group * SHARERSu + h) * Y_HEADu + feature), y);
  }
}

FRAGMENT(add_bias) {
  const float bias = wide(BIAS[AT]);
  score = HIDES && bias == -INFINITE ? bias : score + bias;
}

FRAGMENT(add_warps) {
  for (int w = 0; w < WARPS; ++w)
    for (int j = 0; j < 8; ++j) sum[j] += sums[w][h][feature + j];
  for (int j = 0; j < 8; ++j) unscaled[j] = sum[j];
}

// The last block of a group of heads to finish adds the sums of all parts of the keys, in order.
FRAGMENT(share_sums) {
  for (u32 i = threadIdx.x; i < RESULTSu; i += THREADSu) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += sums[w][i / FEATURESu][i % FEATURESu];
    SCRATCH[blockIdx.x * RECORDu + i] = sum;
  }
  for (u32 h = threadIdx.x; h < SHARERSu; h += THREADSu) {
    SCRATCH[blockIdx.x * RECORDu + RESULTSu + h] = most[h];
    SCRATCH[blockIdx.x * RECORDu + RESULTSu + SHARERSu + h] = weight[h];
  }
  if (!last_of(DOORS + blockIdx.x / PARTSu * DOOR, PARTSu)) return;
  const float* records = SCRATCH + (blockIdx.x - part) * RECORDu;
  __shared__ float factors[SHARERS][PARTS], weights[SHARERS][PARTS];
  for (u32 i = threadIdx.x; i < SHARERSu * PARTSu; i += THREADSu) {
    const u32 h = i / PARTSu, p = i % PARTSu;
    factors[h][p] = across(records + (p * RECORDu + RESULTSu + h));
    weights[h][p] = across(records + (p * RECORDu + RESULTSu + SHARERSu + h));
  }
  __syncthreads();
  for (u32 h = warp; h < SHARERSu; h += WARPSu) {
    float largest = -INFINITE, total = 0.0f;
    for (u32 p = lane; p < PARTSu; p += 32u) largest = nmax(largest, factors[h][p]);
    for (int s = 16; s > 0; s /= 2) largest = nmax(largest, __shfl_xor_sync(0xffffffffu, largest, s));
    for (u32 p = lane; p < PARTSu; p += 32u) {
      factors[h][p] = quick_exp2((factors[h][p] - largest) * 1.44269504f);
      total += factors[h][p] * weights[h][p];
    }
    for (int s = 16; s > 0; s /= 2) total += __shfl_xor_sync(0xffffffffu, total, s);
    if (lane == 0) weight[h] = total;
  }
  __syncthreads();
}

FRAGMENT(add_parts) {
  #pragma unroll 8
  for (u32 p = 0; p < PARTSu; ++p) {
    const Pack<float, 8> own = across((const Pack<float, 8>*)(records + (p * RECORDu + i * 8u)));
    for (int j = 0; j < 8; ++j) {
      sum[j] += factors[h][p] * own.v[j];
      unscaled[j] += own.v[j];
    }
  }
}
