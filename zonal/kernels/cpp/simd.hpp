// Vectors of floats, of pairs of bfloat16, and numbers of 16 bits in memory. All that depends on the instruction set that a source is compiled for is in this file.
//
// ZONAL_LANES: floats of a vector. ZONAL_REGISTERS: vector registers. ZONAL_PAIRS: bfloat16 is multiplied in pairs. ZONAL_TILES: and in tiles of
// sixteen by sixteen pairs. They follow from the compiler's flags; tests define them, so that the code for a wide set runs on a processor without it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX__
#include <immintrin.h>
#endif

#ifndef ZONAL_LANES
#if defined(__AVX512F__)
#define ZONAL_LANES 16
#elif defined(__AVX__)
#define ZONAL_LANES 8
#else
#define ZONAL_LANES 4
#endif
#endif
#ifndef ZONAL_REGISTERS
#if defined(__AVX512F__) || defined(__aarch64__)
#define ZONAL_REGISTERS 32
#else
#define ZONAL_REGISTERS 16
#endif
#endif
#ifndef ZONAL_PAIRS
#ifdef __AVX512BF16__
#define ZONAL_PAIRS 1
#else
#define ZONAL_PAIRS 0
#endif
#endif
#ifndef ZONAL_TILES
#ifdef __AMX_BF16__
#define ZONAL_TILES 1
#else
#define ZONAL_TILES 0
#endif
#endif

#define APART __attribute__((noinline))  // on its own the compiler keeps all sums in registers; inside a larger function it spills one
#define INLINE inline __attribute__((always_inline))
#define EACH_ROW _Pragma("GCC unroll 16") for (int r = 0; r < N; ++r)

namespace {

constexpr int L = ZONAL_LANES;                       // floats of a vector
constexpr int C = 2 * L;                             // queries of a column
// rows of a register tile: two sums each, beside two columns and a broadcast; or those of the processor's own tiles
constexpr int R = ZONAL_TILES ? 16 : ZONAL_REGISTERS == 32 ? 12 : 6;

typedef float V __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef uint16_t Half __attribute__((vector_size(2 * L), aligned(2), may_alias));
typedef float V8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t U8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Half8 __attribute__((vector_size(16), aligned(2), may_alias));

// ---- memory ------------------------------------------------------------------------------------------------------------------------------

inline V load(const float* p) { return *reinterpret_cast<const V*>(p); }
inline V load(const uint16_t* p) {  // bfloat16 is the upper half of a float
  const U wide = __builtin_convertvector(*reinterpret_cast<const Half*>(p), U) << 16;
  return reinterpret_cast<const V&>(wide);
}
inline float number(float x) { return x; }
inline float number(uint16_t x) {
  const uint32_t wide = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) {  // to the nearest, ties to even; NaN stays
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  *to = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
struct Float16 {  // IEEE half precision; a plain uint16_t is bfloat16
  uint16_t bits;
};

inline float number(Float16 x) {
  const uint32_t low = (x.bits & 0x7fffu) << 13;
  float out;
  std::memcpy(&out, &low, 4);
  out *= 0x1p112f;  // the exponent counts from 127 instead of 15; subnormal numbers become normal
  uint32_t bits;
  std::memcpy(&bits, &out, 4);
  bits |= (x.bits & 0x8000u) << 16 | ((x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
  std::memcpy(&out, &bits, 4);
  return out;
}
inline void put(Float16* to, float x) {  // to the nearest, ties to even; NaN stays
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) {  // 65536
    bits = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (bits < 0x38800000u) {  // below 2^-14: an addition rounds
    float low;
    std::memcpy(&low, &bits, 4);
    low += 0.5f;
    std::memcpy(&bits, &low, 4);
    bits -= 0x3f000000u;
  } else {
    bits = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(bits | sign);
}
inline V load(const Float16* p) {
#if ZONAL_LANES == 16 && defined(__AVX512F__)
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif ZONAL_LANES == 8 && defined(__F16C__)
  return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  V out;
  for (int i = 0; i < L; ++i) out[i] = number(p[i]);
  return out;
#endif
}
inline void store(float* p, V x) { *reinterpret_cast<V*>(p) = x; }
inline V spread(float x) { return x - V{}; }  // x + 0 would be an addition: of -0 it is not x

inline V8 load8(const float* p) { return *reinterpret_cast<const V8*>(p); }
inline V8 load8(const uint16_t* p) {
  const U8 wide = __builtin_convertvector(*reinterpret_cast<const Half8*>(p), U8) << 16;
  return reinterpret_cast<const V8&>(wide);
}
inline V8 load8(const Float16* p) {
#ifdef __F16C__
  return (V8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  V8 out;
  for (int i = 0; i < 8; ++i) out[i] = number(p[i]);
  return out;
#endif
}
inline void put8(float* p, V8 x) { *reinterpret_cast<V8*>(p) = x; }
inline void put8(uint16_t* p, V8 x) {
  const U8 bits = reinterpret_cast<const U8&>(x), near = bits + 0x7fff + ((bits >> 16) & 1);
  *reinterpret_cast<Half8*>(p) = __builtin_convertvector((x == x ? near : bits | 0x400000u) >> 16, Half8);
}
inline void put8(Float16* p, V8 x) {
#ifdef __F16C__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int i = 0; i < 8; ++i) put(p + i, x[i]);
#endif
}

// n numbers times a factor, as floats
template <typename S>
inline void widen(const S* from, int64_t n, float factor, float* to) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(to + i, load(from + i) * factor);
  for (; i < n; ++i) to[i] = number(from[i]) * factor;
}

// n floats as numbers of a type
template <typename S>
inline void narrow(const float* from, int64_t n, S* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) put8(to + i, load8(from + i));
  for (; i < n; ++i) put(to + i, from[i]);
}

// ---- products ----------------------------------------------------------------------------------------------------------------------------

// A word is what a lane takes of a row at once: a float, or two neighbouring bfloat16, the first in the lower half. Numbers of a word:
template <typename T>
constexpr int PER_WORD = sizeof(float) / sizeof(T);

inline V words(const float* p) { return load(p); }
inline U words(const uint16_t* p) { return *reinterpret_cast<const U*>(p); }
inline V word(const float* p) { return spread(*p); }
inline U word(const uint16_t* p) {
  uint32_t both;
  std::memcpy(&both, p, 4);
  return both - U{};
}

// sum + a . b in each lane
INLINE V add_product(V sum, V a, V b) { return sum + a * b; }
INLINE V add_product(V sum, U a, U b) {
#ifdef __AVX512BF16__
  return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const U a_first = a << 16, b_first = b << 16, a_second = a & 0xffff0000u, b_second = b & 0xffff0000u;
  sum += reinterpret_cast<const V&>(a_second) * reinterpret_cast<const V&>(b_second);
  return sum + reinterpret_cast<const V&>(a_first) * reinterpret_cast<const V&>(b_first);
#endif
}

// While it lives, the tile registers of its thread, where the processor has some, hold sixteen rows of sixteen words.
struct TileRegisters {
#ifdef __AMX_BF16__
  // palette 1; from byte 16 on the bytes of a row, two bytes a register; from byte 48 on the rows; registers 0 to 4
  alignas(64) static constexpr uint8_t SIZES[64] = {
      1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 0, 0, 0, 0, 0, 0,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16};
  TileRegisters() { _tile_loadconfig(SIZES); }
  ~TileRegisters() { _tile_release(); }
#else
  ~TileRegisters() {}
#endif
};

#if ZONAL_TILES
constexpr int TILE = 16;  // rows of a tile, and words of a row

// out (TILE, C) = rows of TILE * count words, ``row_step`` numbers apart, times columns that lie ``step`` numbers apart
inline void tile_products(const uint16_t* rows, int64_t row_step, const uint16_t* cols, int64_t step, int64_t count, float* out) {
#ifdef __AMX_BF16__
  __asm__ volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < count; ++i, rows += 2 * TILE, cols += TILE * step) {
    _tile_loadd(2, rows, 2 * row_step);
    _tile_loadd(3, cols, 2 * step);
    _tile_loadd(4, cols + 2 * TILE, 2 * step);
    _tile_dpbf16ps(0, 2, 3);
    _tile_dpbf16ps(1, 2, 4);
  }
  _tile_stored(0, out, 4 * C);
  _tile_stored(1, out + TILE, 4 * C);
#else
  for (int r = 0; r < TILE; ++r) {
    V x = V{}, y = V{};
    for (int64_t i = 0; i < count * TILE; ++i) {
      const U both = word(rows + r * row_step + 2 * i);
      x = add_product(x, both, words(cols + i * step));
      y = add_product(y, both, words(cols + i * step + 2 * L));
    }
    store(out + r * C, x);
    store(out + r * C + L, y);
  }
#endif
}
#endif

// bfloat16 nearest to x in the upper half of each lane, as ``put`` rounds
inline U rounded(V x) {
  const U bits = reinterpret_cast<const U&>(x), near = bits + 0x7fff + ((bits >> 16) & 1);
  return (x == x ? near : bits | 0x400000u) & 0xffff0000u;
}

// words of neighbours
inline U paired(V first, V second) {
#ifdef __AVX512BF16__
  const __m512i mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (U)_mm512_permutexvar_epi16(mixed, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  return rounded(first) >> 16 | rounded(second);
#endif
}
inline void store_words(uint16_t* p, U x) { *reinterpret_cast<U*>(p) = x; }
inline void store_rounded(uint16_t* p, V x) {
#ifdef __AVX512BF16__
  *reinterpret_cast<Half*>(p) = (Half)_mm512_cvtneps_pbh((__m512)x);
#else
  *reinterpret_cast<Half*>(p) = __builtin_convertvector(rounded(x) >> 16, Half);
#endif
}

// ---- functions ---------------------------------------------------------------------------------------------------------------------------

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

inline V least(V a, V b) { return b < a ? b : a; }  // a NaN in a stays
inline V most(V a, V b) { return b > a ? b : a; }

inline float sum(V x) {
  float total = 0;
  for (int i = 0; i < L / 2; ++i) total += x[i] + x[i + L / 2];
  return total;
}

inline bool any(I mask) {
  int32_t found = 0;
  for (int i = 0; i < L; ++i) found |= mask[i];
  return found != 0;
}

inline V root(V x) {
#if ZONAL_LANES == 16 && defined(__AVX512F__)
  return (V)_mm512_sqrt_ps((__m512)x);
#elif ZONAL_LANES == 8 && defined(__AVX__)
  return (V)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < L; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

inline V inverse_root(V x) {  // of a normal number
#if ZONAL_LANES == 16 && defined(__AVX512F__)
  const V y = (V)_mm512_maskz_rsqrt14_ps(0xffff, (__m512)x);
  return y * (1.5f - 0.5f * x * y * y);
#elif ZONAL_LANES == 8 && defined(__AVX__)
  const V y = (V)_mm256_rsqrt_ps((__m256)x);
  return y * (1.5f - 0.5f * x * y * y);
#else
  return 1.f / root(x);
#endif
}

template <int N>
INLINE V polynomial(V x, const float (&c)[N]) {
  V out = spread(c[N - 1]);
#pragma GCC unroll 16
  for (int k = N - 2; k >= 0; --k) out = out * x + c[k];
  return out;
}

constexpr float EXPONENTIAL[] = {1.f, 6.9314718056e-1f, 2.4022650696e-1f, 5.5504108665e-2f, 9.6181291076e-3f, 1.3333558146e-3f, 1.5403530393e-4f};
constexpr float LOGARITHM[] = {-4.999999764e-1f, 3.333332536e-1f, -2.500077871e-1f, 2.000163589e-1f, -1.662709284e-1f, 1.419615381e-1f, -1.311405156e-1f, 1.277728426e-1f, -7.777937797e-2f};

// 2^x to two units in the last place; below -126 the least normal number
inline V exp2(V x) {
  const V low = least(most(x, spread(-126.f)), spread(127.f));
  const V shifted = low + 12582912.f;  // 1.5 * 2^23: rounds to the nearest whole number
  const V whole = shifted - 12582912.f;
  const I bits = (__builtin_convertvector(whole, I) + 127) << 23;
  return polynomial(low - whole, EXPONENTIAL) * reinterpret_cast<const V&>(bits);
}

inline V logarithm(V x) {  // natural, of a normal number
  const I bits = reinterpret_cast<const I&>(x), power = (bits - 0x3f3504f3) >> 23, rest = bits - (power << 23);
  const V f = reinterpret_cast<const V&>(rest) - 1.f;
  return f + (f * f * polynomial(f, LOGARITHM) + LN2 * __builtin_convertvector(power, V));
}

// a . b; a single running sum would wait for itself at every step
template <typename A, typename B>
float dot(const A* a, const B* b, int64_t n) {
  V x = V{}, y = V{};
  int64_t i = 0;
  for (; i + 2 * L <= n; i += 2 * L) {
    x += load(a + i) * load(b + i);
    y += load(a + i + L) * load(b + i + L);
  }
  float total = sum(x + y);
  for (; i < n; ++i) total += number(a[i]) * number(b[i]);
  return total;
}

// ---- eight rows --------------------------------------------------------------------------------------------------------------------------

// eight numbers with the sum of x
INLINE V8 as_eight(const V& x) {
  const float* p = reinterpret_cast<const float*>(&x);
#if ZONAL_LANES == 16
  return load8(p) + load8(p + 8);
#elif ZONAL_LANES == 8
  return load8(p);
#else
  return V8{p[0], p[1], p[2], p[3]};
#endif
}

// eight rows of eight numbers become columns
inline void transpose(V8 (&x)[8]) {
#if __has_builtin(__builtin_shufflevector)
  V8 y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      x[i + 2 * k] = __builtin_shufflevector(y[i + k], y[i + 2 + k], 0, 1, 8, 9, 4, 5, 12, 13);
      x[i + 2 * k + 1] = __builtin_shufflevector(y[i + k], y[i + 2 + k], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
#else
  for (int i = 0; i < 8; ++i)
    for (int k = 0; k < i; ++k) {
      const float kept = x[i][k];
      x[i][k] = x[k][i];
      x[k][i] = kept;
    }
#endif
}

}  // namespace
