// Floats of 8 bits and fewer, and integers below 8 bits. Conversions are those of ml_dtypes, bit by bit, because no GPU
// instruction has them all: some round to the largest number where a cast of the IR gives NaN or infinity. To E4M3, the
// type of quantised models, an instruction converts what is within its range.
#ifndef FUSEC_NARROW_TYPES
#define FUSEC_NARROW_TYPES

// What the highest codes stand for: infinities and several NaN, one NaN for each sign, one NaN in place of the negative
// zero, or numbers only.
enum Highest { INFINITIES, NAN_OF_EACH_SIGN, NAN_FOR_MINUS_ZERO, NUMBERS_ONLY };

DEVICE float power_of_two(int n) { return bits_to_f32((u32)(127 + n) << 23); }

// A sign, E bits of the exponent, whose least number is 1 - BIAS, and M bits of the mantissa.
template <int E, int M, int BIAS, Highest HIGHEST> struct Minifloat {
  static constexpr u32 SIZES = (1u << (E + M)) - 1u, MINUS = 1u << (E + M), TOP = ((1u << E) - 1u) << M;
  static constexpr u32 LARGEST = HIGHEST == INFINITIES ? TOP - 1u : HIGHEST == NAN_OF_EACH_SIGN ? SIZES - 1u : SIZES;

  static DEVICE_MEMBER float number(u32 code) {
    const u32 size = code & SIZES;
    if (HIGHEST == NAN_FOR_MINUS_ZERO ? code == MINUS : HIGHEST == NAN_OF_EACH_SIGN && size == SIZES)
      return bits_to_f32(0x7fc00000u);
    if constexpr (E < 5 || HIGHEST == INFINITIES) {  // f16 has room for it, denormals included
      return f16_to_f32((u16)((code & MINUS) << (15 - E - M) | size << (10 - M))) * power_of_two(15 - BIAS);
    } else {
      const float x = size >> M ? bits_to_f32((size << (23 - M)) + ((u32)(127 - BIAS) << 23))
                                : (float)size * power_of_two(1 - BIAS - M);
      return code & MINUS ? -x : x;
    }
  }

  static DEVICE_MEMBER u8 code(float x) {
    const u32 all = f32_to_bits(x), size = all & 0x7fffffffu, sign = all >> 31 << (E + M);
    if (size > 0x7f800000u)
      return (u8)(HIGHEST == INFINITIES ? sign | TOP | 1u << (M - 1) : HIGHEST == NAN_OF_EACH_SIGN ? sign | SIZES : MINUS);
#ifdef CONVERTS_TO_E4M3
    if constexpr (E == 4 && HIGHEST == NAN_OF_EACH_SIGN)  // above 464, half-way from 448 to the next code, x becomes NaN
      return size > 0x43e80000u ? (u8)(sign | SIZES) : f32_to_e4m3(x);
#endif
    u32 near;
    if (size < (u32)(128 - BIAS) << 23)
      near = (u32)rint(bits_to_f32(size) * power_of_two(BIAS - 1 + M));
    else
      near = ((size + ((1u << (22 - M)) - 1u) + (size >> (23 - M) & 1u)) >> (23 - M)) - ((u32)(127 - BIAS) << M);
    if (near > LARGEST) {
      if (HIGHEST == NAN_FOR_MINUS_ZERO) return (u8)MINUS;
      return (u8)(sign | (HIGHEST == INFINITIES ? TOP : SIZES));
    }
    return (u8)(HIGHEST == NAN_FOR_MINUS_ZERO && near == 0u ? 0u : sign | near);
  }
};

// Powers of two alone: 2^(code - 127), and 255 for NaN. Half-way between two, the larger is taken.
struct PowerOfTwo {
  static DEVICE_MEMBER float number(u32 code) {
    return bits_to_f32(code == 255u ? 0x7fc00000u : code == 0u ? 0x400000u : code << 23);
  }
  static DEVICE_MEMBER u8 code(float x) {
    const u32 size = f32_to_bits(x);
    if (size == 0u || size > 0x7f800000u) return 255u;
    return (u8)(size < 0x800000u ? size >= 0x600000u : (size + 0x400000u) >> 23);
  }
};

#define FUSEC_FLOAT(NAME, BITS, ...)                                                     \
  struct NAME { u8 bits; enum { width = BITS }; typedef __VA_ARGS__ Code; };             \
  template <> struct Compute<NAME> { typedef float type; };                              \
  DEVICE float wide(NAME x) { return NAME::Code::number(x.bits); }                       \
  template <> struct Narrow<NAME> {                                                      \
    static DEVICE_MEMBER NAME from(float x) { NAME r; r.bits = NAME::Code::code(x); return r; } \
  };                                                                                     \
  DEVICE u8 element_bits(NAME x) { return x.bits; }
FUSEC_FLOAT(f8e4m3, 8, Minifloat<4, 3, 7, NAN_OF_EACH_SIGN>)
FUSEC_FLOAT(f8e5m2, 8, Minifloat<5, 2, 15, INFINITIES>)
FUSEC_FLOAT(f8e4m3fnuz, 8, Minifloat<4, 3, 8, NAN_FOR_MINUS_ZERO>)
FUSEC_FLOAT(f8e5m2fnuz, 8, Minifloat<5, 2, 16, NAN_FOR_MINUS_ZERO>)
FUSEC_FLOAT(f8e8m0, 8, PowerOfTwo)
FUSEC_FLOAT(f4e2m1, 4, Minifloat<2, 1, 1, NUMBERS_ONLY>)
#undef FUSEC_FLOAT

// As E4M3, with numbers beyond its range at the largest.
DEVICE f8e4m3 saturated_e4m3(float x) {
#ifdef CONVERTS_TO_E4M3
  f8e4m3 r;
  r.bits = f32_to_e4m3(x);
  return r;
#else
  return narrow<f8e4m3>(clipped(x, -448.0f, 448.0f));
#endif
}

// Integers wrap around.
#define FUSEC_INTEGER(NAME, BITS, NUMBER)                                                \
  struct NAME { u8 bits; enum { width = BITS }; };                                       \
  template <> struct Compute<NAME> { typedef NUMBER type; };                             \
  DEVICE NUMBER wide(NAME x) { return (NUMBER)((NUMBER)(x.bits << (8 - BITS)) >> (8 - BITS)); } \
  template <> struct Narrow<NAME> {                                                      \
    static DEVICE_MEMBER NAME from(NUMBER x) { NAME r; r.bits = (u8)(x & ((1 << BITS) - 1)); return r; } \
  };
FUSEC_INTEGER(i4, 4, i8)
FUSEC_INTEGER(u4, 4, u8)
FUSEC_INTEGER(i2, 2, i8)
FUSEC_INTEGER(u2, 2, u8)
#undef FUSEC_INTEGER

// Types below 8 bits share bytes: the first number is in the lowest bits.
template <class T> DEVICE T load_part(const T* p, u64 i) {
  constexpr u32 EACH = 8u / T::width;
  T x;
  x.bits = (u8)(((const u8*)p)[i / EACH] >> (u32)(i % EACH) * T::width & ((1u << T::width) - 1u));
  return x;
}
// Another thread may write the other numbers of the byte at the same time.
template <class T> DEVICE void store_part(T* p, u64 i, T x) {
  constexpr u32 EACH = 8u / T::width, MASK = (1u << T::width) - 1u;
  u8* byte = (u8*)p + i / EACH;
  const u32 shift = (u32)(i % EACH) * T::width;
#ifdef FUSEC_EMULATED
  *byte = (u8)((*byte & ~(MASK << shift)) | (u32)x.bits << shift);
#else
  u32* word = (u32*)((u64)byte & ~3ull);
  const u32 at = 8u * (u32)((u64)byte & 3ull) + shift;
  atomicAnd(word, ~(MASK << at));
  atomicOr(word, (u32)x.bits << at);
#endif
}
// N neighbours that fill whole bytes, at most 4 of them.
template <class T, int N> struct PackedParts {
  u32 word;
  DEVICE_MEMBER T get(int j) const {
    T x;
    x.bits = (u8)(word >> j * T::width & ((1u << T::width) - 1u));
    return x;
  }
  DEVICE_MEMBER void set(int j, T x) { word |= (u32)x.bits << j * T::width; }
};
template <class T, int N> DEVICE PackedParts<T, N> load_parts(const T* p, u64 i) {
  constexpr int NBYTES = N * T::width / 8;
  const u8* place = (const u8*)p + i / (8u / T::width);
  ALIGNED(place, NBYTES);
  PackedParts<T, N> x;
  x.word = NBYTES == 4 ? *(const u32*)place : NBYTES == 2 ? *(const u16*)place : *place;
  return x;
}
template <class T, int N> DEVICE void store_parts(T* p, u64 i, const PackedParts<T, N>& x) {
  constexpr int NBYTES = N * T::width / 8;
  u8* place = (u8*)p + i / (8u / T::width);
  ALIGNED(place, NBYTES);
  if constexpr (NBYTES == 4) *(u32*)place = x.word;
  else if constexpr (NBYTES == 2) *(u16*)place = (u16)x.word;
  else *place = (u8)x.word;
}
#endif
