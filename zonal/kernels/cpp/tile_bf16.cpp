// tile.cpp for bfloat16 queries, keys and values on processors with avx512_bf16: products of pairs with float32 sums.
//
// Queries and keys enter as they are, so that scores carry no rounding but that of their inputs: scale and norms follow in float32, and
// so does the link. Only W and dS are rounded to bfloat16, for their products. Pairs: two neighbouring coordinates for S^T = K Q^T and
// dW^T = V dY^T, two neighbouring keys for Y^T += V^T W^T and dQ^T += K^T dS^T, two neighbouring queries for dV += W^T dY and
// dK += dS^T Q. A row's sum is that of the rounded weights: y is then a mean of values, and where all of them agree it is theirs.

#define ZONAL_LANES 16
#define ZONAL_ROUNDED 1
#include "common.hpp"

#include <immintrin.h>

namespace {

typedef uint16_t B;

constexpr int R = 12;     // rows of a register tile: 24 sums, 2 columns and a broadcast are 27 of 32 registers
constexpr int KEYS = 96;  // keys of a block, a multiple of R and of 2
constexpr int COLS = 2, SPAN = COLS * C;  // columns and queries of a block, backward

INLINE __m512bh pairs(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
INLINE __m512bh pair(const B* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

// x[r], y[r] = rows[r] (pairs) * cols, ``step`` apart, over i < inner pairs
template <int N>
INLINE void rows_by_columns(const B* const (&rows)[N], const B* cols, int64_t step, int64_t inner, V (&x)[N], V (&y)[N]) {
  __m512 a[N], b[N];
  EACH_ROW a[r] = b[r] = _mm512_setzero_ps();
  for (int64_t i = 0; i < inner; ++i) {
    const __m512bh first = pairs(cols), second = pairs(cols + 2 * L);
    EACH_ROW {
      const __m512bh number = pair(rows[r] + 2 * i);
      a[r] = _mm512_dpbf16_ps(a[r], number, first);
      b[r] = _mm512_dpbf16_ps(b[r], number, second);
    }
    cols += step;
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

// scores of N keys from place s on; gain: what each query's are multiplied by
template <int N>
INLINE void scores(const Call& c, const Head<B>& at, const B* queries, const float* gain, int32_t s, V (&x)[N], V (&y)[N]) {
  const B* rows[N];
  EACH_ROW rows[r] = at.k + at.index[s + r] * at.k_step;
  rows_by_columns<N>(rows, queries, 2 * C, c.D / 2, x, y);
  const V gain_x = load(gain), gain_y = load(gain + L);
  EACH_ROW {
    const V scale = spread(at.key_scale == nullptr ? 1.f : at.key_scale[at.index[s + r]]);
    x[r] = in_domain(x[r] * gain_x * scale);
    y[r] = in_domain(y[r] * gain_y * scale);
  }
}

// W^T of N keys (in log space: the scores, and their maximum)
template <int N>
APART void weigh(const Call& c, const Head<B>& at, const Sight& sight, const B* queries, const float* gain, int32_t s, float* weights, Column& column) {
  V x[N], y[N];
  scores<N>(c, at, queries, gain, s, x, y);
  record<N>(c, at.coefficients, sight, s, x, y, weights, column);
}

// two rows of 16 numbers, interleaved
inline __m512i interleaved(__m512 first, __m512 second) {
  const __m512i mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(mixed, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}

// weights (keys, C) as pairs of neighbouring keys (keys / 2, C, 2), and their sums; an odd last key is paired with zeros
void pair_weights(const float* weights, int64_t keys, B* out, Column& column) {
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  for (int j = 0; j < 2; ++j) {
    __m512 mass = _mm512_loadu_ps(&column.mass[j]);
    for (int64_t s = 0; s < keys; s += 2) {
      const __m512 second = s + 1 < keys ? _mm512_loadu_ps(weights + (s + 1) * C + j * L) : _mm512_setzero_ps();
      const __m512i both = interleaved(_mm512_loadu_ps(weights + s * C + j * L), second);
      _mm512_storeu_si512(out + s * C + j * 2 * L, both);
      mass = _mm512_dpbf16_ps(mass, reinterpret_cast<__m512bh>(both), ones);
    }
    _mm512_storeu_ps(&column.mass[j], mass);
  }
}

// rows of keys at places [s0, s1) as pairs of neighbours (pairs, width, 2)
void pair_rows(const B* rows, int64_t step, const int32_t* index, int32_t s0, int32_t s1, int64_t width, B* out) {
  for (int32_t s = s0; s < s1; s += 2) {
    const B* first = rows + index[s] * step;
    const B* second = s + 1 < s1 ? rows + index[s + 1] * step : nullptr;
    for (int64_t p = 0; p < width; ++p) {
      out[2 * p] = first[p];
      out[2 * p + 1] = second == nullptr ? 0 : second[p];
    }
    out += 2 * width;
  }
}

// keys [s0, s1) of the block from ``block`` on, whose values are packed, into a column's sums
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
  pair_weights(weights, s1 - s0, paired, column);
  for (int64_t p = 0; p < c.P; p += R)
    with_rows<R>(std::min<int64_t>(R, c.P - p), [&](auto n) {
      numbers_by_columns<decltype(n)::value>(values + (s0 - block) * c.P + 2 * p, c.P, paired, (s1 - s0 + 1) / 2, out + p * C);
    });
}

void forward_task(const Call& c, int64_t b, int64_t h, int64_t t0, int64_t t1, const Shared& shared, Scratch& scratch) {
  const Head<B> at = head_of<B>(c, b, h, shared);
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
    pair_rows(at.v, at.v_step, at.index, s, end, c.P, values);
    for (int64_t i = 0; i < columns; ++i)
      absorb(c, at, sights[i], queries + i * C * c.D, gains + i * C, s, end, values, weights, paired, out + i * C * c.P, sums[i]);
  }
  finish<B>(c, at.lo, at.hi, b, h, t0, t1, sums, out);
}

// ---- backward --------------------------------------------------------------------------------------------------------------------------

struct Block {  // the queries of a block, backward: two columns
  B *columns, *dy_columns;  // Q and dY as columns of pairs (COLS, D / 2, C, 2), (COLS, P / 2, C, 2)
  B *rows, *dy_rows;        // and as pairs of neighbouring queries (SPAN / 2, D16, 2), (SPAN / 2, P16, 2)
  float *gain, *factor, *shared, *lse;  // a query's scale / norm, its row's factor, dy . y times that, its log-sum-exp (base 2), (SPAN)
  float* dq;                            // as columns (COLS, D, C)
  B *weights, *grads;                   // W^T times the row's factor, dS^T times both scales, (KEYS, SPAN)
  B* paired;                            // the latter of a column as pairs of keys (KEYS / 2, C, 2)
  const B* keys;                        // all keys as pairs (S / 2, D, 2)
};

// a row x of width numbers into its lane of a column of pairs, and into its place among pairs of queries
void pack_row(const B* x, int64_t width, int64_t padded, int i, B* columns, B* rows) {
  B* column = columns + (i / C) * C * width + 2 * (i % C);
  B* row = rows + (i / 2) * 2 * padded + i % 2;
  for (int64_t d = 0; d < width; d += 2) {
    std::memcpy(column + d * C, x + d, 4);
    row[2 * d] = x[d];
    row[2 * d + 2] = x[d + 1];
  }
}

void pack_block(const Call& c, const Head<B>& at, int64_t b, int64_t h, int64_t t0, const Block& block) {
  const int64_t D16 = up(c.D, C), P16 = up(c.P, C);
  const bool online = ZONAL_LOG && c.anchor == ROW;
  if (t0 + SPAN > c.T || D16 != c.D || P16 != c.P) {
    std::memset(block.rows, 0, sizeof(B) * SPAN * D16);
    std::memset(block.dy_rows, 0, sizeof(B) * SPAN * P16);
    std::memset(block.columns, 0, sizeof(B) * SPAN * c.D);
    std::memset(block.dy_columns, 0, sizeof(B) * SPAN * c.P);
  }
  std::memset(block.dq, 0, sizeof(float) * SPAN * c.D);
  for (int i = 0; i < SPAN; ++i) {
    block.gain[i] = block.factor[i] = block.shared[i] = 0;
    block.lse[i] = std::numeric_limits<float>::infinity();
    if (t0 + i >= c.T) continue;
    const int64_t row = (b * c.H + h) * c.T + t0 + i;
    const B* q = at.q + (t0 + i) * at.q_step;
    const B* dy = static_cast<const B*>(c.dy) + b * c.dys.batch + h * c.dys.head + (t0 + i) * c.dys.token;
    const B *y = static_cast<const B*>(c.y) + row * c.P, *rest = static_cast<const B*>(c.rest) + row * c.P;
    pack_row(q, c.D, D16, i, block.columns, block.rows);
    pack_row(dy, c.P, P16, i, block.dy_columns, block.dy_rows);
    block.gain[i] = query_scale(c, q, at.scale);
    block.factor[i] = online ? 1.f : c.factor[row];
    if (ZONAL_LOG) block.lse[i] = online ? c.factor[row] * LOG2E : 0.f;
    if (c.anchor == ROW) block.shared[i] = (dot(dy, y, c.P) + dot(dy, rest, c.P)) * block.factor[i];
  }
}

template <int N>
APART void scores_apart(const Call& c, const Head<B>& at, const B* queries, const float* gain, int32_t s, float* out) {
  V x[N], y[N];
  scores<N>(c, at, queries, gain, s, x, y);
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
  }
}

template <int N>
APART void products_apart(const B* const (&rows)[N], const B* cols, int64_t step, int64_t inner, float* out) {
  V x[N], y[N];
  rows_by_columns<N>(rows, cols, step, inner, x, y);
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
  }
}

struct Partial {  // sums of a block for what is learned: coefficients, and the scale
  V coefficients[40], scale;
};

// W^T and dS^T of N keys from place s on, an even one, with one column
template <int N>
inline void gradients(const Call& c, const Head<B>& at, const Sight& sight, const Block& block, int column, int32_t s, B* weights, B* grads, B* paired, Partial* partial) {
  float scored[N * C], changed[N * C];
  const float* gain = block.gain + column * C;
  scores_apart<N>(c, at, block.columns + column * C * c.D, gain, s, scored);
  const B* rows[N];
  EACH_ROW rows[r] = at.v + at.index[s + r] * at.v_step;
  products_apart<N>(rows, block.dy_columns + column * C * c.P, 2 * C, c.P / 2, changed);
  const bool whole = s >= sight.whole_first && s + N <= sight.whole_last;
  const int n = static_cast<int>(c.numbers);
  (void)n;
  for (int j = 0; j < 2; ++j) {
    const int64_t at_lane = column * C + j * L;
    const V factor = load(block.factor + at_lane), shared = load(block.shared + at_lane), gains = load(gain + j * L);
    EACH_ROW {
      const V score = load(scored + r * C + j * L);
      V ds = load(changed + r * C + j * L) * factor - shared;
#if ZONAL_LOG
      V w = weight_again(c, value(score, at.coefficients, n) * LOG2E - load(block.lse + at_lane));
      if (!whole) w = seen(sight, j, s + r) ? w : V{};
      ds *= w;
#else
      V w = value(score, at.coefficients, n);
      if (!whole) {
        w = seen(sight, j, s + r) ? w : V{};
        ds = seen(sight, j, s + r) ? ds : V{};
      }
#endif
#if !ZONAL_LOG || ZONAL_MAP
      if (c.learned != 0) {
        V term = ds * base(score, at.coefficients, n);
        for (int k = 0; k < c.learned; ++k) {
          partial->coefficients[k] += term;
          term *= score;
        }
      }
      ds *= derivative(score, at.coefficients, n);
#endif
      if (c.dscale != nullptr) partial->scale += ds * score;
      if (at.key_scale != nullptr) ds *= at.key_scale[at.index[s + r]];
      store(scored + r * C + j * L, w * factor);
      store(changed + r * C + j * L, ds * gains);
    }
  }
  EACH_ROW {
    const auto rounded = [&](const float* from) {
      return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + L), _mm512_loadu_ps(from)));
    };
    _mm512_storeu_si512(weights + r * SPAN, rounded(scored + r * C));
    _mm512_storeu_si512(grads + r * SPAN, rounded(changed + r * C));
  }
  for (int r = 0; r < N; r += 2)
    for (int j = 0; j < 2; ++j) {
      const __m512 second = r + 1 < N ? _mm512_loadu_ps(changed + (r + 1) * C + j * L) : _mm512_setzero_ps();
      _mm512_storeu_si512(paired + r * C + j * 2 * L, interleaved(_mm512_loadu_ps(changed + r * C + j * L), second));
    }
}

// into (rows of keys) += tile^T rows: the keys of a block against the SPAN rows of queries
void outer(const B* tile, const B* rows, int64_t width, const int32_t* index, int64_t keys, float* into) {
  const int64_t padded = up(width, C);
  for (int64_t s = 0; s < keys; s += R)
    with_rows<R>(std::min<int64_t>(R, keys - s), [&](auto count) {
      constexpr int N = decltype(count)::value;
      const B* a[N];
      EACH_ROW a[r] = tile + (s + r) * SPAN;
      float sums[N * C];
      for (int64_t p = 0; p < width; p += C) {
        products_apart<N>(a, rows + 2 * p, 2 * padded, SPAN / 2, sums);
        EACH_ROW {
          float* to = into + index[s + r] * width + p;
          if (p + C <= width) {
            store(to, load(to) + load(sums + r * C));
            store(to + L, load(to + L) + load(sums + r * C + L));
          } else {
            for (int64_t i = 0; i < width - p; ++i) to[i] += sums[r * C + i];
          }
        }
      }
    });
}

void backward_block(const Call& c, const Head<B>& at, int64_t b, int64_t h, int64_t t0, const Block& block, const Part& part, double* dscale, double* dc) {
  const int columns = static_cast<int>((std::min<int64_t>(SPAN, c.T - t0) + C - 1) / C);
  pack_block(c, at, b, h, t0, block);
  Sight sights[COLS];
  Reach reach;
  for (int i = 0; i < columns; ++i) {
    sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
    reach.add(sights[i]);
  }
  Partial partial;
  for (int32_t s0 = reach.first / 2 * 2; s0 < reach.last; s0 += KEYS) {
    const int32_t s1 = std::min(s0 + KEYS, reach.last);
    for (int k = 0; k < c.learned; ++k) partial.coefficients[k] = V{};
    partial.scale = V{};
    for (int i = 0; i < COLS; ++i) {
      const int32_t begin = i < columns ? std::max(s0, sights[i].first / 2 * 2) : s1, end = i < columns ? std::min(s1, sights[i].last) : s0;
      for (int32_t s = s0; s < s1; ++s)  // what no lane of the column sees
        if (s < begin || s >= end) {
          std::memset(block.weights + (s - s0) * SPAN + i * C, 0, sizeof(B) * C);
          std::memset(block.grads + (s - s0) * SPAN + i * C, 0, sizeof(B) * C);
        }
      for (int32_t s = begin; s < end; s += R)
        with_rows<R>(std::min<int>(R, end - s), [&](auto count) {
          constexpr int N = decltype(count)::value;
          const int64_t place = (s - s0) * SPAN + i * C;
          gradients<N>(c, at, sights[i], block, i, s, block.weights + place, block.grads + place, block.paired + (s - begin) * C, &partial);
        });
      if (begin < end)
        for (int64_t d = 0; d < c.D; d += R)
          with_rows<R>(std::min<int64_t>(R, c.D - d), [&](auto count) {
            numbers_by_columns<decltype(count)::value>(
                block.keys + begin * c.D + 2 * d, c.D, block.paired, (end - begin + 1) / 2, block.dq + i * C * c.D + d * C);
          });
    }
    outer(block.weights, block.dy_rows, c.P, at.index + s0, s1 - s0, part.dv);
    outer(block.grads, block.rows, c.D, at.index + s0, s1 - s0, part.dk);
    for (int k = 0; k < c.learned; ++k) dc[k] += sum(partial.coefficients[k]);
    if (dscale != nullptr) *dscale += sum(partial.scale);
  }
  float ones[C];
  for (float& one : ones) one = 1.f;  // the scales are in already
  for (int64_t t = t0; t < std::min(t0 + SPAN, c.T); t += C)
    finish_queries(c, at, b, h, t, static_cast<int>(std::min<int64_t>(C, c.T - t)), block.dq + (t - t0) * c.D, ones, 1.f, nullptr);
}

void backward_task(const Call& c, const Part& part, Scratch& scratch) {
  const int64_t D16 = up(c.D, C), P16 = up(c.P, C), groups = c.H / c.Hkv;
  scratch.begin(SPAN * (2 * c.D + c.P + D16 + P16) / 2 + SPAN * (4 + c.D) + KEYS * SPAN + KEYS * C / 2 + up(c.S, 2) * c.D / 2);
  const auto take = [&](int64_t numbers) { return reinterpret_cast<B*>(scratch.take(numbers / 2)); };
  Block block;
  block.columns = take(SPAN * c.D);
  block.dy_columns = take(SPAN * c.P);
  block.rows = take(SPAN * D16);
  block.dy_rows = take(SPAN * P16);
  block.gain = scratch.take(SPAN);
  block.factor = scratch.take(SPAN);
  block.shared = scratch.take(SPAN);
  block.lse = scratch.take(SPAN);
  block.dq = scratch.take(SPAN * c.D);
  block.weights = take(KEYS * SPAN);
  block.grads = take(KEYS * SPAN);
  block.paired = take(KEYS * C);
  B* keys = take(up(c.S, 2) * c.D);
  block.keys = keys;
  for (int64_t h = part.kv * groups; h < (part.kv + 1) * groups; ++h) {
    const Head<B> at = head_of<B>(c, part.b, h, part.shared);
    if (h == part.kv * groups) pair_rows(at.k, at.k_step, at.index, 0, static_cast<int32_t>(c.S), c.D, keys);
    const int64_t place = (part.part * c.B + part.b) * c.H + h;
    double dscale = 0, *dc = c.dcoefficients == nullptr ? nullptr : c.dcoefficients + place * c.learned;
    for (int64_t t0 = part.part * SPAN; t0 < c.T; t0 += c.split * SPAN)
      backward_block(c, at, part.b, h, t0, block, part, c.dscale == nullptr ? nullptr : &dscale, dc);
    if (c.dscale != nullptr) c.dscale[place] = at.scale == 0 ? 0 : dscale / at.scale;
  }
}

}  // namespace

extern "C" {

// Both return 0, or 1 when memory ran out. D is even, and for backward so is P.
int zonal_forward(const Call* call) { return run_forward<B>(*call, forward_task); }
int zonal_backward(const Call* call) { return run_backward<B>(*call, backward_task); }
}
