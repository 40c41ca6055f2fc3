// Ridge and Koopman read-outs of a sequence, exact token by token: x_t = P_t (M_t P_t)^power q_t, y_t = C_t x_t, P_t = (G_t + rho I)^-1 over
// the keys that query t sees.
//
// A thread walks the blocks of a key head with P, M and C in its second cache. With Z the keys of a block and A = I + Z P Z^T = L L^T,
// H = L^-1 Z P: leading blocks of L are the factors of the leading blocks of A, so ``apply(X) = X P - ((X H^T) o seen) H`` gives each row
// the inverse that has seen exactly its keys. Then P <- P - H^T H, and every REMAKE tokens P is made again from G, which float64 holds.
//
// A head runs in float32. Where the condition of G says at one of these points that three digits would be lost, or A is not positive
// definite any more, that head starts again in float64.
//
// Backward walks twice: forwards with the states again, for everything that reads them, then backwards with the running sums of what later
// queries do to a key. With x = P_t w and u = P_t dx: dG_t = -u x^T, so that each key gets -u (x . z) - x (u . z) from every row that sees it.

#define ZONAL_LANES 8
#define ZONAL_ROUNDED 0
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
enum Outcome { GOOD = 0, DOUBLE = 1, INDEFINITE = 2 };

}  // namespace

extern "C" {

// What zonal/kernels/cpp/ridge_library.py fills in. Last axes have stride 1. index (B or 1, S): the keys that are there, in order; lo, hi
// (B or 1, T): places in it, hi >= lo; both rise within a segment, lo is one number there. edges (segments + 1): borders of segments
// among the queries; what one sees starts afresh in the next. gram, cross, shift, last: the memory before the first key, float64
// (B, Hkv, …), or null; only with one segment, whose places start at 0. A task is one segment of a key head.
struct Ridge {
  const float *q, *k, *v, *scale;  // scale (H) of the queries
  const double* ridge;             // (Hkv)
  const int64_t* powers;           // (H), none above power
  const int32_t *index, *lo, *hi, *edges;
  const double *gram, *cross, *shift, *last;
  Strides qs, ks, vs;
  int64_t B, H, Hkv, T, S, D, P, segments, by_batch, power;  // power: the largest of all heads
  double limit;  // longer keys are shortened to it; 0: none
  float* y;      // (B, H, T, P)
  int32_t* outcome;  // (tasks)
  const float* dy;   // as y
  float *dq, *dk, *dv;     // contiguous, dk and dv zeros at first
  double *dscale, *dridge;  // (tasks, H / Hkv), (tasks)
  double *dgram, *dcross, *dshift, *dlast;  // as the memory, or null
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
INLINE V8 all(float x) { return V8{x, x, x, x, x, x, x, x}; }  // V8{} + x is an addition more
INLINE V4 all(double x) { return V4{x, x, x, x}; }
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

struct Range {  // what a few rows of a product need: terms [k0, k1), columns [c0, c1), both whole vectors
  int64_t k0, k1, c0, c1;
};

// rows of a product, four at a time. range(i0, i1) tells what rows [i0, i1) need; the rest of them is left alone.
template <Into INTO, bool ACROSS, typename F, typename R>
INLINE void multiply(int64_t rows, const F* a, int64_t a_step, const F* b, int64_t b_step, F* out, int64_t out_step, const R& range) {
  constexpr int l = Lane<F>::count;
  for (int64_t i = 0; i < rows; i += 4) {
    const int64_t count = std::min<int64_t>(4, rows - i);
    const Range need = range(i, i + count);
    const F* from = ACROSS ? a + need.k0 * a_step + i : a + i * a_step + need.k0;
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

// the upper part of a symmetric product of the rows of a (inner, n): out = or += or -= a^T a
template <Into INTO, typename F>
void square(int64_t n, int64_t inner, const F* a, int64_t step, F* out, int64_t out_step) {
  const int64_t columns = wide<F>(n);
  multiply<INTO, true>(n, a, step, a, step, out, out_step, [=](int64_t i, int64_t) { return Range{0, inner, i / Lane<F>::count * Lane<F>::count, columns}; });
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
    F m[4][4], root[4];
    for (int j = 0; j < 4; ++j)
      for (int k = j; k < 4; ++k) m[j][k] = here[j * step + i + k];
    for (int j = 0; j < 4; ++j) {
      if (!(m[j][j] > 0 && m[j][j] < std::numeric_limits<F>::infinity())) return false;
      root[j] = 1 / std::sqrt(m[j][j]);
      for (int k = j + 1; k < 4; ++k) m[j][k] *= root[j];
      for (int k = j + 1; k < 4; ++k)
        for (int n = k; n < 4; ++n) m[k][n] -= m[j][k] * m[j][n];
    }
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

struct Span {  // keys [from, to) and the queries [t0, t1) that see all before them and some of them; far: they are only summed up
  int64_t t0, t1;
  int32_t from, to;
  bool far;
};

struct Task {
  const Ridge& c;
  int64_t number, b, kv, groups, first, end;
  const int32_t *index, *hi;
  int32_t start = 0, counted = 0;  // counted: no inverse is made from the sum of keys past this one
  std::vector<Span> spans;

  Task(const Ridge& call, int64_t i) : c(call), number(i) {
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
        spans.push_back({t, t, from, next, true});
        from = counted = next;
        since = 0;
      }
      const int32_t to = std::min<int32_t>(from + BLOCK, limit);
      int64_t t1 = t;
      while (t1 < end && (to == limit || hi[t1] < to)) ++t1;
      spans.push_back({t, t1, from, to, false});
      since += to - from;
      if (since >= REMAKE) {
        counted = to;
        since = 0;
      }
      from = to;
      t = t1;
    }
  }

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

// rows of tensors come from far away: those of the next block are on their way while this one is worked on
INLINE void fetch(const float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(row + i);
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

// The state of a task and the buffers of a block. Rows are padded with zeros to whole vectors.
template <typename F>
struct Walk {
  static constexpr int l = Lane<F>::count;
  const Ridge& c;
  const Task& task;
  const int64_t r, rw, P, Pw, order;  // order: of the matrix that is inverted, a multiple of its rows at a time
  const double rho;
  int64_t since = 0;    // tokens since P was made from G
  int64_t n = 0;        // keys of the block
  bool finite = true;   // its values are
  bool counted = true;  // an inverse will be made from the sum of its keys
  bool backwards;
  F *inverse, *sums, *cross, *cross_t = nullptr, *shift = nullptr, *shift_t = nullptr;
  double *gram, *system, *inverted;
  F *keys, *keys_t, *earlier_t = nullptr, *values, *values_t = nullptr, *factor, *half_t, *scores, *rows, *more;
  F places[BLOCK];  // 0, 1, 2, …

  static constexpr int64_t doubles = sizeof(F) / sizeof(float);
  template <typename N>
  static N* take(Scratch& room, int64_t numbers) {
    N* at = reinterpret_cast<N*>(room.take(numbers * (sizeof(N) / sizeof(float))));
    std::memset(at, 0, sizeof(N) * numbers);
    return at;
  }

  static int64_t floats(const Ridge& c) {
    const int64_t r = c.D, rw = up(r, 8), Pw = up(c.P, 8), order = up(r, 4) + 4;
    const int64_t state = 2 * r * rw + 2 * std::max(r * Pw, c.P * rw) + 2 * r * rw;
    const int64_t block = (BLOCK + 1) * rw + 2 * (rw + 8) * BLOCK + BLOCK * Pw + (Pw + 8) * BLOCK + BLOCK * (BLOCK + rw) + (rw + 8) * BLOCK + BLOCK * BLOCK + 2 * BLOCK * std::max(rw, Pw);
    return doubles * (state + block) + 2 * (r * rw + order * (order + rw) + r * rw) + 16 * 40;
  }

  Walk(const Task& of, bool back, Scratch& room)
      : c(of.c), task(of), r(c.D), rw(wide<F>(c.D)), P(c.P), Pw(wide<F>(c.P)), order(up(c.D, 4)), rho(c.ridge[of.kv]), backwards(back) {
    for (int i = 0; i < BLOCK; ++i) places[i] = static_cast<F>(i);
    inverse = take<F>(room, r * rw);
    sums = take<F>(room, r * rw);
    gram = take<double>(room, r * up(r, 4));
    system = take<double>(room, order * (order + up(r, 4)));
    inverted = take<double>(room, r * up(r, 4));
    cross = back ? take<F>(room, P * rw) : nullptr;
    cross_t = back ? nullptr : take<F>(room, r * Pw);
    if (c.power > 0) {
      shift_t = take<F>(room, r * rw);
      if (back) shift = take<F>(room, r * rw);
      earlier_t = take<F>(room, r * BLOCK);
    }
    keys = take<F>(room, (BLOCK + 1) * rw);
    keys_t = take<F>(room, r * BLOCK);
    values = take<F>(room, BLOCK * Pw);
    if (back) values_t = take<F>(room, P * BLOCK);
    factor = take<F>(room, BLOCK * (BLOCK + rw));
    half_t = take<F>(room, r * BLOCK);
    scores = take<F>(room, BLOCK * BLOCK);
    rows = take<F>(room, BLOCK * std::max(rw, Pw));
    more = take<F>(room, BLOCK * std::max(rw, Pw));
  }

  Outcome begin() {
    if (c.gram == nullptr) {
      for (int64_t i = 0; i < r; ++i) inverse[i * rw + i] = static_cast<F>(1 / rho);
      return GOOD;
    }
    const int64_t head = task.b * c.Hkv + task.kv, width = up(r, 4);
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = 0; j < r; ++j) gram[i * width + j] = c.gram[(head * r + i) * r + j];
    for (int64_t p = 0; p < P; ++p)
      for (int64_t i = 0; i < r; ++i) {
        const F number = static_cast<F>(c.cross[(head * P + p) * r + i]);
        if (backwards) cross[p * rw + i] = number;
        else cross_t[i * Pw + p] = number;
      }
    for (int64_t i = 0; i < r && c.power > 0; ++i)
      for (int64_t j = 0; j < r; ++j) {
        const F number = static_cast<F>(c.shift[(head * r + i) * r + j]);
        shift_t[j * rw + i] = number;
        if (backwards) shift[i * rw + j] = number;
      }
    return remade();
  }

  // P from G, and whether float32 holds it
  Outcome remade() {
    const int64_t width = up(r, 4), step = order + width;
    since = 0;
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = i; j < r; ++j) {
        gram[i * width + j] += sums[i * rw + j];
        sums[i * rw + j] = 0;
      }
    double size = 0, inverse_size = 0;
    std::memset(system, 0, sizeof(double) * order * step);
    for (int64_t i = 0; i < order; ++i) {
      for (int64_t j = i; j < r; ++j) system[i * step + j] = gram[i * width + j];
      system[i * step + i] += i < r ? rho : 1;
      for (int64_t j = i; j < r; ++j) size += (i == j ? 1 : 2) * system[i * step + j] * system[i * step + j];
      if (i < r) system[i * step + order + i] = 1;
    }
    if (!eliminate(system, step, order, step)) return INDEFINITE;
    const double* lower = system + order;  // L^-1, of which row k ends at column k
    multiply<SET, true>(r, lower, step, lower, step, inverted, width, [=](int64_t i, int64_t) { return Range{i, r, i, width}; });
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = i; j < r; ++j) {
        inverse[i * rw + j] = static_cast<F>(inverted[i * width + j]);
        inverse_size += (i == j ? 1 : 2) * inverted[i * width + j] * inverted[i * width + j];
      }
    mirror(inverse, r, rw);
    return sizeof(F) == 4 && !(std::numeric_limits<float>::epsilon() * std::sqrt(size * inverse_size) <= LOST) ? DOUBLE : GOOD;
  }

  void put_key(int32_t s, F* to) const {
    const float* k = task.key(s);
    F scale = 1;
    if (c.limit > 0) {
      const F limit = static_cast<F>(c.limit), norm = length<F>(k, r);
      scale = norm > limit || norm != norm ? limit / norm : F(1);
    }
    for (int64_t d = 0; d < r; ++d) to[d] = scale * k[d];
  }

  // keys [from, to) with the one before them, their values, and what is across
  void load_block(int32_t from, int32_t to, bool across) {
    n = to - from;
    finite = true;
    counted = to <= task.counted;
    if (from > task.start) put_key(from - 1, keys);
    else
      for (int64_t d = 0; d < r; ++d) keys[d] = c.last == nullptr ? F(0) : static_cast<F>(c.last[(task.b * c.Hkv + task.kv) * r + d]);
    for (int32_t s = from; s < to; ++s) {
      put_key(s, keys + (s - from + 1) * rw);
      const float* v = task.value(s);
      F* row = values + (s - from) * Pw;
      for (int64_t p = 0; p < P; ++p) row[p] = v[p];
      if (s + BLOCK < task.spans.back().to) {
        fetch(task.key(s + BLOCK), r);
        fetch(task.value(s + BLOCK), P);
      }
    }
    std::memset(keys + (n + 1) * rw, 0, sizeof(F) * (BLOCK - n) * rw);
    std::memset(values + n * Pw, 0, sizeof(F) * (BLOCK - n) * Pw);
    typename Lane<F>::Vector nothing = {};  // NaN times nothing is NaN, and so is infinity
    for (int64_t i = 0; i < n * Pw; i += l) nothing += at(values + i) * F(0);
    for (int i = 0; i < l; ++i) finite = finite && nothing[i] == 0;
    if (!across) return;
    turn(keys + rw, rw, BLOCK, r, keys_t, BLOCK);
    if (c.power > 0) turn(keys, rw, BLOCK, r, earlier_t, BLOCK);
    if (backwards) turn(values, Pw, BLOCK, P, values_t, BLOCK);
  }

  F* block_keys() const { return keys + rw; }
  F* half() const { return factor + BLOCK; }
  int64_t factor_step() const { return BLOCK + rw; }

  // H = L^-1 Z P of the block
  bool factorise() {
    const int64_t step = factor_step(), size = up(n, 4);
    whole<SET, false>(size, r, rw, block_keys(), rw, inverse, rw, half(), step);
    multiply<SET, false>(size, half(), step, keys_t, BLOCK, factor, step, [=](int64_t i, int64_t) { return Range{0, r, i / l * l, wide<F>(size)}; });
    for (int64_t i = 0; i < size; ++i) {
      factor[i * step + i] += 1;
      std::memset(factor + i * step + wide<F>(size), 0, sizeof(F) * (BLOCK - wide<F>(size)));
    }
    if (!eliminate(factor, step, size, step)) return false;
    std::memset(factor + size * step, 0, sizeof(F) * (BLOCK - size) * step);
    turn(half(), step, BLOCK, r, half_t, BLOCK);
    return true;
  }

  // the block's keys into G, M and C
  void add_sums() {
    if (counted) square<ADD>(r, n, block_keys(), rw, sums, rw);
    if (backwards) whole<ADD, true>(P, n, rw, values, Pw, block_keys(), rw, cross, rw);
    else whole<ADD, true>(r, n, Pw, block_keys(), rw, values, Pw, cross_t, Pw);
    if (c.power > 0) {
      whole<ADD, true>(r, n, rw, keys, rw, block_keys(), rw, shift_t, rw);
      if (backwards) whole<ADD, true>(r, n, rw, block_keys(), rw, keys, rw, shift, rw);
    }
    since += n;
  }

  // and into P
  Outcome advance() {
    add_sums();
    if (since >= REMAKE) return remade();
    square<SUB>(r, n, half(), factor_step(), inverse, rw);
    mirror(inverse, r, rw);
    return GOOD;
  }

  // out (count, BLOCK) = x against what is across, zeros where nothing is seen
  void near(const F* x, int64_t step, int64_t count, const F* across, int64_t inner, const Seen& seen, F* out) const {
    multiply<SET, false>(count, x, step, across, BLOCK, out, BLOCK, [&](int64_t, int64_t i) { return Range{0, inner, 0, wide<F>(seen.keys[i - 1])}; });
    for (int64_t i = 0; i < count; ++i) {
      const auto last = all(static_cast<F>(seen.keys[i]));
      for (int64_t j = 0; j < BLOCK; j += l) {
        auto& number = at(out + i * BLOCK + j);
        number = at(places + j) < last ? number : typename Lane<F>::Vector{};
      }
    }
  }

  // out (count, columns) += or -= such scores against rows of the block
  template <Into INTO>
  void weigh(const F* weights, int64_t count, const F* block, int64_t step, int64_t columns, const Seen& seen, F* out, int64_t out_step) const {
    multiply<INTO, false>(count, weights, BLOCK, block, step, out, out_step, [&](int64_t, int64_t i) { return Range{0, seen.keys[i - 1], 0, columns}; });
  }

  // out (n, columns) += or -= such scores, across, against rows of queries
  template <Into INTO>
  void gather(const F* weights, int64_t count, const F* x, int64_t step, int64_t columns, const Seen& seen, F* out, int64_t out_step) const {
    multiply<INTO, true>(n, weights, BLOCK, x, step, out, out_step, [&](int64_t s, int64_t) { return Range{seen.rows[s], count, 0, columns}; });
  }

  // each row times the inverse that has seen its keys
  void apply(const F* x, int64_t count, const Seen& seen, F* out) const {
    whole<SET, false>(count, r, rw, x, rw, inverse, rw, out, rw);
    if (n == 0) return;
    near(x, rw, count, half_t, r, seen, scores);
    weigh<SUB>(scores, count, half(), factor_step(), rw, seen, out, rw);
  }

  // each row times the M that has seen its keys
  void move(const F* x, int64_t count, const Seen& seen, F* out) const {
    whole<SET, false>(count, r, rw, x, rw, shift_t, rw, out, rw);
    if (n == 0) return;
    near(x, rw, count, earlier_t, r, seen, scores);
    weigh<ADD>(scores, count, block_keys(), rw, rw, seen, out, rw);
  }

  void put_queries(int64_t g, int64_t t0, int64_t count, F* to) const {
    const F scale = c.scale[task.head(g)];
    for (int64_t i = 0; i < count; ++i) {
      const float* q = task.query(g, t0 + i);
      for (int64_t d = 0; d < r; ++d) to[i * rw + d] = scale * q[d];
      for (int64_t d = r; d < rw; ++d) to[i * rw + d] = 0;
      if (t0 + i + BLOCK < task.end) fetch(task.query(g, t0 + i + BLOCK), r);
    }
  }

  void read(const Span& span, int64_t g, int64_t t0, int64_t count) {
    const Seen seen(task, span, t0, count);
    put_queries(g, t0, count, rows);
    apply(rows, count, seen, more);
    for (int64_t k = 0; k < task.power(g); ++k) {
      move(more, count, seen, rows);
      apply(rows, count, seen, more);
    }
    float* y = c.y + task.row(g, t0) * P;
    F* out = rows;
    if constexpr (sizeof(F) == 4)
      if (P == Pw) out = y;
    whole<SET, false>(count, r, Pw, more, rw, cross_t, Pw, out, Pw);
    if (n > 0) {
      near(more, rw, count, keys_t, r, seen, scores);
      if (finite) weigh<ADD>(scores, count, values, Pw, Pw, seen, out, Pw);
      // rows that do not see a value must not take zero times what is no number
      else
        for (int64_t i = 0; i < count; ++i) whole<ADD, false>(1, seen.keys[i], Pw, scores + i * BLOCK, BLOCK, values, Pw, out + i * Pw, Pw);
    }
    if (static_cast<void*>(out) == y) return;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t p = 0; p < P; ++p) y[i * P + p] = static_cast<float>(out[i * Pw + p]);
  }
};

// f on the keys of a far span, block by block
template <typename F>
INLINE void each_block(const Span& span, const F& f) {
  for (int32_t s = span.from; s < span.to; s += BLOCK) f(s, std::min<int32_t>(s + BLOCK, span.to));
}

template <typename F>
Outcome forward_in(const Task& task, Scratch& room) {
  room.begin(Walk<F>::floats(task.c));
  Walk<F> walk(task, false, room);
  Outcome state = walk.begin();
  for (size_t i = 0; state == GOOD && i < task.spans.size(); ++i) {
    const Span& span = task.spans[i];
    if (span.far) {
      each_block(span, [&](int32_t from, int32_t to) {
        walk.load_block(from, to, false);
        walk.add_sums();
      });
      state = walk.remade();
      continue;
    }
    walk.load_block(span.from, span.to, true);
    if (walk.n > 0 && !walk.factorise()) return INDEFINITE;
    for (int64_t g = 0; g < task.groups; ++g)
      for (int64_t t = span.t0; t < span.t1; t += BLOCK) walk.read(span, g, t, std::min<int64_t>(BLOCK, span.t1 - t));
    if (walk.n > 0 && i + 1 < task.spans.size()) state = walk.advance();
  }
  return state;
}

void forward_task(const Ridge& c, int64_t number, Scratch& room) {
  const Task task(c, number);
  Outcome found = forward_in<float>(task, room);
  if (found != GOOD) found = forward_in<double>(task, room) == GOOD ? DOUBLE : INDEFINITE;
  c.outcome[number] = found;
}

// ---- backward ----------------------------------------------------------------------------------------------------------------------------

// What backward keeps beside the state: x and u = P dx of every solve, (power + 1, groups, queries, rw) each, and running sums.
template <typename F>
struct Back {
  Walk<F>& walk;
  const Ridge& c;
  const Task& task;
  const int64_t r, rw, P, Pw, queries;
  F *xs, *us, *dkeys, *dvalues, *dy, *dx, *own, *others;
  F *turned, *symmetric, *cross, *cross_t, *shift = nullptr, *shift_t = nullptr;  // sum of u x^T and that plus its transpose; dC, dM and theirs
  double* ridge;

  static int64_t floats(const Ridge& c, const Task& task) {
    const int64_t r = c.D, rw = up(r, 8), Pw = up(c.P, 8);
    const int64_t kept = 2 * (c.power + 1) * task.groups * (task.end - task.first) * rw;
    return Walk<F>::doubles * (kept + (BLOCK + 1) * rw + 3 * BLOCK * std::max(rw, Pw) + 2 * BLOCK * BLOCK + 2 * r * rw + c.P * rw + r * Pw + 2 * r * rw) + 16 * 20;
  }

  Back(Walk<F>& of, Scratch& room)
      : walk(of), c(of.c), task(of.task), r(of.r), rw(of.rw), P(of.P), Pw(of.Pw), queries(of.task.end - of.task.first), ridge(c.dridge + of.task.number) {
    const int64_t kept = (c.power + 1) * task.groups * queries * rw;
    xs = reinterpret_cast<F*>(room.take(kept * Walk<F>::doubles));  // every number is written before it is read
    us = reinterpret_cast<F*>(room.take(kept * Walk<F>::doubles));
    const auto take = [&](int64_t n) { return Walk<F>::template take<F>(room, n); };
    dkeys = take((BLOCK + 1) * rw);
    dvalues = take(BLOCK * Pw);
    dy = take(BLOCK * Pw);
    dx = take(BLOCK * rw);
    own = take(BLOCK * BLOCK);
    others = take(BLOCK * BLOCK);
    turned = take(r * rw);
    symmetric = take(r * rw);
    cross = take(P * rw);
    cross_t = take(r * Pw);
    if (c.power > 0) {
      shift = take(r * rw);
      shift_t = take(r * rw);
    }
  }

  F* kept(F* all, int64_t stage, int64_t g, int64_t t) const { return all + ((stage * task.groups + g) * queries + t - task.first) * rw; }

  void put_gradients(int64_t g, int64_t t0, int64_t count) {
    const float* from = c.dy + task.row(g, t0) * P;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t p = 0; p < P; ++p) dy[i * Pw + p] = from[i * P + p];
  }

  // forwards: gradients of some queries, and what they do to the keys of their own block
  void rows(const Span& span, int64_t g, int64_t t0, int64_t count) {
    const Seen seen(task, span, t0, count);
    const int64_t last = task.power(g), n = walk.n;
    F *dz = dkeys + rw, *z = walk.block_keys();
    F* x = kept(xs, 0, g, t0);
    walk.put_queries(g, t0, count, walk.rows);
    walk.apply(walk.rows, count, seen, x);
    for (int64_t k = 1; k <= last; ++k) {
      walk.move(x, count, seen, walk.rows);
      x = kept(xs, k, g, t0);
      walk.apply(walk.rows, count, seen, x);
    }
    put_gradients(g, t0, count);
    whole<SET, false>(count, P, rw, dy, Pw, walk.cross, rw, dx, rw);
    if (n > 0) {
      walk.near(dy, Pw, count, walk.values_t, P, seen, others);
      walk.template weigh<ADD>(others, count, z, rw, rw, seen, dx, rw);
      walk.template gather<ADD>(others, count, x, rw, rw, seen, dz, rw);
      walk.near(x, rw, count, walk.keys_t, r, seen, own);
      walk.template gather<ADD>(own, count, dy, Pw, Pw, seen, dvalues, Pw);
    }
    for (int64_t k = last;; --k) {
      F* u = kept(us, k, g, t0);
      walk.apply(dx, count, seen, u);
      double along = 0;
      for (int64_t i = 0; i < count; ++i) along += inner<F>(u + i * rw, x + i * rw, r);
      *ridge -= along;
      if (n > 0) {
        if (k < last) walk.near(x, rw, count, walk.keys_t, r, seen, own);
        walk.near(u, rw, count, walk.keys_t, r, seen, others);
        walk.template gather<SUB>(own, count, u, rw, rw, seen, dz, rw);
        walk.template gather<SUB>(others, count, x, rw, rw, seen, dz, rw);
      }
      if (k == 0) break;
      x = kept(xs, k - 1, g, t0);
      whole<SET, false>(count, r, rw, u, rw, walk.shift, rw, dx, rw);
      if (n > 0) {
        walk.template weigh<ADD>(others, count, walk.keys, rw, rw, seen, dx, rw);
        walk.template gather<ADD>(others, count, x, rw, rw, seen, dkeys, rw);
        walk.near(x, rw, count, walk.earlier_t, r, seen, own);
        walk.template gather<ADD>(own, count, u, rw, rw, seen, dz, rw);
      }
    }
    const F *u = kept(us, 0, g, t0), scale = c.scale[task.head(g)];
    double* dscale = c.dscale + task.number * task.groups + g;
    for (int64_t i = 0; i < count; ++i) {
      const float* q = task.query(g, t0 + i);
      float* dq = c.dq + task.row(g, t0 + i) * r;
      for (int64_t d = 0; d < r; ++d) dq[d] = static_cast<float>(scale * u[i * rw + d]);
      *dscale += inner<F>(u + i * rw, q, r);
    }
  }

  // gradients of the block's keys, with the one before them, and values, added to dk and dv
  void give(int32_t from, int32_t to) const {
    const int64_t head = task.b * c.Hkv + task.kv;
    const auto add = [&](float* sum_of, const F* x, int64_t numbers) {
      for (int64_t d = 0; d < numbers; ++d) sum_of[d] += static_cast<float>(x[d]);
    };
    if (from > task.start) add(c.dk + (head * c.S + task.index[from - 1]) * r, dkeys, r);
    else if (c.dlast != nullptr)
      for (int64_t d = 0; d < r; ++d) c.dlast[head * r + d] += dkeys[d];
    for (int32_t s = from; s < to; ++s) {
      add(c.dk + (head * c.S + task.index[s]) * r, dkeys + (s - from + 1) * rw, r);
      add(c.dv + (head * c.S + task.index[s]) * P, dvalues + (s - from) * Pw, P);
    }
  }

  void clear() {
    std::memset(dkeys, 0, sizeof(F) * (BLOCK + 1) * rw);
    std::memset(dvalues, 0, sizeof(F) * BLOCK * Pw);
  }

  // the sums of later queries as they are multiplied with
  void prepare() {
    turn(turned, rw, r, r, symmetric, rw);
    for (int64_t i = 0; i < r * rw; ++i) symmetric[i] += turned[i];
    turn(cross, rw, P, r, cross_t, Pw);
    if (c.power > 0) turn(shift, rw, r, r, shift_t, rw);
  }

  // backwards: what later queries do to keys [from, to)
  void keys(int32_t from, int32_t to) {
    walk.load_block(from, to, false);
    clear();
    const int64_t n = walk.n;
    const F* z = walk.block_keys();
    F* dz = dkeys + rw;
    whole<SUB, false>(n, r, rw, z, rw, symmetric, rw, dz, rw);
    whole<ADD, false>(n, P, rw, walk.values, Pw, cross, rw, dz, rw);
    whole<SET, false>(n, r, Pw, z, rw, cross_t, Pw, dvalues, Pw);
    if (c.power > 0) {
      whole<ADD, false>(n, r, rw, walk.keys, rw, shift_t, rw, dz, rw);
      whole<ADD, false>(n, r, rw, z, rw, shift, rw, dkeys, rw);
    }
    give(from, to);
  }

  // through the limit of their length: beyond it a key does not change along itself
  void shorten(int32_t from, int32_t to) const {
    if (c.limit <= 0) return;
    for (int32_t s = from; s < to; ++s) {
      const float* k = task.key(s);
      const F norm = length<F>(k, r);
      if (!(norm > c.limit)) continue;
      float* dk = c.dk + ((task.b * c.Hkv + task.kv) * c.S + task.index[s]) * r;
      const F along = inner<F>(dk, k, r) / (norm * norm);
      const F scale = static_cast<F>(c.limit) / norm;
      for (int64_t d = 0; d < r; ++d) dk[d] = static_cast<float>(scale * (dk[d] - along * k[d]));
    }
  }

  // a block's queries into the sums
  void add_queries(const Span& span) {
    for (int64_t g = 0; g < task.groups; ++g)
      for (int64_t t = span.t0; t < span.t1; t += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, span.t1 - t);
        put_gradients(g, t, count);
        whole<ADD, true>(P, count, rw, dy, Pw, kept(xs, task.power(g), g, t), rw, cross, rw);
        for (int64_t k = 0; k <= task.power(g); ++k) {
          whole<ADD, true>(r, count, rw, kept(us, k, g, t), rw, kept(xs, k, g, t), rw, turned, rw);
          if (k > 0) whole<ADD, true>(r, count, rw, kept(us, k, g, t), rw, kept(xs, k - 1, g, t), rw, shift, rw);
        }
      }
  }

  void give_memory() const {
    const int64_t head = task.b * c.Hkv + task.kv;
    for (int64_t i = 0; c.dgram != nullptr && i < r; ++i)
      for (int64_t j = 0; j < r; ++j) {
        c.dgram[(head * r + i) * r + j] = -0.5 * (static_cast<double>(turned[i * rw + j]) + turned[j * rw + i]);
        if (c.dshift != nullptr) c.dshift[(head * r + i) * r + j] = shift[i * rw + j];
      }
    for (int64_t p = 0; c.dcross != nullptr && p < P; ++p)
      for (int64_t i = 0; i < r; ++i) c.dcross[(head * P + p) * r + i] = cross[p * rw + i];
  }
};

template <typename F>
void backward_in(const Task& task, Scratch& room) {
  room.begin(Walk<F>::floats(task.c) + Back<F>::floats(task.c, task));
  Walk<F> walk(task, true, room);
  Back<F> back(walk, room);
  walk.begin();
  for (size_t i = 0; i < task.spans.size(); ++i) {
    const Span& span = task.spans[i];
    if (span.far) {
      each_block(span, [&](int32_t from, int32_t to) {
        walk.load_block(from, to, false);
        walk.add_sums();
      });
      walk.remade();
      continue;
    }
    walk.load_block(span.from, span.to, true);
    if (walk.n > 0) walk.factorise();
    back.clear();
    for (int64_t g = 0; g < task.groups; ++g)
      for (int64_t t = span.t0; t < span.t1; t += BLOCK) back.rows(span, g, t, std::min<int64_t>(BLOCK, span.t1 - t));
    back.give(span.from, span.to);
    if (walk.n > 0 && i + 1 < task.spans.size()) walk.advance();
  }
  for (size_t i = task.spans.size(); i-- > 0;) {
    const Span& span = task.spans[i];
    if (i + 1 < task.spans.size() && span.to > span.from) {
      back.prepare();
      each_block(span, [&](int32_t from, int32_t to) { back.keys(from, to); });
    }
    back.add_queries(span);
  }
  if (!task.spans.empty()) back.shorten(task.start, task.spans.back().to);
  back.give_memory();
}

void backward_task(const Ridge& c, int64_t number, Scratch& room) {
  const Task task(c, number);
  if (c.outcome[number] == GOOD) backward_in<float>(task, room);
  else backward_in<double>(task, room);
}

template <typename F>
int each_task(const Ridge& c, const F& task) {
  const int64_t tasks = c.B * c.Hkv * c.segments;
  if (tasks == 0) return 0;
  std::atomic<int> failed{0};
  std::atomic<int64_t> next{0};
  // to wake the other threads takes some ten microseconds
#pragma omp parallel if (tasks > 1 && (c.B * c.H * c.T + c.B * c.Hkv * c.S) * c.D * (c.D + c.P) > (1 << 19))
  {
    static thread_local Scratch room;
    try {
      for (int64_t i = next++; i < tasks; i = next++) task(i, room);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  }
  return failed;
}

}  // namespace

extern "C" {

int64_t zonal_version() { return 6; }

// Returns 0, 1 when memory ran out, or 2 where a matrix that is inverted is not positive definite or not a number.
int zonal_ridge_forward(const Ridge* call) {
  if (each_task(*call, [&](int64_t i, Scratch& room) { forward_task(*call, i, room); })) return 1;
  const int64_t tasks = call->B * call->Hkv * call->segments;
  return std::find(call->outcome, call->outcome + tasks, INDEFINITE) == call->outcome + tasks ? 0 : 2;
}

// Returns 0, or 1 when memory ran out. outcome: as forward left it.
int zonal_ridge_backward(const Ridge* call) {
  return each_task(*call, [&](int64_t i, Scratch& room) { backward_task(*call, i, room); });
}
}
