// A reduction, softmax or norm: passes that combine a term of each element, and the merge of chunks. ACC holds the results
// of a pass, one for each of the WIDTH numbers of a thread. KIND is the type that is computed in.

FRAGMENT(start_pass) {
  KIND ACC[WIDTH];
  for (int w = 0; w < WIDTH; ++w) ACC[w] = START;
}

FRAGMENT(store_chunk) {
  if (live && t == 0)
    for (int w = 0; w < WIDTH; ++w) { STORES }
}

FRAGMENT(merge_chunks) {
  for (u32 s = t; s < CHUNKSu; s += THREADSu) {
    const KIND size = SIZE;
    for (int w = 0; w < WIDTH; ++w) ACC[w] = COMBINE()(ACC[w], PART);
  }
}

// The chunks of LOCAL groups, from the first that the block's channels belong to, each by one warp.
FRAGMENT(find_groups) {
  __shared__ KIND sums[PASSES][LOCAL];
  const u32 first = blockIdx.x % BLOCKSu * BLOCK_CHANNELSu / MEMBERSu;
}

FRAGMENT(merge_groups) {
  for (u32 turn = 0; turn < TURNSu; ++turn) {
    const u32 mine = turn * WARPSu + threadIdx.x / WARPu, g = mine < LOCALu ? mine : 0u;
    const u32 of = first + g < GROUPSu ? first + g : LAST_GROUPu;
    KIND sum[1] = {START};
    for (u32 i = threadIdx.x % WARPu; i < PARTSu; i += WARPu) {
      const u32 s = i / MEMBERSu;
      const KIND size = SIZE;
      sum[0] = COMBINE()(sum[0], (KIND)(TERM));
    }
    reduce_threads<BLOCK, WARP, 1, 1>(sum, (KIND*)0, COMBINE());
    if (threadIdx.x % WARPu == 0 && mine < LOCALu) sums[NUMBER][g] = FINISHED;
  }
  __syncthreads();
}

FRAGMENT(take_group) {
  KIND ACC[WIDTH];
  for (int w = 0; w < WIDTH; ++w) ACC[w] = sums[NUMBER][(at * WIDTHu + w) / MEMBERSu - first];
}
