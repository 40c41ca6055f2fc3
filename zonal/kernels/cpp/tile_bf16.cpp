// The forward pass of tile.cpp for bfloat16 queries, keys and values on processors with avx512_bf16: products of pairs with float32 sums.
//
// Queries and keys enter as they are, so that scores carry no rounding but that of their inputs: scale and norms follow in float32, and
// so does the link. Only W is rounded to bfloat16, for its product with V. Pairs: two neighbouring coordinates for S^T = K Q^T, two
// neighbouring keys for Y^T += V^T W^T; values are packed so once for each block of keys, queries once a task.

#define ZONAL_LANES 16
#include "common.hpp"

#include <immintrin.h>

namespace {

typedef uint16_t B;

constexpr int R = 12;     // rows of a register tile: 24 sums, 2 columns and a broadcast are 27 of 32 registers
constexpr int KEYS = 96;  // keys of a block, a multiple of R and of 2

INLINE __m512bh pairs(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
INLINE __m512bh pair(const B* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

// x[r], y[r] += rows[r] (pairs) * cols over i < inner pairs
template <int N>
INLINE void rows_by_columns(const B* const (&rows)[N], const B* cols, int64_t inner, V (&x)[N], V (&y)[N]) {
  __m512 a[N], b[N];
  EACH_ROW a[r] = b[r] = _mm512_setzero_ps();
  for (int64_t i = 0; i < inner; ++i) {
    const __m512bh first = pairs(cols), second = pairs(cols + 2 * L);
    EACH_ROW {
      const __m512bh number = pair(rows[r] + 2 * i);
      a[r] = _mm512_dpbf16_ps(a[r], number, first);
      b[r] = _mm512_dpbf16_ps(b[r], number, second);
    }
    cols += 2 * C;
  }
  EACH_ROW {
    x[r] = reinterpret_cast<const V&>(a[r]);
    y[r] = reinterpret_cast<const V&>(b[r]);
  }
}

// sums (N rows of C floats) += values * cols over pairs of keys: values (inner, width, 2), N neighbouring of width
template <int N>
APART void numbers_by_columns(const B* values, int64_t width, const B* cols, int64_t inner, float* sums) {
  __m512 a[N], b[N];
  EACH_ROW {
    a[r] = _mm512_loadu_ps(sums + r * C);
    b[r] = _mm512_loadu_ps(sums + r * C + L);
  }
  for (int64_t i = 0; i < inner; ++i) {
    const __m512bh first = pairs(cols), second = pairs(cols + 2 * L);
    EACH_ROW {
      const __m512bh number = pair(values + 2 * r);
      a[r] = _mm512_dpbf16_ps(a[r], number, first);
      b[r] = _mm512_dpbf16_ps(b[r], number, second);
    }
    values += 2 * width;
    cols += 2 * C;
  }
  EACH_ROW {
    _mm512_storeu_ps(sums + r * C, a[r]);
    _mm512_storeu_ps(sums + r * C + L, b[r]);
  }
}

// scores of N keys from place s on into weights (N, C), through the link but in log space; gain: what each query's are multiplied by
template <int N>
APART void weigh(const Call& c, const Head<B>& at, const Sight& sight, const B* queries, const float* gain, int32_t s, float* weights, Column& column) {
  V x[N], y[N];
  const B* rows[N];
  EACH_ROW rows[r] = at.k + at.index[s + r] * at.k_step;
  rows_by_columns<N>(rows, queries, c.D / 2, x, y);
  const V gain_x = load(gain), gain_y = load(gain + L);
  EACH_ROW {
    const V scale = spread(at.key_scale == nullptr ? 1.f : at.key_scale[at.index[s + r]]);
    x[r] = in_domain(x[r] * gain_x * scale);
    y[r] = in_domain(y[r] * gain_y * scale);
  }
  record<N>(c, at.coefficients, sight, s, x, y, weights, column);
}

// weights (keys, C) as pairs of neighbouring keys (keys / 2, C, 2); an odd last key is paired with zeros
void pair_weights(const float* weights, int64_t keys, B* out) {
  const __m512i mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t s = 0; s < keys; s += 2)
    for (int j = 0; j < 2; ++j) {
      const __m512 first = _mm512_loadu_ps(weights + s * C + j * L);
      const __m512 second = s + 1 < keys ? _mm512_loadu_ps(weights + (s + 1) * C + j * L) : _mm512_setzero_ps();
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      _mm512_storeu_si512(out + s * C + j * 2 * L, _mm512_permutexvar_epi16(mixed, both));
    }
}

// values of keys [s0, s1) as pairs of neighbouring keys (pairs, P, 2)
void pair_values(const Call& c, const Head<B>& at, int32_t s0, int32_t s1, B* out) {
  for (int32_t s = s0; s < s1; s += 2) {
    const B* first = at.v + at.index[s] * at.v_step;
    const B* second = s + 1 < s1 ? at.v + at.index[s + 1] * at.v_step : nullptr;
    for (int64_t p = 0; p < c.P; ++p) {
      out[2 * p] = first[p];
      out[2 * p + 1] = second == nullptr ? 0 : second[p];
    }
    out += 2 * c.P;
  }
}

// keys [s0, s1) of the block from s_block on, whose values are packed, into a column's sums
void absorb(
    const Call& c, const Head<B>& at, const Sight& sight, const B* queries, const float* gain, int32_t block, int32_t s1, const B* values,
    float* weights, B* paired, float* out, Column& column) {
  // pairs begin at even places of the block
  const int32_t s0 = block + std::max(0, sight.first - block) / 2 * 2;
  s1 = std::min(s1, sight.last);
  if (s0 >= s1) return;
#if ZONAL_LOG
  const V before[2] = {column.top[0], column.top[1]};
#endif
  for (int32_t s = s0; s < s1; s += R)
    with_rows<R>(std::min<int>(R, s1 - s), [&](auto n) { weigh<decltype(n)::value>(c, at, sight, queries, gain, s, weights + (s - s0) * C, column); });
#if ZONAL_LOG
  exponentials(before, s1 - s0, c.P, weights, out, column);
#endif
  pair_weights(weights, s1 - s0, paired);
  for (int64_t p = 0; p < c.P; p += R)
    with_rows<R>(std::min<int64_t>(R, c.P - p), [&](auto n) {
      numbers_by_columns<decltype(n)::value>(values + (s0 - block) * c.P + 2 * p, c.P, paired, (s1 - s0 + 1) / 2, out + p * C);
    });
}

void forward_task(const Call& c, int64_t b, int64_t h, int64_t t0, int64_t t1, const float* scales, Scratch& scratch) {
  const Head<B> at = head_of<B>(c, b, h, scales);
  const int64_t columns = (t1 - t0 + C - 1) / C;
  scratch.begin(COLUMNS * C * (c.D / 2 + c.P + 1) + KEYS * (C + C / 2) + KEYS * c.P / 2 + c.P);
  B* queries = reinterpret_cast<B*>(scratch.take(COLUMNS * C * c.D / 2));
  float* gains = scratch.take(COLUMNS * C);
  float* out = scratch.take(COLUMNS * C * c.P);
  float* weights = scratch.take(KEYS * C);
  B* paired = reinterpret_cast<B*>(scratch.take(KEYS * C / 2));
  B* values = reinterpret_cast<B*>(scratch.take((KEYS + 1) / 2 * c.P));
  Sight sights[COLUMNS];
  Column sums[COLUMNS];
  Reach reach;
  for (int64_t i = 0; i < columns; ++i) {
    B* column = queries + i * C * c.D;
    for (int lane = 0; lane < C; ++lane) {
      const int64_t t = t0 + i * C + lane;
      const B* q = at.q + std::min(t, c.T - 1) * at.q_step;
      gains[i * C + lane] = t < c.T ? query_scale(c, q, at.scale) * UNIT : 0.f;
      for (int64_t d = 0; d < c.D; d += 2) std::memcpy(column + d * C + 2 * lane, q + d, 4);
    }
    sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
    reach.add(sights[i]);
  }
  std::memset(out, 0, sizeof(float) * columns * C * c.P);
  for (int32_t s = reach.first; s < reach.last; s += KEYS) {
    const int32_t end = std::min(s + KEYS, reach.last);
    pair_values(c, at, s, end, values);
    for (int64_t i = 0; i < columns; ++i)
      absorb(c, at, sights[i], queries + i * C * c.D, gains + i * C, s, end, values, weights, paired, out + i * C * c.P, sums[i]);
  }
  finish(c, at.lo, at.hi, b, h, t0, t1, sums, out);
}

}  // namespace

extern "C" {

int64_t zonal_version() { return 2; }

// Returns 0, or 1 when memory ran out. D is even.
int zonal_forward(const Call* call) { return run_forward<B>(*call, forward_task); }
}
