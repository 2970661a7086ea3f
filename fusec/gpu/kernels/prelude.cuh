// What every kernel begins with: types, conversions and arithmetic with the meaning of the reference. No header is
// included, so NVRTC needs none; with FUSEC_EMULATED defined a C++ compiler builds the same for the CPU.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#ifndef FUSEC_EMULATED
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define ALIGNED(p, n)
#define TABLE static __device__ const
#define INFINITE __int_as_float(0x7f800000)
DEVICE float bits_to_f32(u32 b) { return __uint_as_float(b); }
DEVICE u32 f32_to_bits(float x) { return __float_as_uint(x); }
DEVICE float f16_to_f32(u16 h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
DEVICE u16 f32_to_f16(float x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
DEVICE u16 f64_to_f16(double x) { u16 h; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h) : "d"(x)); return h; }
// Not said to change memory: no kernel reads what it wrote so, and loads of later elements may go ahead of them.
DEVICE void store_words(void* p, u32 a, u32 b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b));
}
DEVICE void store_words(void* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d));
}
#endif

#ifdef FUSEC_EMULATED
DEVICE float quick_exp(float x) { return exp(x); }
DEVICE float quick_div(float x, float y) { return x / y; }
#else
DEVICE float quick_exp(float x) { return __expf(x); }
DEVICE float quick_div(float x, float y) { return __fdividef(x, y); }
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

// A stored element and the type it is computed in.
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
// A number as it is after having been stored.
template <class T, class C> DEVICE typename Compute<T>::type rounded(C x) { return wide(narrow<T>(x)); }

DEVICE u16 element_bits(f16 x) { return x.bits; }
DEVICE u16 element_bits(bf16 x) { return x.bits; }
DEVICE u16 element_bits(i16 x) { return (u16)x; }
DEVICE u16 element_bits(u16 x) { return x; }
DEVICE u8 element_bits(i8 x) { return (u8)x; }
DEVICE u8 element_bits(u8 x) { return x; }
DEVICE u8 element_bits(bool x) { return x; }

// So many neighbours, moved by one instruction (or two, of 16 bytes).
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T v[N]; };
template <class T, int N> DEVICE Pack<T, N> load_pack(const T* p) {
  ALIGNED(p, alignof(Pack<T, N>));
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
// By instructions of 16 bytes, written down: left to itself the compiler cuts some stores into pieces.
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

// c += a b of a warp, 16 x 16 by 16 x 8 numbers, two to a word: of thread 4 g + q, a has rows g and g + 8 in turn at
// places 2 q and 2 q + 1, then both at 8 more; b these places of column g; c rows g and g + 8 at columns 2 q and 2 q + 1.
template <class T> DEVICE float dot_words(T, u32 x, u32 y) {
  T a[2], b[2];
  a[0].bits = (u16)x; a[1].bits = (u16)(x >> 16); b[0].bits = (u16)y; b[1].bits = (u16)(y >> 16);
  return wide(a[0]) * wide(b[0]) + wide(a[1]) * wide(b[1]);
}
template <class T> DEVICE void mma_by_parts(T t, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int p = 0; p < 4; ++p) {
    const u32 x0 = __shfl_sync(0xffffffffu, a0, g * 4 + p), x1 = __shfl_sync(0xffffffffu, a1, g * 4 + p);
    const u32 x2 = __shfl_sync(0xffffffffu, a2, g * 4 + p), x3 = __shfl_sync(0xffffffffu, a3, g * 4 + p);
    for (int e = 0; e < 2; ++e) {
      const int from = (2 * q + e) * 4 + p;
      const u32 y0 = __shfl_sync(0xffffffffu, b0, from), y1 = __shfl_sync(0xffffffffu, b1, from);
      c[e] += dot_words(t, x0, y0) + dot_words(t, x2, y1);
      c[2 + e] += dot_words(t, x1, y0) + dot_words(t, x3, y1);
    }
  }
}
#if !defined(FUSEC_EMULATED) && __CUDA_ARCH__ >= 800
#define MMA(TYPE) \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
DEVICE void mma(f16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { MMA("f16"); }
DEVICE void mma(bf16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { MMA("bf16"); }
#else
template <class T> DEVICE void mma(T t, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_by_parts(t, c, a0, a1, a2, a3, b0, b1);
}
#endif

// NaN wins, as in NumPy's maximum and minimum.
template <class T> DEVICE T nmax(T x, T y) { return x > y || x != x ? x : y; }
template <class T> DEVICE T nmin(T x, T y) { return x < y || x != x ? x : y; }
template <class T> DEVICE T clipped(T x, T low, T high) { return nmin(nmax(x, low), high); }
template <class T> DEVICE T square(T x) { return x * x; }
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

// For results that are rounded to 16 bits.
DEVICE float quick_sigmoid(float x) { return quick_div(1.0f, 1.0f + quick_exp(-x)); }
// The tail of the normal distribution is its density times a smooth function, here a polynomial of 1 / (1 + 0.28 |x|)
// fitted by least squares to a relative error of 4e-6 everywhere.
DEVICE float quick_gelu_cdf(float x) {
  float z = fabs(x), t = quick_div(1.0f, 1.0f + 0.28f * z);
  float p = -0.0502312505f;
  p = p * t + 0.1054435459f;
  p = p * t + 0.0249494871f;
  p = p * t + 0.0944561471f;
  p = p * t + 0.1019357231f;
  p = p * t + 0.1117406616f;
  p = p * t + 0.1117038446f;
  float tail = p * t * quick_exp(-0.5f * z * z);
  return x < 0.0f ? tail : 1.0f - tail;
}
DEVICE float quick_gelu_tanh_cdf(float x) {
  return quick_sigmoid(1.59576912160573071176f * (x + 0.044715f * x * x * x));
}
DEVICE float quick_tanh_softplus(float x) {
  float e = quick_exp(x < 20.0f ? x : 20.0f), n = e * (e + 2.0f);
  return x != x ? x : quick_div(n, n + 2.0f);
}
DEVICE float quick_gelu_gradient(float dy, float x) {
  x = clipped(x, -40.0f, 40.0f);
  return dy * (quick_gelu_cdf(x) + x * quick_exp(-0.5f * x * x) * 0.39894228040143267794f);
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

// Integers wrap around; what is divided by zero is zero, as NumPy has it.
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

// Reductions over T threads of a block, STEP apart, of W numbers each; all threads of the block take part.
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
  if (STEP == 1) {  // warps first, then one number of each
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
