// Batch norm whose blocks form clusters, one for OWN channels. Each block sends its sums to all blocks of its cluster.

FRAGMENT(cluster_memory) {
  u64* door = reinterpret_cast<u64*>(memory);
  float* received = reinterpret_cast<float*>(memory + DOOR_BYTES);
  cluster_begins(door, SENT);
}

// A thread sends the sums of one channel to one block.
FRAGMENT(send_sums) {
  for (u32 n = threadIdx.x; n < OWNu * CHUNKSu; n += BLOCKu) {
    const u32 i = n % OWNu, rank = n / OWNu;
    MERGE_WARPS
    send(received + (i * CHUNKSu + chunk) * 2u, Pack<float, 2>{{sum0, sum1}}, door, rank);
  }
}
