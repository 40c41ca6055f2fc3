// What the passes of ridge.cpp are made of: the call, products of small matrices, elimination, and who sees what in a task.

#include "common.hpp"

#include <vector>

#ifndef ZONAL_BLOCK
#define ZONAL_BLOCK 16
#endif

namespace {

constexpr int BLOCK = ZONAL_BLOCK;      // keys of a block, and rows taken through it at once
constexpr int64_t FAR = 8 * BLOCK;      // so many keys without a query between them are summed up, and P is made from the sum
constexpr int64_t REMAKE = 1024;        // tokens after which P is made again from G
constexpr double LOST = 1e-3;           // eps |G + rho I| |P| from which on float32 is not enough
constexpr double GROWTH[] = {0.5, 8};   // log of the largest weight of a key, in float32 and in float64: see Task::block
enum Outcome { GOOD = 0, DOUBLE = 1, INDEFINITE = 2 };

}  // namespace

extern "C" {

// What zonal/kernels/ridge.py fills in. Last axes have stride 1. index (B or 1, S): the keys that are there, in order; lo, hi
// (B or 1, T): places in it, hi >= lo; both rise within a segment, lo is one number there. edges (segments + 1): borders of segments
// among the queries; what one sees starts afresh in the next. gram, cross, shift, last: the memory before the first key, float64
// (B, Hkv, …), or null; only with one segment, whose places start at 0. A task is one segment of a key head.
// decay (B, Hkv, S): the log rate of each key, or null where nothing fades; level (B, Hkv, D), of the memory, and passed (B), its keys.
struct Ridge {
  const float *q, *k, *v, *scale;  // scale (H) of the queries
  const double* ridge;             // (Hkv)
  const int64_t* powers;           // (H), none above power
  const int32_t *index, *lo, *hi, *edges;
  const double *gram, *cross, *shift, *last, *level, *decay;
  const int64_t* passed;
  Strides qs, ks, vs, dys, decays;
  int64_t B, H, Hkv, T, S, D, P, segments, by_batch, power;  // power: the largest of all heads
  double limit;  // longer keys are shortened to it; 0: none
  float* y;      // (B, H, T, P)
  int32_t* outcome;  // (tasks), or forward null
  const float* dy;
  float *dq, *dk, *dv;  // contiguous
  double *dscale, *dridge;  // (tasks, H / Hkv), (tasks)
  double *dgram, *dcross, *dshift, *dlast, *dlevel;  // as the memory, or null
  double* ddecay;                                    // as decay, or null
};
}

namespace {

// ---- products ----------------------------------------------------------------------------------------------------------------------------

typedef double V4 __attribute__((vector_size(32), aligned(8), may_alias));
template <typename F>
struct Lane {
  using Vector = V8;
  static constexpr int count = 8;
};
template <>
struct Lane<double> {
  using Vector = V4;
  static constexpr int count = 4;
};
INLINE V8 all(float x) { return x - V8{}; }  // as of ``spread``
INLINE V4 all(double x) { return x - V4{}; }
template <typename F>
INLINE typename Lane<F>::Vector& at(F* p) { return *reinterpret_cast<typename Lane<F>::Vector*>(p); }
template <typename F>
INLINE const typename Lane<F>::Vector& at(const F* p) { return *reinterpret_cast<const typename Lane<F>::Vector*>(p); }
template <typename F>
int64_t wide(int64_t n) { return up(n, Lane<F>::count); }

enum Into { SET, ADD, SUB };
#define EACH_VECTOR _Pragma("GCC unroll 3") for (int w = 0; w < W; ++w)

// out (N rows of W vectors) = or += or -= sum_k a[r][k] b[k], or with ACROSS a[k][r] b[k]
template <Into INTO, bool ACROSS, int N, int W, typename F>
APART void tile(const F* a, int64_t a_step, const F* b, int64_t b_step, int64_t inner, F* out, int64_t out_step) {
  using X = typename Lane<F>::Vector;
  constexpr int l = Lane<F>::count;
  X sums[N][W];
  EACH_ROW EACH_VECTOR sums[r][w] = X{};
  for (int64_t k = 0; k < inner; ++k) {
    X row[W];
    EACH_VECTOR row[w] = at(b + w * l);
    EACH_ROW {
      const X number = all(ACROSS ? a[r] : a[r * a_step]);
      EACH_VECTOR sums[r][w] += number * row[w];
    }
    a += ACROSS ? a_step : 1;
    b += b_step;
  }
  EACH_ROW EACH_VECTOR {
    X& to = at(out + r * out_step + w * l);
    to = INTO == SET ? sums[r][w] : INTO == ADD ? to + sums[r][w] : to - sums[r][w];
  }
}

// With vectors of sixteen floats, four rows of floats meet up to eight vectors of a row of b at once, in pairs, or eight
// rows up to three: with fewer sums than that each waits for its last one.
typedef float V16 __attribute__((vector_size(64), aligned(4), may_alias));

template <Into INTO, bool ACROSS, int N, int W>
APART void tile_in_pairs(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t inner, float* out, int64_t out_step) {
  constexpr int M = W / 2;
  V16 sums[N][M + 1] = {};
  V8 rest[N] = {};
  for (int64_t k = 0; k < inner; ++k) {
    V16 row[M + 1];
    V8 last;
    _Pragma("GCC unroll 4") for (int w = 0; w < M; ++w) row[w] = *reinterpret_cast<const V16*>(b + 16 * w);
    if (W % 2) last = load8(b + 16 * M);
    EACH_ROW {
      const float x = ACROSS ? a[r] : a[r * a_step];
      _Pragma("GCC unroll 4") for (int w = 0; w < M; ++w) sums[r][w] += (x - V16{}) * row[w];
      if (W % 2) rest[r] += all(x) * last;
    }
    a += ACROSS ? a_step : 1;
    b += b_step;
  }
  EACH_ROW {
    float* to = out + r * out_step;
    _Pragma("GCC unroll 4") for (int w = 0; w < M; ++w) {
      V16& at = *reinterpret_cast<V16*>(to + 16 * w);
      at = INTO == SET ? sums[r][w] : INTO == ADD ? at + sums[r][w] : at - sums[r][w];
    }
    if (W % 2) {
      V8& at = *reinterpret_cast<V8*>(to + 16 * M);
      at = INTO == SET ? rest[r] : INTO == ADD ? at + rest[r] : at - rest[r];
    }
  }
}

template <typename F>
constexpr bool IN_PAIRS = L == 16 && sizeof(F) == sizeof(float);

struct Range {  // what a few rows of a product need: terms [k0, k1), columns [c0, c1), both whole vectors
  int64_t k0, k1, c0, c1;
};

// rows of a product, four or eight at a time. range(i0, i1) tells what rows [i0, i1) need; the rest of them is left alone.
template <Into INTO, bool ACROSS, typename F, typename R>
INLINE void multiply(int64_t rows, const F* a, int64_t a_step, const F* b, int64_t b_step, F* out, int64_t out_step, const R& range) {
  constexpr int l = Lane<F>::count;
  for (int64_t i = 0, count; i < rows; i += count) {
    if constexpr (IN_PAIRS<F>) {
      if (rows - i >= 8) {
        const Range need = range(i, i + 8);
        if (need.c1 - need.c0 <= 3 * l) {
          count = 8;
          const F *from = ACROSS ? a + need.k0 * a_step + i : a + i * a_step + need.k0, *right = b + need.k0 * b_step + need.c0;
          with_rows<3>((need.c1 - need.c0) / l, [&](auto w) { tile_in_pairs<INTO, ACROSS, 8, decltype(w)::value>(from, a_step, right, b_step, need.k1 - need.k0, out + i * out_step + need.c0, out_step); });
          continue;
        }
      }
    }
    count = std::min<int64_t>(4, rows - i);
    const Range need = range(i, i + count);
    const F* from = ACROSS ? a + need.k0 * a_step + i : a + i * a_step + need.k0;
    if constexpr (IN_PAIRS<F>) {
      if (count == 4) {
        for (int64_t c = need.c0; c < need.c1;)
          with_rows<8>((need.c1 - c) / l, [&](auto w) {
            constexpr int W = decltype(w)::value;
            tile_in_pairs<INTO, ACROSS, 4, W>(from, a_step, b + need.k0 * b_step + c, b_step, need.k1 - need.k0, out + i * out_step + c, out_step);
            c += W * l;
          });
        continue;
      }
    }
    with_rows<4>(count, [&](auto n) {
      constexpr int N = decltype(n)::value;
      for (int64_t c = need.c0; c < need.c1;) {
        const int64_t left = (need.c1 - c) / l;
        const F* right = b + need.k0 * b_step + c;
        F* to = out + i * out_step + c;
        if (left == 1) tile<INTO, ACROSS, N, 1>(from, a_step, right, b_step, need.k1 - need.k0, to, out_step), c += l;
        else if (left == 2 || left == 4) tile<INTO, ACROSS, N, 2>(from, a_step, right, b_step, need.k1 - need.k0, to, out_step), c += 2 * l;
        else tile<INTO, ACROSS, N, 3>(from, a_step, right, b_step, need.k1 - need.k0, to, out_step), c += 3 * l;
      }
    });
  }
}

template <Into INTO, bool ACROSS, typename F>
void whole(int64_t rows, int64_t inner, int64_t columns, const F* a, int64_t a_step, const F* b, int64_t b_step, F* out, int64_t out_step) {
  multiply<INTO, ACROSS>(rows, a, a_step, b, b_step, out, out_step, [=](int64_t, int64_t) { return Range{0, inner, 0, columns}; });
}

// the upper part of a symmetric product of the rows of a and b (inner, n): out = or += or -= a^T b
template <Into INTO, typename F>
void product_above(int64_t n, int64_t inner, const F* a, const F* b, int64_t step, F* out, int64_t out_step) {
  const int64_t columns = wide<F>(n);
  multiply<INTO, true>(n, a, step, b, step, out, out_step, [=](int64_t i, int64_t) { return Range{0, inner, i / Lane<F>::count * Lane<F>::count, columns}; });
}

INLINE void turn_eight(const float* from, int64_t from_step, float* to, int64_t to_step) {
  V8 x[8];
  for (int i = 0; i < 8; ++i) x[i] = load8(from + i * from_step);
  transpose(x);
  for (int i = 0; i < 8; ++i) put8(to + i * to_step, x[i]);
}
INLINE void turn_eight(const double* from, int64_t from_step, double* to, int64_t to_step) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[j * to_step + i] = from[i * from_step + j];
}

// to (columns, rows) = from (rows, columns)
template <typename F>
void turn(const F* from, int64_t from_step, int64_t rows, int64_t columns, F* to, int64_t to_step) {
  const int64_t rows8 = rows / 8 * 8, columns8 = columns / 8 * 8;
  for (int64_t i = 0; i < rows8; i += 8)
    for (int64_t j = 0; j < columns8; j += 8) turn_eight(from + i * from_step + j, from_step, to + j * to_step + i, to_step);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < rows8 ? columns8 : 0; j < columns; ++j) to[j * to_step + i] = from[i * from_step + j];
}

// the lower part of a symmetric matrix from the upper one
template <typename F>
void mirror(F* a, int64_t n, int64_t step) {
  const int64_t n8 = n / 8 * 8;
  for (int64_t i = 0; i < n8; i += 8) {
    for (int64_t r = i; r < i + 8; ++r)
      for (int64_t j = r + 1; j < i + 8; ++j) a[j * step + r] = a[r * step + j];
    for (int64_t j = i + 8; j < n8; j += 8) turn_eight(a + i * step + j, step, a + j * step + i, step);
  }
  for (int64_t j = n8; j < n; ++j)
    for (int64_t i = 0; i < j; ++i) a[j * step + i] = a[i * step + j];
}

#define EACH_OF_FOUR(i, from) _Pragma("GCC unroll 4") for (int i = from; i < 4; ++i)

// Rows of w = [A | B], of whose symmetric A the upper part is there, become L^-1 [A | B] = [L^T | L^-1 B] with A = L L^T. rows: a multiple of
// four. False where A is not positive definite, or not a number.
template <typename F>
bool eliminate(F* w, int64_t step, int64_t rows, int64_t columns) {
  constexpr int l = Lane<F>::count;
  using X = typename Lane<F>::Vector;
  for (int64_t i = 0; i < rows; i += 4) {
    F* here = w + i * step;
    const int64_t from = i / l * l;
    if (i > 0) multiply<SUB, true>(4, w + i, step, w, step, here, step, [=](int64_t, int64_t) { return Range{0, i, from, columns}; });
    // each pivot waits for the one before it: divided by, not by its root, which takes as long again
    F m[4][4], root[4];
    bool positive = true;
    EACH_OF_FOUR(j, 0) EACH_OF_FOUR(k, j) m[j][k] = here[j * step + i + k];
    EACH_OF_FOUR(j, 0) {
      positive = positive && m[j][j] > 0 && m[j][j] < std::numeric_limits<F>::infinity();
      const F part = 1 / m[j][j];
      root[j] = std::sqrt(part);
      EACH_OF_FOUR(k, j + 1) {
        const F number = m[j][k] * part;
        EACH_OF_FOUR(n, k) m[k][n] -= number * m[j][n];
      }
      EACH_OF_FOUR(k, j + 1) m[j][k] *= root[j];
    }
    if (!positive) return false;
    for (int64_t c = from; c < columns; c += l) {
      const X a = at(here + c) * root[0];
      const X b = (at(here + step + c) - a * m[0][1]) * root[1];
      const X d = (at(here + 2 * step + c) - a * m[0][2] - b * m[1][2]) * root[2];
      const X e = (at(here + 3 * step + c) - a * m[0][3] - b * m[1][3] - d * m[2][3]) * root[3];
      at(here + c) = a;
      at(here + step + c) = b;
      at(here + 2 * step + c) = d;
      at(here + 3 * step + c) = e;
    }
  }
  return true;
}

// ---- a task ------------------------------------------------------------------------------------------------------------------------------

// Keys [from, to) and the queries [t0, t1) that see all before them and some of them. far: they are only summed up, and after the last
// such keys P is made. keep: what the sums are multiplied by before them.
struct Span {
  int64_t t0, t1;
  int32_t from, to;
  bool far, last;
  double keep = 1;
};

struct Task {
  const Ridge& c;
  int64_t number, b, kv, groups, first, end;
  const int32_t *index, *hi;
  int32_t start = 0, counted = 0;  // counted: no inverse is made from the sum of keys past this one
  std::vector<Span> spans;
  std::vector<double> weights, lost;  // of each key where the past fades: its weight, and what it takes of the past, 1 - rate
  double most_growth, grown = 0;      // log of the largest weight that may be, and of the last one

  Task(const Ridge& call, int64_t i, double growth) : c(call), number(i), most_growth(growth) {
    const int64_t segment = i % c.segments;
    kv = i / c.segments % c.Hkv;
    b = i / c.segments / c.Hkv;
    groups = c.H / c.Hkv;
    first = c.edges[segment];
    end = c.edges[segment + 1];
    const int64_t m = c.by_batch ? b : 0;
    index = c.index + m * c.S;
    hi = c.hi + m * c.T;
    if (first < end) plan(c.lo[m * c.T + first]);
  }

  void plan(int32_t from) {
    start = counted = from;
    const int32_t limit = std::max(hi[end - 1], from);
    int64_t since = 0;
    for (int64_t t = first; t < end;) {
      const int32_t next = std::max(hi[t], from);
      // at the very start P is at its largest, and steps from there lose most digits
      if (next - from >= FAR || (from == start && next - from > 1)) {
        for (; from < next; from = spans.back().to) spans.push_back(block(t, from, next, true));
        spans.back().last = true;
        counted = next;
        since = 0;
      }
      spans.push_back(block(t, from, limit, false));
      const int32_t to = spans.back().to;
      int64_t& t1 = spans.back().t1;
      while (t1 < end && (to == limit || hi[t1] < to)) ++t1;
      since += to - from;
      if (since >= REMAKE && t1 < end) {
        counted = to;
        since = 0;
      }
      from = to;
      t = t1;
    }
  }

  // The next block of keys. A read-out does not change when all sums are multiplied by one number, so that instead of the past fading,
  // later keys weigh more. Where the weights of a block would grow past the limit, all sums are scaled before it so that its first key
  // weighs 1; where they would do so within it, it is shorter.
  Span block(int64_t t, int32_t from, int32_t limit, bool far) {
    Span span{t, t, from, std::min<int32_t>(from + BLOCK, limit), far, false};
    if (c.decay == nullptr || from == span.to) return span;
    const double* decay = c.decay + b * c.decays.batch + kv * c.decays.head;
    double whole = 0;
    for (int32_t s = from; s < span.to; ++s) whole -= decay[index[s]];
    if (from == start || grown + whole > most_growth) {
      span.keep = std::exp(decay[index[from]] - grown);
      grown = decay[index[from]];
    }
    for (int32_t s = from; s < span.to; ++s) {
      const double next = grown - decay[index[s]];
      if (s > from && next > most_growth) {
        span.to = s;
        break;
      }
      grown = next;
      weights.push_back(std::exp(grown));
      lost.push_back(-std::expm1(decay[index[s]]));
    }
    return span;
  }

  // of a key where the past fades: the direction in which it gives back what the ridge has lost
  int64_t direction(int32_t s) const { return ((c.passed == nullptr ? 0 : c.passed[b]) + s - start) % c.D; }

  int64_t head(int64_t g) const { return kv * groups + g; }
  int64_t power(int64_t g) const { return c.powers[head(g)]; }
  const float* key(int32_t s) const { return c.k + b * c.ks.batch + kv * c.ks.head + index[s] * c.ks.token; }
  const float* value(int32_t s) const { return c.v + b * c.vs.batch + kv * c.vs.head + index[s] * c.vs.token; }
  const float* query(int64_t g, int64_t t) const { return c.q + b * c.qs.batch + head(g) * c.qs.head + t * c.qs.token; }
  int64_t row(int64_t g, int64_t t) const { return (b * c.H + head(g)) * c.T + t; }
};

// a . b
template <typename F, typename A, typename B>
F inner(const A* a, const B* b, int64_t n) {
  if constexpr (std::is_same_v<F, float>) return dot(a, b, n);
  F total = 0;
  for (int64_t d = 0; d < n; ++d) total += static_cast<F>(a[d]) * static_cast<F>(b[d]);
  return total;
}

// rows of tensors come from far away: those of the next block are on their way while this one is worked on. WRITE: 1 for one that is written
template <int WRITE = 0>
INLINE void fetch(const float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(row + i, WRITE);
}

template <typename F>
F length(const float* k, int64_t n) {
  return std::sqrt(inner<F>(k, k, n));
}

// Of some rows: how many keys of the block each sees, which rises, and from which row on each key is seen.
struct Seen {
  int32_t keys[BLOCK];
  int32_t rows[BLOCK];

  Seen(const Task& task, const Span& span, int64_t t0, int64_t count) {
    const int32_t all = span.to - span.from;
    int32_t known = 0;
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = std::min(std::max(task.hi[t0 + i] - span.from, 0), all);
      for (; known < keys[i]; ++known) rows[known] = static_cast<int32_t>(i);
    }
    for (; known < BLOCK; ++known) rows[known] = static_cast<int32_t>(count);
  }
};

}  // namespace
