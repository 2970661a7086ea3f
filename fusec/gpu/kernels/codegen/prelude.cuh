// The beginning of every kernel: types, conversions, and arithmetic that means what the reference means. It includes no
// header, so NVRTC needs none. With FUSEC_EMULATED defined, a C++ compiler builds it for the CPU.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 { u16 bits; enum { is_brain = 0 }; };
struct bf16 { u16 bits; enum { is_brain = 1 }; };

#ifndef FUSEC_EMULATED
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define ALIGNED(p, n)
#define GLOBAL(p)
#define TABLE static __device__ const
#define INFINITE __int_as_float(0x7f800000)
DEVICE float bits_to_f32(u32 b) { return __uint_as_float(b); }
DEVICE u32 f32_to_bits(float x) { return __float_as_uint(x); }
DEVICE float f16_to_f32(u16 h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
DEVICE u16 f32_to_f16(float x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
DEVICE u16 f64_to_f16(double x) { u16 h; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h) : "d"(x)); return h; }
// There is no "memory" clobber, so that the compiler may move later loads before these stores. No kernel reads what it
// stored by them.
DEVICE void store_words(void* p, u32 a, u32 b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b));
}
DEVICE void store_words(void* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d));
}
// Dynamic shared memory of a block; its launch gives the size.
#define RESIDENT(name) extern __shared__ __align__(16) u8 name[]
// Asynchronous copies of N bytes to shared memory; `copy_or_zeros_ahead` copies 16 bytes, or stores zeros. `copied`
// ends a group of copies. `wait_for_copies<LEFT>` waits for the thread's own copies, except those of its last LEFT
// groups. Before sm_80, copies are synchronous.
#if __CUDA_ARCH__ >= 800
template <int N> DEVICE void copy_ahead(void* to, const void* from) {
  const u32 place = (u32)__cvta_generic_to_shared(to);
  if constexpr (N == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(N) : "memory");
  }
}
DEVICE void copy_or_zeros_ahead(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
DEVICE void copied() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#else
template <int N> DEVICE void copy_ahead(void* to, const void* from) {
  struct __align__(N) Piece { u8 bytes[N]; };
  *(Piece*)to = *(const Piece*)from;
}
DEVICE void copy_or_zeros_ahead(void* to, const void* from, bool is_there) {
  struct __align__(16) Piece { u32 words[4]; };
  *(Piece*)to = is_there ? *(const Piece*)from : Piece();
}
DEVICE void copied() {}
template <int LEFT> DEVICE void wait_for_copies() {}
#endif
// Add to a counter once all that the block has written can be read by other blocks, and return what it was before.
DEVICE u32 add_after_writes(u32* counter, u32 x) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}
// A barrier of `blocks` blocks, which must all run at the same time; `is_first` is true for one of them. The number after
// `counter` counts arrivals. The first block flips the highest bit of the sum, whose other bits are 0 again. After the
// barrier all may read (by `load_fresh`) what any of them wrote before it.
DEVICE void wait_for_blocks(u32* counter, u32 blocks, bool is_first) {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 now;
    const u32 before = add_after_writes(counter + 1, is_first ? 0x80000001u - blocks : 1u);
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter + 1) : "memory");
    } while ((now ^ before) < 0x80000000u);
  }
  __syncthreads();
}
// Hold a number in a register, so that the compiler does not load it again: its source may change from here on.
DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void pin(double& x) { asm volatile("" : "+d"(x)::"memory"); }
DEVICE void pin(i32& x) { asm volatile("" : "+r"(x)::"memory"); }
DEVICE void pin(u32& x) { asm volatile("" : "+r"(x)::"memory"); }
DEVICE void pin(f16& x) { asm volatile("" : "+h"(x.bits)::"memory"); }
DEVICE void pin(bf16& x) { asm volatile("" : "+h"(x.bits)::"memory"); }
#endif
template <class T> DEVICE void pin(T& x) {}

#ifdef FUSEC_EMULATED
DEVICE float quick_exp(float x) { return exp(x); }
DEVICE float quick_div(float x, float y) { return x / y; }
#else
DEVICE float quick_exp(float x) { return __expf(x); }
DEVICE float quick_div(float x, float y) { return __fdividef(x, y); }
#endif

#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 890
#define CONVERTS_TO_E4M3
DEVICE u8 f32_to_e4m3(float x) {  // saturates at 448; the second operand is the lower half
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return (u8)pair;
}
#endif
DEVICE u16 f32_to_bf16(float x) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  u32 b = f32_to_bits(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return (u16)((b >> 16) | 0x40u);
  return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
#endif
}

// The type that a stored element is computed in.
template <class T> struct Compute { typedef T type; };
template <> struct Compute<f16> { typedef float type; };
template <> struct Compute<bf16> { typedef float type; };

template <class T> DEVICE T wide(T x) { return x; }
DEVICE float wide(f16 x) { return f16_to_f32(x.bits); }
DEVICE float wide(bf16 x) { return bits_to_f32((u32)x.bits << 16); }

template <class T> struct Narrow {
  static DEVICE_MEMBER T from(T x) { return x; }
};
template <> struct Narrow<f16> {
  static DEVICE_MEMBER f16 from(float x) { f16 r; r.bits = f32_to_f16(x); return r; }
  static DEVICE_MEMBER f16 from(double x) { f16 r; r.bits = f64_to_f16(x); return r; }
};
template <> struct Narrow<bf16> {
  static DEVICE_MEMBER bf16 from(float x) { bf16 r; r.bits = f32_to_bf16(x); return r; }
};
template <class T, class C> DEVICE T narrow(C x) { return Narrow<T>::from(x); }
// Round a number as storing it would.
template <class T, class C> DEVICE typename Compute<T>::type rounded(C x) { return wide(narrow<T>(x)); }

DEVICE u16 element_bits(f16 x) { return x.bits; }
DEVICE u16 element_bits(bf16 x) { return x.bits; }
DEVICE u16 element_bits(i16 x) { return (u16)x; }
DEVICE u16 element_bits(u16 x) { return x; }
DEVICE u8 element_bits(i8 x) { return (u8)x; }
DEVICE u8 element_bits(u8 x) { return x; }
DEVICE u8 element_bits(bool x) { return x; }

// N neighbouring elements, which one instruction moves, or several of 16 bytes.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T v[N]; };
template <class T, int N> DEVICE Pack<T, N> load_pack(const T* p) {
  ALIGNED(p, alignof(Pack<T, N>));
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
// Load 16 bytes here and not later, from memory that nothing changes.
DEVICE void load_words(u32 (&x)[4], const void* p) {
#ifdef FUSEC_EMULATED
  ALIGNED(p, 16), GLOBAL(p);
  for (int i = 0; i < 4; ++i) x[i] = ((const u32*)p)[i];
#else
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p) : "memory");
#endif
}
// Load 16 bytes here and not later, from memory that this thread may overwrite afterwards.
template <class T, int N> DEVICE Pack<T, N> load_pack_here(const T* p) {
#ifndef FUSEC_EMULATED
  if constexpr (sizeof(Pack<T, N>) == 16) {
    union { Pack<T, N> pack; u32 words[4]; } x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3]) : "l"(p));
    return x.pack;
  }
#endif
  return load_pack<T, N>(p);
}
// Load a pack from memory that nothing changes, or give zeros. It is written in assembly, because the compiler merges each
// element with zero, or branches, and then loads of several packs wait for each other.
template <class T, int N> DEVICE Pack<T, N> load_pack_or_zeros(const T* p, bool is_there) {
#ifndef FUSEC_EMULATED
  union { Pack<T, N> pack; u32 words[4]; u16 half; } x;
  if constexpr (sizeof(x.pack) == 16) {
    asm("{.reg .pred there; setp.ne.u32 there, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
        "@there ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(x.words[0]), "=&r"(x.words[1]), "=&r"(x.words[2]), "=&r"(x.words[3]) : "l"(p), "r"((u32)is_there));
    return x.pack;
  } else if constexpr (sizeof(x.pack) == 8) {
    asm("{.reg .pred there; setp.ne.u32 there, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;"
        "@there ld.global.v2.u32 {%0, %1}, [%2];}" : "=&r"(x.words[0]), "=&r"(x.words[1]) : "l"(p), "r"((u32)is_there));
    return x.pack;
  } else if constexpr (sizeof(x.pack) == 4) {
    asm("{.reg .pred there; setp.ne.u32 there, %2, 0; mov.u32 %0, 0; @there ld.global.u32 %0, [%1];}"
        : "=&r"(x.words[0]) : "l"(p), "r"((u32)is_there));
    return x.pack;
  } else if constexpr (sizeof(x.pack) == 2) {
    asm("{.reg .pred there; setp.ne.u32 there, %2, 0; mov.u16 %0, 0; @there ld.global.u16 %0, [%1];}"
        : "=&h"(x.half) : "l"(p), "r"((u32)is_there));
    return x.pack;
  }
#endif
  return is_there ? load_pack<T, N>(p) : Pack<T, N>();
}
// Store by instructions of 16 bytes, written in assembly, because the compiler splits some stores.
template <class T, int N> DEVICE u32 word_of(const Pack<T, N>& x, int i) {
  u32 word = 0;
  if constexpr (sizeof(T) < 4) {
    for (int k = 0; k < 4 / (int)sizeof(T); ++k)
      word |= (u32)element_bits(x.v[i * (4 / sizeof(T)) + k]) << (8 * sizeof(T) * k);
    return word;
  } else {
    return reinterpret_cast<const u32*>(&x)[i];
  }
}
template <class T, int N> DEVICE void store_pack(T* p, const Pack<T, N>& x) {
  constexpr int nbytes = N * sizeof(T);
  if constexpr (nbytes % 16 == 0) {
    for (int i = 0; i < nbytes / 16; ++i) {
      store_words((char*)p + 16 * i, word_of(x, 4 * i), word_of(x, 4 * i + 1), word_of(x, 4 * i + 2),
                  word_of(x, 4 * i + 3));
    }
  } else if constexpr (nbytes == 8) {
    store_words(p, word_of(x, 0), word_of(x, 1));
  } else if constexpr (nbytes == 4) {
    *reinterpret_cast<u32*>(p) = word_of(x, 0);
  } else {
    *reinterpret_cast<Pack<T, N>*>(p) = x;
  }
}

enum { COUNTER_STRIDE = 32 };  // distance of barrier counters, in numbers of 32 bits, so that no two share a cache line
// Read what another block wrote before a barrier of blocks. A load from this block's own cache could be old.
template <class T> DEVICE T load_fresh(const T* p) { return *(const volatile T*)p; }

template <int N> DEVICE Pack<float, N> load_fresh(const Pack<float, N>* p) {
  Pack<float, N> x;
#ifdef FUSEC_EMULATED
  x = *p;
#else
  if constexpr (N == 2) {
    asm volatile("ld.volatile.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.v[0]), "=f"(x.v[1]) : "l"(p->v) : "memory");
  } else {
    for (int i = 0; i < N; i += 4)
      asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.v[i]), "=f"(x.v[i + 1]), "=f"(x.v[i + 2]), "=f"(x.v[i + 3]) : "l"(p->v + i) : "memory");
  }
#endif
  return x;
}

// Words that blocks of a cooperative launch send each other. Each word has a number other than that of the word before
// it, so that the receiver needs no barrier. One instruction of 8 bytes stores both, so that no thread sees half of
// them. `receive` reads two words. In the emulator all blocks send before any receives, because blocks take turns
// there.
#ifdef FUSEC_EMULATED
DEVICE void all_have_sent() { barrier(AT_BLOCKS); }
DEVICE void send_word(u64* to, u32 word, u32 number) { *to = (u64)number << 32 | word; }
DEVICE void receive(u32 (&x)[4], const u64* from) {
  ALIGNED(from, 16);
  memcpy(x, from, sizeof(x));
}
DEVICE bool is_sent(u32 number, u32 wanted) {
  if (number != wanted) unexpected = "a word that was not sent in time";
  return true;
}
#else
DEVICE void all_have_sent() {}
DEVICE void send_word(u64* to, u32 word, u32 number) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word), "r"(number) : "memory");
}
DEVICE void receive(u32 (&x)[4], const u64* from) {
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from) : "memory");
}
DEVICE bool is_sent(u32 number, u32 wanted) { return number == wanted; }
#endif

// Blocks of a cluster (Hopper and later) send each other numbers. Each has an mbarrier at the same place of
// its shared memory, which expects a number of bytes from all blocks, its own included. Blocks send when all of them have
// begun.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 900
DEVICE u32 shared_place(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void cluster_begins(u64* mbarrier, u32 nbytes) {
  if (threadIdx.x == 0) {
    const u32 place = shared_place(mbarrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(nbytes) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_is_there() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <int N> DEVICE void send(float* to, const Pack<float, N>& x, u64* mbarrier, u32 rank) {
  u32 there, its_mbarrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_place(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_mbarrier) : "r"(shared_place(mbarrier)), "r"(rank));
  if constexpr (N == 2) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(there), "f"(x.v[0]), "f"(x.v[1]), "r"(its_mbarrier) : "memory");
  } else {
    for (int i = 0; i < N; i += 4)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                   ::"r"(there + 4 * i), "f"(x.v[i]), "f"(x.v[i + 1]), "f"(x.v[i + 2]), "f"(x.v[i + 3]), "r"(its_mbarrier)
                   : "memory");
  }
}
DEVICE void wait_for_peers(u64* mbarrier) {
  u32 here = 0;
  while (!here)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; "
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(here) : "r"(shared_place(mbarrier)) : "memory");
}
#endif

// Dependent launches (Hopper and later). After `wait_for_launches`, what the launches before wrote can be read, and
// what they read may be overwritten. `next_may_begin` lets the next launch begin.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 900
DEVICE void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void next_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_launches() {}
DEVICE void next_may_begin() {}
#endif

// Hide from the compiler what a pointer points to, so that no load through it moves before this place.
template <class T> DEVICE T* from_here(T* p) {
#ifndef FUSEC_EMULATED
  asm volatile("" : "+l"(p)::"memory");
#endif
  return p;
}

// The number, but unknown to ptxas, which then keeps it in a register: an instruction has one constant operand at most. The
// first bit of an address is zero.
DEVICE u32 in_register(u32 x, const void* p) { return x - (u32)((u64)p >> 63); }

// Count a block, and tell if it is the last of `blocks`, which may read (by `load_fresh`) what the others wrote.
DEVICE bool last_of(u32* counter, u32 blocks) {
  __shared__ u32 before;
  __syncthreads();
  if (threadIdx.x == 0) {
    before = add_after_writes(counter, 1u);
    if (before == blocks - 1u) *(volatile u32*)counter = 0u;
  }
  __syncthreads();
  return before == blocks - 1u;
}

// NaN wins, as in NumPy's maximum and minimum.
template <class T> DEVICE T nmax(T x, T y) { return x > y || x != x ? x : y; }
template <class T> DEVICE T nmin(T x, T y) { return x < y || x != x ? x : y; }
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
DEVICE float nmax(float x, float y) { float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
DEVICE float nmin(float x, float y) { float z; asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
#endif
template <class T> DEVICE T clipped(T x, T low, T high) { return nmin(nmax(x, low), high); }
// The nearest whole number between limits, even for a tie, and 0 for NaN: 3 * 2^22 + x has no bits for a fraction.
template <class T> DEVICE T whole_number(float x, float low, float high) {
  const float sum = (x < low ? low : x > high ? high : x) + 12582912.0f;
  return x == x ? (T)f32_to_bits(sum) : T(0);
}
template <class T> DEVICE T square(T x) { return x * x; }
// Subtract y, which is larger than x only by rounding; the result is not negative, and NaN stays NaN.
template <class T> DEVICE T less(T x, T y) { return x - y < T(0) ? T(0) : x - y; }
template <class T> DEVICE T sign(T x) { return x != x ? x : T((x > T(0)) - (x < T(0))); }

template <class T> DEVICE T sigmoid(T x) { T z = exp(-fabs(x)); return (x >= T(0) ? T(1) : z) / (T(1) + z); }
template <class T> DEVICE T softplus(T x) { return nmax(x, T(0)) + log1p(exp(-fabs(x))); }
template <class T> DEVICE T gelu_cdf(T x) { return T(0.5) * erfc(x * T(-0.70710678118654752440)); }
template <class T> DEVICE T gelu_tanh_cdf(T x) {
  return sigmoid(T(1.59576912160573071176) * (x + T(0.044715) * x * x * x));
}
template <class T> DEVICE T elu(T x, T alpha) { return x > T(0) ? x : alpha * expm1(nmin(x, T(0))); }
template <class T> DEVICE T celu(T x, T alpha) {
  return nmax(x, T(0)) + nmin(T(0), alpha * expm1(nmin(x, T(0)) / alpha));
}
template <class T> DEVICE T gelu_gradient(T dy, T x) {
  x = clipped(x, T(-40), T(40));
  return dy * (gelu_cdf(x) + x * exp(T(-0.5) * x * x) * T(0.39894228040143267794));
}
template <class T> DEVICE T gelu_tanh_gradient(T dy, T x) {
  x = clipped(x, T(-40), T(40));
  T slope = T(1.59576912160573071176) * (T(1) + T(0.134145) * x * x);
  return dy * gelu_tanh_cdf(x) * (T(1) + x * slope * gelu_tanh_cdf(-x));
}
template <class T> DEVICE T swish_gradient(T dy, T x, T beta) {
  T z = clipped(beta * x, T(-800), T(800));
  return dy * sigmoid(z) * (T(1) + z * sigmoid(-z));
}

// For results that are rounded to 16 bits. An exponential below the normal numbers changes no bit of 1 + exp(x).
// Powers of two and reciprocals, to about as many digits as 16 bits have.
#ifdef FUSEC_EMULATED
DEVICE float quick_exp2(float x) { return exp2f(x); }
DEVICE float quick_reciprocal(float x) { return 1.0f / x; }
#else
DEVICE float quick_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float quick_reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif
#if defined(FUSEC_EMULATED)
DEVICE float hardware_tanh(float x) { return tanhf(x); }
#elif __CUDA_ARCH__ >= 750
DEVICE float hardware_tanh(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#else
DEVICE float hardware_tanh(float x) { return tanh(x); }
#endif
DEVICE float quick_sigmoid(float x) { return quick_reciprocal(1.0f + quick_exp2(x * -1.4426950408889634f)); }
DEVICE float quick_tanh(float x) { return 2.0f * quick_sigmoid(2.0f * x) - 1.0f; }
// The tail of the normal distribution from z >= 0 on, divided by exp(-z z / 2): a polynomial of 1 / (1 + 0.28 z), fitted by
// least squares to a relative error of 4e-6 everywhere.
DEVICE float quick_tail(float z) {
  float t = quick_reciprocal(1.0f + 0.28f * z), p = -0.0502312505f;
  p = p * t + 0.1054435459f;
  p = p * t + 0.0249494871f;
  p = p * t + 0.0944561471f;
  p = p * t + 0.1019357231f;
  p = p * t + 0.1117406616f;
  p = p * t + 0.1117038446f;
  return p * t;
}
DEVICE float quick_bell(float z) { return quick_exp2(z * z * -0.72134752044448170368f); }  // exp(-z z / 2)
DEVICE float quick_gelu_cdf(float x) {
  float z = fabs(x), tail = quick_tail(z) * quick_bell(z);
  return x < 0.0f ? tail : 1.0f - tail;
}
DEVICE float quick_gelu_tanh_cdf(float x) {
  return quick_sigmoid(1.59576912160573071176f * (x + 0.044715f * x * x * x));
}
// gelu that is rounded to 8 bits afterwards: x / 2 (1 + tanh(x p(x x))), with a polynomial p that is off by 2.5e-5 at most.
// The GPU's own tanh has 11 bits. From 8 on, where tanh is 1, p stays as it is.
DEVICE float gelu_for_bytes(float x) {
  const float half = 0.5f * x, square = x * x < 64.0f ? x * x : 64.0f;
  return half + half * hardware_tanh(x * (0.79750784f + square * (0.037005684f - 0.00035152268f * square)));
}
DEVICE float quick_tanh_softplus(float x) {
  float e = quick_exp(x < 20.0f ? x : 20.0f), n = e * (e + 2.0f);
  return x != x ? x : quick_div(n, n + 2.0f);
}
DEVICE float quick_gelu_gradient(float dy, float x) {
  float z = nmin(fabs(x), 40.0f);
  float below = quick_bell(z) * (quick_tail(z) - z * 0.39894228040143267794f);  // the derivative at -z
  return dy * (x < 0.0f ? below : 1.0f - below);
}
DEVICE float quick_gelu_tanh_gradient(float dy, float x) {
  x = clipped(x, -40.0f, 40.0f);
  float slope = 1.59576912160573071176f * (1.0f + 0.134145f * x * x);
  return dy * quick_gelu_tanh_cdf(x) * (1.0f + x * slope * quick_gelu_tanh_cdf(-x));
}
DEVICE float quick_swish_gradient(float dy, float x, float beta) {
  float z = clipped(beta * x, -800.0f, 800.0f);
  return dy * quick_sigmoid(z) * (1.0f + z * quick_sigmoid(-z));
}
template <class T> DEVICE T float_floor_mod(T x, T y) {
  T r = fmod(x, y);
  if (r == T(0)) return copysign(T(0), y);
  return (y < T(0)) != (r < T(0)) ? r + y : r;
}

// Integers wrap around, and a division by zero gives zero, as in NumPy.
template <class T> DEVICE T wrap_add(T x, T y) { return (T)((u64)x + (u64)y); }
template <class T> DEVICE T wrap_sub(T x, T y) { return (T)((u64)x - (u64)y); }
template <class T> DEVICE T wrap_mul(T x, T y) { return (T)((u64)x * (u64)y); }
template <class T> DEVICE T wrap_neg(T x) { return (T)(0ull - (u64)x); }
template <class T> DEVICE T wrap_abs(T x) { return x < T(0) ? wrap_neg(x) : x; }
template <class T> struct Signed { static constexpr bool value = T(-1) < T(0); };
template <class T> DEVICE T int_div(T x, T y) {
  if (y == T(0)) return T(0);
  if (Signed<T>::value && y == T(-1)) return wrap_neg(x);
  return (T)(x / y);
}
template <class T> DEVICE T int_mod(T x, T y) {
  if (y == T(0) || (Signed<T>::value && y == T(-1))) return T(0);
  return (T)(x % y);
}
template <class T> DEVICE T int_floor_mod(T x, T y) {
  T r = int_mod(x, y);
  return r != T(0) && (r < T(0)) != (y < T(0)) ? (T)(r + y) : r;
}
template <class T> DEVICE T int_pow(T x, T y) {
  if (Signed<T>::value && y < T(0)) {
    if (x == T(1)) return x;
    if (x == T(-1)) return (y & T(1)) ? x : T(1);
    return T(0);
  }
  u64 result = 1, base = (u64)x;
  for (u64 n = (u64)y; n; n >>= 1, base *= base)
    if (n & 1) result *= base;
  return (T)result;
}
template <class T> DEVICE T shift_left(T x, T y) {
  return y < T(0) || (u64)y >= 8 * sizeof(T) ? T(0) : (T)((u64)x << (u64)y);
}
template <class T> DEVICE T shift_right(T x, T y) {
  if (y < T(0) || (u64)y >= 8 * sizeof(T)) return x < T(0) ? T(-1) : T(0);
  return (T)(x >> y);
}

// Reductions of W numbers of each thread, over T threads of a block of B, which are STEP apart. All threads take part.
struct Add {
  template <class T> DEVICE_MEMBER T operator()(T x, T y) const { return x + y; }
  DEVICE_MEMBER i64 operator()(i64 x, i64 y) const { return wrap_add(x, y); }
  DEVICE_MEMBER i32 operator()(i32 x, i32 y) const { return wrap_add(x, y); }
};
struct Multiply {
  template <class T> DEVICE_MEMBER T operator()(T x, T y) const { return x * y; }
  DEVICE_MEMBER i64 operator()(i64 x, i64 y) const { return wrap_mul(x, y); }
  DEVICE_MEMBER i32 operator()(i32 x, i32 y) const { return wrap_mul(x, y); }
};
struct Largest {
  template <class T> DEVICE_MEMBER T operator()(T x, T y) const { return nmax(x, y); }
};
struct Smallest {
  template <class T> DEVICE_MEMBER T operator()(T x, T y) const { return nmin(x, y); }
};
template <int B, int T, int STEP, int W, class F, class Op>
DEVICE void reduce_threads(F (&x)[W], F* shared, Op op) {
  if (T == 1) return;
  if (T <= 32 && STEP == 1) {
    for (int s = T / 2; s > 0; s /= 2)
      for (int w = 0; w < W; ++w) x[w] = op(x[w], __shfl_xor_sync(0xffffffffu, x[w], s));
    return;
  }
  const int i = threadIdx.x, t = i / STEP % T;
  if (STEP == 1) {  // within warps first, then one number of each warp
    for (int w = 0; w < W; ++w) {
      for (int s = 16; s > 0; s /= 2) x[w] = op(x[w], __shfl_xor_sync(0xffffffffu, x[w], s));
      if (i % 32 == 0) shared[w * B + i / 32] = x[w];
    }
    __syncthreads();
    for (int w = 0; w < W; ++w) {
      x[w] = shared[w * B + (i - t) / 32];
      for (int s = 1; s < T / 32; ++s) x[w] = op(x[w], shared[w * B + (i - t) / 32 + s]);
    }
    __syncthreads();
    return;
  }
  if constexpr (W == 1 && STEP < 32 && T * STEP > 32 && (T & T - 1) == 0 && (STEP & STEP - 1) == 0) {
    constexpr int WARPS = T * STEP / 32;  // as above, for numbers that are STEP threads apart
    for (int s = 16; s >= STEP; s /= 2) x[0] = op(x[0], __shfl_xor_sync(0xffffffffu, x[0], s));
    if (i % 32 < STEP) shared[i / 32 * STEP + i % STEP] = x[0];
    __syncthreads();
    const F* mine = shared + i / 32 / WARPS * WARPS * STEP + i % STEP;
    x[0] = mine[0];
    for (int s = 1; s < WARPS; ++s) x[0] = op(x[0], mine[s * STEP]);
    __syncthreads();
    return;
  }
  for (int w = 0; w < W; ++w) shared[w * B + i] = x[w];
  __syncthreads();
  for (int s = T / 2; s > 0; s /= 2) {
    if (t < s)
      for (int w = 0; w < W; ++w) shared[w * B + i] = op(shared[w * B + i], shared[w * B + i + s * STEP]);
    __syncthreads();
  }
  for (int w = 0; w < W; ++w) x[w] = shared[w * B + i - t * STEP];
  __syncthreads();
}

// Multiply tiles in a warp: d[16][8] += a[16][16] b[16][8], with sums in fp32. Thread 4g + t holds d[g][2t, 2t + 1] and
// those of row g + 8. Its words of a are the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), and those of b
// the pairs (2t, g), (2t + 8, g). For i8, sums are i32, the depth is 32, and a word holds four numbers instead of two.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
#define FUSEC_PRODUCT(kind, number)                                                                                  \
  asm("mma.sync.aligned." kind " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
      : "+" number(d[0]), "+" number(d[1]), "+" number(d[2]), "+" number(d[3])                                       \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
template <class T> DEVICE void multiply_tile(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (T::is_brain) FUSEC_PRODUCT("m16n8k16.row.col.f32.bf16.bf16.f32", "f");
  else FUSEC_PRODUCT("m16n8k16.row.col.f32.f16.f16.f32", "f");
}
template <class T> DEVICE void multiply_tile(i32 (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  FUSEC_PRODUCT("m16n8k32.row.col.s32.s8.s8.s32", "r");
}
#undef FUSEC_PRODUCT
// The same for i8, with all sums beginning at `start`.
DEVICE void multiply_tile_onto(i32 start, i32 (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(start));
}
#else
#ifndef FUSEC_EMULATED
#define FROM(word, lane) __shfl_sync(0xffffffffu, word, lane)
#endif
template <class T> DEVICE float dot_words(float, u32 a, u32 b) {
  T a0, a1, b0, b1;
  a0.bits = (u16)a, a1.bits = (u16)(a >> 16), b0.bits = (u16)b, b1.bits = (u16)(b >> 16);
  return wide(a0) * wide(b0) + wide(a1) * wide(b1);
}
template <class T> DEVICE i32 dot_words(i32, u32 a, u32 b) {
  i32 sum = 0;
  for (int i = 0; i < 32; i += 8) sum += (i32)(T)(a >> i) * (i32)(T)(b >> i);
  return sum;
}
template <class T, class S> DEVICE void multiply_tile(S (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int g = threadIdx.x % 32u / 4u, t = threadIdx.x % 4u;
#ifdef FUSEC_EMULATED
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  const u32* all = words_of_warp(mine);
#define FROM(word, lane) all[(lane) * 6 + word##_place]
  enum { a0_place, a1_place, a2_place, a3_place, b0_place, b1_place };
#endif
  for (int k = 0; k < 4; ++k) {
    const u32 rows[2][2] = {{FROM(a0, g * 4 + k), FROM(a2, g * 4 + k)}, {FROM(a1, g * 4 + k), FROM(a3, g * 4 + k)}};
    for (int j = 0; j < 2; ++j) {
      const u32 low = FROM(b0, (t * 2 + j) * 4 + k), high = FROM(b1, (t * 2 + j) * 4 + k);
      for (int i = 0; i < 2; ++i)
        d[i * 2 + j] += dot_words<T>(d[0], rows[i][0], low) + dot_words<T>(d[0], rows[i][1], high);
    }
  }
}
#undef FROM
DEVICE void multiply_tile_onto(i32 start, i32 (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  for (int e = 0; e < 4; ++e) d[e] = start;
  multiply_tile<i8>(d, a0, a1, a2, a3, b0, b1);
}
#endif

// Load two or four tiles of 8 x 8 numbers of 16 bits from shared memory. Thread 8i + j gives the address of row j of
// tile i (16 bytes). Thread 4g + t gets (g, 2t) and (g, 2t + 1) of each tile; if TRANSPOSED, (2t, g) and (2t + 1, g).
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 750
template <bool TRANSPOSED> DEVICE void load_tiles(u32 (&x)[4], const void* row) {
  const u32 place = (u32)__cvta_generic_to_shared(row);
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(place) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(place) : "memory");
  }
}
template <bool TRANSPOSED> DEVICE void load_tiles(u32 (&x)[2], const void* row) {
  const u32 place = (u32)__cvta_generic_to_shared(row);
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1]) : "r"(place) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1]) : "r"(place) : "memory");
  }
}
#else
template <bool TRANSPOSED, int N> DEVICE void load_tiles(u32 (&x)[N], const void* row) {
  const int g = threadIdx.x % 32u / 4u, t = threadIdx.x % 4u;
  const u64 place = (u64)row;
#ifdef FUSEC_EMULATED
  const u32 mine[6] = {(u32)place, (u32)(place >> 32)};
  const u32* all = words_of_warp(mine);
#define FROM(lane) (all[(lane) * 6] | (u64)all[(lane) * 6 + 1] << 32)
#else
#define FROM(lane) __shfl_sync(0xffffffffu, place, lane)
#endif
  for (int i = 0; i < N; ++i) {
    const u16* rows[2] = {(const u16*)FROM(8 * i + (TRANSPOSED ? 2 * t : g)), (const u16*)FROM(8 * i + 2 * t + 1)};
    ALIGNED(rows[0], 16);
    x[i] = TRANSPOSED ? rows[0][g] | (u32)rows[1][g] << 16 : rows[0][2 * t] | (u32)rows[0][2 * t + 1] << 16;
  }
}
#undef FROM
#endif
// Multiply tiles of half the depth: the pairs (g, 2t) and (g + 8, 2t) of a, (2t, g) of b.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
#define FUSEC_PRODUCT(type)                                                                                           \
  asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                \
      : "r"(a0), "r"(a1), "r"(b0))
template <class T> DEVICE void multiply_half_tile(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  if constexpr (T::is_brain) FUSEC_PRODUCT("bf16");
  else FUSEC_PRODUCT("f16");
}
#undef FUSEC_PRODUCT
#else
template <class T> DEVICE void multiply_half_tile(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  multiply_tile<T>(d, a0, a1, 0u, 0u, b0, 0u);
}
#endif

// Return where swizzled memory with rows of WIDE bytes holds what plain memory has at `place`.
template <int WIDE> DEVICE u32 swizzled(u32 place) { return place ^ (place >> 7) % (WIDE / 16u) * 16u; }
// Asynchronous products of a warpgroup, which has four warps (Hopper). Each warp has its rows of a and its sums in
// registers. b is in shared memory, as tiles of 8 x 8. `group_begins` waits until registers are written, and
// `group_ends` ends a group of products. `wait_for_groups<LEFT>` waits for all groups but the last LEFT.
// `number_of_warp` comes from one lane, so that the compiler knows that it is the same in all lanes. It then computes
// the addresses of products once for a warp.
#if defined(FUSEC_EMULATED)
DEVICE u32 number_of_warp() { return threadIdx.x / 32u; }
DEVICE void group_begins() {}
DEVICE void seen_by_groups() {}
// A tile holds columns of b one after the other; if TRANSPOSED, rows. Tiles are `lead` bytes apart along the depth, and
// `stride` bytes along the columns.
template <class T, int N, bool TRANSPOSED>
DEVICE void multiply_tiles(float (*sums)[4], const u32 (&a)[4], const u8* b, u32 lead, u32 stride, int onto) {
  const u32 g = threadIdx.x % 32u / 4u, t = threadIdx.x % 4u;
  for (int n = 0; n < N; ++n) {
    u32 words[2];
    for (u32 i = 0; i < 2u; ++i) {
      const u16* tile = (const u16*)(b + i * lead + n * stride);
      ALIGNED(tile, 16);
      words[i] = TRANSPOSED ? tile[16 * t + g] | (u32)tile[16 * t + 8 + g] << 16 : ((const u32*)tile)[4 * g + t];
    }
    for (int e = 0; e < 4 && !onto; ++e) sums[n][e] = 0.0f;
    multiply_tile<T>(sums[n], a[0], a[1], a[2], a[3], words[0], words[1]);
  }
}
template <class T, int N, bool TRANSPOSED>
DEVICE void group_product(float (&d)[N][4], const u32 (&a)[4], const void* b, u32 lead, u32 stride, int onto) {
  float (*sums)[4] = d;
  const u32 a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
  group_does([=] {
    const u32 words[4] = {a0, a1, a2, a3};
    multiply_tiles<T, N, TRANSPOSED>(sums, words, (const u8*)b, lead, stride, onto);
  });
}
// The same where a is in shared memory, too, as tiles that hold its rows. Tiles are STRIDE bytes apart along rows, and 128
// along columns.
template <class T, int N, int STRIDE>
DEVICE void group_product_of_tiles(float (&d)[N][4], const void* a, u32 a_lead, const void* b, u32 b_lead, int onto) {
  float (*sums)[4] = d;
  group_does([=] {
    u32 words[4];
    for (u32 i = 0; i < 4u; ++i) {
      const u8* tile = (const u8*)a + i / 2u * a_lead + (threadIdx.x / 32u % 4u * 2u + i % 2u) * STRIDE;
      ALIGNED(tile, 16);
      words[i] = ((const u32*)tile)[threadIdx.x % 32u];
    }
    multiply_tiles<T, N, false>(sums, words, (const u8*)b, b_lead, 128u, onto);
  });
}
DEVICE u8* next_kilobyte(u8* p) { return p; }
// Rows of WIDE bytes in swizzled memory, from place `at` on.
template <int WIDE> struct SwizzledRows { const u8* memory; u32 at; };
template <int WIDE> DEVICE SwizzledRows<WIDE> rows_at(const void* memory) { return {(const u8*)memory, 0u}; }
template <int WIDE> DEVICE SwizzledRows<WIDE> later(SwizzledRows<WIDE> rows, u32 octets) {
  return {rows.memory, rows.at + octets * 16u};
}
template <int WIDE> DEVICE u32 word_of_row(SwizzledRows<WIDE> rows, u32 row, u32 octet, u32 word) {
  return ((const u32*)(rows.memory + swizzled<WIDE>(rows.at + row * WIDE + octet * 16u)))[word];
}
template <class T, int N, int WIDE, class S>
DEVICE void group_product_of_rows(S (&d)[N][4], SwizzledRows<WIDE> a, SwizzledRows<WIDE> b, int onto) {
  S (*sums)[4] = d;
  group_does([=] {
    const u32 warp = threadIdx.x / 32u % 4u, g = threadIdx.x % 32u / 4u, t = threadIdx.x % 4u;
    u32 words[4];
    for (u32 i = 0; i < 4u; ++i) words[i] = word_of_row(a, warp * 16u + i % 2u * 8u + g, i / 2u, t);
    for (int n = 0; n < N; ++n) {
      for (int e = 0; e < 4 && !onto; ++e) sums[n][e] = S(0);
      const u32 low = word_of_row(b, n * 8u + g, 0u, t), high = word_of_row(b, n * 8u + g, 1u, t);
      multiply_tile<T>(sums[n], words[0], words[1], words[2], words[3], low, high);
    }
  });
}
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE u32 number_of_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32u, 0); }
// Round a place in shared memory up to a multiple of 1024.
DEVICE u8* next_kilobyte(u8* p) { return p + (0u - (u32)__cvta_generic_to_shared(p)) % 1024u; }
// Rows of WIDE bytes in swizzled memory: the low half of a descriptor. `later` adds octets of bytes, 16 each.
template <int WIDE> struct SwizzledRows { u32 first; };
template <int WIDE> DEVICE SwizzledRows<WIDE> rows_at(const void* memory) {
  return {((u32)__cvta_generic_to_shared(memory) >> 4) | 1u << 16};
}
template <int WIDE> DEVICE SwizzledRows<WIDE> later(SwizzledRows<WIDE> rows, u32 octets) { return {rows.first + octets}; }
DEVICE void group_begins() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_ends() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Make this thread's writes to shared memory visible to products; a barrier follows.
DEVICE void seen_by_groups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE u64 group_tiles(const void* b, u32 lead, u32 stride) {
  return (u64)((u32)__cvta_generic_to_shared(b) >> 4 & 0x3fffu) | (u64)(lead >> 4) << 16 | (u64)(stride >> 4) << 32;
}
#endif

// A split barrier: each warp arrives (`has_come`), works on, and later waits for all warps (`wait_for_all`), always
// before it arrives again. `turn` counts the rounds. A barrier of the block follows `barrier_for`.
#ifdef FUSEC_EMULATED
DEVICE void barrier_for(u64* gate, u32 warps) {}
DEVICE void has_come(u64* gate) {}
DEVICE void wait_for_all(u64* gate, u32 turn) { __syncthreads(); }
#elif __CUDA_ARCH__ >= 900
DEVICE void barrier_for(u64* gate, u32 warps) {
  const u32 place = (u32)__cvta_generic_to_shared(gate);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(place), "r"(warps) : "memory");
}
DEVICE void has_come(u64* gate) {
  const u32 place = (u32)__cvta_generic_to_shared(gate);
  __syncwarp();
  if (threadIdx.x % 32u == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(place) : "memory");
}
DEVICE void wait_for_all(u64* gate, u32 turn) {
  const u32 place = (u32)__cvta_generic_to_shared(gate);
  asm volatile(
      "{ .reg .pred come; AGAIN: mbarrier.try_wait.parity.shared.b64 come, [%0], %1; @!come bra AGAIN; }"
      ::"r"(place), "r"(turn % 2u) : "memory");
}
#endif

#ifndef FUSEC_EMULATED
DEVICE bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }
#endif
// Two numbers as they are stored, in a word.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
template <class T> DEVICE u32 word_of(float low, float high) {
  u32 word;
  if constexpr (T::is_brain) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#else
template <class T> DEVICE u32 word_of(float low, float high) {
  return element_bits(narrow<T>(low)) | (u32)element_bits(narrow<T>(high)) << 16;
}
#endif

// The two numbers of 16 bits in a word.
struct Pair { float low, high; };
template <class T> DEVICE Pair pair_of(u32 word) {
  T low, high;
  low.bits = (u16)word, high.bits = (u16)(word >> 16);
  return {wide(low), wide(high)};
}
// The product of two numbers of 16 bits, and of two more, each rounded once.
template <class T> DEVICE u32 multiply_pair(u32 x, u32 y) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 900
  u32 z;
  if constexpr (T::is_brain) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
#else
  const Pair a = pair_of<T>(x), b = pair_of<T>(y);
  return word_of<T>(a.low * b.low, a.high * b.high);
#endif
}
// Three contiguous numbers of 16 bits, and a zero, from the two words that contain them. is_odd: they begin within a word.
template <class T> DEVICE Pack<T, 4> pixel_of_words(u32 low, u32 high, bool is_odd) {
  const Pack<u32, 2> both = {{is_odd ? low >> 16 | high << 16 : low, is_odd ? high >> 16 : high & 0xffffu}};
  return *reinterpret_cast<const Pack<T, 4>*>(&both);
}
// The larger of two numbers of 16 bits, and of two more. NaN wins.
template <class T> DEVICE u32 larger_pair(u32 x, u32 y) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
  u32 z;
  if constexpr (T::is_brain) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
#else
  const Pair a = pair_of<T>(x), b = pair_of<T>(y);
  return word_of<T>(nmax(a.low, b.low), nmax(a.high, b.high));
#endif
}
// The bits of each of two numbers of 16 bits that is larger than another. NaN is not, and nothing is larger than NaN.
template <class T> DEVICE u32 where_larger(u32 x, u32 y) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 900
  u32 bits;
  if constexpr (T::is_brain) asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(x), "r"(y));
  else asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(x), "r"(y));
  return bits;
#else
  const Pair a = pair_of<T>(x), b = pair_of<T>(y);
  return (a.low > b.low ? 0xffffu : 0u) | (a.high > b.high ? 0xffff0000u : 0u);
#endif
}
// The bits of each of two numbers of 16 bits that is NaN.
template <class T> DEVICE u32 where_nan(u32 x) {
  const Pair a = pair_of<T>(x);
  return (a.low != a.low ? 0xffffu : 0u) | (a.high != a.high ? 0xffff0000u : 0u);
}
// Return the word of another thread of the warp.
DEVICE u32 word_from(u32 word, u32 lane) {
#ifdef FUSEC_EMULATED
  const u32 mine[6] = {word};
  return words_of_warp(mine)[lane * 6u];
#else
  return __shfl_sync(0xffffffffu, word, lane);
#endif
}

// Load 4, 8 or 16 bytes here and not later.
template <class T, int N> DEVICE Pack<T, N> load_now(const T* p) {
  GLOBAL(p);
#ifndef FUSEC_EMULATED
  union { Pack<T, N> pack; u32 words[sizeof(Pack<T, N>) / 4]; } x;
  if constexpr (sizeof(x) == 4)
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x.words[0]) : "l"(p));
  else if constexpr (sizeof(x) == 8)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.words[0]), "=r"(x.words[1]) : "l"(p));
  else
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3]) : "l"(p));
  return x.pack;
#else
  return load_pack<T, N>(p);
#endif
}

// Bring the line of an address to the second-level cache.
#ifdef FUSEC_EMULATED
DEVICE void fetch_line(const void* p) { GLOBAL(p); }
#else
DEVICE void fetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#endif

// Convert bytes and small integers to floats and back through the bits of 1.5 * 2^23, because conversion instructions
// take longer. Integers are at most 2^22 in magnitude, and floats less.
#ifdef FUSEC_EMULATED
DEVICE float plain_add(float x, float y) { return x + y; }
DEVICE float larger(float x, float y) { return x > y ? x : y; }
DEVICE float smaller(float x, float y) { return x < y ? x : y; }
DEVICE float saturated(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
DEVICE u32 with_byte(u32 x, int j, u32 rest) { return (x >> 8 * j & 255u) | rest; }
DEVICE u32 in_register(u32 x) { return x; }
DEVICE i32 rint_to_i32(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : (i32)rint(x);
}
#else
DEVICE float plain_add(float x, float y) { return __fadd_rn(x, y); }
DEVICE float larger(float x, float y) { return fmaxf(x, y); }
DEVICE float smaller(float x, float y) { return fminf(x, y); }
DEVICE float saturated(float x) { return __saturatef(x); }
DEVICE u32 with_byte(u32 x, int j, u32 rest) { return __byte_perm(x, rest, 0x7650u + (u32)j); }
// Keep a constant in a register. Blocks have one dim, which the compiler does not know. Otherwise it would move such a
// constant from a uniform register for each use.
DEVICE u32 in_register(u32 x) { return x + threadIdx.z; }
DEVICE i32 rint_to_i32(float x) { return __float2int_rn(x); }
#endif
DEVICE float small_to_f32(i32 x) { return bits_to_f32(0x4b400000u + (u32)x) - 12582912.0f; }
DEVICE i32 small_rint(float x) { return (i32)(f32_to_bits(plain_add(x, 12582912.0f)) - 0x4b400000u); }
// Put a byte, plus 128, into the last eight bits of a float near 2^23.
template <int N> DEVICE float byte_to_f32(const Pack<u32, N>& words, int j) {
  return bits_to_f32(with_byte(words.v[j / 4] ^ 0x80808080u, j % 4, in_register(0x4b000000u))) - 8388736.0f;
}
// Add the products of four pairs of bytes to `sum`.
DEVICE i32 dot_bytes(u32 a, u32 b, i32 sum) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 610
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
#else
  for (int i = 0; i < 32; i += 8) sum = (i32)((u32)sum + (u32)((i32)(i8)(a >> i) * (i32)(i8)(b >> i)));
#endif
  return sum;
}
// Interleave two words: the bytes of their low or high halves, or these halves as they are.
#ifdef FUSEC_EMULATED
DEVICE u32 low_bytes(u32 a, u32 b) {
  return (a & 255u) | (b & 255u) << 8 | (a >> 8 & 255u) << 16 | (b >> 8 & 255u) << 24;
}
DEVICE u32 high_bytes(u32 a, u32 b) { return low_bytes(a >> 16, b >> 16); }
DEVICE u32 low_halves(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
DEVICE u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
#else
DEVICE u32 low_bytes(u32 a, u32 b) { return __byte_perm(a, b, 0x5140u); }
DEVICE u32 high_bytes(u32 a, u32 b) { return __byte_perm(a, b, 0x7362u); }
DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410u); }
DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632u); }
#endif
// The larger of two 16-bit integers, for two pairs in a word.
DEVICE u32 larger_halves(u32 x, u32 y) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 900
  u32 z;
  asm("max.s16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
#else
  const i32 low[2] = {(i32)(x << 16), (i32)(y << 16)}, high[2] = {(i32)x >> 16, (i32)y >> 16};
  return (u32)(low[0] > low[1] ? low[0] : low[1]) >> 16 | (u32)(high[0] > high[1] ? high[0] : high[1]) << 16;
#endif
}
// Pack four numbers as i8 into a word, saturated.
DEVICE u32 saturated_word(i32 a, i32 b, i32 c, i32 d) {
  u32 word = 0;
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 720
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(d), "r"(c), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(b), "r"(a), "r"(word));
#else
  const i32 all[4] = {d, c, b, a};
  for (int i = 0; i < 4; ++i) word = word << 8 | ((u32)(all[i] > 127 ? 127 : all[i] < -128 ? -128 : all[i]) & 255u);
#endif
  return word;
}
template <int N> DEVICE void store_bytes(i8* p, const i32 (&x)[N]) {
  Pack<u32, N / 4> words;
  for (int i = 0; i < N; i += 4) words.v[i / 4] = saturated_word(x[i], x[i + 1], x[i + 2], x[i + 3]);
  store_pack<u32, N / 4>((u32*)p, words);
}

// Round 2^14 times a number to an integer in the last 16 bits. Numbers below zero and NaN give 0, those above one 16384.
DEVICE u32 rounded_unit(float x) { return f32_to_bits(saturated(x) * 16384.0f + bits_to_f32(in_register(0x4b400000u))); }
// Pack four such integers as i8 into a word. Those above 127 become 127.
DEVICE u32 word_of_units(u32 a, u32 b, u32 c, u32 d) {
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 900
  u32 low, high;
  asm("min.s16x2 %0, %1, %2;" : "=r"(low) : "r"(low_halves(a, b)), "r"(0x007f007f));
  asm("min.s16x2 %0, %1, %2;" : "=r"(high) : "r"(low_halves(c, d)), "r"(0x007f007f));
  return __byte_perm(low, high, 0x6420u);
#else
  return saturated_word((i32)(a & 0xffffu), (i32)(b & 0xffffu), (i32)(c & 0xffffu), (i32)(d & 0xffffu));
#endif
}
template <int N> DEVICE void store_units(i8* p, const u32 (&x)[N]) {
  Pack<u32, N / 4> words;
  for (int i = 0; i < N; i += 4) words.v[i / 4] = word_of_units(x[i], x[i + 1], x[i + 2], x[i + 3]);
  store_pack<u32, N / 4>((u32*)p, words);
}

// Subtract a pair of 16-bit floats from another.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
template <class T> DEVICE u32 pair_less(u32 x, u32 y) {
  u32 z;
  if constexpr (T::is_brain)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(0x3f803f80u), "r"(y ^ 0x80008000u));
  else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
#else
template <class T> DEVICE u32 pair_less(u32 x, u32 y) {
  T low[2], high[2];
  low[0].bits = (u16)x, high[0].bits = (u16)(x >> 16), low[1].bits = (u16)y, high[1].bits = (u16)(y >> 16);
  return word_of<T>(wide(low[0]) - wide(low[1]), wide(high[0]) - wide(high[1]));
}
#endif
// Subtract a pair of fp16 from a sixteenth of another.
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
DEVICE u32 pair_sixteenth_less(u32 x, u32 y) {
  u32 z;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(0x2c002c00u), "r"(y ^ 0x80008000u));
  return z;
}
#else
DEVICE u32 pair_sixteenth_less(u32 x, u32 y) {
  f16 low[2], high[2];
  low[0].bits = (u16)x, high[0].bits = (u16)(x >> 16), low[1].bits = (u16)y, high[1].bits = (u16)(y >> 16);
  return word_of<f16>(wide(low[0]) / 16.0f - wide(low[1]), wide(high[0]) / 16.0f - wide(high[1]));
}
#endif
