// What the passes of sums.cpp are made of: the call, its blocks, packing, products, the state of features, and weights between neighbours.

#include "common.hpp"
#include "products.hpp"

#include <vector>

#ifndef ZONAL_BLOCK
#define ZONAL_BLOCK 64
#endif

namespace {

constexpr int BLOCK = ZONAL_BLOCK;    // queries of a block, and keys taken in at once
constexpr int PER = BLOCK / C;        // columns of a block
constexpr int STRIP = 3072;           // numbers of the state in one strip: it stays in the first cache with its features
constexpr int FEATURE = 8;            // what it costs to make a feature and keep the state in turn, in multiplications with the state
constexpr int SLICE = 4 * R;         // features made at once for all tokens at hand

}  // namespace

extern "C" {

// What zonal/kernels/sums.py fills in. Last axes have stride 1. index (B or 1, S): the keys that are there, in order; present
// (B or 1): how many; lo, hi (B or 1, T): places in it, hi >= lo; both rise within a segment, lo is one number there. edges (segments + 1):
// borders of segments among the queries; what one sees starts afresh in the next.
// Feature a of F is the product of rows left[a] <= right[a] of the low features: 1, the vector, and products of earlier rows
// (low_left, low_right); left rises, and up to run_end[a] it stays while right rises by one each. squares, roots: the number of ways to write the monomial, and its root; place: where it stands in a
// memory, which holds roots * M.
struct Sums {
  const float *q, *k, *v, *scale, *coefficients, *monomials, *squares, *roots;
  const double* running;      // (B, Hkv, S): log decays summed up to and with each key, none above 0; null: nothing fades
  const float* favour;        // (B, Hkv, S): what each key counts; null: one
  const int32_t *left, *right, *run_end, *degree, *place, *low_left, *low_right, *index, *present, *lo, *hi, *edges;
  const float* initial;       // (B, Hkv, F, W) or null: the memory before the first key
  const double* before;       // (B): keys in it, for the count anchor; null without
  Strides qs, ks, vs;
  int64_t B, H, Hkv, T, S, D, P, F, low, powers, segments, by_batch, numbers, learned, anchor, normalise, split, offset, guards, shares, left_part;
                              // offset: the position of query 0 among the keys; guards: rows whose terms cancel are found and summed directly
                              // left_part: where it is not 0, a score is a product of two dot products, over the first left_part numbers and over
                              // the others; features are the products of a number of either part, and scale is 1
  uint8_t* apart;             // (B, H, T): which those are, zeros at first; null without guards
  float *y, *factor, *final;  // (B, H, T, P), (B, H, T), (B, Hkv, F, W) or null: the memory after the last key
  const float *dy, *dfinal;   // as y and final
  float *dq, *dk, *dv, *dinitial;  // (split, B, H, T, D), (split, B, Hkv, S, D), (B, Hkv, S, P); as initial, or null
  // Where all heads have the same queries and keys their gradients are summed over the heads, in ``shares`` parts, (shares, B, T, D) and
  // (shares, B, S, D), without dscale. Otherwise shares is 0.
  float* dmass;               // (B, Hkv, S): the gradient of the sum of weights that came through each key, zeros at first; or null
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
  int64_t first, rest, row;  // numbers of both parts of a score (``rest`` is 0 where it has one), and of a row of both, each padded to whole columns
  const int32_t *index, *lo, *hi;
  const double* running;
  const float* favour;
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
    first = c.left_part > 0 ? c.left_part : c.D;
    rest = c.D - first;
    row = up(first, C) + up(rest, C);
    strip = std::max<int64_t>(SLICE, std::min<int64_t>(8 * SLICE, STRIP / width / SLICE * SLICE));
    const int64_t m = c.by_batch ? b : 0;
    index = c.index + m * c.S;
    lo = c.lo + m * c.T;
    hi = c.hi + m * c.T;
    present = c.present[m];
    running = c.running == nullptr ? nullptr : c.running + (b * c.Hkv + kv) * c.S;
    favour = c.favour == nullptr ? nullptr : c.favour + (b * c.Hkv + kv) * c.S;
    plan();
  }

  // While few keys are behind, all of them are seen directly, which is less work than to read the state; so are those that few queries have
  // still to see, which is less work than to take them in; and all of them where the state would never pay.
  void plan() {
    const int64_t first = c.edges[segment], end = c.edges[segment + 1];
    start = end > first ? lo[first] : 0;
    const double each = static_cast<double>(c.F) * (width + FEATURE), pair = static_cast<double>(groups) * (c.D + width);
    const int64_t near = std::max<int64_t>(BLOCK, static_cast<int64_t>(each / (c.D + width)));
    const bool ends = c.final == nullptr && c.dfinal == nullptr;
    double direct = 0, carried = 0;
    int32_t done = start;
    bool begun = c.initial != nullptr;
    for (int64_t t0 = first; t0 < end; t0 += BLOCK) {
      const int64_t t1 = std::min<int64_t>(t0 + BLOCK, end);
      const int32_t last = std::max(hi[t1 - 1], done);
      int32_t to = std::max(hi[t0], done);
      if ((!begun && last - start <= near) || (ends && pair * (end - t0) <= each)) to = done;
      begun = begun || to > done;
      spans.push_back({t0, t1, done, to, last, begun});
      direct += pair * (t1 - t0) * (last - start);
      carried += pair * (t1 - t0) * (last - to) + each * ((to - done) + groups * (t1 - t0) * begun);
      done = to;
    }
    if (ends && c.initial == nullptr && direct <= carried)
      for (Span& span : spans) span = {span.t0, span.t1, start, start, span.last, false};
    if (!ends) spans.push_back({end, end, done, present, present, false});
  }

  int64_t keys() const { return spans.empty() ? 0 : spans.back().last - start; }  // of the segment that anybody sees, or that are kept
  int64_t head(int64_t g) const { return kv * groups + g; }
  const float* key(int32_t s) const { return c.k + b * c.ks.batch + kv * c.ks.head + index[s] * c.ks.token; }
  const float* value_row(int32_t s) const { return c.v + b * c.vs.batch + kv * c.vs.head + index[s] * c.vs.token + p0; }
  const float* query(int64_t g, int64_t t) const { return c.q + b * c.qs.batch + head(g) * c.qs.head + t * c.qs.token; }
  bool weighs() const { return running != nullptr || favour != nullptr; }
  // The log decay of all time before place ``to``; the state of keys up to there is what is left of them then. A query that reads them stands
  // no earlier, so that no factor is above one.
  double mark(int32_t to) const { return running == nullptr || to == 0 ? 0. : running[index[to - 1]]; }
  double until(int64_t t) const { return running == nullptr ? 0. : running[std::max<int64_t>(0, std::min(t + c.offset, c.S - 1))]; }
  float counts(int32_t s) const { return favour == nullptr ? 1.f : favour[index[s]]; }
  float left(int32_t s, int32_t to) const { return running == nullptr ? counts(s) : counts(s) * static_cast<float>(std::exp(mark(to) - running[index[s]])); }
  const float* coefficients(int64_t g) const { return c.coefficients + head(g) * c.numbers; }
};

inline float unit(const Sums& c, const float* x) { return c.normalise ? inverse_norm(x, c.D) : 1.f; }

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
  as_column([&](int64_t i) { return rows.at[i]; }, rows.factor, C, n, column);
}

// and back: rows = column, or rows += column
template <bool ADD>
void take(const float* column, int64_t n, const Rows& rows) {
  const auto eight = [&](int64_t i, int64_t d, V8 x) { put8(rows.at[i] + d, ADD ? load8(rows.at[i] + d) + x : x); };
  const auto one = [&](int64_t i, int64_t d, float x) { rows.at[i][d] = ADD ? rows.at[i][d] + x : x; };
  as_rows(column, rows.factor, static_cast<int>(rows.count), n, eight, one);
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

// their rows of [v, 1] times what each key counts, (BLOCK, step), and that by itself where it is asked for, (BLOCK)
template <typename Counts>
void pack_values(const Task& task, int32_t s0, int32_t s1, const Counts& counts, float* rows, float* masses = nullptr) {
  const int64_t values = task.p1 - task.p0;
  const bool weighs = task.weighs();
  if (masses != nullptr) std::memset(masses, 0, sizeof(float) * BLOCK);
  for (int32_t s = s0; s < s1; ++s, rows += task.step) {
    const float *v = task.value_row(s), count = weighs ? counts(s) : 1.f;
    if (weighs)
      for (int64_t p = 0; p < values; ++p) rows[p] = v[p] * count;
    else
      std::copy_n(v, values, rows);
    std::fill(rows + values, rows + task.step, 0.f);
    if (task.mass) rows[values] = count;
    if (masses != nullptr) masses[s - s0] = count;
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

inline RowsAt<float, false> rows_at(const float* rows, int64_t step) { return {rows, step, nullptr}; }

// sum += x, where ``lost`` keeps what rounding took from earlier additions (Kahan)
template <typename X>
INLINE void add(float* sum, float* lost, X x) {
  X before, missing;
  std::memcpy(&before, sum, sizeof(X));
  std::memcpy(&missing, lost, sizeof(X));
  const X more = x - missing, after = before + more;
  missing = (after - before) - more;
  std::memcpy(sum, &after, sizeof(X));
  std::memcpy(lost, &missing, sizeof(X));
}

// ``add`` to fewer numbers than a vector has: the end of a row
APART void add_few(float* sums, float* lost, const float* x, int64_t numbers) {
  for (int64_t i = 0; i < numbers; ++i) add(sums + i, lost + i, x[i]);
}

// into (N rows of W vectors) += the features of tokens against their rows. features (columns, N, C) with ``features_step`` from column to
// column, rows (tokens, step); lost: beside into, what rounding took there
template <int N, int W, bool KEEPS = false>
APART void columns_by_rows(const float* features, int64_t features_step, const float* rows, int64_t step, int64_t tokens, float* into, int64_t into_step,
                           float* lost = nullptr) {
  V x[N], y[N];
  EACH_ROW x[r] = y[r] = V{};
  for (; tokens > 0; tokens -= C, features += features_step) {
    const int64_t lanes = std::min<int64_t>(tokens, C);
    for (int64_t i = 0; i < lanes; ++i) {
      const V first = load(rows), second = W == 2 ? load(rows + L) : V{};
      EACH_ROW {
        const V number = spread(features[r * C + i]);
        x[r] += number * first;
        if constexpr (W == 2) y[r] += number * second;
      }
      rows += step;
    }
  }
  EACH_ROW {
    float* to = into + r * into_step;
    if constexpr (KEEPS) {
      add(to, lost + r * into_step, x[r]);
      if constexpr (W == 2) add(to + L, lost + r * into_step + L, y[r]);
    } else {
      store(to, load(to) + x[r]);
      if constexpr (W == 2) store(to + L, load(to + L) + y[r]);
    }
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

// whether all numbers of a row but one fill vectors
inline bool one_is_left(int64_t width) { return width % L == 1; }

// Features [a0, a1) of a state += weights psi(tokens)^T rows. low (columns, low, C), rows (tokens, step); ``last``, where it is not null, is
// the last column of rows, a column of tokens to ``last_step`` numbers: cheaper than a vector where it alone is left over. lost: beside the
// strip, what rounding took from it: a state is as good as the sums of single blocks, however many. room (columns, SLICE, C).
void absorb(const Sums& c, const float* low, int64_t tokens, const float* weights, const float* rows, int64_t step, int64_t width,
            const float* last, int64_t last_step, int64_t a0, int64_t a1, float* strip, float* lost, float* room) {
  const int64_t columns = (tokens + C - 1) / C;
  const bool apart = last != nullptr && one_is_left(width);
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
        float *state = strip + (a - a0) * width, *missing = lost + (a - a0) * width;
        const float* at = room + (a - s0) * C;
        int64_t p = 0;
        for (; p + C <= body; p += C) columns_by_rows<N, 2, true>(at, SLICE * C, rows + p, step, tokens, state + p, width, missing + p);
        if (p + L <= body) {
          columns_by_rows<N, 1, true>(at, SLICE * C, rows + p, step, tokens, state + p, width, missing + p);
          p += L;
        }
        if (p < body) {
          float sums[N * L] = {};
          columns_by_rows<N, 1>(at, SLICE * C, rows + p, step, tokens, sums, L);
          EACH_ROW
            add_few(state + r * width + p, missing + r * width + p, sums + r * L, body - p);
        }
      });
    for (int64_t a = s0; apart && a < s1; a += L) {  // a vector of features at once, so that their lanes are summed by one transposition
      const int64_t count = std::min<int64_t>(L, s1 - a);
      V totals[L] = {};
      for (int64_t i = 0; i < columns; ++i) {
        const V first = load(last + i * last_step), second = load(last + i * last_step + L);
        const float* at = room + (i * SLICE + a - s0) * C;
        for (int64_t r = 0; r < L; ++r) totals[r] += load(at + r * C) * first + load(at + r * C + L) * second;
      }
      float masses[L];
      for (int r = 0; r < L; ++r) masses[r] = sum(totals[r]);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t place = (a - a0 + r) * width + width - 1;
        add(strip + place, lost + place, masses[r]);
      }
    }
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

// a state, or its gradient, after more time has passed
void fade(const Task& task, int32_t from, int32_t to, float* state, float* lost) {
  if (task.running == nullptr || from == to) return;
  const float left = static_cast<float>(std::exp(task.mark(to) - task.mark(from)));
  for (int64_t i = 0; i < task.c.F * task.width; ++i) {
    state[i] *= left;
    lost[i] *= left;
  }
}

// ---- between neighbours ------------------------------------------------------------------------------------------------------------------

// A log decay in two numbers, to base 2: their differences lose no digits where the decays themselves are long sums.
struct Mark {
  float high, low;
};

inline Mark mark_of(double log_decay) {
  const double exponent = log_decay * 1.4426950408889634;
  const float high = static_cast<float>(exponent);
  return {high, static_cast<float>(exponent - high)};
}

struct Lanes {  // which keys the sixteen queries of a column see, and when they stand
  I hi[2];
  V high[2], low[2];
  int32_t whole, last;  // keys before whole are seen by all lanes, keys from last on by none
};

// sees(t): whether query t is asked at all
template <typename Sees>
Lanes lanes_of(const Task& task, const Span& span, int64_t column, const Sees& sees) {
  Lanes lanes;
  lanes.whole = std::numeric_limits<int32_t>::max();
  lanes.last = 0;
  for (int i = 0; i < C; ++i) {
    const int64_t t = span.t0 + column * C + i;
    const int32_t hi = t < span.t1 && sees(t) ? task.hi[t] : 0;
    lanes.hi[i / L][i % L] = hi;
    if (task.running != nullptr) {
      const Mark mark = mark_of(task.until(std::min(t, span.t1 - 1)));
      lanes.high[i / L][i % L] = mark.high;
      lanes.low[i / L][i % L] = mark.low;
    }
    lanes.whole = std::min(lanes.whole, hi);
    lanes.last = std::max(lanes.last, hi);
  }
  return lanes;
}

// of all columns, (groups, PER)
template <typename Sees>
std::vector<Lanes> all_lanes(const Task& task, const Span& span, const Sees& sees) {
  std::vector<Lanes> lanes;
  for (int64_t g = 0; g < task.groups; ++g)
    for (int64_t i = 0; i < PER; ++i) lanes.push_back(lanes_of(task, span, i, [&](int64_t t) { return sees(g, t); }));
  return lanes;
}

constexpr auto EVERY = [](int64_t, int64_t) { return true; };  // query of a group

void pack_marks(const Task& task, int32_t s0, int32_t s1, Mark* marks) {
  for (int32_t s = s0; task.running != nullptr && s < s1; ++s) marks[s - s0] = mark_of(task.running[task.index[s]]);
}

// what is left of a key when the queries of half a column stand; later keys count in full, and are not seen
inline V left_of(const Lanes& lanes, int j, Mark mark) {
  const V exponent = least((lanes.high[j] - mark.high) + (lanes.low[j] - mark.low), V{});
  return exponent <= -126.f ? V{} : exp2(exponent);  // NaN stays
}

// weights (N, C) of keys from place s on, whose rows are at ``rows``; marks: null where nothing fades
// parts: whether a score is a product of two; without, the first stays in registers
template <int N, bool parts>
APART void weigh(const Task& task, const float* coefficients, const Lanes& lanes, const float* rows, const Mark* marks, const float* column, int32_t s, float* weights) {
  const Sums& c = task.c;
  V x[N] = {}, y[N] = {};
  const float* at[N];
  EACH_ROW at[r] = rows + r * c.D;
  add_rows<N>(at, column, C, task.first, x, y);
  if constexpr (parts) {
    float other[N * C];
    EACH_ROW at[r] += task.first;
    rows_by_columns<N>(at, column + task.first * C, C, task.rest, other);
    EACH_ROW {
      x[r] *= load(other + r * C);
      y[r] *= load(other + r * C + L);
    }
  }
  EACH_ROW {
    x[r] = in_domain(x[r]);
    y[r] = in_domain(y[r]);
  }
  values<N>(x, y, coefficients, static_cast<int>(c.numbers));
  if (marks != nullptr)
    for (int r = 0; r < N; ++r) {
      x[r] *= left_of(lanes, 0, marks[r]);
      y[r] *= left_of(lanes, 1, marks[r]);
    }
  EACH_ROW {
    if (s + r >= lanes.whole) {
      x[r] = lanes.hi[0] > s + r ? x[r] : V{};
      y[r] = lanes.hi[1] > s + r ? y[r] : V{};
    }
    store(weights + r * C, x[r]);
    store(weights + r * C + L, y[r]);
  }
}

}  // namespace
