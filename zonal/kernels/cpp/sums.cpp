// Sums over keys in time linear in their number, y_t = factor_t sum_{s <= t} l(S_ts) v_s, for links that are polynomials of a dot product:
// l(x) = sum_k c_k x^k, so that l(q . k) = sum_a w_a psi_a(q) psi_a(k) over the monomials psi_a of degrees up to l's.
//
// A head's past is one state M = sum_s psi(k_s) [v_s, 1]^T (features x W) that stays in the second cache. Tokens go in blocks: queries
// read the state and see the keys that are not in it yet directly, through the link. Features are made strip by strip for the tokens
// at hand, and never kept. All tokens lie across the lanes of vectors, sixteen to a column:
//
//   read    U^T (W x 16)      += M^T psi(Q)^T        a strip of M, the features of a column of queries
//   absorb  M (strip x W)     += psi(K)^T [V, 1]     six features against the rows of all keys at hand
//   slope   G (strip x 16)     = M U'^T              the gradient of features, then that of the vectors they are made of
//
// Backward walks twice: forwards with M again for the queries' gradients (and everything between neighbours), then backwards with the
// adjoint state dM = sum_t w psi(q_t) du_t^T for those of keys and values.

#define ZONAL_LANES 8
#define ZONAL_ROUNDED 0
#include "common.hpp"

#include <vector>

#ifndef ZONAL_BLOCK
#define ZONAL_BLOCK 64
#endif

namespace {

constexpr int R = 6;                  // rows of a register tile: 12 sums, 2 columns and a broadcast are 15 of 16 registers
constexpr int BLOCK = ZONAL_BLOCK;    // queries of a block, and keys taken in at once
constexpr int PER = BLOCK / C;        // columns of a block
constexpr int STRIP = 3072;           // numbers of the state in one strip: it stays in the first cache with its features
constexpr int FEATURE = 8;            // what it costs to make a feature and keep the state in turn, in multiplications with the state
constexpr int SLICE = 4 * R;         // features made at once for all tokens at hand

}  // namespace

extern "C" {

// What zonal/kernels/cpp/sums_library.py fills in. Last axes have stride 1. index (B or 1, S): the keys that are there, in order; present
// (B or 1): how many; lo, hi (B or 1, T): places in it, hi >= lo; both rise within a segment, lo is one number there. edges (segments + 1):
// borders of segments among the queries; what one sees starts afresh in the next.
// Feature a of F is the product of rows left[a] <= right[a] of the low features: 1, the vector, and products of earlier rows
// (low_left, low_right); left rises, and up to run_end[a] it stays while right rises by one each. squares, roots: the number of ways to write the monomial, and its root; place: where it stands in a
// memory, which holds roots * M.
struct Sums {
  const float *q, *k, *v, *scale, *coefficients, *monomials, *squares, *roots;
  const int32_t *left, *right, *run_end, *degree, *place, *low_left, *low_right, *index, *present, *lo, *hi, *edges;
  const float* initial;       // (B, Hkv, F, W) or null: the memory before the first key
  const double* before;       // (B): keys in it, for the count anchor; null without
  Strides qs, ks, vs;
  int64_t B, H, Hkv, T, S, D, P, F, low, powers, segments, by_batch, numbers, learned, anchor, normalise, split;
  float eps;
  float *y, *factor, *final;  // (B, H, T, P), (B, H, T), (B, Hkv, F, W) or null: the memory after the last key
  const float *dy, *dfinal;   // as y and final
  float *dq, *dk, *dv, *dinitial;  // (split, B, H, T, D), (split, B, Hkv, S, D), (B, Hkv, S, P): zeros at first; as initial, or null
  double *dscale, *dcoefficients, *dmonomials;  // (B, H), (tasks, H / Hkv, learned), (tasks, H / Hkv, powers) or null; zeros at first
};
}

namespace {

struct Span {  // a block: queries [t0, t1) read the state once keys [from, to) are in it, and see keys [to, last) directly
  int64_t t0, t1;
  int32_t from, to, last;
  bool reads;
};

// One key head's segment and a part of its values: columns [p0, p1), and as the last column of [v, 1] the mass where it is summed here.
struct Task {
  const Sums& c;
  int64_t b, kv, segment, part, p0, p1, mass, width, step, groups, strip;
  const int32_t *index, *lo, *hi;
  int32_t start, present;
  std::vector<Span> spans;

  Task(const Sums& call, int64_t number, bool sums_mass) : c(call) {
    part = number % c.split;
    segment = number / c.split % c.segments;
    kv = number / c.split / c.segments % c.Hkv;
    b = number / c.split / c.segments / c.Hkv;
    p0 = part * c.P / c.split;
    p1 = (part + 1) * c.P / c.split;
    mass = c.anchor == ROW && (sums_mass || part == 0);
    width = p1 - p0 + mass;
    step = up(width, C);
    groups = c.H / c.Hkv;
    strip = std::max<int64_t>(SLICE, std::min<int64_t>(8 * SLICE, STRIP / width / SLICE * SLICE));
    const int64_t m = c.by_batch ? b : 0;
    index = c.index + m * c.S;
    lo = c.lo + m * c.T;
    hi = c.hi + m * c.T;
    present = c.present[m];
    plan();
  }

  // While few keys are behind, all of them are seen directly, which is less work than to read the state; and to the end where the state
  // would never pay.
  void plan() {
    const int64_t first = c.edges[segment], end = c.edges[segment + 1];
    start = end > first ? lo[first] : 0;
    const bool carries = c.initial != nullptr || c.final != nullptr || c.dfinal != nullptr;
    const double each = static_cast<double>(c.F) * (width + FEATURE), pair = static_cast<double>(groups) * (c.D + width);
    const int64_t near = std::max<int64_t>(BLOCK, static_cast<int64_t>(each / (c.D + width)));
    double direct = 0, carried = 0;
    int32_t done = start;
    bool begun = c.initial != nullptr;
    for (int64_t t0 = first; t0 < end; t0 += BLOCK) {
      const int64_t t1 = std::min<int64_t>(t0 + BLOCK, end);
      const int32_t last = std::max(hi[t1 - 1], done);
      int32_t to = std::max(hi[t0], done);
      if (!begun && last - start <= near) to = done;
      begun = begun || to > done;
      spans.push_back({t0, t1, done, to, last, begun});
      direct += pair * (t1 - t0) * (last - start);
      carried += pair * (t1 - t0) * (last - to) + each * ((to - done) + groups * (t1 - t0) * begun);
      done = to;
    }
    if (!carries && direct <= carried)
      for (Span& span : spans) span = {span.t0, span.t1, start, start, span.last, false};
    if (c.final != nullptr || c.dfinal != nullptr) spans.push_back({end, end, done, present, present, false});
  }

  int64_t keys() const { return spans.empty() ? 0 : spans.back().last - start; }  // of the segment that anybody sees, or that are kept
  int64_t head(int64_t g) const { return kv * groups + g; }
  const float* key(int32_t s) const { return c.k + b * c.ks.batch + kv * c.ks.head + index[s] * c.ks.token; }
  const float* value_row(int32_t s) const { return c.v + b * c.vs.batch + kv * c.vs.head + index[s] * c.vs.token + p0; }
  const float* query(int64_t g, int64_t t) const { return c.q + b * c.qs.batch + head(g) * c.qs.head + t * c.qs.token; }
  const float* coefficients(int64_t g) const { return c.coefficients + head(g) * c.numbers; }
};

inline float unit(const Sums& c, const float* x) { return c.normalise ? 1.f / std::max(std::sqrt(dot(x, x, c.D)), c.eps) : 1.f; }

// ---- packing -----------------------------------------------------------------------------------------------------------------------------

struct Rows {  // sixteen tokens' rows and what each is multiplied by; those past ``count`` are there (as the last one again) but count nothing
  float* at[C];
  float factor[C];
  int64_t count;
};

template <typename Row, typename Factor>
INLINE Rows rows_of(int64_t count, const Row& row, const Factor& factor) {
  Rows rows;
  rows.count = std::min<int64_t>(count, C);
  for (int64_t i = 0; i < C; ++i) {
    rows.at[i] = const_cast<float*>(row(std::min(i, rows.count - 1)));
    rows.factor[i] = i < rows.count ? factor(i) : 0.f;
  }
  return rows;
}

// rows of n numbers as a column (n, C)
void put(const Rows& rows, int64_t n, float* column) {
  int64_t d = 0;
  for (; d + L <= n; d += L)
    for (int j = 0; j < C; j += L) {
      V x[L];
      for (int i = 0; i < L; ++i) x[i] = load(rows.at[j + i] + d) * rows.factor[j + i];
      transpose(x);
      for (int i = 0; i < L; ++i) store(column + (d + i) * C + j, x[i]);
    }
  for (; d < n; ++d)
    for (int i = 0; i < C; ++i) column[d * C + i] = rows.at[i][d] * rows.factor[i];
}

// and back: rows = column, or rows += column
template <bool ADD>
void take(const float* column, int64_t n, const Rows& rows) {
  int64_t d = 0;
  for (; d + L <= n; d += L)
    for (int j = 0; j < rows.count; j += L) {
      V x[L];
      for (int i = 0; i < L; ++i) x[i] = load(column + (d + i) * C + j);
      transpose(x);
      for (int i = 0; i < L && j + i < rows.count; ++i) {
        float* to = rows.at[j + i] + d;
        store(to, ADD ? load(to) + x[i] * rows.factor[j + i] : x[i] * rows.factor[j + i]);
      }
    }
  for (; d < n; ++d)
    for (int i = 0; i < rows.count; ++i) rows.at[i][d] = (ADD ? rows.at[i][d] : 0.f) + column[d * C + i] * rows.factor[i];
}

// products of a column's rows up to the last low feature
void extend(const Sums& c, float* column) {
  for (int64_t r = c.D + 1; r < c.low; ++r)
    for (int j = 0; j < C; j += L) store(column + r * C + j, load(column + c.low_left[r] * C + j) * load(column + c.low_right[r] * C + j));
}

// the low features of a column: row 0 tells which lanes are there
void put_low(const Sums& c, const Rows& rows, float* column) {
  for (int i = 0; i < C; ++i) column[i] = i < rows.count;
  put(rows, c.D, column + C);
  extend(c, column);
}

// low features of a block's queries, (groups, PER, low, C)
void pack_queries(const Task& task, const Span& span, float* out) {
  const Sums& c = task.c;
  for (int64_t g = 0; g < task.groups; ++g)
    for (int64_t t = span.t0; t < span.t1; t += C) {
      const auto row = [&](int64_t i) { return task.query(g, t + i); };
      const auto factor = [&](int64_t i) { return c.scale[task.head(g)] * unit(c, row(i)); };
      put_low(c, rows_of(span.t1 - t, row, factor), out + (g * PER + (t - span.t0) / C) * c.low * C);
    }
}

// low features of keys [s0, s1), (columns, low, C); factors: one over the norm of each key
void pack_keys(const Task& task, int32_t s0, int32_t s1, const float* factors, float* out) {
  for (int32_t s = s0; s < s1; s += C, out += task.c.low * C) {
    const auto factor = [&](int64_t i) { return factors[s + i - task.start]; };
    put_low(task.c, rows_of(s1 - s, [&](int64_t i) { return task.key(s + static_cast<int32_t>(i)); }, factor), out);
  }
}

// their rows of [v, 1], (BLOCK, step)
void pack_values(const Task& task, int32_t s0, int32_t s1, float* rows) {
  const int64_t values = task.p1 - task.p0;
  for (int32_t s = s0; s < s1; ++s, rows += task.step) {
    std::memcpy(rows, task.value_row(s), sizeof(float) * values);
    std::fill(rows + values, rows + task.step, 0.f);
    if (task.mass) rows[values] = 1.f;
  }
}

// rows of keys times their factors, (BLOCK, D)
void pack_rows(const Task& task, int32_t s0, int32_t s1, const float* factors, float* rows) {
  for (int32_t s = s0; s < s1; ++s) {
    const float* k = task.key(s);
    for (int64_t d = 0; d < task.c.D; ++d) *rows++ = k[d] * factors[s - task.start];
  }
}

// (columns, width, C) from rows (tokens, step)
void turn(const float* rows, int64_t step, int64_t tokens, int64_t width, float* columns) {
  for (int64_t i = 0; i < tokens; i += C, columns += width * C)
    put(rows_of(tokens - i, [&](int64_t r) { return rows + (i + r) * step; }, [](int64_t) { return 1.f; }), width, columns);
}

// ---- products ----------------------------------------------------------------------------------------------------------------------------

// sums (N rows of C) += a[i][r] * cols[i] over i < inner: N neighbouring numbers of each row against that row's column
template <int N>
APART void numbers_by_columns(const float* a, int64_t stride, const float* cols, int64_t step, int64_t inner, float* sums) {
  V x[N], y[N];
  EACH_ROW {
    x[r] = load(sums + r * C);
    y[r] = load(sums + r * C + L);
  }
  for (int64_t i = 0; i < inner; ++i) {
    const V first = load(cols), second = load(cols + L);
    EACH_ROW {
      const V number = spread(a[r]);
      x[r] += number * first;
      y[r] += number * second;
    }
    a += stride;
    cols += step;
  }
  EACH_ROW {
    store(sums + r * C, x[r]);
    store(sums + r * C + L, y[r]);
  }
}

// the columns of a (inner, width) against columns (inner, C), added to sums (width, C)
void columns_by_columns(const float* a, int64_t stride, int64_t width, const float* cols, int64_t step, int64_t inner, float* sums) {
  const int64_t tiles = (width + R - 1) / R;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t p = tile * width / tiles, rows = (tile + 1) * width / tiles - p;
    with_rows<R>(rows, [&](auto n) { numbers_by_columns<decltype(n)::value>(a + p, stride, cols, step, inner, sums + p * C); });
  }
}

// out (N rows of C) = rows (N, inner) against columns (inner, C)
template <int N>
APART void rows_by_columns(const float* rows, int64_t stride, const float* cols, int64_t step, int64_t inner, float* out, int64_t out_step) {
  V x[N], y[N];
  EACH_ROW x[r] = y[r] = V{};
  const float* at[N];
  EACH_ROW at[r] = rows + r * stride;
  for (int64_t i = 0; i < inner; ++i) {
    const V first = load(cols), second = load(cols + L);
    EACH_ROW {
      const V number = spread(at[r][i]);
      x[r] += number * first;
      y[r] += number * second;
    }
    cols += step;
  }
  EACH_ROW {
    store(out + r * out_step, x[r]);
    store(out + r * out_step + L, y[r]);
  }
}

// into (N rows of C) += the features of tokens against their rows. features (columns, N, C) with ``features_step`` from column to column,
// rows (tokens, step)
template <int N>
APART void columns_by_rows(const float* features, int64_t features_step, const float* rows, int64_t step, int64_t tokens, float* into, int64_t into_step) {
  V x[N], y[N];
  EACH_ROW x[r] = y[r] = V{};
  for (; tokens > 0; tokens -= C, features += features_step) {
    const int64_t lanes = std::min<int64_t>(tokens, C);
    for (int64_t i = 0; i < lanes; ++i) {
      const V first = load(rows), second = load(rows + L);
      EACH_ROW {
        const V number = spread(features[r * C + i]);
        x[r] += number * first;
        y[r] += number * second;
      }
      rows += step;
    }
  }
  EACH_ROW {
    float* to = into + r * into_step;
    store(to, load(to) + x[r]);
    store(to + L, load(to + L) + y[r]);
  }
}

// ---- the state ---------------------------------------------------------------------------------------------------------------------------

// features [a0, a1) of a column, times their weights (null: none), (a1 - a0, C)
template <bool WEIGHTED>
void features(const Sums& c, const float* column, const float* weights, int64_t a0, int64_t a1, float* out) {
  for (int64_t a = a0; a < a1;) {
    const int64_t end = std::min<int64_t>(c.run_end[a], a1);
    const float *left = column + c.left[a] * C, *right = column + c.right[a] * C;
    const V first = load(left), second = load(left + L);
    for (; a < end; ++a, right += C, out += C) {
      V x = first * load(right), y = second * load(right + L);
      if constexpr (WEIGHTED) {
        const V weight = spread(weights[a]);
        x *= weight;
        y *= weight;
      }
      store(out, x);
      store(out + L, y);
    }
  }
}

// Features [a0, a1) of a state += weights psi(tokens)^T rows. low (columns, low, C), rows (tokens, step); ``last``, where it is not null, is
// the last column of rows, sixteen tokens to ``last_step`` numbers: cheaper than a column of sixteen where it alone is left over. room (columns, SLICE, C).
void absorb(const Sums& c, const float* low, int64_t tokens, const float* weights, const float* rows, int64_t step, int64_t width,
            const float* last, int64_t last_step, int64_t a0, int64_t a1, float* strip, float* room) {
  const int64_t columns = (tokens + C - 1) / C;
  const bool apart = last != nullptr && width % C == 1;
  const int64_t body = apart ? width - 1 : width;
  for (int64_t s0 = a0; s0 < a1; s0 += SLICE) {
    const int64_t s1 = std::min(s0 + SLICE, a1);
    for (int64_t i = 0; i < columns; ++i) {
      if (weights == nullptr) features<false>(c, low + i * c.low * C, nullptr, s0, s1, room + i * SLICE * C);
      else features<true>(c, low + i * c.low * C, weights, s0, s1, room + i * SLICE * C);
    }
    for (int64_t a = s0; a < s1; a += R)
      with_rows<R>(s1 - a, [&](auto n) {
        constexpr int N = decltype(n)::value;
        float* state = strip + (a - a0) * width;
        const float* at = room + (a - s0) * C;
        for (int64_t p = 0; p + C <= body; p += C) columns_by_rows<N>(at, SLICE * C, rows + p, step, tokens, state + p, width);
        if (body % C != 0) {
          float sums[N * C] = {};
          const int64_t p = body / C * C;
          columns_by_rows<N>(at, SLICE * C, rows + p, step, tokens, sums, C);
          EACH_ROW
            for (int64_t i = 0; p + i < body; ++i) state[r * width + p + i] += sums[r * C + i];
        }
        if (apart)
          EACH_ROW {
            V total = V{};
            for (int64_t i = 0; i < columns; ++i)
              total += load(at + (i * SLICE + r) * C) * load(last + i * last_step) + load(at + (i * SLICE + r) * C + L) * load(last + i * last_step + L);
            state[r * width + width - 1] += sum(total);
          }
      });
  }
}

// the gradient of features g (a1 - a0, C) back to the low features of their column
void pull(const Sums& c, const float* column, const float* weights, const float* g, int64_t a0, int64_t a1, float* dcolumn) {
  for (int64_t a = a0; a < a1;) {
    const int32_t left = c.left[a];
    const V first = load(column + left * C), second = load(column + left * C + L);
    V x = V{}, y = V{};
    for (; a < a1 && c.left[a] == left; ++a, g += C) {
      V gx = load(g), gy = load(g + L);
      if (weights != nullptr) {
        const V weight = spread(weights[a]);
        gx *= weight;
        gy *= weight;
      }
      const float* other = column + c.right[a] * C;
      float* to = dcolumn + c.right[a] * C;
      x += gx * load(other);
      y += gy * load(other + L);
      store(to, load(to) + gx * first);
      store(to + L, load(to + L) + gy * second);
    }
    float* to = dcolumn + left * C;
    store(to, load(to) + x);
    store(to + L, load(to + L) + y);
  }
}

// the gradient of low features back to the vector, rows 1 … D
void pull_low(const Sums& c, const float* column, float* dcolumn) {
  for (int64_t r = c.low - 1; r > c.D; --r)
    for (int j = 0; j < C; j += L) {
      const int32_t a = c.low_left[r], b = c.low_right[r];
      const V g = load(dcolumn + r * C + j), x = load(column + a * C + j), y = load(column + b * C + j);
      store(dcolumn + a * C + j, load(dcolumn + a * C + j) + g * y);
      store(dcolumn + b * C + j, load(dcolumn + b * C + j) + g * x);
    }
}

// sums of squares g psi for each power, which are the gradients of the polynomial's coefficients
void powers(const Sums& c, const float* column, const float* g, int64_t a0, int64_t a1, V* sums) {
  for (int64_t a = a0; a < a1; ++a, g += C) {
    const float *l = column + c.left[a] * C, *r = column + c.right[a] * C;
    sums[c.degree[a]] += spread(c.squares[a]) * (load(l) * load(r) * load(g) + load(l + L) * load(r + L) * load(g + L));
  }
}

// what each feature counts on the query's side, (groups, F)
void weigh_features(const Task& task, float* weights) {
  const Sums& c = task.c;
  for (int64_t g = 0; g < task.groups; ++g)
    for (int64_t a = 0; a < c.F; ++a) weights[g * c.F + a] = c.squares[a] * c.monomials[task.head(g) * c.powers + c.degree[a]];
}

// a state from its form in memory, and back; ``inverse``: of a gradient, whose form is the other way round
void from_memory(const Task& task, const float* memory, bool gradient, float* state) {
  const Sums& c = task.c;
  const int64_t whole = c.P + (c.anchor == ROW), values = task.p1 - task.p0;
  memory += (task.b * c.Hkv + task.kv) * c.F * whole;
  for (int64_t a = 0; a < c.F; ++a) {
    const float *from = memory + c.place[a] * whole, factor = gradient ? c.roots[a] : 1.f / c.roots[a];
    float* to = state + a * task.width;
    for (int64_t p = 0; p < values; ++p) to[p] = from[task.p0 + p] * factor;
    if (task.mass) to[values] = from[c.P] * factor;
  }
}

void to_memory(const Task& task, const float* state, bool gradient, float* memory) {
  const Sums& c = task.c;
  const int64_t whole = c.P + (c.anchor == ROW), values = task.p1 - task.p0;
  memory += (task.b * c.Hkv + task.kv) * c.F * whole;
  for (int64_t a = 0; a < c.F; ++a) {
    const float *from = state + a * task.width, factor = gradient ? 1.f / c.roots[a] : c.roots[a];
    float* to = memory + c.place[a] * whole;
    for (int64_t p = 0; p < values; ++p) to[task.p0 + p] = from[p] * factor;
    if (task.mass && task.part == 0) to[c.P] = from[values] * factor;
  }
}

// ---- between neighbours ------------------------------------------------------------------------------------------------------------------

struct Lanes {  // which keys the sixteen queries of a column see
  I hi[2];
  int32_t whole, last;  // keys before whole are seen by all lanes, keys from last on by none
};

Lanes lanes_of(const Task& task, const Span& span, int64_t column) {
  Lanes lanes;
  lanes.whole = std::numeric_limits<int32_t>::max();
  lanes.last = 0;
  for (int i = 0; i < C; ++i) {
    const int64_t t = span.t0 + column * C + i;
    const int32_t hi = t < span.t1 ? task.hi[t] : 0;
    lanes.hi[i / L][i % L] = hi;
    lanes.whole = std::min(lanes.whole, hi);
    lanes.last = std::max(lanes.last, hi);
  }
  return lanes;
}

// weights (N, C) of keys from place s on, whose rows are at ``rows``
template <int N>
APART void weigh(const Sums& c, const float* coefficients, const Lanes& lanes, const float* rows, const float* column, int32_t s, float* weights) {
  V x[N], y[N];
  EACH_ROW x[r] = y[r] = V{};
  const float* at[N];
  EACH_ROW at[r] = rows + r * c.D;
  for (int64_t d = 0; d < c.D; ++d) {
    const V first = load(column), second = load(column + L);
    EACH_ROW {
      const V number = spread(at[r][d]);
      x[r] += number * first;
      y[r] += number * second;
    }
    column += C;
  }
  EACH_ROW {
    x[r] = in_domain(x[r]);
    y[r] = in_domain(y[r]);
  }
  values<N>(x, y, coefficients, static_cast<int>(c.numbers));
  EACH_ROW {
    if (s + r >= lanes.whole) {
      x[r] = lanes.hi[0] > s + r ? x[r] : V{};
      y[r] = lanes.hi[1] > s + r ? y[r] : V{};
    }
    store(weights + r * C, x[r]);
    store(weights + r * C + L, y[r]);
  }
}

// ---- forward -----------------------------------------------------------------------------------------------------------------------------

struct Buffers {
  float *state, *weights, *factors, *queries, *out, *keys, *values, *rows, *strip, *room;
};

Buffers forward_buffers(const Task& task, Scratch& scratch, size_t extra = 0) {
  const Sums& c = task.c;
  const int64_t columns = task.groups * PER;
  scratch.begin(extra + 512 + task.keys() + c.F * (task.width + task.groups) + columns * C * (c.low + std::max(c.low, task.width)) + BLOCK * (c.low + task.step + c.D) + (2 * task.strip + BLOCK) * C + SLICE * BLOCK);
  Buffers at;
  at.state = scratch.take(c.F * task.width);
  at.weights = scratch.take(task.groups * c.F);
  at.factors = scratch.take(task.keys());
  for (int64_t s = 0; s < task.keys(); ++s) at.factors[s] = unit(c, task.key(task.start + static_cast<int32_t>(s)));
  at.queries = scratch.take(columns * c.low * C);
  at.out = scratch.take(columns * std::max(c.low, task.width) * C);
  at.keys = scratch.take(BLOCK * c.low);
  at.values = scratch.take(BLOCK * task.step);
  at.rows = scratch.take(BLOCK * c.D);
  at.strip = scratch.take(task.strip * C);
  at.room = scratch.take(std::max<int64_t>({SLICE * BLOCK, C * BLOCK, task.strip * C}));
  return at;
}

// keys [s0, s1), at most BLOCK, into the state; then, where ``reads``, what the block's queries read there into out
void advance(const Task& task, const Span& span, int32_t s0, int32_t s1, bool reads, const Buffers& at) {
  const Sums& c = task.c;
  pack_keys(task, s0, s1, at.factors, at.keys);
  pack_values(task, s0, s1, at.values);
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C;
  for (int64_t a0 = 0; a0 < c.F; a0 += task.strip) {
    const int64_t a1 = std::min(a0 + task.strip, c.F);
    float* state = at.state + a0 * task.width;
    if (s1 > s0) absorb(c, at.keys, s1 - s0, nullptr, at.values, task.step, task.width, task.mass ? at.keys : nullptr, c.low * C, a0, a1, state, at.room);
    for (int64_t g = 0; reads && g < task.groups; ++g)
      for (int64_t i = 0; i < columns; ++i) {
        features<true>(c, at.queries + (g * PER + i) * c.low * C, at.weights + g * c.F, a0, a1, at.strip);
        columns_by_columns(state, task.width, task.width, at.strip, C, a1 - a0, at.out + (g * PER + i) * task.width * C);
      }
  }
}

void directly(const Task& task, const Span& span, const Buffers& at) {
  const Sums& c = task.c;
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C;
  Lanes lanes[PER];
  for (int64_t i = 0; i < columns; ++i) lanes[i] = lanes_of(task, span, i);
  for (int32_t s0 = span.to; s0 < span.last; s0 += BLOCK) {
    const int32_t s1 = std::min(s0 + BLOCK, span.last);
    pack_rows(task, s0, s1, at.factors, at.rows);
    pack_values(task, s0, s1, at.values);
    for (int64_t g = 0; g < task.groups; ++g)
      for (int64_t i = 0; i < columns; ++i) {
        const int32_t end = std::min(s1, lanes[i].last);
        const float* column = at.queries + (g * PER + i) * c.low * C + C;
        for (int32_t s = s0; s < end; s += R)
          with_rows<R>(std::min<int32_t>(R, end - s), [&](auto n) {
            weigh<decltype(n)::value>(c, task.coefficients(g), lanes[i], at.rows + (s - s0) * c.D, column, s, at.room + (s - s0) * C);
          });
        if (end > s0) columns_by_columns(at.values, task.step, task.width, at.room, C, end - s0, at.out + (g * PER + i) * task.width * C);
      }
  }
}

void finish(const Task& task, const Span& span, const Buffers& at) {
  const Sums& c = task.c;
  const int64_t values = task.p1 - task.p0;
  for (int64_t g = 0; g < task.groups; ++g)
    for (int64_t t = span.t0; t < span.t1; t += C) {
      const float* column = at.out + (g * PER + (t - span.t0) / C) * task.width * C;
      const int64_t first = (task.b * c.H + task.head(g)) * c.T + t;
      const auto factor = [&](int64_t i) {
        if (c.anchor == ROW) {
          const float mass = column[values * C + i];
          return mass != 0.f ? 1.f / mass : 0.f;
        }
        if (c.anchor != COUNT) return 1.f;
        const double seen = task.hi[t + i] - task.lo[t + i] + (c.before == nullptr ? 0. : c.before[task.b]);
        return seen > 0 ? static_cast<float>(1. / seen) : 0.f;
      };
      const Rows rows = rows_of(span.t1 - t, [&](int64_t i) { return c.y + (first + i) * c.P + task.p0; }, factor);
      take<false>(column, values, rows);
      if (task.part == 0) std::copy_n(rows.factor, rows.count, c.factor + first);
    }
}

void forward_task(const Sums& c, int64_t number, Scratch& scratch) {
  const Task task(c, number, true);
  const Buffers at = forward_buffers(task, scratch);
  weigh_features(task, at.weights);
  if (c.initial != nullptr) from_memory(task, c.initial, false, at.state);
  else std::memset(at.state, 0, sizeof(float) * c.F * task.width);
  for (const Span& span : task.spans) {
    pack_queries(task, span, at.queries);
    std::memset(at.out, 0, sizeof(float) * task.groups * PER * task.width * C);
    int32_t s = span.from;
    for (; span.to - s > BLOCK; s += BLOCK) advance(task, span, s, s + BLOCK, false, at);
    if (span.to > s || span.reads) advance(task, span, s, span.to, span.reads, at);
    directly(task, span, at);
    finish(task, span, at);
  }
  if (c.final != nullptr) to_memory(task, at.state, false, c.final);
}


// ---- backward ----------------------------------------------------------------------------------------------------------------------------

struct More {  // what backward needs besides: du as rows (groups, BLOCK, step) and columns (groups, PER, width, C), queries as rows
  float *du, *du_columns, *query_rows;   // (groups, BLOCK, up(D, C))
  float *dlow;                           // gradients of low features, (groups * PER, low, C)
  float *value_columns, *dvalues;        // (PER, width, C), (PER, values, C)
  float *scores, *changes;               // weights and gradients of scores between neighbours, (PER, BLOCK keys, C)
  float *near_keys, *near_values;        // (BLOCK, up(D, C)), (BLOCK, step)
};

struct Backward {
  Buffers at;
  More more;
};

Backward backward_buffers(const Task& task, Scratch& scratch) {
  const Sums& c = task.c;
  const int64_t columns = task.groups * PER, D16 = up(c.D, C);
  const size_t extra = columns * C * (task.step + task.width + D16 + c.low) + BLOCK * (2 * task.width + 2 * BLOCK + D16 + task.step) + task.strip * C;
  Backward all;
  all.at = forward_buffers(task, scratch, extra);
  all.more.du = scratch.take(columns * C * task.step);
  all.more.du_columns = scratch.take(columns * C * task.width);
  all.more.query_rows = scratch.take(columns * C * D16);
  all.more.dlow = scratch.take(columns * C * c.low);
  all.more.value_columns = scratch.take(BLOCK * task.width);
  all.more.dvalues = scratch.take(BLOCK * task.width);
  all.more.scores = scratch.take(BLOCK * BLOCK);
  all.more.changes = scratch.take(BLOCK * BLOCK);
  all.more.near_keys = scratch.take(BLOCK * D16);
  all.more.near_values = scratch.take(BLOCK * task.step);
  return all;
}

// the gradient of what queries summed up, [v, 1]: factor dy, and of the mass -factor dy . y
void pack_gradients(const Task& task, const Span& span, const More& more) {
  const Sums& c = task.c;
  const int64_t values = task.p1 - task.p0, tokens = span.t1 - span.t0, D16 = up(c.D, C);
  for (int64_t g = 0; g < task.groups; ++g) {
    float *rows = more.du + g * BLOCK * task.step, *queries = more.query_rows + g * BLOCK * D16;
    std::memset(rows, 0, sizeof(float) * BLOCK * task.step);
    std::memset(queries, 0, sizeof(float) * BLOCK * D16);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t row = (task.b * c.H + task.head(g)) * c.T + span.t0 + i;
      const float *dy = c.dy + row * c.P, *q = task.query(g, span.t0 + i);
      const float factor = c.factor[row], scale = c.scale[task.head(g)] * unit(c, q);
      for (int64_t p = 0; p < values; ++p) rows[i * task.step + p] = dy[task.p0 + p] * factor;
      if (task.mass) rows[i * task.step + values] = -dot(dy, c.y + row * c.P, c.P) * factor;
      for (int64_t d = 0; d < c.D; ++d) queries[i * D16 + d] = q[d] * scale;
    }
    turn(rows, task.step, tokens, task.width, more.du_columns + g * PER * task.width * C);
  }
}

// out (a1 - a0, C) = a strip of a state against a column (width, C)
void slope(const Task& task, const float* strip, int64_t features, const float* column, float* out) {
  for (int64_t a = 0; a < features; a += R)
    with_rows<R>(features - a, [&](auto n) { rows_by_columns<decltype(n)::value>(strip + a * task.width, task.width, column, C, task.width, out + a * C, C); });
}

// forwards: keys [s0, s1) into the state, then the gradient that queries get from there
void advance_back(const Task& task, const Span& span, int32_t s0, int32_t s1, bool reads, const Backward& all, V* power_sums) {
  const Sums& c = task.c;
  const Buffers& at = all.at;
  pack_keys(task, s0, s1, at.factors, at.keys);
  pack_values(task, s0, s1, at.values);
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C;
  for (int64_t a0 = 0; a0 < c.F; a0 += task.strip) {
    const int64_t a1 = std::min(a0 + task.strip, c.F);
    float* state = at.state + a0 * task.width;
    if (s1 > s0) absorb(c, at.keys, s1 - s0, nullptr, at.values, task.step, task.width, task.mass ? at.keys : nullptr, c.low * C, a0, a1, state, at.room);
    for (int64_t g = 0; reads && g < task.groups; ++g)
      for (int64_t i = 0; i < columns; ++i) {
        const float* column = at.queries + (g * PER + i) * c.low * C;
        slope(task, state, a1 - a0, all.more.du_columns + (g * PER + i) * task.width * C, at.strip);
        pull(c, column, at.weights + g * c.F, at.strip, a0, a1, all.more.dlow + (g * PER + i) * c.low * C);
        if (power_sums != nullptr) powers(c, column, at.strip, a0, a1, power_sums + g * c.powers);
      }
  }
}

// weights and gradients of the scores of N keys from place s on with a column of queries
template <int N>
inline void gradients(const Task& task, int64_t g, const Lanes& lanes, const float* rows, const float* values, const float* column, const float* du, int32_t s,
                      float* weights, float* changes, V* partial) {
  const Sums& c = task.c;
  const float* coefficients = task.coefficients(g);
  const int numbers = static_cast<int>(c.numbers);
  (void)numbers;
  float scored[N * C], changed[N * C];
  rows_by_columns<N>(rows, c.D, column, C, c.D, scored, C);
  rows_by_columns<N>(values, task.step, du, C, task.width, changed, C);
  EACH_ROW
    for (int j = 0; j < 2; ++j) {
      const V score = in_domain(load(scored + r * C + j * L));
      V ds = load(changed + r * C + j * L), w = value(score, coefficients, numbers);
      if (s + r >= lanes.whole) {
        w = lanes.hi[j] > s + r ? w : V{};
        ds = lanes.hi[j] > s + r ? ds : V{};
      }
      if (partial != nullptr) {
        V term = ds * base(score, coefficients, numbers);
        for (int k = 0; k < c.learned; ++k) {
          partial[k] += term;
          term *= score;
        }
      }
      ds *= derivative(score, coefficients, numbers);
      store(weights + r * C + j * L, w);
      store(changes + r * C + j * L, ds);
    }
}

// (keys, width) += tiles (columns, BLOCK keys, C) against rows (columns * C, step)
void gather(const float* tiles, int64_t keys, const float* rows, int64_t step, int64_t columns, float* into) {
  for (int64_t s = 0; s < keys; s += R)
    with_rows<R>(keys - s, [&](auto n) {
      for (int64_t p = 0; p < step; p += C)
        columns_by_rows<decltype(n)::value>(tiles + s * C, BLOCK * C, rows + p, step, columns * C, into + s * step + p, step);
    });
}

// what queries and keys do to each other directly, added to dlow and to the part's dk and dv
void directly_back(const Task& task, const Span& span, const Backward& all, float* dk, float* dv, double* dcoefficients) {
  const Sums& c = task.c;
  const Buffers& at = all.at;
  const More& more = all.more;
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C, D16 = up(c.D, C);
  Lanes lanes[PER];
  for (int64_t i = 0; i < columns; ++i) lanes[i] = lanes_of(task, span, i);
  V partial[40];
  for (int32_t s0 = span.to; s0 < span.last; s0 += BLOCK) {
    const int32_t s1 = std::min(s0 + BLOCK, span.last);
    pack_rows(task, s0, s1, at.factors, at.rows);
    pack_values(task, s0, s1, at.values);
    std::memset(more.near_keys, 0, sizeof(float) * BLOCK * D16);
    std::memset(more.near_values, 0, sizeof(float) * BLOCK * task.step);
    for (int64_t g = 0; g < task.groups; ++g) {
      for (int64_t k = 0; k < c.learned; ++k) partial[k] = V{};
      for (int64_t i = 0; i < columns; ++i) {
        const int32_t end = std::max(s0, std::min(s1, lanes[i].last));
        const int64_t number = g * PER + i;
        float *weights = more.scores + i * BLOCK * C, *changes = more.changes + i * BLOCK * C;
        for (int32_t s = s0; s < end; s += R)
          with_rows<R>(std::min<int32_t>(R, end - s), [&](auto n) {
            gradients<decltype(n)::value>(task, g, lanes[i], at.rows + (s - s0) * c.D, at.values + (s - s0) * task.step, at.queries + number * c.low * C + C,
                                          more.du_columns + number * task.width * C, s, weights + (s - s0) * C, changes + (s - s0) * C,
                                          dcoefficients == nullptr ? nullptr : partial);
          });
        std::memset(weights + (end - s0) * C, 0, sizeof(float) * (s1 - end) * C);
        std::memset(changes + (end - s0) * C, 0, sizeof(float) * (s1 - end) * C);
        columns_by_columns(at.rows, c.D, c.D, changes, C, end - s0, more.dlow + number * c.low * C + C);
      }
      gather(more.scores, s1 - s0, more.du + g * BLOCK * task.step, task.step, columns, more.near_values);
      gather(more.changes, s1 - s0, more.query_rows + g * BLOCK * D16, D16, columns, more.near_keys);
      for (int64_t k = 0; k < c.learned && dcoefficients != nullptr; ++k)
        for (int i = 0; i < L; ++i) dcoefficients[g * c.learned + k] += partial[k][i];
    }
    for (int32_t s = s0; s < s1; ++s) {
      float *to_key = dk + task.index[s] * c.D, *to_value = dv + task.index[s] * c.P + task.p0;
      for (int64_t d = 0; d < c.D; ++d) to_key[d] += more.near_keys[(s - s0) * D16 + d];
      for (int64_t p = 0; p < task.p1 - task.p0; ++p) to_value[p] += more.near_values[(s - s0) * task.step + p];
    }
  }
}

// backwards: where ``reads``, what a block's queries add to the adjoint state; then the gradients of keys [s0, s1) in it
void retreat(const Task& task, const Span& span, int32_t s0, int32_t s1, bool reads, const Backward& all, float* dk, float* dv) {
  const Sums& c = task.c;
  const Buffers& at = all.at;
  const More& more = all.more;
  const int64_t keys = s1 - s0, columns = (keys + C - 1) / C, values = task.p1 - task.p0, tokens = span.t1 - span.t0;
  pack_keys(task, s0, s1, at.factors, at.keys);
  pack_values(task, s0, s1, at.values);
  turn(at.values, task.step, keys, task.width, more.value_columns);
  std::memset(at.out, 0, sizeof(float) * columns * C * c.low);
  std::memset(more.dvalues, 0, sizeof(float) * columns * C * values);
  float* made = at.room;
  for (int64_t a0 = 0; a0 < c.F; a0 += task.strip) {
    const int64_t a1 = std::min(a0 + task.strip, c.F);
    float* state = at.state + a0 * task.width;
    for (int64_t g = 0; reads && g < task.groups; ++g) {
      const float* du_columns = more.du_columns + g * PER * task.width * C;
      absorb(c, at.queries + g * PER * c.low * C, tokens, at.weights + g * c.F, more.du + g * BLOCK * task.step, task.step, task.width,
             du_columns + (task.width - 1) * C, task.width * C, a0, a1, state, at.room);
    }
    for (int64_t i = 0; i < columns; ++i) {
      const float* column = at.keys + i * c.low * C;
      slope(task, state, a1 - a0, more.value_columns + i * task.width * C, at.strip);
      pull(c, column, nullptr, at.strip, a0, a1, at.out + i * c.low * C);
      features<false>(c, column, nullptr, a0, a1, made);
      columns_by_columns(state, task.width, values, made, C, a1 - a0, more.dvalues + i * values * C);
    }
  }
  for (int64_t i = 0; i < columns; ++i) pull_low(c, at.keys + i * c.low * C, at.out + i * c.low * C);
  const auto one = [](int64_t) { return 1.f; };
  for (int32_t s = s0; s < s1; s += C) {
    const int64_t i = (s - s0) / C;
    take<true>(at.out + (i * c.low + 1) * C, c.D, rows_of(s1 - s, [&](int64_t r) { return dk + task.index[s + r] * c.D; }, one));
    take<true>(more.dvalues + i * values * C, values, rows_of(s1 - s, [&](int64_t r) { return dv + task.index[s + r] * c.P + task.p0; }, one));
  }
}

void backward_task(const Sums& c, int64_t number, Scratch& scratch) {
  const Task task(c, number, false);
  const Backward all = backward_buffers(task, scratch);
  const Buffers& at = all.at;
  float* dk = c.dk + ((task.part * c.B + task.b) * c.Hkv + task.kv) * c.S * c.D;
  float* dv = c.dv + (task.b * c.Hkv + task.kv) * c.S * c.P;
  double* dcoefficients = c.dcoefficients == nullptr ? nullptr : c.dcoefficients + number * task.groups * c.learned;
  double* dmonomials = c.dmonomials == nullptr ? nullptr : c.dmonomials + number * task.groups * c.powers;
  std::vector<V> power_sums(dmonomials == nullptr ? 0 : task.groups * c.powers);
  V* sums = dmonomials == nullptr ? nullptr : power_sums.data();
  weigh_features(task, at.weights);
  if (c.initial != nullptr) from_memory(task, c.initial, false, at.state);
  else std::memset(at.state, 0, sizeof(float) * c.F * task.width);
  for (const Span& span : task.spans) {
    if (span.t1 == span.t0) continue;  // nobody reads what comes in last
    pack_queries(task, span, at.queries);
    pack_gradients(task, span, all.more);
    std::memset(all.more.dlow, 0, sizeof(float) * task.groups * PER * c.low * C);
    std::fill(power_sums.begin(), power_sums.end(), V{});
    int32_t s = span.from;
    for (; span.to - s > BLOCK; s += BLOCK) advance_back(task, span, s, s + BLOCK, false, all, sums);
    if (span.to > s || span.reads) advance_back(task, span, s, span.to, span.reads, all, sums);
    directly_back(task, span, all, dk, dv, dcoefficients);
    for (int64_t g = 0; g < task.groups; ++g) {
      for (int64_t i = 0; i < PER; ++i) pull_low(c, at.queries + (g * PER + i) * c.low * C, all.more.dlow + (g * PER + i) * c.low * C);
      float* dq = c.dq + ((task.part * c.B + task.b) * c.H + task.head(g)) * c.T * c.D;
      for (int64_t t = span.t0; t < span.t1; t += C)
        take<false>(all.more.dlow + ((g * PER + (t - span.t0) / C) * c.low + 1) * C, c.D,
                    rows_of(span.t1 - t, [&](int64_t i) { return dq + (t + i) * c.D; }, [](int64_t) { return 1.f; }));
      for (int64_t k = 0; dmonomials != nullptr && k < c.powers; ++k)
        for (int i = 0; i < L; ++i) dmonomials[g * c.powers + k] += power_sums[g * c.powers + k][i];
    }
  }
  if (c.dfinal != nullptr) from_memory(task, c.dfinal, true, at.state);
  else std::memset(at.state, 0, sizeof(float) * c.F * task.width);
  for (auto span = task.spans.rbegin(); span != task.spans.rend(); ++span) {
    bool reads = span->reads;
    if (reads) {
      pack_queries(task, *span, at.queries);
      pack_gradients(task, *span, all.more);
    }
    int32_t s = span->from;
    do {
      const int32_t end = std::min(s + BLOCK, span->to);
      if (reads || end > s) retreat(task, *span, s, end, reads, all, dk, dv);
      reads = false;
      s = end;
    } while (s < span->to);
  }
  if (c.dinitial != nullptr) to_memory(task, at.state, true, c.dinitial);
}

// parts summed in order, and the way back through norm and scale: rows of gradients in ``g`` and of vectors from ``x`` on
void finish_rows(const Sums& c, float* g, int64_t part_size, const float* x, int64_t x_step, int64_t rows, float scale, double* dscale) {
  double along_all = 0;
  for (int64_t i = 0; i < rows; ++i, g += c.D, x += x_step) {
    for (int64_t part = 1; part < c.split; ++part)
      for (int64_t d = 0; d < c.D; ++d) g[d] += g[part * part_size + d];
    const float along = dot(g, x, c.D), norm = std::sqrt(dot(x, x, c.D)), inverse = c.normalise ? 1.f / std::max(norm, c.eps) : 1.f;
    along_all += static_cast<double>(along) * inverse;
    // beyond eps a unit vector does not change along itself
    const float back = c.normalise && norm > c.eps ? along * inverse * inverse : 0.f;
    for (int64_t d = 0; d < c.D; ++d) g[d] = scale * inverse * (g[d] - back * x[d]);
  }
  if (dscale != nullptr) *dscale = along_all;
}

template <typename F>
int each_task(const Sums& c, const F& task) {
  const int64_t tasks = c.B * c.Hkv * c.segments * c.split;
  if (tasks == 0) return 0;
  std::atomic<int> failed{0};
  std::atomic<int64_t> next{0};
  // to wake the other threads takes some ten microseconds
#pragma omp parallel if (tasks > 1 && c.B * c.H * (c.T + c.S) * c.F * (c.P + 1) > (1 << 19))
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

}  // namespace

extern "C" {

int64_t zonal_version() { return 4; }

// Returns 0, or 1 when memory ran out.
int zonal_sums_forward(const Sums* call) {
  return each_task(*call, [&](int64_t i, Scratch& scratch) { forward_task(*call, i, scratch); });
}

// Returns 0, or 1 when memory ran out. Gradients of raw queries and keys end up in part 0 of dq and dk.
int zonal_sums_backward(const Sums* call) {
  const Sums& c = *call;
  const int failed = each_task(c, [&](int64_t i, Scratch& scratch) { backward_task(c, i, scratch); });
  if (failed) return failed;
#pragma omp parallel for schedule(static) if (c.B * c.H * c.T * c.D > (1 << 15))
  for (int64_t i = 0; i < c.B * c.H; ++i) {
    const int64_t b = i / c.H, h = i % c.H;
    finish_rows(c, c.dq + i * c.T * c.D, c.B * c.H * c.T * c.D, c.q + b * c.qs.batch + h * c.qs.head, c.qs.token, c.T, c.scale[h],
                c.dscale == nullptr ? nullptr : c.dscale + i);
  }
#pragma omp parallel for schedule(static) if (c.B * c.Hkv * c.S * c.D > (1 << 15))
  for (int64_t i = 0; i < c.B * c.Hkv; ++i)
    finish_rows(c, c.dk + i * c.S * c.D, c.B * c.Hkv * c.S * c.D, c.k + i / c.Hkv * c.ks.batch + i % c.Hkv * c.ks.head, c.ks.token, c.S, 1.f, nullptr);
  return 0;
}
}
