// Runs CUDA C on the CPU: blocks one after the other, the threads of a block as fibers that take turns at barriers.
#define FUSEC_EMULATED
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#define __global__
#define __launch_bounds__(n)
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
#define ALIGNED(p, n) (misaligned |= (size_t)(p) % (n) != 0)
template <class... Words> static void store_words(void *p, Words... words) {
  unsigned all[] = {words...};
  misaligned |= (size_t)p % sizeof(all) != 0;
  memcpy(p, all, sizeof(all));
}

enum { STACK = 1 << 16, MOST = 1024 };
static ucontext_t scheduler, fibers[MOST];
static char *stacks;
static int at[MOST];  // the line of the barrier a thread waits at; -1: it has finished
static unsigned long long slots[MOST];
static void (*body)(void *);
static void *closure;

static void barrier(int line) {
  unsigned self = threadIdx.x;
  at[self] = line;
  swapcontext(&fibers[self], &scheduler);
  threadIdx.x = self;
}
#define __syncthreads() barrier(__LINE__)
template <class T> static T __shfl_xor_sync(unsigned mask, T x, int lane) {
  unsigned self = threadIdx.x;
  memcpy(&slots[self], &x, sizeof(T));
  barrier(-2);
  T y;
  memcpy(&y, &slots[self ^ lane], sizeof(T));
  barrier(-3);
  return y;
}
template <class T> static T __shfl_sync(unsigned mask, T x, int lane) {
  unsigned self = threadIdx.x;
  memcpy(&slots[self], &x, sizeof(T));
  barrier(-2);
  T y;
  memcpy(&y, &slots[self / 32 * 32 + lane], sizeof(T));
  barrier(-3);
  return y;
}
static void enter() {
  body(closure);
  at[threadIdx.x] = -1;
}
template <class F> static void call(void *f) { (*(F *)f)(); }

template <class F> static const char *run_blocks(unsigned grid, unsigned block, int meets, F f) {
  body = call<F>;
  closure = &f;
  misaligned = 0;
  if (meets && block % 32) return "a block of no whole warps";
  if (meets && !stacks) stacks = (char *)malloc((size_t)STACK * MOST);
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    if (!meets) {
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) f();
      continue;
    }
    for (unsigned t = 0; t < block; ++t) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks + (size_t)STACK * t;
      fibers[t].uc_stack.ss_size = STACK;
      fibers[t].uc_link = &scheduler;
      makecontext(&fibers[t], enter, 0);
      at[t] = 0;
    }
    while (at[0] != -1) {
      for (unsigned t = 0; t < block; ++t) {
        threadIdx.x = t;
        swapcontext(&scheduler, &fibers[t]);
        if (at[t] != at[0]) return "threads of a block wait at different barriers";
      }
    }
  }
  return misaligned ? "a wide access at an address it does not divide" : 0;
}
