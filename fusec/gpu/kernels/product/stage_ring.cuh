// Stages of shared memory that some warps fill and others multiply by (Hopper). A stage has two barriers: `full` counts
// threads whose copies have arrived, and bytes, and `empty` the warps that have multiplied.
// Phase 0 of a barrier is the first. Rows of 128 bytes have octet i of 16 bytes at place i ^ (row % 8), so no eight
// neighbours share a bank. Columns are stored by octets: octet i of all columns, then octet i + 1.
#ifndef STAGE_RING
#define STAGE_RING
#ifdef FUSEC_EMULATED
struct Phases { u8 wanted, left; u16 number; i32 bytes; };
DEVICE void phases_of(u64* gate, u32 arrivals) { *(Phases*)gate = Phases{(u8)arrivals, (u8)arrivals, 0, 0}; }
DEVICE void phases_are_set() {}
DEVICE void change(u64* gate, u32 arrivals, i32 bytes) {
  Phases* phases = (Phases*)gate;
  phases->left -= arrivals, phases->bytes += bytes;
  if (!phases->left && !phases->bytes) phases->left = phases->wanted, ++phases->number;
  ++progress;
}
DEVICE void wait_for_phase(u64* gate, u32 phase) { while (((Phases*)gate)->number % 2u == phase) poll(); }
DEVICE void arrive_with_copies(u64* gate) {
  copied();
  wait_for_copies<0>();
  change(gate, 1u, 0);
}
DEVICE void arrive_and_expect(u64* gate, u32 bytes) { change(gate, 1u, (i32)bytes); }
DEVICE void copy_bytes_ahead(void* to, const void* from, u32 bytes, u64* gate) {
  ALIGNED(to, 16), ALIGNED(from, 16);
  memcpy(to, from, bytes);
  change(gate, 0u, -(i32)bytes);
}
DEVICE void arrive(u64* gate) { change(gate, 1u, 0); }
template <int COUNT> DEVICE void keep_registers() {}
template <int COUNT> DEVICE void take_registers() {}
template <int N> DEVICE void group_product_of_bytes(i32 (&d)[N][4], const u8* a, const u8* b, u32 step, u32 onto) {
  i32 (*sums)[4] = d;
  group_does([=] {
    const u32 g = threadIdx.x / 32u % 4u * 16u + threadIdx.x % 32u / 4u, q = threadIdx.x % 4u * 2u;
    for (u32 n = 0; n < N; ++n)
      for (u32 e = 0; e < 4u; ++e) {
        const u32 row = g + e / 2u * 8u, column = n * 8u + q + e % 2u;
        i32 sum = onto ? sums[n][e] : 0;
        for (u32 k = step * 32u; k < step * 32u + 32u; ++k)
          sum += (i8)a[row * 128u + ((k / 16u ^ row % 8u) * 16u | k % 16u)] * (i8)b[(k / 16u * N * 8u + column) * 16u + k % 16u];
        sums[n][e] = sum;
      }
  });
}
#else
DEVICE void phases_of(u64* gate, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_place(gate)), "r"(arrivals) : "memory");
}
DEVICE void phases_are_set() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void wait_for_phase(u64* gate, u32 phase) {
  asm volatile(
      "{ .reg .pred over; AGAIN: mbarrier.try_wait.parity.shared.b64 over, [%0], %1; @!over bra AGAIN; }"
      ::"r"(shared_place(gate)), "r"(phase) : "memory");
}
// Arrive when all copies of this thread so far are in shared memory.
DEVICE void arrive_with_copies(u64* gate) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_place(gate)) : "memory");
}
DEVICE void arrive_and_expect(u64* gate, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_place(gate)), "r"(bytes) : "memory");
}
// Copy contiguous bytes, which the barrier counts.
DEVICE void copy_bytes_ahead(void* to, const void* from, u32 bytes, u64* gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_place(to)), "l"(from), "r"(bytes), "r"(shared_place(gate)) : "memory");
}
DEVICE void arrive(u64* gate) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_place(gate)) : "memory");
}
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Warps that copy keep few registers, so that those that multiply get more. Four warps ask together.
template <int COUNT> DEVICE void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// Rows of 128 bytes whose octets are exchanged; a group of eight rows is 1024 bytes.
DEVICE u64 rows_of_bytes(const void* p, u32 step) {
  return (u64)((shared_place(p) >> 4) + step * 2u & 0x3fffu) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
#endif
#endif
#endif
