// Runs CUDA C on the CPU: blocks one after the other, the threads of a block as fibers that take turns at barriers.
// Blocks that wait for each other, all or those of a cluster, run up to there first; shared memory that a source declares is the next block's from then on.
#define FUSEC_EMULATED
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#include <vector>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define TABLE static const
#define INFINITE __builtin_inff()

struct Index { unsigned x; };
static Index threadIdx, blockIdx;

static float bits_to_f32(unsigned b) { float x; memcpy(&x, &b, 4); return x; }
static unsigned f32_to_bits(float x) { unsigned b; memcpy(&b, &x, 4); return b; }
static float f16_to_f32(unsigned short h) {
  int exponent = h >> 10 & 31, mantissa = h & 1023;
  float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
                           : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return h & 0x8000 ? -x : x;
}
static unsigned short f64_to_f16(double x) {
  unsigned long long b;
  memcpy(&b, &x, 8);
  unsigned sign = b >> 48 & 0x8000;
  int exponent = (int)(b >> 52 & 0x7ff) - 1023;
  unsigned long long mantissa = b & ((1ull << 52) - 1);
  if (exponent == 1024) return sign | (mantissa ? 0x7e00 : 0x7c00);
  if (exponent > 15) return sign | 0x7c00;
  int shift = 42;
  unsigned long long base = 0;
  if (exponent >= -14) base = (unsigned long long)(exponent + 15) << 10;
  else {
    mantissa |= 1ull << 52;
    shift += -14 - exponent;
    if (shift > 60) return sign;
  }
  unsigned long long kept = mantissa >> shift, rest = mantissa & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  if (rest > half || (rest == half && (kept & 1))) ++kept;
  return sign | (unsigned short)(base + kept);
}
static unsigned short f32_to_f16(float x) { return f64_to_f16(x); }
static int misaligned;  // set by a wide access that a GPU would refuse
static const char *unexpected;  // what a peer should not have sent
#define ALIGNED(p, n) (misaligned |= (size_t)(p) % (n) != 0)
static unsigned together;  // blocks that are there at once: all that wait for each other, or a cluster
static char *resident;        // what each of these keeps
static size_t resident_bytes;  // from one block's to the next one's, so that all are aligned in the same way
// An instruction for global memory, which a GPU refuses for the address of shared memory; here for that of what blocks keep.
#define GLOBAL(p) \
  (unexpected = (char *)(p) >= resident && (char *)(p) < resident + resident_bytes * together \
                    ? "an instruction for global memory at an address of shared memory" : unexpected)
template <class... Words> static void store_words(void *p, Words... words) {
  GLOBAL(p);
  unsigned all[] = {words...};
  misaligned |= (size_t)p % sizeof(all) != 0;
  memcpy(p, all, sizeof(all));
}

enum { STACK = 1 << 16, MOST = 8192, AT_BLOCKS = -9, POLLS = -10 };
static jmp_buf scheduler, fibers[MOST];  // where each goes on: swapcontext would ask the kernel for a signal mask
static bool begun[MOST];                 // whether a fiber has a stack, and waits for a barrier or its next body
static char *stacks;
static int at[MOST];  // the line of the barrier a thread waits at; -1: it has finished
static unsigned long long slots[MOST];
static void (*body)(void *);
static unsigned first_block;  // of those that are there at once
#define RESIDENT(name) unsigned char *name = (unsigned char *)resident + (blockIdx.x - first_block) * resident_bytes
static void *closure;

static unsigned width;  // threads of a block
static void barrier(int line) {
  unsigned self = threadIdx.x, own = blockIdx.x;
  at[(own - first_block) * width + self] = line;
  if (!_setjmp(fibers[(own - first_block) * width + self])) _longjmp(scheduler, 1);
  threadIdx.x = self;
  blockIdx.x = own;
}
#define __syncthreads() barrier(__LINE__)
// A warp looks again for what other warps of its block do.
static void poll() { barrier(POLLS); }
static unsigned long long progress;  // counts what warps did that others look for
template <class T> static T __shfl_xor_sync(unsigned mask, T x, int lane) {
  unsigned self = threadIdx.x;
  memcpy(&slots[self], &x, sizeof(T));
  barrier(-2);
  T y;
  memcpy(&y, &slots[self ^ lane], sizeof(T));
  barrier(-3);
  return y;
}
struct Copy { void *to; const void *from; int bytes, group; };
static std::vector<Copy> copies[MOST];  // of each thread, made when it waits for them
static int group_of[MOST];
static unsigned fiber() { return (blockIdx.x - first_block) * width + threadIdx.x; }
template <int N> static void copy_ahead(void *to, const void *from) {
  misaligned |= (size_t)to % N != 0 || (size_t)from % N != 0;
  copies[fiber()].push_back({to, from, N, group_of[fiber()]});
}
static void copy_or_zeros_ahead(void *to, const void *from, bool is_there) {
  static const unsigned long long zeros[2] __attribute__((aligned(16))) = {};
  copy_ahead<16>(to, is_there ? from : zeros);
}
static void copied() { ++group_of[fiber()]; }
template <int LEFT> static void wait_for_copies() {
  std::vector<Copy> waiting;
  for (const Copy &each : copies[fiber()])
    if (each.group < group_of[fiber()] - LEFT) memcpy(each.to, each.from, each.bytes);
    else waiting.push_back(each);
  copies[fiber()] = waiting;
}
// Products of four warps, made as late as they may be: when they are waited for.
struct Product { std::function<void()> made; int group; };
static std::vector<Product> products[MOST];
static int products_of[MOST];
template <class F> static void group_does(F made) { products[fiber()].push_back({made, products_of[fiber()]}); }
static void group_ends() { ++products_of[fiber()]; }
template <int LEFT> static void wait_for_groups() {
  std::vector<Product> due, waiting;
  for (const Product &each : products[fiber()])
    (each.group < products_of[fiber()] - LEFT ? due : waiting).push_back(each);
  products[fiber()] = waiting;
  for (const Product &each : due) each.made();
}
// Rounded alone: no product and sum become one instruction.
static float __fmul_rn(float x, float y) { return x * y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static int __ffsll(long long x) { return __builtin_ffsll(x); }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static void __threadfence() {}
static void __syncwarp() { barrier(-7); }
template <class T> static T atomicMax(T *place, T x) {
  const T before = *place;
  return *place = before > x ? before : x, before;
}
template <class T> static T atomicAdd(T *place, T x) {
  const T before = *place;
  *place = (T)(before + x);
  return before;
}
template <class T> static T atomicCAS(T *place, T wanted, T x) {
  const T before = *place;
  if (before == wanted) *place = x;
  return before;
}
static unsigned add_after_writes(unsigned *counter, unsigned x) { return atomicAdd(counter, x); }
static void wait_for_blocks(unsigned *counter, unsigned blocks, bool is_first) {
  if (threadIdx.x == 0) counter[1] += is_first ? 0x80000001u - blocks : 1u;
  barrier(AT_BLOCKS);
  if (counter[1] << 1) unexpected = "no first block of those that wait, or several";
}
static void cluster_begins(unsigned long long *mbarrier, unsigned nbytes) { *mbarrier = nbytes; }
static void cluster_is_there() { barrier(AT_BLOCKS); }
template <class T> static T *of_peer(T *p, unsigned rank) {
  if (rank >= together) {
    unexpected = "sent to a peer that is not there";
    rank = 0;
  }
  return (T *)((char *)p + ((long)rank - (long)(blockIdx.x - first_block)) * (long)resident_bytes);
}
template <class Numbers> static void send(float *to, const Numbers &x, unsigned long long *mbarrier, unsigned rank) {
  misaligned |= (size_t)to % (sizeof(x) < 16 ? sizeof(x) : 16) != 0;
  memcpy(of_peer(to, rank), &x, sizeof(x));
  *of_peer(mbarrier, rank) -= sizeof(x);
}
static void wait_for_peers(unsigned long long *mbarrier) {
  barrier(AT_BLOCKS);
  if (*mbarrier) unexpected = "peers have sent more or fewer bytes than the receiver expects";
}
static void pin(float &) {}
static void pin(double &) {}
static void pin(int &) {}
// What each thread of the warp passed, six words a thread: two buffers in turn, so that one barrier is enough.
static unsigned words[2][MOST][6];
static int turn[MOST];
static const unsigned *words_of_warp(const unsigned (&mine)[6]) {
  unsigned self = fiber(), now = turn[self]++ & 1;
  memcpy(words[now][self], mine, sizeof(mine));
  barrier(-4);
  return words[now][self / 32 * 32];
}
static bool any_of_warp(bool x) {
  slots[threadIdx.x] = x;
  barrier(-5);
  bool any = false;
  for (unsigned t = threadIdx.x / 32 * 32, end = t + 32; t < end; ++t) any |= slots[t];
  barrier(-6);
  return any;
}
static void enter() {
  for (;;) {
    body(closure);
    unsigned own = fiber();
    at[own] = -1;
    if (!_setjmp(fibers[own])) _longjmp(scheduler, 1);
  }
}
// Go on with a fiber until it waits or ends.
static void resume(unsigned t) {
  if (_setjmp(scheduler)) return;
  if (begun[t]) _longjmp(fibers[t], 1);
  begun[t] = true;
  ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = stacks + (size_t)STACK * t;
  fresh.uc_stack.ss_size = STACK;
  fresh.uc_link = 0;
  makecontext(&fresh, enter, 0);
  setcontext(&fresh);
}
template <class F> static void call(void *f) { (*(F *)f)(); }

// All threads of a warp go on to their next barrier.
static void run_warp(unsigned block, unsigned first) {
  for (unsigned t = first; t < first + 32; ++t) {
    threadIdx.x = t;
    blockIdx.x = first_block + block;
    resume(block * width + t);
  }
}
static bool apart(const int *own, unsigned from, unsigned to) {
  for (unsigned t = from; t < to; ++t)
    if (own[t] != own[from]) return true;
  return false;
}

// Tell if a thread of a block waits at a line, or with `is` false, if one does not.
static bool has(const int *own, unsigned block, int line, bool is) {
  for (unsigned t = 0; t < block; ++t)
    if ((own[t] == line) == is) return true;
  return false;
}

// Denormals are zeros, as in kernels that CuPy compiles: it passes -ftz=true to NVRTC.
struct FlushDenormals {
#ifdef __SSE2__
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
#endif
};
template <class F>
static const char *run_blocks(unsigned grid, unsigned block, int waits, int cluster, size_t kept_bytes, F f) {
  FlushDenormals flush;
  body = call<F>;
  closure = &f;
  misaligned = 0, unexpected = 0;
  width = block;
  if (waits && block % 32) return "a block of no whole warps";
  together = cluster ? cluster : 1;
  if (grid % together) return "a cluster without all its blocks";
  if ((size_t)together * block > MOST) return "too many threads at once";
  if (waits && !stacks) stacks = (char *)malloc((size_t)STACK * MOST);
  const size_t used_bytes = (kept_bytes + 15) / 16 * 16;
  resident_bytes = (kept_bytes + 1023) / 1024 * 1024;
  resident = (char *)aligned_alloc(1024, resident_bytes * together + 1024);
  memset(resident, 0xA5, resident_bytes * together + 16);
  const char *problem = 0;
  for (first_block = 0; first_block < grid && !problem; first_block += together) {
    if (!waits) {
      blockIdx.x = first_block;
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) f();
      continue;
    }
    for (unsigned t = 0; t < together * block; ++t) {
      at[t] = turn[t] = 0;
      copies[t].clear();
      products[t].clear();
    }
    unsigned idle = 0;  // sweeps in which nobody did what others look for
    for (int going = 1; going && !problem;) {
      going = 0;
      const unsigned long long then = progress;
      bool polls = has(at, together * block, POLLS, true);
      for (unsigned b = 0; b < together && !problem; ++b) {
        int *own = at + b * block;
        if (polls && own[0] == AT_BLOCKS && !apart(own, 0, block)) {  // other blocks are not there yet
          going = 1;
          continue;
        }
        while (has(own, block, -1, false) && !problem) {
          const unsigned long long before = progress;
          bool polled = has(own, block, POLLS, true);  // then the other warps wait for those that poll, or have ended
          for (unsigned t = 0; t < block && !problem; t += 32) {
            if (polled && own[t] != POLLS) continue;
            do run_warp(b, t);
            while (own[t] < -1 && own[t] != AT_BLOCKS && own[t] != POLLS && !apart(own, t, t + 32));  // for its own threads only
            if (apart(own, t, t + 32)) problem = "threads of a warp wait at different barriers";
          }
          if (has(own, block, POLLS, true)) {
            if (progress == before && polled) break;  // the other blocks go on
            continue;
          }
          if (!problem && apart(own, 0, block)) problem = "threads of a block wait at different barriers";
          if (own[0] == AT_BLOCKS) break;
        }
        going |= has(own, block, -1, false);
      }
      idle = progress == then ? idle + 1 : 0;
      if (polls && idle > 16 && !problem) problem = "warps wait for each other forever";
    }
  }
  if (problem) memset(begun, 0, sizeof(begun));  // some wait amid a body for good
  for (size_t i = 0; i < 16; ++i)
    if ((unsigned char)resident[resident_bytes * (together - 1) + used_bytes + i] != 0xA5) problem = "written behind what a block keeps";
  free(resident);
  if (!problem) problem = unexpected;
  return problem ? problem : misaligned ? "a wide access at an address it does not divide" : 0;
}
