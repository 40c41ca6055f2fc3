// What the tile kernels share: vectors, the link, the call and its masks. Names of the template are explained in tile.cpp.
//
// The link comes as macros in front: ZONAL_LOG, ZONAL_CLAMP, ZONAL_LOW, ZONAL_HIGH and the expressions ZONAL_VALUE, ZONAL_DERIVATIVE,
// ZONAL_BASE of x, c, n: of K, or with ZONAL_LOG of log K, which is x itself unless ZONAL_MAP. No header
// of torch is needed: OpenMP's team is the one torch has set up.

#include "simd.hpp"

#include <atomic>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int COLUMNS = 16;  // columns of a task, forward

// zeros in n numbers of a tensor, which has no address where it is empty
inline void clear(float* x, int64_t n) { std::fill_n(x, n, 0.f); }

// 1 / |x|, in float64 where squares leave the range of float32; 0 for a vector of zeros
template <typename T>
float inverse_norm(const T* x, int64_t n) {
  const float square = dot(x, x, n);
  if (square > 1e-18f && square < 1e30f) return 1.f / std::sqrt(square);
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(number(x[i])) * number(x[i]);
  return total > 0 ? static_cast<float>(std::min(1 / std::sqrt(total), 3e38)) : 0.f;
}

// 1 / the sum of a row; 0 where float32 has no normal number for it, for its inverse may be infinite, and few of its digits are left
inline float inverse_sum(float sum) { return std::abs(sum) < std::numeric_limits<float>::min() ? 0.f : 1.f / sum; }

// Rows of width numbers times a factor each, as a column: number d of row i at out[d * C + i]. Calls them by ``rows(i)``; i < count <= C.
template <typename F>
INLINE void as_column(const F& rows, const float* factors, int count, int64_t width, float* out) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) {
      V8 x[8];
      for (int j = 0; j < 8; ++j) x[j] = load8(rows(i + j) + d) * factors[i + j];
      transpose(x);
      for (int j = 0; j < 8; ++j) put8(out + (d + j) * C + i, x[j]);
    }
    for (; d < width; ++d)
      for (int j = 0; j < 8; ++j) out[d * C + i + j] = number(rows(i + j)[d]) * factors[i + j];
  }
  for (; i < count; ++i)
    for (int64_t d = 0; d < width; ++d) out[d * C + i] = number(rows(i)[d]) * factors[i];
}

// The way back: column (width, C) times a factor a lane; f(lane, d, eight numbers from d on) and g(lane, d, number) take what comes.
template <typename F, typename G>
INLINE void as_rows(const float* column, const float* factors, int count, int64_t width, const F& f, const G& g) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) {
      V8 x[8];
      for (int j = 0; j < 8; ++j) x[j] = load8(column + (d + j) * C + i);
      transpose(x);
      for (int j = 0; j < 8; ++j) f(i + j, d, x[j] * factors[i + j]);
    }
    for (; d < width; ++d)
      for (int j = 0; j < 8; ++j) g(i + j, d, column[d * C + i + j] * factors[i + j]);
  }
  for (; i < count; ++i)
    for (int64_t d = 0; d < width; ++d) g(i, d, column[d * C + i] * factors[i]);
}

// and into rows of numbers, ``step`` apart
INLINE void to_rows(const float* column, const float* factors, int count, int64_t width, float* rows, int64_t step) {
  const auto eight = [&](int64_t lane, int64_t d, V8 x) { put8(rows + lane * step + d, x); };
  const auto one = [&](int64_t lane, int64_t d, float x) { rows[lane * step + d] = x; };
  as_rows(column, factors, count, width, eight, one);
}

constexpr struct Ones {  // factors of a column that stays as it is
  float at[C];
  constexpr Ones() : at() {
    for (float& x : at) x = 1.f;
  }
} ONES;

inline V horner(V x, const float* c, int n) {
  V out = spread(c[n - 1]);
  for (int k = n - 2; k >= 0; --k) out = out * x + c[k];
  return out;
}

inline V horner_derivative(V x, const float* c, int n) {
  V out = V{};
  for (int k = n - 1; k >= 1; --k) out = out * x + c[k] * k;
  return out;
}

inline V value(V x, const float* c, int n) { (void)c; (void)n; return ZONAL_VALUE; }
inline V derivative(V x, const float* c, int n) { (void)c; (void)n; return ZONAL_DERIVATIVE; }
template <int N>
INLINE void values(V (&x)[N], V (&y)[N], const float* c, int n) {
#ifdef ZONAL_HORNER
  // all at once: one chain of additions and multiplications alone would wait for itself
  V a[N], b[N];
  EACH_ROW a[r] = b[r] = spread(c[n - 1]);
  for (int k = n - 2; k >= 0; --k)
    EACH_ROW {
      a[r] = a[r] * x[r] + c[k];
      b[r] = b[r] * y[r] + c[k];
    }
  EACH_ROW {
    x[r] = a[r];
    y[r] = b[r];
  }
#else
  EACH_ROW {
    x[r] = value(x[r], c, n);
    y[r] = value(y[r], c, n);
  }
#endif
}
inline V base(V x, const float* c, int n) { (void)x; (void)c; (void)n; return V{} + (ZONAL_BASE); }

inline V in_domain(V x) {
#if ZONAL_CLAMP
  return most(least(x, spread(ZONAL_HIGH)), spread(ZONAL_LOW));
#else
  return x;
#endif
}

// f with the number of rows, 1 to MAX, as a constant
template <int MAX, typename F>
INLINE void with_rows(int64_t rows, const F& f) {
  if constexpr (MAX > 1) {
    if (rows < MAX) return with_rows<MAX - 1>(rows, f);
  }
  f(std::integral_constant<int, MAX>());
}

// a thread's buffers, kept from call to call: new pages cost more than the arithmetic
struct Scratch {
  float* data = nullptr;
  size_t size = 0, used = 0;
  ~Scratch() { std::free(data); }
  void begin(size_t floats) {
    floats += 16 * 16;  // rounding of each part
    if (floats > size) {
      std::free(data);
      data = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
      size = data == nullptr ? 0 : floats;
      if (data == nullptr) throw std::bad_alloc();
    }
    used = 0;
  }
  float* take(size_t floats) {
    float* at = data + used;
    used += (floats + 15) / 16 * 16;
    return at;
  }
};

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

extern "C" {

int64_t zonal_version() { return 8; }

struct Strides {  // what a step along each axis but the last is, in numbers
  int64_t batch, head, token;
};

struct Axes {  // and along the last
  int64_t batch, head, token, last;
};

struct Plane {  // strides of (B, H, n) with n contiguous
  int64_t batch, head;
};

// What zonal/kernels/tile.py fills in. Last axes of q, k, v, dy have stride 1. key_mask (B, S) or null; edges: documents + 1 borders of packed
// documents, or null. Who sees whom: TileSpec of the same file; left < 0: no window. The log prior of query t and key s is
// row_t (B, H, T) + col_s (B, H, S) - slope (H) |position_t - s|, each part null where it is absent. q, k, v, y, rest, dy and their gradients are of
// one type.
struct Call {
  const void *q, *k, *v;
  const float *scale, *coefficients, *slope;
  const double *row, *col;
  Plane rows, cols;
  const uint8_t* key_mask;
  const int64_t* edges;
  Strides qs, ks, vs, dys;
  int64_t type, B, H, Hkv, T, S, D, P, documents, causal, include_self, chunk, left, right, numbers, learned, anchor, normalise;
  void *y, *rest;    // (B, H, T, P) contiguous, as all that follows but dy; what rounding y to 16 bits left of it, or null
  float* factor;     // (B, H, T)
  const void* dy;
  void *dq, *dk, *dv;
  float* sums;                     // of dk and dv: (places, S, D + P), a place for each thread, or for each part of each key head when split > 1
  double *dscale, *dcoefficients;  // (split, B, H), (split, B, H, learned), zeros, or null
  double *drow, *dcol;             // (B, H, T), (split, B, H, S), zeros, or null
  int64_t split, places;           // parts of the queries that are summed up on their own, backward
};
}

namespace {

enum Anchor { ROW = 0, COUNT = 1, RAW = 2 };
enum Type { FLOAT = 0, BFLOAT = 1, FLOAT16 = 2 };

constexpr float UNIT = ZONAL_LOG && !ZONAL_MAP ? LOG2E : 1.f;  // of scores: in log space to base 2, but where a map takes them first

// A weight that backward makes again from its logarithm, base 2. Of a row that was divided by its sum none exceeds 1, but for the rounding of large logarithms.
inline V weight_again(const Call& c, V power) { return exp2(c.anchor == ROW ? least(power, V{}) : power); }

// to wake the other threads takes some ten microseconds, longer where the processor is busy
bool worth_a_team(const Call& c) { return c.B * c.H * up(c.T, C) * c.S * (c.D + c.P) > (1 << 19); }

// norms of keys: 1 / |k|
template <typename T>
void key_scales(const Call& c, float* out) {
  const int64_t rows = c.B * c.Hkv * c.S;
#pragma omp parallel for schedule(static) if (worth_a_team(c))
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t b = i / (c.Hkv * c.S), h = i / c.S % c.Hkv, s = i % c.S;
    const T* k = static_cast<const T*>(c.k) + b * c.ks.batch + h * c.ks.head + s * c.ks.token;
    out[i] = inverse_norm(k, c.D);
  }
}

// What all tasks read: norms of keys, and who sees whom. index (B or 1, S): the keys that are there, in order, then the others; lo, hi (B or 1,
// T): intervals of places in it, hi >= lo.
struct Shared {
  const float* key_scales;  // null where keys stay as they are
  const int32_t *index, *lo, *hi;
  int64_t by_batch;
};

// the position of query 0 among the keys
inline int64_t first_position(const Call& c) { return c.S - c.T; }

// the keys [lo, hi) that query t of the document [start, end) may see before the mask
void interval(const Call& c, int64_t t, int64_t start, int64_t end, int32_t* lo, int32_t* hi) {
  const int64_t position = t + first_position(c);
  int64_t from = start, to = end;
  if (c.chunk > 0) {
    const int64_t ahead = position - start;
    to = std::min(to, start + (ahead >= 0 ? ahead / c.chunk : -((-ahead + c.chunk - 1) / c.chunk)) * c.chunk);
  } else if (c.causal) {
    to = std::min(to, position + c.include_self);
  }
  if (c.left >= 0) {
    from = std::max(from, position - c.left);
    to = std::min(to, position + c.right + 1);
  }
  from = std::min(from, c.S);
  *lo = static_cast<int32_t>(from);
  *hi = static_cast<int32_t>(std::max(from, to));
}

template <typename T>
Shared share(const Call& c, Scratch& room) {
  const bool scaled = c.normalise && c.S > 0;
  const int64_t masks = c.key_mask == nullptr ? 1 : c.B;
  room.begin((scaled ? c.B * c.Hkv * c.S : 0) + masks * (c.S + 2 * c.T) + c.S + 1);
  float* scales = scaled ? room.take(c.B * c.Hkv * c.S) : nullptr;
  if (scaled) key_scales<T>(c, scales);
  const auto take = [&](int64_t n) { return reinterpret_cast<int32_t*>(room.take(n)); };
  int32_t *index = take(masks * c.S), *lo = take(masks * c.T), *hi = take(masks * c.T), *rank = take(c.S + 1);
  for (int64_t t = 0, document = 0; t < c.T; ++t) {
    while (c.documents > 0 && c.edges[document + 1] <= t) ++document;
    interval(c, t, c.documents > 0 ? c.edges[document] : 0, c.documents > 0 ? c.edges[document + 1] : c.S, lo + t, hi + t);
  }
  if (c.key_mask == nullptr) {
    for (int64_t s = 0; s < c.S; ++s) index[s] = static_cast<int32_t>(s);
    return {scales, index, lo, hi, 0};
  }
  for (int64_t b = c.B - 1; b >= 0; --b) {  // the first row of lo and hi is read by all others
    const uint8_t* mask = c.key_mask + b * c.S;
    int32_t real = 0;
    for (int64_t s = 0; s < c.S; ++s) {
      rank[s] = real;
      if (mask[s]) index[b * c.S + real++] = static_cast<int32_t>(s);
    }
    rank[c.S] = real;
    for (int64_t s = 0; s < c.S; ++s)
      if (!mask[s]) index[b * c.S + real++] = static_cast<int32_t>(s);
    for (int64_t t = 0; t < c.T; ++t) {
      lo[b * c.T + t] = rank[lo[t]];
      hi[b * c.T + t] = rank[hi[t]];
    }
  }
  return {scales, index, lo, hi, 1};
}

struct HeadRules {  // what one head has, but for its tokens
  const float *key_scale, *coefficients;
  const int32_t *index, *lo, *hi;
  const double *row, *col;  // of the log prior, or null
  int64_t q_step, k_step, v_step;
  float scale, slope;
};

template <typename T>
struct Head : HeadRules {  // and those, as they lie in memory
  const T *q, *k, *v;
};

template <typename T>
Head<T> head_of(const Call& c, int64_t b, int64_t h, const Shared& shared) {
  const int64_t kv = h / (c.H / c.Hkv), m = shared.by_batch ? b : 0;
  Head<T> at;
  at.q = static_cast<const T*>(c.q) + b * c.qs.batch + h * c.qs.head;
  at.k = static_cast<const T*>(c.k) + b * c.ks.batch + kv * c.ks.head;
  at.v = static_cast<const T*>(c.v) + b * c.vs.batch + kv * c.vs.head;
  at.key_scale = shared.key_scales == nullptr ? nullptr : shared.key_scales + (b * c.Hkv + kv) * c.S;
  at.coefficients = c.coefficients + h * c.numbers;
  at.index = shared.index + m * c.S;
  at.lo = shared.lo + m * c.T;
  at.hi = shared.hi + m * c.T;
  at.q_step = c.qs.token;
  at.k_step = c.ks.token;
  at.v_step = c.vs.token;
  at.scale = c.scale[h];
  at.row = c.row == nullptr ? nullptr : c.row + b * c.rows.batch + h * c.rows.head;
  at.col = c.col == nullptr ? nullptr : c.col + b * c.cols.batch + h * c.cols.head;
  at.slope = c.slope == nullptr ? 0.f : c.slope[h];
  return at;
}

template <typename T>
float query_scale(const Call& c, const T* q, float scale) {
  return c.normalise ? scale * inverse_norm(q, c.D) : scale;
}

// one column: what its lanes see
struct Sight {
  I lo[2], hi[2];
  int32_t first, last, whole_first, whole_last;  // keys that some lane sees, keys that all lanes see
};

Sight sight_of(const int32_t* lows, const int32_t* highs, int64_t t0, int64_t T) {
  Sight s;
  s.first = std::numeric_limits<int32_t>::max();
  s.last = 0;
  s.whole_first = 0;
  s.whole_last = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < C; ++i) {
    const int64_t t = std::min(t0 + i, T - 1);  // lanes past the end see what the last one sees; nothing of theirs is kept
    const int32_t lo = lows[t], hi = highs[t];
    s.lo[i / L][i % L] = lo;
    s.hi[i / L][i % L] = hi;
    if (hi > lo) {
      s.first = std::min(s.first, lo);
      s.last = std::max(s.last, hi);
    }
    s.whole_first = std::max(s.whole_first, lo);
    s.whole_last = std::min(s.whole_last, hi);
  }
  if (s.last == 0) s.first = 0;
  return s;
}

inline I seen(const Sight& sight, int half, int32_t key) { return (sight.lo[half] <= key) & (sight.hi[half] > key); }

// The log prior of a column of queries, base 2. Rows and columns may be running sums over all tokens, of which only
// differences matter: a reference is taken out in double.
struct Prior {
  bool there = false;
  const double* col = nullptr;
  double reference = 0;
  float slope = 0;
  V row[2] = {V{}, V{}};
  I position[2] = {I{}, I{}};

  // what all queries of the column share for a key
  float of_key(int32_t key) const {
    return static_cast<float>((reference + (col == nullptr ? 0. : col[key])) * static_cast<double>(LOG2E));
  }
  // log B of half of the column and a key, of which ``shared`` is ``of_key``
  V operator()(int half, int32_t key, float shared) const {
    const V sum = row[half] + shared;
    if (slope == 0.f) return sum;
    const V apart = __builtin_convertvector(position[half] - key, V);
    return sum - slope * most(apart, -apart);
  }
};

Prior prior_of(const Call& c, const HeadRules& at, int64_t t0) {
  Prior prior;
  prior.there = at.row != nullptr || at.col != nullptr || at.slope != 0.f;
  if (!prior.there) return prior;
  prior.col = at.col;
  prior.slope = at.slope * LOG2E;
  if (at.row != nullptr) prior.reference = at.row[t0];
  for (int i = 0; i < C; ++i) {
    const int64_t t = std::min(t0 + i, c.T - 1);
    prior.position[i / L][i % L] = static_cast<int32_t>(t + first_position(c));
    if (at.row != nullptr)
      prior.row[i / L][i % L] = static_cast<float>((at.row[t] - prior.reference) * static_cast<double>(LOG2E));
  }
  return prior;
}

// B of its logarithm, base 2: 0 where float32 has no normal number for it, so that nothing is left of what a bias of -infinity hides
inline V prior_value(V power) { return power < spread(-126.f) ? V{} : exp2(power); }

constexpr float NONE = -std::numeric_limits<float>::infinity();  // the logarithm of nothing

struct Column {  // the running sums of a column of queries: sum of K, and in log space the maximum taken out
  V mass[2] = {V{}, V{}}, top[2] = {spread(NONE), spread(NONE)};
};

struct Reach {  // the keys that any of several columns sees
  int32_t first = std::numeric_limits<int32_t>::max(), last = 0;
  void add(const Sight& sight) {
    if (sight.last == 0) return;
    first = std::min(first, sight.first);
    last = std::max(last, sight.last);
  }
};

// scores x, y of N keys from place s on through the link (in log space through its map), its mask and the column's sums, into weights (N, C).
// SUMS: the column's mass is summed up here; otherwise weights are rounded first, and a row's sum is of the rounded ones.
template <bool SUMS, int N>
INLINE void record(
    const Call& c, const HeadRules& at, const Sight& sight, int32_t s, V (&x)[N], V (&y)[N], float* weights,
    Column& column) {
  const V nothing = ZONAL_LOG ? spread(NONE) : V{};
  values<N>(x, y, at.coefficients, static_cast<int>(c.numbers));
#if ZONAL_MAP
  EACH_ROW {
    x[r] *= LOG2E;
    y[r] *= LOG2E;
  }
#endif
  if (s < sight.whole_first || s + N > sight.whole_last)
    EACH_ROW {
      x[r] = seen(sight, 0, s + r) ? x[r] : nothing;
      y[r] = seen(sight, 1, s + r) ? y[r] : nothing;
    }
  EACH_ROW {
#if ZONAL_LOG
    column.top[0] = most(column.top[0], x[r]);
    column.top[1] = most(column.top[1], y[r]);
#else
    if (SUMS) {
      column.mass[0] += x[r];
      column.mass[1] += y[r];
    }
#endif
    store(weights + r * C, x[r]);
    store(weights + r * C + L, y[r]);
  }
}

#if ZONAL_LOG
// scores into weights relative to the running maximum, which has just become column.top; SUMS: as of ``record``
template <bool SUMS>
APART void exponentials(
    const V (&before)[2], int64_t keys, int64_t value_dim, float* weights, float* out, Column& column) {
  const V none = spread(NONE);
  for (int j = 0; j < 2; ++j) {
    const V safe = column.top[j] > none ? column.top[j] : V{};
    if (sum(column.top[j] != before[j] ? spread(1.f) : V{}) != 0.f) {
      const V keep = before[j] > none ? exp2(before[j] - safe) : V{};
      column.mass[j] *= keep;
      for (int64_t p = 0; p < value_dim; ++p) store(out + p * C + j * L, load(out + p * C + j * L) * keep);
    }
    V mass = column.mass[j];  // in a register: a weight's place in memory might be its own
    for (int64_t s = 0; s < keys; ++s) {
      const V x = load(weights + s * C + j * L);
      const V w = x == none ? V{} : exp2(x - safe);  // NaN stays
      if (SUMS) mass += w;
      store(weights + s * C + j * L, w);
    }
    column.mass[j] = mass;
  }
}
#endif

// what a task has summed up, (columns, P, C), as rows of y and their factors
template <typename T>
void finish(const Call& c, const int32_t* lows, const int32_t* highs, int64_t b, int64_t h, int64_t t0, int64_t t1, const Column* sums, const float* out) {
  float factors[C];
  for (int64_t from = t0; from < t1; from += C, ++sums, out += C * c.P) {
    const int count = static_cast<int>(std::min<int64_t>(C, t1 - from));
    const int64_t row = (b * c.H + h) * c.T + from;
    for (int lane = 0; lane < count; ++lane) {
      const float mass = sums->mass[lane / L][lane % L];
      const int32_t seen = highs[from + lane] - lows[from + lane];
      float factor = 1.f;
      if (c.anchor == ROW) factor = inverse_sum(mass);
      if (c.anchor == COUNT) factor = seen > 0 ? 1.f / seen : 0.f;
      factors[lane] = c.factor[row + lane] = factor;
#if ZONAL_LOG
      const float top = sums->top[lane / L][lane % L];
      if (c.anchor == ROW)
        c.factor[row + lane] = mass == 0.f ? std::numeric_limits<float>::infinity() : (top + std::log2(mass)) * LN2;
      else  // the maximum that was taken out comes back
        factors[lane] = mass == 0.f ? 0.f : factor * std::exp2(top);
#endif
    }
    T* y = static_cast<T*>(c.y) + row * c.P;
    T* rest = c.rest == nullptr ? nullptr : static_cast<T*>(c.rest) + row * c.P;
    const auto one = [&](int64_t lane, int64_t p, float x) {
      put(y + lane * c.P + p, x);
      if (rest != nullptr) put(rest + lane * c.P + p, x - number(y[lane * c.P + p]));
    };
    const auto eight = [&](int64_t lane, int64_t p, V8 x) {
      put8(y + lane * c.P + p, x);
      if (rest != nullptr) put8(rest + lane * c.P + p, x - load8(y + lane * c.P + p));
    };
    as_rows(out, factors, count, c.P, eight, one);
  }
}

int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// ---- vectors of extreme norms ----------------------------------------------------------------------------------------------------------

// Products of queries and keys are summed before norms divide them. They leave the range of float32 where norms are very small or large (and products
// of bfloat16 have no subnormal numbers). Such calls get copies of queries and keys, each times the power of two that brings it near unit length.
template <typename T>
struct Copies {
  std::vector<T> rows;
  std::vector<int> powers;

  Copies(const void* from, const Strides& steps, int64_t batch, int64_t heads, int64_t tokens, int64_t dim)
      : rows(batch * heads * tokens * dim), powers(batch * heads * tokens) {
    std::vector<float> scaled(dim);
    for (size_t i = 0; i < powers.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i);
      const int64_t b = row / (heads * tokens), h = row / tokens % heads, n = row % tokens;
      const T* x = static_cast<const T*>(from) + b * steps.batch + h * steps.head + n * steps.token;
      const float inverse = inverse_norm(x, dim);
      powers[i] = inverse > 0 ? std::ilogb(inverse) : 0;
      for (int64_t d = 0; d < dim; ++d) scaled[d] = std::ldexp(number(x[d]), powers[i]);
      narrow(scaled.data(), dim, rows.data() + row * dim);
    }
  }

  // gradients of the copies become those of what they were made of
  void finish(void* grads, int64_t dim) const {
    T* x = static_cast<T*>(grads);
    for (size_t i = 0; i < powers.size(); ++i)
      for (int64_t d = 0; d < dim; ++d, ++x) put(x, std::ldexp(number(*x), powers[i]));
  }
};

inline bool extreme(float inverse) { return inverse > 1e9f || (inverse > 0 && inverse < 1e-9f); }

template <typename T>
bool any_extreme(const Call& c, const Shared& shared) {
  if (!c.normalise) return false;
  for (int64_t i = 0; i < c.B * c.Hkv * c.S; ++i)
    if (extreme(shared.key_scales[i])) return true;
  int found = 0;
  const int64_t rows = c.B * c.H * c.T;
#pragma omp parallel for schedule(static) reduction(| : found) if (worth_a_team(c))
  for (int64_t i = 0; i < rows; ++i) {
    const T* q = static_cast<const T*>(c.q) + i / (c.H * c.T) * c.qs.batch + i / c.T % c.H * c.qs.head + i % c.T * c.qs.token;
    found |= extreme(inverse_norm(q, c.D));
  }
  return found != 0;
}

// run(call) with copies of queries and keys; gradients, where there are any, become those of the call's own
template <typename T, typename F>
int with_copies(const Call& c, const F& run) {
  const Copies<T> q(c.q, c.qs, c.B, c.H, c.T, c.D), k(c.k, c.ks, c.B, c.Hkv, c.S, c.D);
  Call call = c;
  call.q = q.rows.data();
  call.k = k.rows.data();
  call.qs = {c.H * c.T * c.D, c.T * c.D, c.D};
  call.ks = {c.Hkv * c.S * c.D, c.S * c.D, c.D};
  const int failed = run(call);
  if (c.dq != nullptr) q.finish(c.dq, c.D);
  if (c.dk != nullptr) k.finish(c.dk, c.D);
  return failed;
}

// task(i, scratch) for i < tasks, shared out over the threads if ``team``: to wake them takes some ten microseconds. Each thread keeps its
// scratch from call to call. Returns 0, or 1 when memory ran out.
template <typename Scratch, typename F>
int each_task(int64_t tasks, bool team, const F& task) {
  if (tasks == 0) return 0;
  std::atomic<int> failed{0};
  std::atomic<int64_t> next{0};
#pragma omp parallel if (team && tasks > 1)
  {
    static thread_local Scratch scratch;
    try {
      for (int64_t i = next++; i < tasks; i = next++) task(i, scratch);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  }
  return failed;
}

// every task of the forward pass, shared out over the threads. Returns 0, or 1 when memory ran out.
template <typename T>
int run_forward(const Call& c, void (*task)(const Call&, int64_t, int64_t, int64_t, int64_t, const Shared&, Scratch&)) {
  if (c.B == 0 || c.H == 0 || c.T == 0) return 0;
  try {
    Scratch room;
    const Shared shared = share<T>(c, room);
    if (any_extreme<T>(c, shared)) return with_copies<T>(c, [&](const Call& call) { return run_forward<T>(call, task); });
    // enough tasks to keep every thread busy to the end, the long ones first
    int64_t span = COLUMNS * C;
    while (span > C && c.B * c.H * ((c.T + span - 1) / span) < 8 * threads()) span = std::max<int64_t>(C, span / 2);
    const int64_t blocks = (c.T + span - 1) / span;
    return each_task<Scratch>(c.B * c.H * blocks, worth_a_team(c), [&](int64_t i, Scratch& scratch) {
      const int64_t block = blocks - 1 - i / (c.B * c.H), head = i % (c.B * c.H);
      task(c, head / c.H, head % c.H, block * span, std::min(c.T, (block + 1) * span), shared, scratch);
    });
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------------------------

// Sums of keys s0 to s1 as gradients of the raw keys, through their norm, and of the values.
template <typename T>
void finish_keys(const Call& c, int64_t b, int64_t kv, int64_t s0, int64_t s1, float* sums) {
  const T* keys = static_cast<const T*>(c.k) + b * c.ks.batch + kv * c.ks.head;
  const int64_t row = (b * c.Hkv + kv) * c.S;
  for (int64_t s = s0; s < s1; ++s) {
    float* dk = sums + s * c.D;
    const T* k = keys + s * c.ks.token;
    // a unit vector does not change along itself
    const float inverse = c.normalise ? inverse_norm(k, c.D) : 0.f, back = c.normalise ? dot(dk, k, c.D) * inverse : 0.f;
    T *to_k = static_cast<T*>(c.dk) + (row + s) * c.D, *to_v = static_cast<T*>(c.dv) + (row + s) * c.P;
    for (int64_t d = 0; d < c.D && c.normalise; ++d) dk[d] -= back * (number(k[d]) * inverse);
    narrow(dk, c.D, to_k);
    narrow(sums + c.S * c.D + s * c.P, c.P, to_v);
  }
}

// Gradients of ``count`` queries from t on: scale times g (D, C), which are times ``factors`` those of the queries through no norm. Adds what the
// scale gets to *dscale.
template <typename T>
void finish_queries(const Call& c, const Head<T>& at, int64_t b, int64_t h, int64_t t, int count, const float* g, const float* factors, float scale, double* dscale) {
  float row[C * 256];
  to_rows(g, factors, count, c.D, row, c.D);
  for (int i = 0; i < count; ++i) {
    const T* q = at.q + (t + i) * at.q_step;
    float* x = row + i * c.D;
    const float along = dot(x, q, c.D);
    T* to = static_cast<T*>(c.dq) + ((b * c.H + h) * c.T + t + i) * c.D;
    // a unit vector does not change along itself
    const float inverse = c.normalise ? inverse_norm(q, c.D) : 0.f, back = along * inverse;
    if (dscale != nullptr) *dscale += along;
    for (int64_t d = 0; d < c.D; ++d) x[d] = scale * (x[d] - back * (number(q[d]) * inverse));
    narrow(x, c.D, to);
  }
}

struct Part {  // a task of backward: queries part, part + split, … (in blocks) of all heads that read one key head
  int64_t part, b, kv;
  const Shared& shared;
  float *dk, *dv;  // what it sums up, (S, D) and (S, P), zeros
};

// Every task of the backward pass, shared out over the threads; ``finish`` makes gradients of keys of what a task has summed up. Returns 0, or 1
// when memory ran out.
template <typename T>
int run_backward(
    const Call& c, void (*task)(const Call&, const Part&, Scratch&),
    void (*finish)(const Call&, int64_t, int64_t, int64_t, int64_t, float*) = finish_keys<T>) {
  if (c.B == 0 || c.H == 0) return 0;
  std::atomic<int> failed{0};
  const int64_t heads = c.B * c.Hkv, step = c.S * (c.D + c.P);
  try {
    Scratch room;
    const Shared shared = share<T>(c, room);
    if (any_extreme<T>(c, shared)) return with_copies<T>(c, [&](const Call& call) { return run_backward<T>(call, task, finish); });
    std::atomic<int64_t> next{0};
#pragma omp parallel if (worth_a_team(c)) num_threads(static_cast<int>(c.places))
    {
      static thread_local Scratch scratch;
      int64_t place = 0;
#ifdef _OPENMP
      place = omp_get_thread_num();
#endif
      try {
        for (int64_t i = next++; i < heads * c.split; i = next++) {
          float* sums = c.sums + (c.split > 1 ? i : place) * step;
          clear(sums, step);
          const Part at{i / heads, i / c.Hkv % c.B, i % c.Hkv, shared, sums, sums + c.S * c.D};
          task(c, at, scratch);
          if (c.split == 1) finish(c, at.b, at.kv, 0, c.S, sums);
        }
      } catch (const std::bad_alloc&) {
        failed = 1;
      }
    }
    if (c.split > 1) {
      constexpr int64_t rows = 64;
      const int64_t blocks = (c.S + rows - 1) / rows;
#pragma omp parallel for schedule(static) if (worth_a_team(c))
      for (int64_t i = 0; i < heads * blocks; ++i) {
        const int64_t head = i / blocks, s0 = i % blocks * rows, s1 = std::min(c.S, s0 + rows);
        float* sums = c.sums + head * step;
        for (int64_t part = 1; part < c.split; ++part) {  // of the queries, in order
          const float* more = sums + part * heads * step;
          for (int64_t j = s0 * c.D; j < s1 * c.D; ++j) sums[j] += more[j];
          for (int64_t j = c.S * c.D + s0 * c.P; j < c.S * c.D + s1 * c.P; ++j) sums[j] += more[j];
        }
        finish(c, head / c.Hkv, head % c.Hkv, s0, s1, sums);
      }
    }
  } catch (const std::bad_alloc&) {
    failed = 1;
  }
  return failed;
}

// ---- tasks of other kernels ------------------------------------------------------------------------------------------------------------

// 1 when memory ran out in task(i, scratch), else 0
template <typename Scratch, typename F>
int one_task(int64_t i, const F& task) {
  static thread_local Scratch scratch;
  try {
    task(i, scratch);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// ``each_task`` for short tasks: without OpenMP unless ``team``, as its team of one costs a short step a tenth of its time
template <typename Scratch, typename F>
int each_short_task(int64_t tasks, bool team, const F& task) {
  if (!team || tasks == 1) {
    int failed = 0;
    for (int64_t i = 0; i < tasks && !failed; ++i) failed = one_task<Scratch>(i, task);
    return failed;
  }
  std::atomic<int> failed{0};
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < tasks; ++i)
    if (one_task<Scratch>(i, task)) failed = 1;
  return failed;
}

// whether the environment has kernels switched off
inline bool switched_off() {
  const char* kernels = std::getenv("ZONAL_KERNELS");
  return kernels && !std::strcmp(kernels, "off");
}

}  // namespace
