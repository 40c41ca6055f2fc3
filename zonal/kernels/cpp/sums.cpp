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

#include "sums.hpp"

namespace {

constexpr float THIN = 1.f / 256, LOST = 1.f / (1 << 16);

// ---- forward -----------------------------------------------------------------------------------------------------------------------------

struct Buffers {
  float *state, *lost, *weights, *factors, *queries, *out, *keys, *values, *masses, *rows, *near, *strip, *room;
  float *left, *reads;  // what is left of each key when the state has taken its block in, and of the state when the queries at hand read it, (BLOCK)
  Mark* marks;
  uint8_t* thin;  // (groups, BLOCK): rows of the block that do without the state
};

Buffers forward_buffers(const Task& task, Scratch& scratch, size_t extra = 0) {
  const Sums& c = task.c;
  const int64_t columns = task.groups * PER;
  scratch.begin(extra + 512 + 2 * task.keys() + BLOCK + c.F * (2 * task.width + task.groups) + columns * C * (c.low + std::max(c.low, task.width)) + BLOCK * (c.low + task.step + c.D + 3 + task.groups) + (task.width + c.D) * C + (2 * task.strip + BLOCK) * C + SLICE * BLOCK);
  Buffers at;
  at.state = scratch.take(c.F * task.width);
  at.lost = scratch.take(c.F * task.width);
  at.near = scratch.take(std::max(task.width, c.D) * C);
  at.weights = scratch.take(task.groups * c.F);
  at.factors = scratch.take(task.keys());
  for (int64_t s = 0; s < task.keys(); ++s) at.factors[s] = unit(c, task.key(task.start + static_cast<int32_t>(s)));
  at.left = scratch.take(task.keys());
  for (const Span& span : task.spans)
    for (int32_t s = span.from; s < span.to; ++s) at.left[s - task.start] = task.left(s, span.to);
  at.reads = scratch.take(BLOCK);
  at.queries = scratch.take(columns * c.low * C);
  at.out = scratch.take(columns * std::max(c.low, task.width) * C);
  at.keys = scratch.take(BLOCK * c.low);
  at.values = scratch.take(BLOCK * task.step);
  at.masses = scratch.take(BLOCK);
  at.marks = reinterpret_cast<Mark*>(scratch.take(2 * BLOCK));
  at.thin = reinterpret_cast<uint8_t*>(scratch.take(task.groups * BLOCK / 4));
  std::memset(at.thin, 0, task.groups * BLOCK);
  at.rows = scratch.take(BLOCK * c.D);
  at.strip = scratch.take(task.strip * C);
  at.room = scratch.take(std::max<int64_t>({SLICE * BLOCK, C * BLOCK, task.strip * C}));
  return at;
}

// the state, or its gradient, from a memory, or nothing
void start(const Task& task, const float* memory, bool gradient, const Buffers& at) {
  const size_t size = sizeof(float) * task.c.F * task.width;
  if (memory != nullptr) from_memory(task, memory, gradient, at.state);
  else std::memset(at.state, 0, size);
  std::memset(at.lost, 0, size);
}

// keys [s0, s1), at most BLOCK, into the state as it is when all of the span's have come; then, where ``reads``, what the block's queries
// read there into out
void advance(const Task& task, const Span& span, int32_t s0, int32_t s1, bool reads, const Buffers& at) {
  const Sums& c = task.c;
  pack_keys(task, s0, s1, at.factors, at.keys);
  pack_values(task, s0, s1, [&](int32_t s) { return at.left[s - task.start]; }, at.values, at.masses);
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C;
  for (int64_t a0 = 0; a0 < c.F; a0 += task.strip) {
    const int64_t a1 = std::min(a0 + task.strip, c.F);
    float* state = at.state + a0 * task.width;
    if (s1 > s0) absorb(c, at.keys, s1 - s0, nullptr, at.values, task.step, task.width, task.mass ? at.masses : nullptr, C, a0, a1, state, at.lost + a0 * task.width, at.room);
    for (int64_t g = 0; reads && g < task.groups; ++g)
      for (int64_t i = 0; i < columns; ++i) {
        features<true>(c, at.queries + (g * PER + i) * c.low * C, at.weights + g * c.F, a0, a1, at.strip);
        columns_by_columns(rows_at(state, task.width), task.width, at.strip, C, a1 - a0, at.out + (g * PER + i) * task.width * C);
      }
  }
}

// columns_by_columns for a block of keys, summed up by itself first: thousands of keys that are alike would round alike, one after the other
void block_by_columns(const float* a, int64_t stride, int64_t width, const float* cols, int64_t keys, float* near, float* sums) {
  std::memset(near, 0, sizeof(float) * width * C);
  columns_by_columns(rows_at(a, stride), width, cols, C, keys, near);
  for (int64_t i = 0; i < width * C; i += L) store(sums + i, load(sums + i) + load(near + i));
}

// what queries that ``sees(g, t)`` get from keys [from, to) through the link, added to out
template <typename Sees>
void directly(const Task& task, const Span& span, int32_t from, int32_t to, const Sees& sees, const Buffers& at) {
  const Sums& c = task.c;
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C;
  const Mark* marks = task.running == nullptr ? nullptr : at.marks;
  const std::vector<Lanes> all = all_lanes(task, span, sees);
  for (int32_t s0 = from; s0 < to; s0 += BLOCK) {
    const int32_t s1 = std::min(s0 + BLOCK, to);
    pack_rows(task, s0, s1, at.factors, at.rows);
    pack_marks(task, s0, s1, at.marks);
    pack_values(task, s0, s1, [&](int32_t s) { return task.counts(s); }, at.values);
    for (int64_t g = 0; g < task.groups; ++g)
      for (int64_t i = 0; i < columns; ++i) {
        const Lanes& lanes = all[g * PER + i];
        const int32_t end = std::min(s1, lanes.last);
        const float* column = at.queries + (g * PER + i) * c.low * C + C;
        for (int32_t s = s0; s < end; s += R)
          with_rows<R>(std::min<int32_t>(R, end - s), [&](auto n) {
            const Mark* first = marks == nullptr ? nullptr : marks + (s - s0);
            constexpr int rows = decltype(n)::value;
            const auto weights = task.rest > 0 ? weigh<rows, true> : weigh<rows, false>;
            weights(task, task.coefficients(g), lanes, at.rows + (s - s0) * c.D, first, column, s, at.room + (s - s0) * C);
          });
        if (end > s0) block_by_columns(at.values, task.step, task.width, at.room, end - s0, at.near, at.out + (g * PER + i) * task.width * C);
      }
  }
}

// what is left for each query of a block of a state that keeps what is left of its keys after the last of them; ones past the last query
void pack_reads(const Task& task, const Span& span, float* reads) {
  for (int64_t i = 0; i < BLOCK; ++i)
    reads[i] = task.running == nullptr || span.t0 + i >= span.t1 ? 1.f : static_cast<float>(std::exp(task.until(span.t0 + i) - task.mark(span.to)));
}

void fade_reads(const Task& task, const Span& span, const Buffers& at) {
  if (task.running == nullptr || !span.reads) return;
  for (int64_t t = span.t0; t < span.t1; t += C)
    for (int j = 0; j < C; j += L) {
      const V left = load(at.reads + t - span.t0 + j);
      for (int64_t g = 0; g < task.groups; ++g)
        for (int64_t p = 0; p < task.width; ++p) {
          float* row = at.out + ((g * PER + (t - span.t0) / C) * task.width + p) * C + j;
          store(row, load(row) * left);
        }
    }
}

// Rows of a positive link whose terms cancel. A row's sum is sum_a w_a psi_a(q) M_a, whose terms' sizes sum to at most
// bound = |sqrt w psi(q)| |sqrt w M| (Cauchy and Schwarz); it is known to some units in the last place of that, 1e-6 at worst. Rows below THIN of it are
// summed again without the state. What a memory brought cannot be: rows below LOST of it, of which a tenth or more may be rounding, become NaN.
void guard(const Task& task, const Span& span, const Buffers& at) {
  const Sums& c = task.c;
  if (!c.guards || !span.reads) return;
  const int64_t values = task.p1 - task.p0;
  const float share = c.initial == nullptr ? THIN : LOST;
  bool any = false;
  for (int64_t g = 0; g < task.groups; ++g) {
    const float *weights = at.weights + g * c.F, *monomials = c.monomials + task.head(g) * c.powers;
    float size = 0;
    for (int64_t a = 0; a < c.F; ++a) size += std::fabs(weights[a]) * at.state[a * task.width + values] * at.state[a * task.width + values];
    for (int64_t t = span.t0; t < span.t1; t += C) {
      const int64_t column = g * PER + (t - span.t0) / C;
      const float* queries = at.queries + column * c.low * C;
      float* mass = at.out + (column * task.width + values) * C;
      for (int j = 0; j < C; j += L) {
        V square = V{}, bound = V{}, left = load(at.reads + t - span.t0 + j);
        for (int64_t d = 1; d <= c.D; ++d) square += load(queries + d * C + j) * load(queries + d * C + j);
        for (int64_t k = c.powers - 1; k >= 0; --k) bound = bound * square + std::fabs(monomials[k]);
        bound = root(bound * size) * left * share;
        const I low = load(mass + j) < bound;
        for (int64_t i = 0; i < L && t + j + i < span.t1; ++i) {
          if (!low[i]) continue;
          if (c.initial == nullptr) at.thin[g * BLOCK + t + j + i - span.t0] = 1;
          else mass[j + i] = std::numeric_limits<float>::quiet_NaN();
          any = any || c.initial == nullptr;
        }
      }
    }
  }
  if (!any) return;
  const auto thin = [&](int64_t g, int64_t t) { return at.thin[g * BLOCK + t - span.t0] != 0; };
  for (int64_t g = 0; g < task.groups; ++g)
    for (int64_t t = span.t0; t < span.t1; ++t)
      for (int64_t p = 0; thin(g, t) && p < task.width; ++p) at.out[((g * PER + (t - span.t0) / C) * task.width + p) * C + (t - span.t0) % C] = 0.f;
  directly(task, span, task.start, span.last, thin, at);
  for (int64_t g = 0; task.part == 0 && g < task.groups; ++g) std::copy_n(at.thin + g * BLOCK, span.t1 - span.t0, c.apart + (task.b * c.H + task.head(g)) * c.T + span.t0);
  std::memset(at.thin, 0, task.groups * BLOCK);
}

void finish(const Task& task, const Span& span, const Buffers& at) {
  const Sums& c = task.c;
  const int64_t values = task.p1 - task.p0;
  for (int64_t g = 0; g < task.groups; ++g)
    for (int64_t t = span.t0; t < span.t1; t += C) {
      const float* column = at.out + (g * PER + (t - span.t0) / C) * task.width * C;
      const int64_t first = (task.b * c.H + task.head(g)) * c.T + t;
      const auto factor = [&](int64_t i) {
        if (c.anchor == ROW) return inverse_sum(column[values * C + i]);
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
  start(task, c.initial, false, at);
  for (const Span& span : task.spans) {
    pack_queries(task, span, at.queries);
    pack_reads(task, span, at.reads);
    std::memset(at.out, 0, sizeof(float) * task.groups * PER * task.width * C);
    fade(task, span.from, span.to, at.state, at.lost);
    int32_t s = span.from;
    for (; span.to - s > BLOCK; s += BLOCK) advance(task, span, s, s + BLOCK, false, at);
    if (span.to > s || span.reads) advance(task, span, s, span.to, span.reads, at);
    fade_reads(task, span, at);
    directly(task, span, span.to, span.last, EVERY, at);
    guard(task, span, at);
    finish(task, span, at);
  }
  if (c.final != nullptr) to_memory(task, at.state, false, c.final);
}


// ---- backward ----------------------------------------------------------------------------------------------------------------------------

struct More {  // what backward needs besides: du as rows (groups, BLOCK, step) and columns (groups, PER, width, C), queries as rows
  float *du, *du_columns, *query_rows;   // (groups, BLOCK, row)
  float *read_columns;                   // as du_columns, where what was read from the state has another gradient than what was seen directly
  float *dlow;                           // gradients of low features, (groups * PER, low, C)
  float *value_columns, *dvalues;        // (PER, width, C), (PER, values, C)
  float *scores, *changes, *others;      // weights between neighbours and gradients of both parts of their scores, (PER, BLOCK keys, C)
  float *near_keys, *near_values;        // (BLOCK, row), (BLOCK, step)
};

struct Backward {
  Buffers at;
  More more;
  const float* read_columns;  // of the block at hand, in more: the gradient of what was read from the state
  bool thin;                  // some of its rows did without the state
};

Backward backward_buffers(const Task& task, Scratch& scratch) {
  const Sums& c = task.c;
  const int64_t columns = task.groups * PER;
  const size_t extra = columns * C * (task.step + 2 * task.width + task.row + c.low) + BLOCK * (2 * task.width + 3 * BLOCK + task.row + task.step) + task.strip * C;
  Backward all;
  all.at = forward_buffers(task, scratch, extra);
  all.more.du = scratch.take(columns * C * task.step);
  all.more.du_columns = scratch.take(columns * C * task.width);
  all.more.read_columns = scratch.take(columns * C * task.width);
  all.more.query_rows = scratch.take(columns * C * task.row);
  all.more.dlow = scratch.take(columns * C * c.low);
  all.more.value_columns = scratch.take(BLOCK * task.width);
  all.more.dvalues = scratch.take(BLOCK * task.width);
  all.more.scores = scratch.take(BLOCK * BLOCK);
  all.more.changes = scratch.take(BLOCK * BLOCK);
  all.more.others = scratch.take(BLOCK * BLOCK);
  all.more.near_keys = scratch.take(BLOCK * task.row);
  all.more.near_values = scratch.take(BLOCK * task.step);
  return all;
}

// Into du the gradient of what queries summed up, [v, 1]: factor dy, and of the mass -factor dy . y. Forwards that is what keys seen directly get,
// and what was read from the state has columns of its own where it differs; backwards du is the gradient of what was read.
void pack_gradients(const Task& task, const Span& span, bool forwards, Backward& all) {
  const Sums& c = task.c;
  More& more = all.more;
  const int64_t values = task.p1 - task.p0, tokens = span.t1 - span.t0;
  pack_reads(task, span, all.at.reads);
  all.thin = false;
  for (int64_t g = 0; g < task.groups; ++g) {
    float *rows = more.du + g * BLOCK * task.step, *queries = more.query_rows + g * BLOCK * task.row;
    std::memset(rows, 0, sizeof(float) * BLOCK * task.step);
    if (forwards) std::memset(queries, 0, sizeof(float) * BLOCK * task.row);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t row = (task.b * c.H + task.head(g)) * c.T + span.t0 + i;
      const bool thin = c.apart != nullptr && c.apart[row];
      all.at.thin[g * BLOCK + i] = thin;
      all.thin = all.thin || thin;
      const float *dy = c.dy + row * c.P, factor = c.factor[row] * (forwards ? 1.f : thin ? 0.f : all.at.reads[i]);
      for (int64_t p = 0; p < values; ++p) rows[i * task.step + p] = dy[task.p0 + p] * factor;
      if (task.mass) rows[i * task.step + values] = -dot(dy, c.y + row * c.P, c.P) * factor;
      if (!forwards) continue;
      const float *q = task.query(g, span.t0 + i), scale = c.scale[task.head(g)] * unit(c, q);
      float *first = queries + i * task.row, *rest = first + up(task.first, C);
      for (int64_t d = 0; d < task.first; ++d) first[d] = q[d] * scale;
      for (int64_t d = 0; d < task.rest; ++d) rest[d] = q[task.first + d] * scale;
    }
    if (forwards || one_is_left(task.width)) turn(rows, task.step, tokens, task.width, more.du_columns + g * PER * task.width * C);
  }
  const bool same = !forwards || (task.running == nullptr && !all.thin);
  all.read_columns = same ? more.du_columns : more.read_columns;
  for (int64_t i = 0; !same && i < task.groups * BLOCK; i += L) {
    V left = load(all.at.reads + i % BLOCK);
    for (int64_t j = 0; j < L; ++j) left[j] = all.at.thin[i + j] ? 0.f : left[j];
    for (int64_t p = 0; p < task.width; ++p) {
      const int64_t at = (i / C * task.width + p) * C + i % C;
      store(more.read_columns + at, load(more.du_columns + at) * left);
    }
  }
}

// out (a1 - a0, C) = a strip of a state against a column (width, C)
void slope(const Task& task, const float* strip, int64_t features, const float* column, float* out) {
  for (int64_t a = 0; a < features; a += R)
    with_rows<R>(features - a, [&](auto n) {
      constexpr int N = decltype(n)::value;
      const float* rows[N];
      EACH_ROW rows[r] = strip + (a + r) * task.width;
      rows_by_columns<N>(rows, column, C, task.width, out + a * C);
    });
}

// forwards: keys [s0, s1) into the state, then the gradient that queries get from there
void advance_back(const Task& task, const Span& span, int32_t s0, int32_t s1, bool reads, const Backward& all, V* power_sums) {
  const Sums& c = task.c;
  const Buffers& at = all.at;
  pack_keys(task, s0, s1, at.factors, at.keys);
  pack_values(task, s0, s1, [&](int32_t s) { return at.left[s - task.start]; }, at.values, at.masses);
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C;
  for (int64_t a0 = 0; a0 < c.F; a0 += task.strip) {
    const int64_t a1 = std::min(a0 + task.strip, c.F);
    float* state = at.state + a0 * task.width;
    if (s1 > s0) absorb(c, at.keys, s1 - s0, nullptr, at.values, task.step, task.width, task.mass ? at.masses : nullptr, C, a0, a1, state, at.lost + a0 * task.width, at.room);
    for (int64_t g = 0; reads && g < task.groups; ++g)
      for (int64_t i = 0; i < columns; ++i) {
        const float* column = at.queries + (g * PER + i) * c.low * C;
        slope(task, state, a1 - a0, all.read_columns + (g * PER + i) * task.width * C, at.strip);
        pull(c, column, at.weights + g * c.F, at.strip, a0, a1, all.more.dlow + (g * PER + i) * c.low * C);
        if (power_sums != nullptr) powers(c, column, at.strip, a0, a1, power_sums + g * c.powers);
      }
  }
}

// weights and gradients of the scores of N keys from place s on with a column of queries; others: of the second part of the scores
template <int N>
inline void gradients(const Task& task, int64_t g, const Lanes& lanes, const float* rows, const float* values, const Mark* marks, const float* column, const float* du,
                      int32_t s, float* weights, float* changes, float* others, V* partial) {
  const Sums& c = task.c;
  const float* coefficients = task.coefficients(g);
  const int numbers = static_cast<int>(c.numbers);
  (void)numbers;
  float scored[N * C], other[N * C], changed[N * C];
  const float *key[N], *value_row[N];
  EACH_ROW {
    key[r] = rows + r * c.D;
    value_row[r] = values + r * task.step;
  }
  rows_by_columns<N>(key, column, C, task.first, scored);
  if (task.rest > 0) {
    EACH_ROW key[r] += task.first;
    rows_by_columns<N>(key, column + task.first * C, C, task.rest, other);
  }
  rows_by_columns<N>(value_row, du, C, task.width, changed);
  EACH_ROW
    for (int j = 0; j < 2; ++j) {
      const int64_t at = r * C + j * L;
      const V score = in_domain(task.rest > 0 ? load(scored + at) * load(other + at) : load(scored + at));
      V ds = load(changed + at), w = value(score, coefficients, numbers);
      if (marks != nullptr) {
        const V left = left_of(lanes, j, marks[r]);
        w *= left;
        ds *= left;
      }
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
      store(weights + at, w);
      if (task.rest > 0) store(others + at, ds * load(scored + at));
      store(changes + at, task.rest > 0 ? ds * load(other + at) : ds);
    }
}

// numbers [p0, p1) of (keys, step) += tiles (columns, BLOCK keys, C) against rows (columns * C, step)
void gather(const float* tiles, int64_t keys, const float* rows, int64_t step, int64_t p0, int64_t p1, int64_t columns, float* into) {
  for (int64_t s = 0; s < keys; s += R)
    with_rows<R>(keys - s, [&](auto n) {
      for (int64_t p = p0; p < p1; p += C)
        (p1 - p > L ? columns_by_rows<decltype(n)::value, 2> : columns_by_rows<decltype(n)::value, 1>)(
            tiles + s * C, BLOCK * C, rows + p, step, columns * C, into + s * step + p, step, nullptr);
    });
}

struct Into {  // gradients of a task's part
  float *dk, *dv, *dmass;
  double* dcoefficients;
};

// what queries that ``sees(g, t)`` and keys [from, to) do to each other directly, added to dlow and to the part's gradients
template <typename Sees>
void directly_back(const Task& task, const Span& span, int32_t from, int32_t to, const Sees& sees, const Backward& all, const Into& into) {
  const Sums& c = task.c;
  const Buffers& at = all.at;
  const More& more = all.more;
  const int64_t columns = (span.t1 - span.t0 + C - 1) / C, split = up(task.first, C);
  const std::vector<Lanes> lanes = all_lanes(task, span, sees);
  const Mark* marks = task.running == nullptr ? nullptr : at.marks;
  const int64_t values = task.p1 - task.p0;
  std::vector<V> partial(c.learned);
  for (int32_t s0 = from; s0 < to; s0 += BLOCK) {
    const int32_t s1 = std::min(s0 + BLOCK, to);
    pack_rows(task, s0, s1, at.factors, at.rows);
    pack_marks(task, s0, s1, at.marks);
    pack_values(task, s0, s1, [&](int32_t s) { return task.counts(s); }, at.values);
    std::memset(more.near_keys, 0, sizeof(float) * BLOCK * task.row);
    std::memset(more.near_values, 0, sizeof(float) * BLOCK * task.step);
    for (int64_t g = 0; g < task.groups; ++g) {
      for (int64_t k = 0; k < c.learned; ++k) partial[k] = V{};
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t number = g * PER + i;
        const int32_t end = std::max(s0, std::min(s1, lanes[number].last));
        float *weights = more.scores + i * BLOCK * C, *changes = more.changes + i * BLOCK * C, *others = more.others + i * BLOCK * C;
        for (int32_t s = s0; s < end; s += R)
          with_rows<R>(std::min<int32_t>(R, end - s), [&](auto n) {
            const Mark* first = marks == nullptr ? nullptr : marks + (s - s0);
            gradients<decltype(n)::value>(task, g, lanes[number], at.rows + (s - s0) * c.D, at.values + (s - s0) * task.step, first,
                                          at.queries + number * c.low * C + C, more.du_columns + number * task.width * C, s, weights + (s - s0) * C,
                                          changes + (s - s0) * C, others + (s - s0) * C, into.dcoefficients == nullptr ? nullptr : partial.data());
          });
        std::memset(weights + (end - s0) * C, 0, sizeof(float) * (s1 - end) * C);
        std::memset(changes + (end - s0) * C, 0, sizeof(float) * (s1 - end) * C);
        std::memset(others + (end - s0) * C, 0, sizeof(float) * (s1 - end) * C);
        float* dlow = more.dlow + number * c.low * C + C;
        block_by_columns(at.rows, c.D, task.first, changes, end - s0, at.near, dlow);
        if (task.rest > 0) block_by_columns(at.rows + task.first, c.D, task.rest, others, end - s0, at.near, dlow + task.first * C);
      }
      const float* queries = more.query_rows + g * BLOCK * task.row;
      gather(more.scores, s1 - s0, more.du + g * BLOCK * task.step, task.step, 0, task.step, columns, more.near_values);
      gather(more.changes, s1 - s0, queries, task.row, 0, split, columns, more.near_keys);
      gather(more.others, s1 - s0, queries, task.row, split, task.row, columns, more.near_keys);
      for (int64_t k = 0; k < c.learned && into.dcoefficients != nullptr; ++k)
        for (int i = 0; i < L; ++i) into.dcoefficients[g * c.learned + k] += partial[k][i];
    }
    for (int32_t s = s0; s < s1; ++s) {
      float *to_key = into.dk + task.index[s] * c.D, *to_value = into.dv + task.index[s] * c.P + task.p0;
      const float *near = more.near_values + (s - s0) * task.step, count = task.counts(s);
      const float *first = more.near_keys + (s - s0) * task.row, *rest = first + split;
      for (int64_t d = 0; d < task.first; ++d) to_key[d] += first[d];
      for (int64_t d = 0; d < task.rest; ++d) to_key[task.first + d] += rest[d];
      for (int64_t p = 0; p < values; ++p) to_value[p] += near[p] * count;
      if (into.dmass != nullptr) into.dmass[task.index[s]] += near[values] * count;
    }
  }
}

// backwards: where ``reads``, what a block's queries add to the adjoint state; then the gradients of keys [s0, s1) in it
void retreat(const Task& task, const Span& span, int32_t s0, int32_t s1, bool reads, const Backward& all, const Into& into) {
  const Sums& c = task.c;
  const Buffers& at = all.at;
  const More& more = all.more;
  const int64_t keys = s1 - s0, columns = (keys + C - 1) / C, values = task.p1 - task.p0, tokens = span.t1 - span.t0;
  const int64_t kept = values + (into.dmass != nullptr);
  const auto left = [&](int32_t s) { return at.left[s - task.start]; };
  pack_keys(task, s0, s1, at.factors, at.keys);
  pack_values(task, s0, s1, left, at.values);
  turn(at.values, task.step, keys, task.width, more.value_columns);
  std::memset(at.out, 0, sizeof(float) * columns * C * c.low);
  std::memset(more.dvalues, 0, sizeof(float) * columns * C * kept);
  float* made = at.room;
  for (int64_t a0 = 0; a0 < c.F; a0 += task.strip) {
    const int64_t a1 = std::min(a0 + task.strip, c.F);
    float* state = at.state + a0 * task.width;
    for (int64_t g = 0; reads && g < task.groups; ++g) {
      const float* read_columns = all.read_columns + g * PER * task.width * C;
      absorb(c, at.queries + g * PER * c.low * C, tokens, at.weights + g * c.F, more.du + g * BLOCK * task.step, task.step, task.width,
             read_columns + (task.width - 1) * C, task.width * C, a0, a1, state, at.lost + a0 * task.width, at.room);
    }
    for (int64_t i = 0; i < columns; ++i) {
      const float* column = at.keys + i * c.low * C;
      slope(task, state, a1 - a0, more.value_columns + i * task.width * C, at.strip);
      pull(c, column, nullptr, at.strip, a0, a1, at.out + i * c.low * C);
      features<false>(c, column, nullptr, a0, a1, made);
      columns_by_columns(rows_at(state, task.width), kept, made, C, a1 - a0, more.dvalues + i * kept * C);
    }
  }
  for (int64_t i = 0; i < columns; ++i) pull_low(c, at.keys + i * c.low * C, at.out + i * c.low * C);
  const auto one = [](int64_t) { return 1.f; };
  for (int32_t s = s0; s < s1; s += C) {
    const int64_t i = (s - s0) / C;
    const auto counts = [&](int64_t r) { return task.weighs() ? left(s + static_cast<int32_t>(r)) : 1.f; };
    take<true>(at.out + (i * c.low + 1) * C, c.D, rows_of(s1 - s, [&](int64_t r) { return into.dk + task.index[s + r] * c.D; }, one));
    const Rows rows = rows_of(s1 - s, [&](int64_t r) { return into.dv + task.index[s + r] * c.P + task.p0; }, counts);
    take<true>(more.dvalues + i * kept * C, values, rows);
    for (int64_t r = 0; into.dmass != nullptr && r < rows.count; ++r) into.dmass[task.index[s + r]] += more.dvalues[(i * kept + values) * C + r] * rows.factor[r];
  }
}

// share: of the gradients of shared queries and keys, the part that this task adds to
void backward_task(const Sums& c, int64_t number, int64_t share, Scratch& scratch) {
  const Task task(c, number, false);
  Backward all = backward_buffers(task, scratch);
  const Buffers& at = all.at;
  const int64_t kv_head = task.b * c.Hkv + task.kv;
  const Into into = {
      c.dk + (c.shares > 0 ? share * c.B + task.b : task.part * c.B * c.Hkv + kv_head) * c.S * c.D, c.dv + kv_head * c.S * c.P,
      c.dmass == nullptr || !task.mass ? nullptr : c.dmass + kv_head * c.S,
      c.dcoefficients == nullptr ? nullptr : c.dcoefficients + number * task.groups * c.learned,
  };
  const auto thin = [&](const Span& span) { return [&](int64_t g, int64_t t) { return at.thin[g * BLOCK + t - span.t0] != 0; }; };
  double* dmonomials = c.dmonomials == nullptr ? nullptr : c.dmonomials + number * task.groups * c.powers;
  std::vector<V> power_sums(dmonomials == nullptr ? 0 : task.groups * c.powers);
  V* sums = dmonomials == nullptr ? nullptr : power_sums.data();
  weigh_features(task, at.weights);
  start(task, c.initial, false, at);
  for (const Span& span : task.spans) {
    if (span.t1 == span.t0) continue;  // nobody reads what comes in last
    pack_queries(task, span, at.queries);
    pack_gradients(task, span, true, all);
    std::memset(all.more.dlow, 0, sizeof(float) * task.groups * PER * c.low * C);
    std::fill(power_sums.begin(), power_sums.end(), V{});
    fade(task, span.from, span.to, at.state, at.lost);
    int32_t s = span.from;
    for (; span.to - s > BLOCK; s += BLOCK) advance_back(task, span, s, s + BLOCK, false, all, sums);
    if (span.to > s || span.reads) advance_back(task, span, s, span.to, span.reads, all, sums);
    directly_back(task, span, span.to, span.last, EVERY, all, into);
    if (all.thin) directly_back(task, span, task.start, span.to, thin(span), all, into);
    for (int64_t g = 0; g < task.groups; ++g) {
      for (int64_t i = 0; i < PER; ++i) pull_low(c, at.queries + (g * PER + i) * c.low * C, all.more.dlow + (g * PER + i) * c.low * C);
      float* dq = c.dq + (c.shares > 0 ? share * c.B + task.b : (task.part * c.B + task.b) * c.H + task.head(g)) * c.T * c.D;
      const float scale = c.shares > 0 ? c.scale[task.head(g)] : 1.f;
      for (int64_t t = span.t0; t < span.t1; t += C) {
        const float* column = all.more.dlow + ((g * PER + (t - span.t0) / C) * c.low + 1) * C;
        const Rows rows = rows_of(span.t1 - t, [&](int64_t i) { return dq + (t + i) * c.D; }, [&](int64_t) { return scale; });
        if (c.shares > 0) take<true>(column, c.D, rows);
        else take<false>(column, c.D, rows);
      }
      for (int64_t k = 0; dmonomials != nullptr && k < c.powers; ++k)
        for (int i = 0; i < L; ++i) dmonomials[g * c.powers + k] += power_sums[g * c.powers + k][i];
    }
  }
  start(task, c.dfinal, true, at);
  for (auto span = task.spans.rbegin(); span != task.spans.rend(); ++span) {
    bool reads = span->reads;
    if (reads) {
      pack_queries(task, *span, at.queries);
      pack_gradients(task, *span, false, all);
    }
    int32_t s = span->from;
    do {
      const int32_t end = std::min(s + BLOCK, span->to);
      if (reads || end > s) retreat(task, *span, s, end, reads, all, into);
      reads = false;
      s = end;
    } while (s < span->to);
    fade(task, span->from, span->to, at.state, at.lost);
  }
  if (c.dinitial != nullptr) to_memory(task, at.state, true, c.dinitial);
}

// parts summed in order, and the way back through norm and scale: rows of gradients in ``g`` and of vectors from ``x`` on
void finish_rows(const Sums& c, float* g, int64_t parts, int64_t part_size, const float* x, int64_t x_step, int64_t rows, float scale, double* dscale) {
  double along_all = 0;
  const bool along_vectors = c.normalise || dscale != nullptr;
  if (!along_vectors && parts == 1 && scale == 1.f) return;
  for (int64_t i = 0; i < rows; ++i, g += c.D, x += x_step) {
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t d = 0; d < c.D; ++d) g[d] += g[part * part_size + d];
    if (!along_vectors) {
      for (int64_t d = 0; d < c.D; ++d) g[d] *= scale;
      continue;
    }
    const float inverse = unit(c, x), along = dot(g, x, c.D);
    along_all += static_cast<double>(along) * inverse;
    // a unit vector does not change along itself
    const float back = c.normalise ? along * inverse : 0.f;
    for (int64_t d = 0; d < c.D; ++d) g[d] = scale * inverse * (g[d] - back * (x[d] * inverse));
  }
  if (dscale != nullptr) *dscale = along_all;
}

int64_t all_tasks(const Sums& c) { return c.B * c.Hkv * c.segments * c.split; }

// whether it takes longer than waking the other threads
bool long_enough(const Sums& c) { return c.B * c.H * (c.T + c.S) * c.F * (c.P + 1) > (1 << 19); }

}  // namespace

extern "C" {

// Returns 0, or 1 when memory ran out.
int zonal_sums_forward(const Sums* call) {
  return each_task<Scratch>(all_tasks(*call), long_enough(*call), [&](int64_t i, Scratch& scratch) { forward_task(*call, i, scratch); });
}

// out (B, H, T) = the products of rows of a and b, of P numbers each
struct Dots {
  const float *a, *b;
  Strides as, bs;
  int64_t B, H, T, P;
  double* out;
};

int zonal_sums_dots(const Dots* call) {
  const Dots& c = *call;
#pragma omp parallel for schedule(static) if (c.B * c.H * c.T * c.P > (1 << 16))
  for (int64_t i = 0; i < c.B * c.H; ++i)
    for (int64_t t = 0; t < c.T; ++t)
      c.out[i * c.T + t] = dot(c.a + i / c.H * c.as.batch + i % c.H * c.as.head + t * c.as.token, c.b + i / c.H * c.bs.batch + i % c.H * c.bs.head + t * c.bs.token, c.P);
  return 0;
}

// Returns 0, or 1 when memory ran out. Gradients of raw queries and keys end up in part 0 of dq and dk.
int zonal_sums_backward(const Sums* call) {
  const Sums& c = *call;
  const int64_t shares = c.shares, of_one = c.Hkv * c.segments * c.split;
  const bool alone = c.segments * c.split == 1;  // a task has its key head for itself: it clears what it adds to when it begins, and finds it near
  if (!alone) {
    clear(c.dv, c.B * c.Hkv * c.S * c.P);
    if (shares == 0) clear(c.dk, c.split * c.B * c.Hkv * c.S * c.D);
  }
  const int failed = each_task<Scratch>(shares > 0 ? c.B * shares : all_tasks(c), long_enough(c), [&](int64_t i, Scratch& scratch) {
    const int64_t b = i / std::max<int64_t>(shares, 1), share = shares > 0 ? i % shares : 0;
    if (shares > 0) {
      clear(c.dq + (share * c.B + b) * c.T * c.D, c.T * c.D);
      clear(c.dk + (share * c.B + b) * c.S * c.D, c.S * c.D);
    } else if (alone) {
      clear(c.dk + i * c.S * c.D, c.S * c.D);
    }
    const int64_t first = shares > 0 ? b * of_one + share * of_one / shares : i, last = shares > 0 ? b * of_one + (share + 1) * of_one / shares : i + 1;
    for (int64_t n = first; n < last; ++n) {
      if (alone) clear(c.dv + n * c.S * c.P, c.S * c.P);
      backward_task(c, n, share, scratch);
    }
  });
  if (failed) return failed;
  const int64_t parts = shares > 0 ? shares : c.split, heads = shares > 0 ? 1 : c.H, kv_heads = shares > 0 ? 1 : c.Hkv;
#pragma omp parallel for schedule(static) if (c.B * heads * c.T * c.D > (1 << 15))
  for (int64_t i = 0; i < c.B * heads; ++i) {
    const int64_t b = i / heads, h = i % heads;
    finish_rows(c, c.dq + i * c.T * c.D, parts, c.B * heads * c.T * c.D, c.q + b * c.qs.batch + h * c.qs.head, c.qs.token, c.T, shares > 0 ? 1.f : c.scale[h],
                c.dscale == nullptr ? nullptr : c.dscale + i);
  }
#pragma omp parallel for schedule(static) if (c.B * kv_heads * c.S * c.D > (1 << 15))
  for (int64_t i = 0; i < c.B * kv_heads; ++i)
    finish_rows(c, c.dk + i * c.S * c.D, parts, c.B * kv_heads * c.S * c.D, c.k + i / kv_heads * c.ks.batch + i % kv_heads * c.ks.head, c.ks.token, c.S, 1.f, nullptr);
  return 0;
}
}
