// Exact attention y_t = factor_t sum_s l(S_ts) v_s by tiles that live in registers and the first cache.
//
// Queries lie across the lanes of a vector, sixteen to a column; keys and values are read where they are, one number at a time, and
// broadcast. So nothing is packed but queries (once a task), a row's sum and maximum need no horizontal step, and a mask is an interval of
// keys for each lane. Key padding is a list of the keys that are there.
//
//   S^T (keys x 16)  = K Q^T           6 x 16 numbers in registers, link applied there, stored as W^T
//   Y^T (P x 16)    += V^T W^T
//   backward: dW^T = V dY^T, dS^T = (dW^T - D) l'(S^T), dQ^T += K^T dS^T, dK += dS^T Q, dV += W^T dY

#define ZONAL_LANES 8
#define ZONAL_ROUNDED 0
#include "common.hpp"
#include "products.hpp"

namespace {

constexpr int R = 6;         // rows of a register tile: 12 sums, 2 columns and a broadcast are 15 of 16 registers
constexpr int KEYS = 96;     // keys of a block, a multiple of R: K and V of a block stay in the second cache
constexpr int SPAN = 4 * C;  // queries of a block, backward

// scores of N keys from place s on with a column of queries, in the domain of the link
template <int N>
INLINE void scores(const Call& c, const Head<float>& at, const float* queries, int32_t s, V (&x)[N], V (&y)[N]) {
  const float* rows[N];
  EACH_ROW {
    rows[r] = at.k + at.index[s + r] * at.k_step;
    x[r] = y[r] = V{};
  }
  rows_by_columns<N>(rows, queries, C, c.D, x, y);
  EACH_ROW {
    if (at.key_scale != nullptr) {
      const V scale = spread(at.key_scale[at.index[s + r]]);
      x[r] *= scale;
      y[r] *= scale;
    }
    x[r] = in_domain(x[r]);
    y[r] = in_domain(y[r]);
  }
}

// W^T of N keys (in log space: the scores, and their maximum)
template <int N>
APART void weigh(const Call& c, const Head<float>& at, const Sight& sight, const float* queries, int32_t s, float* weights, Column& column) {
  V x[N], y[N];
  scores<N>(c, at, queries, s, x, y);
  record<N>(c, at.coefficients, sight, s, x, y, weights, column);
}

// keys [s0, s1) into a column's sums; out (P x C), weights (KEYS x C) is where W^T goes
void absorb(const Call& c, const Head<float>& at, const Sight& sight, const float* queries, int32_t s0, int32_t s1, float* weights, float* out, Column& column) {
  s0 = std::max(s0, sight.first);
  s1 = std::min(s1, sight.last);
  if (s0 >= s1) return;
#if ZONAL_LOG
  const V before[2] = {column.top[0], column.top[1]};
#endif
  for (int32_t s = s0; s < s1; s += R)
    with_rows<R>(std::min<int>(R, s1 - s), [&](auto n) { weigh<decltype(n)::value>(c, at, sight, queries, s, weights + (s - s0) * C, column); });
#if ZONAL_LOG
  exponentials(before, s1 - s0, c.P, weights, out, column);
#endif
  for (int64_t p = 0; p < c.P; p += R)
    with_rows<R>(std::min<int64_t>(R, c.P - p), [&](auto n) {
      numbers_by_columns<decltype(n)::value>(at.v + p, at.v_step, at.index + s0, weights, C, s1 - s0, out + p * C);
    });
}

// queries t0 … t0 + 15 as a column (D x C), times scale and norm; lanes past the end are zeros
void pack_queries(const Call& c, const Head<float>& at, int64_t t0, float factor, float* out) {
  const int count = static_cast<int>(std::min<int64_t>(C, c.T - t0));
  const auto row = [&](int i) { return at.q + (t0 + i) * at.q_step; };
  float factors[C];
  for (int i = 0; i < count; ++i) factors[i] = query_scale(c, row(i), at.scale) * factor;
  if (count < C) std::memset(out, 0, sizeof(float) * C * c.D);
  as_column(row, factors, count, c.D, out);
}

void forward_task(const Call& c, int64_t b, int64_t h, int64_t t0, int64_t t1, const Shared& shared, Scratch& scratch) {
  const Head<float> at = head_of<float>(c, b, h, shared);
  const int64_t columns = (t1 - t0 + C - 1) / C;
  scratch.begin(COLUMNS * C * (c.D + c.P) + KEYS * C);
  float* queries = scratch.take(COLUMNS * C * c.D);
  float* out = scratch.take(COLUMNS * C * c.P);
  float* weights = scratch.take(KEYS * C);
  Sight sights[COLUMNS];
  Column sums[COLUMNS];
  Reach reach;
  for (int64_t i = 0; i < columns; ++i) {
    pack_queries(c, at, t0 + i * C, UNIT, queries + i * C * c.D);
    sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
    reach.add(sights[i]);
  }
  std::memset(out, 0, sizeof(float) * columns * C * c.P);
  for (int32_t s = reach.first; s < reach.last; s += KEYS)
    for (int64_t i = 0; i < columns; ++i)
      absorb(c, at, sights[i], queries + i * C * c.D, s, std::min(s + KEYS, reach.last), weights, out + i * C * c.P, sums[i]);
  finish<float>(c, at.lo, at.hi, b, h, t0, t1, sums, out);
}

// ---- backward --------------------------------------------------------------------------------------------------------------------------

struct Block {  // the queries of a block, backward: four columns
  float *columns, *rows;            // Q as columns (4, D, C) and as rows (SPAN, D16), times scale and norm
  float *dy_columns, *dy_rows;      // dY times the row's factor, (4, P, C) and (SPAN, P16)
  float *shared, *lse, *inverse;    // dy . y times the factor, the row's log-sum-exp (base 2), 1 / norm of the query, (SPAN)
  float* dq;                        // as columns (4, D, C)
  float *weights, *grads;           // W^T and dS^T times the key's scale, (KEYS, SPAN)
};

void pack_block(const Call& c, const Head<float>& at, int64_t b, int64_t h, int64_t t0, const Block& block) {
  const int64_t D16 = up(c.D, C), P16 = up(c.P, C);
  const bool online = ZONAL_LOG && c.anchor == ROW;
  const int count = static_cast<int>(std::min<int64_t>(SPAN, c.T - t0));
  if (count < SPAN || D16 != c.D || P16 != c.P) {
    std::memset(block.rows, 0, sizeof(float) * SPAN * D16);
    std::memset(block.dy_rows, 0, sizeof(float) * SPAN * P16);
    std::memset(block.columns, 0, sizeof(float) * SPAN * c.D);
    std::memset(block.dy_columns, 0, sizeof(float) * SPAN * c.P);
  }
  std::memset(block.dq, 0, sizeof(float) * SPAN * c.D);
  float ones[C];
  for (float& one : ones) one = 1.f;
  for (int i = 0; i < SPAN; ++i) {
    block.shared[i] = block.inverse[i] = 0;
    block.lse[i] = std::numeric_limits<float>::infinity();
    if (i >= count) continue;
    const int64_t row = (b * c.H + h) * c.T + t0 + i;
    const float *q = at.q + (t0 + i) * at.q_step, *dy = static_cast<const float*>(c.dy) + b * c.dys.batch + h * c.dys.head + (t0 + i) * c.dys.token, *y = static_cast<const float*>(c.y) + row * c.P;
    block.inverse[i] = query_scale(c, q, 1.f);
    const float a = at.scale * block.inverse[i], factor = online ? 1.f : c.factor[row];
    if (ZONAL_LOG) block.lse[i] = online ? c.factor[row] * LOG2E : 0.f;
    if (c.anchor == ROW) block.shared[i] = dot(dy, y, c.P) * factor;
    for (int64_t d = 0; d < c.D; ++d) block.rows[i * D16 + d] = q[d] * a;
    for (int64_t p = 0; p < c.P; ++p) block.dy_rows[i * P16 + p] = dy[p] * factor;
  }
  for (int i = 0; i < count; i += C) {
    const int rows = std::min(C, count - i);
    as_column([&](int r) { return block.rows + (i + r) * D16; }, ones, rows, c.D, block.columns + i * c.D);
    as_column([&](int r) { return block.dy_rows + (i + r) * P16; }, ones, rows, c.P, block.dy_columns + i * c.P);
  }
}

// W^T and dS^T of N keys with one column
template <int N>
APART void scores_apart(const Call& c, const Head<float>& at, const float* queries, int32_t s, float* out) {
  V x[N], y[N];
  scores<N>(c, at, queries, s, x, y);
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
  }
}

template <int N>
inline void gradients(const Call& c, const Head<float>& at, const Sight& sight, const Block& block, int column, int32_t s, float* weights, float* grads, V* partial) {
  float scored[N * C], changed[N * C];
  scores_apart<N>(c, at, block.columns + column * C * c.D, s, scored);
  const float* rows[N];
  EACH_ROW rows[r] = at.v + at.index[s + r] * at.v_step;
  products_apart<N>(rows, block.dy_columns + column * C * c.P, C, c.P, changed);
  const bool whole = s >= sight.whole_first && s + N <= sight.whole_last;
  const int n = static_cast<int>(c.numbers);
  (void)n;
  EACH_ROW
    for (int j = 0; j < 2; ++j) {
      const V score = load(scored + r * C + j * L);
      V ds = load(changed + r * C + j * L) - load(block.shared + column * C + j * L);
#if ZONAL_LOG
      V w = weight_again(c, value(score, at.coefficients, n) * LOG2E - load(block.lse + column * C + j * L));
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
      if (partial != nullptr) {
        V term = ds * base(score, at.coefficients, n);
        for (int k = 0; k < c.learned; ++k) {
          partial[k] += term;
          term *= score;
        }
      }
      ds *= derivative(score, at.coefficients, n);
#else
      (void)partial;
#endif
      if (at.key_scale != nullptr) ds *= at.key_scale[at.index[s + r]];
      store(weights + r * SPAN + j * L, w);
      store(grads + r * SPAN + j * L, ds);
    }
}

void backward_block(const Call& c, const Head<float>& at, int64_t b, int64_t h, int64_t t0, const Block& block, float* dk, float* dv, double* dscale, double* dc) {
  const int columns = static_cast<int>((std::min<int64_t>(SPAN, c.T - t0) + C - 1) / C);
  pack_block(c, at, b, h, t0, block);
  Sight sights[SPAN / C];
  Reach reach;
  for (int i = 0; i < columns; ++i) {
    sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
    reach.add(sights[i]);
  }
  V partial[40];
  for (int32_t s0 = reach.first; s0 < reach.last; s0 += KEYS) {
    const int32_t s1 = std::min(s0 + KEYS, reach.last);
    for (int k = 0; k < c.learned; ++k) partial[k] = V{};
    for (int i = 0; i < SPAN / C; ++i) {
      const int32_t begin = i < columns ? std::max(s0, sights[i].first) : s1, end = i < columns ? std::min(s1, sights[i].last) : s0;
      for (int32_t s = s0; s < s1; ++s)  // what no lane of the column sees
        if (s < begin || s >= end) {
          std::memset(block.weights + (s - s0) * SPAN + i * C, 0, sizeof(float) * C);
          std::memset(block.grads + (s - s0) * SPAN + i * C, 0, sizeof(float) * C);
        }
      for (int32_t s = begin; s < end; s += R)
        with_rows<R>(std::min<int>(R, end - s), [&](auto count) {
          constexpr int N = decltype(count)::value;
          const int64_t place = (s - s0) * SPAN + i * C;
          gradients<N>(c, at, sights[i], block, i, s, block.weights + place, block.grads + place, dc == nullptr ? nullptr : partial);
        });
      if (begin < end)
        for (int64_t d = 0; d < c.D; d += R)
          with_rows<R>(std::min<int64_t>(R, c.D - d), [&](auto count) {
            const float* grads = block.grads + (begin - s0) * SPAN + i * C;
            numbers_by_columns<decltype(count)::value>(at.k + d, at.k_step, at.index + begin, grads, SPAN, end - begin, block.dq + i * C * c.D + d * C);
          });
    }
    outer<R, SPAN>(block.weights, block.dy_rows, c.P, at.index + s0, s1 - s0, dv);
    outer<R, SPAN>(block.grads, block.rows, c.D, at.index + s0, s1 - s0, dk);
    for (int k = 0; k < c.learned && dc != nullptr; ++k)
      for (int i = 0; i < L; ++i) dc[k] += partial[k][i];
  }
  for (int64_t t = t0; t < std::min(t0 + SPAN, c.T); t += C) {
    const int count = static_cast<int>(std::min<int64_t>(C, c.T - t));
    finish_queries(c, at, b, h, t, count, block.dq + (t - t0) * c.D, block.inverse + (t - t0), at.scale, dscale);
  }
}

void backward_task(const Call& c, const Part& part, Scratch& scratch) {
  const int64_t D16 = up(c.D, C), P16 = up(c.P, C), groups = c.H / c.Hkv;
  scratch.begin(SPAN * (2 * c.D + c.P + D16 + P16 + 3) + 2 * KEYS * SPAN);
  Block block;
  block.columns = scratch.take(SPAN * c.D);
  block.rows = scratch.take(SPAN * D16);
  block.dy_columns = scratch.take(SPAN * c.P);
  block.dy_rows = scratch.take(SPAN * P16);
  block.shared = scratch.take(SPAN);
  block.lse = scratch.take(SPAN);
  block.inverse = scratch.take(SPAN);
  block.dq = scratch.take(SPAN * c.D);
  block.weights = scratch.take(KEYS * SPAN);
  block.grads = scratch.take(KEYS * SPAN);
  for (int64_t h = part.kv * groups; h < (part.kv + 1) * groups; ++h) {
    const Head<float> at = head_of<float>(c, part.b, h, part.shared);
    const int64_t place = (part.part * c.B + part.b) * c.H + h;
    double* dc = c.dcoefficients == nullptr ? nullptr : c.dcoefficients + place * c.learned;
    double* dscale = c.dscale == nullptr ? nullptr : c.dscale + place;
    for (int64_t t0 = part.part * SPAN; t0 < c.T; t0 += c.split * SPAN) backward_block(c, at, part.b, h, t0, block, part.dk, part.dv, dscale, dc);
  }
}

}  // namespace

extern "C" {

// Whether tile_bf16.cpp would run on this processor.
int zonal_has_bf16() {
#if defined(__x86_64__) && defined(__AVX2__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return 0;
#endif
}

// Both return 0, or 1 when memory ran out.
int zonal_forward(const Call* call) { return run_forward<float>(*call, forward_task); }
int zonal_backward(const Call* call) { return run_backward<float>(*call, backward_task); }
}
