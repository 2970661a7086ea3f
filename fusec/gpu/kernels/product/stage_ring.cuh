// Stages of shared memory that some warps fill and others multiply by (Hopper). A stage has two barriers: `full` counts
// the threads whose copies have arrived, and `empty` the warps that have multiplied. Phase 0 of a barrier is the first.
// Operands are rows of 128 bytes, in which octet i of 16 bytes is at place i ^ (row % 8): no eight neighbours share a bank.
#ifndef STAGE_RING
#define STAGE_RING
#ifdef FUSEC_EMULATED
struct Phases { u16 wanted, left; u32 number; };
DEVICE void phases_of(u64* gate, u32 arrivals) { *(Phases*)gate = Phases{(u16)arrivals, (u16)arrivals, 0u}; }
DEVICE void phases_are_set() {}
DEVICE void arrive(u64* gate) {
  Phases* phases = (Phases*)gate;
  if (--phases->left == 0) phases->left = phases->wanted, ++phases->number;
}
DEVICE void wait_for_phase(u64* gate, u32 phase) { while (((Phases*)gate)->number % 2u == phase) poll(); }
DEVICE void arrive_with_copies(u64* gate) {
  copied();
  wait_for_copies<0>();
  arrive(gate);
}
template <int COUNT> DEVICE void keep_registers() {}
template <int COUNT> DEVICE void take_registers() {}
DEVICE i32 byte_of(const u8* rows, u32 row, u32 k) { return (i8)rows[row * 128u + ((k / 16u ^ row % 8u) * 16u | k % 16u)]; }
template <int N> DEVICE void group_product_of_bytes(i32 (&d)[N][4], const u8* a, const u8* b, u32 step, u32 onto) {
  i32 (*sums)[4] = d;
  group_does([=] {
    const u32 g = threadIdx.x / 32u % 4u * 16u + threadIdx.x % 32u / 4u, q = threadIdx.x % 4u * 2u;
    for (u32 n = 0; n < N; ++n)
      for (u32 e = 0; e < 4u; ++e) {
        i32 sum = onto ? sums[n][e] : 0;
        for (u32 k = step * 32u; k < step * 32u + 32u; ++k)
          sum += byte_of(a, g + e / 2u * 8u, k) * byte_of(b, n * 8u + q + e % 2u, k);
        sums[n][e] = sum;
      }
  });
}
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE void phases_of(u64* gate, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_place(gate)), "r"(arrivals) : "memory");
}
DEVICE void phases_are_set() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64* gate) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_place(gate)) : "memory");
}
DEVICE void wait_for_phase(u64* gate, u32 phase) {
  asm volatile(
      "{ .reg .pred over; AGAIN: mbarrier.try_wait.parity.shared.b64 over, [%0], %1; @!over bra AGAIN; }"
      ::"r"(shared_place(gate)), "r"(phase) : "memory");
}
// Arrive when all copies of this thread so far are in shared memory.
DEVICE void arrive_with_copies(u64* gate) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_place(gate)) : "memory");
}
// Warps that copy keep few registers, so that those that multiply get more. Four warps ask together.
template <int COUNT> DEVICE void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// Rows of 128 bytes whose octets are exchanged; a group of eight rows is 1024 bytes.
DEVICE u64 rows_of_bytes(const void* p, u32 step) {
  return (u64)((shared_place(p) >> 4) + step * 2u & 0x3fffu) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
#endif
#endif
