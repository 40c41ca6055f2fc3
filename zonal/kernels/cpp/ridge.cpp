// Ridge and Koopman read-outs of a sequence, exact token by token: x_t = P_t (M_t P_t)^power q_t, y_t = C_t x_t, P_t = (G_t + rho I)^-1 over
// the keys that query t sees.
//
// A thread walks the blocks of a key head with P, M and C in its second cache. With Z the keys of a block and A = I + Z P Z^T = L L^T,
// H = L^-1 Z P: leading blocks of L are the factors of the leading blocks of A, so ``apply(X) = X P - ((X H^T) o seen) H`` gives each row
// the inverse that has seen exactly its keys. Then P <- P - H^T H, and every REMAKE tokens P is made again from G, which float64 holds.
//
// A head runs in float32. Where the condition of G says at one of these points that three digits would be lost, or A is not positive
// definite any more, that head starts again in float64. So it does where gradients would lose them: P begins at I / rho and is as large as
// that across the keys, which cancels in P z to |z| / (rho + |z|^2); the error that is left, eps |P| |z|^2, is squared in a key's gradient.
//
// Backward walks twice: forwards with the states again, for everything that reads them, then backwards with the running sums of what later
// queries do to a key. With x = P_t w and u = P_t dx: dG_t = -u x^T, so that each key gets -u (x . z) - x (u . z) from every row that sees it.
//
// Where the past fades, G, M, C and the ridge are multiplied by the rate l_t before key t, which then gives back r rho (1 - l_t) of the ridge
// in one direction e. With weights w_s that grow as the past fades (Task::block), a key adds w_s (z z^T + r rho (1 - l_s) e e^T) to the matrix
// that is inverted. So Z has two rows a key, each times its weight, and A = W + Z P Z^T. P is symmetric to the last bit, as its error would
// otherwise be divided by every rate. All that is summed before a key is multiplied by its rate; and a read-out does not change when all sums
// are multiplied by one number. So the gradient of a rate is minus that of a number that multiplies all that this key and later ones add.

#include "ridge.hpp"

namespace {

// The state of a task and the buffers of a block. Rows are padded with zeros to whole vectors.
template <typename F, bool FADES>
struct Walk {
  static constexpr int l = Lane<F>::count;
  static constexpr int ROWS = FADES ? 2 : 1;       // that a key adds to the matrix that is inverted
  static constexpr int64_t WIDE = ROWS * BLOCK;
  const Ridge& c;
  const Task& task;
  const int64_t r, rw, P, Pw, order;  // order: of the matrix that is inverted, a multiple of its rows at a time
  const double rho;
  int64_t since = 0;    // tokens since P was made from G
  int64_t n = 0;        // keys of the block
  int32_t coming = 0;   // the first key that is not on its way
  double longest = 0;   // of the keys that were loaded, squared
  double most = 1 / rho;  // no less than |P|, which keys only make smaller
  bool finite = true;   // its values are
  bool counted = true;  // an inverse will be made from the sum of its keys
  bool backwards;
  F *inverse, *sums, *cross, *cross_t = nullptr, *shift = nullptr, *shift_t = nullptr;
  double *gram, *system, *inverted;
  F *keys, *keys_t, *earlier_t = nullptr, *values, *values_t = nullptr, *factor, *half_t, *scores, *rows, *more;
  F places[WIDE];  // 0, 1, 2, …
  // where the past fades: keys times their weights, those and the pseudo-keys across, the ridge in units of rho, and the trace of G
  F *weighted = nullptr, *rows_t = nullptr;
  double *level = nullptr, trace = 0;
  F weights[BLOCK];            // of the block's keys, 1 past its end
  double back[BLOCK];          // what they give back of the ridge, in units of rho, without their weights
  int64_t directions[BLOCK];   // and where

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
    const int64_t block = (BLOCK + 1) * rw + 2 * (rw + 8) * BLOCK + BLOCK * Pw + (Pw + 8) * BLOCK + WIDE * (WIDE + rw) + (rw + 8) * WIDE + BLOCK * WIDE + 2 * BLOCK * std::max(rw, Pw);
    const int64_t fading = FADES ? BLOCK * rw + r * WIDE : 0;
    return doubles * (state + block + fading) + 2 * (r * rw + order * (order + rw) + r * rw + r) + 16 * 40;
  }

  Walk(const Task& of, bool back, Scratch& room)
      : c(of.c), task(of), r(c.D), rw(wide<F>(c.D)), P(c.P), Pw(wide<F>(c.P)), order(up(c.D, 4)), rho(c.ridge[of.kv]), backwards(back) {
    for (int i = 0; i < WIDE; ++i) places[i] = static_cast<F>(i);
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
    factor = take<F>(room, WIDE * (WIDE + rw));
    half_t = take<F>(room, r * WIDE);
    scores = take<F>(room, BLOCK * WIDE);
    rows = take<F>(room, BLOCK * std::max(rw, Pw));
    more = take<F>(room, BLOCK * std::max(rw, Pw));
    if constexpr (FADES) {
      weighted = take<F>(room, BLOCK * rw);
      rows_t = take<F>(room, r * WIDE);
      level = take<double>(room, r);
    }
  }

  Outcome begin() {
    for (int64_t i = 0; FADES && i < r; ++i) level[i] = c.level == nullptr ? 1 : c.level[(task.b * c.Hkv + task.kv) * r + i];
    if (c.gram == nullptr) {
      for (int64_t i = 0; i < r; ++i) inverse[i * rw + i] = static_cast<F>(1 / rho);
      return GOOD;
    }
    const int64_t head = task.b * c.Hkv + task.kv, width = up(r, 4);
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = 0; j < r; ++j) gram[i * width + j] = c.gram[(head * r + i) * r + j];
    for (int64_t i = 0; i < r; ++i) trace += gram[i * width + i];
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
      system[i * step + i] += i >= r ? 1 : FADES ? rho * level[i] : rho;
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
    most = std::min(1 / rho, std::sqrt(inverse_size));
    return sizeof(F) == 4 && !(std::numeric_limits<float>::epsilon() * std::sqrt(size * inverse_size) <= LOST) ? DOUBLE : GOOD;
  }

  // whether float32 holds what the loaded keys do to gradients; NaN, which no type holds, is left to the factors
  Outcome fits() {
    constexpr double eps = std::numeric_limits<float>::epsilon();
    if constexpr (sizeof(F) == 8) return GOOD;
    if constexpr (FADES) {  // P grows as the past fades: its size, and the condition, are asked for anew
      const F end = n > 0 ? weights[n - 1] : 1;
      double least = std::numeric_limits<double>::infinity(), ridges = 0, size = 0;
      for (int64_t d = 0; d < r; ++d) {
        const int64_t i = (d - directions[0] + r) % r;  // the key that gives back this direction, if the block has one
        least = std::min(least, level[d] / (i < n ? weights[i] : end));
        ridges += level[d];
        size += inner<F>(inverse + d * rw, inverse + d * rw, r);
      }
      most = std::min(1 / (rho * least), end * std::sqrt(size));
      if (eps * std::sqrt(size) * (trace + rho * ridges) > LOST) return DOUBLE;
    }
    const double lost = most * longest;
    return eps * lost * lost > LOST ? DOUBLE : GOOD;
  }

  // all sums times a number, and the inverse accordingly
  void fade(const Span& span) {
    if (!FADES || span.keep == 1) return;
    const auto scale = [](auto* x, int64_t numbers, double by) APART {
      const auto factor = static_cast<std::remove_reference_t<decltype(*x)>>(by);
      for (int64_t i = 0; i < numbers; ++i) x[i] *= factor;
    };
    scale(inverse, r * rw, 1 / span.keep);
    if (backwards) scale(cross, P * rw, span.keep);
    else scale(cross_t, r * Pw, span.keep);
    if (c.power > 0) scale(shift_t, r * rw, span.keep);
    if (c.power > 0 && backwards) scale(shift, r * rw, span.keep);
    scale(level, r, span.keep);
    trace *= span.keep;
    if (span.from >= task.counted) return;
    scale(sums, r * rw, span.keep);
    scale(gram, r * up(r, 4), span.keep);
  }

  // a key, shortened to the limit; returns its length, which is not asked for in float64 without a limit
  F put_key(int32_t s, F* to) const {
    const float* k = task.key(s);
    const F limit = c.limit > 0 ? static_cast<F>(c.limit) : std::numeric_limits<F>::infinity();
    const F norm = sizeof(F) == 4 || c.limit > 0 ? length<F>(k, r) : F(0);
    const F scale = norm > limit || norm != norm ? limit / norm : F(1);
    for (int64_t d = 0; d < r; ++d) to[d] = scale * k[d];
    return std::min(norm, limit);
  }

  // Rows of the next block are sent for, some at a time: a processor has ten or twenty on their way, and stands still for more.
  void ahead(int32_t count) {
    for (const int32_t end = std::min(coming + count, task.spans.back().to); coming < end; ++coming) {
      fetch(task.key(coming), r);
      fetch(task.value(coming), P);
    }
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
      const double norm = put_key(s, keys + (s - from + 1) * rw);
      longest = std::max(longest, norm * norm);
      const float* v = task.value(s);
      F* row = values + (s - from) * Pw;
      for (int64_t p = 0; p < P; ++p) row[p] = v[p];
    }
    if constexpr (FADES) {
      std::memset(weighted + n * rw, 0, sizeof(F) * (BLOCK - n) * rw);
      for (int64_t i = 0; i < BLOCK; ++i) weights[i] = 1, back[i] = 0, directions[i] = 0;
      for (int64_t i = 0; i < n; ++i) {
        weights[i] = static_cast<F>(task.weights[from - task.start + i]);
        back[i] = static_cast<double>(r) * task.lost[from - task.start + i];
        directions[i] = task.direction(from + static_cast<int32_t>(i));
        longest = std::max(longest, rho * back[i]);  // of the pseudo-key
        for (int64_t d = 0; d < rw; ++d) weighted[i * rw + d] = weights[i] * keys[(i + 1) * rw + d];
      }
    }
    coming = to;
    ahead(across ? BLOCK / 4 : BLOCK);
    std::memset(keys + (n + 1) * rw, 0, sizeof(F) * (BLOCK - n) * rw);
    std::memset(values + n * Pw, 0, sizeof(F) * (BLOCK - n) * Pw);
    constexpr int N = 4;  // sums that do not wait for each other
    typename Lane<F>::Vector nothing[N] = {};  // NaN times nothing is NaN, and so is infinity
    for (int64_t i = 0; i < BLOCK * Pw; i += N * l) EACH_ROW nothing[r] += at(values + i + r * l) * F(0);
    for (int i = 0; i < l; ++i) finite = finite && nothing[0][i] + nothing[1][i] + nothing[2][i] + nothing[3][i] == 0;
    if (!across) return;
    turn(FADES ? weighted : keys + rw, rw, BLOCK, r, keys_t, BLOCK);
    if (c.power > 0) turn_weighted(keys, rw, r, earlier_t);
    if (backwards) turn_weighted(values, Pw, P, values_t);
  }

  // to (columns, BLOCK) = the block's rows across, times their weights
  void turn_weighted(const F* from, int64_t step, int64_t columns, F* to) const {
    turn(from, step, BLOCK, columns, to, BLOCK);
    if constexpr (FADES)
      for (int64_t d = 0; d < columns; ++d)
        for (int64_t j = 0; j < BLOCK; j += l) at(to + d * BLOCK + j) *= at(weights + j);
  }

  F* block_keys() const { return keys + rw; }
  F* added() const { return FADES ? weighted : block_keys(); }
  F* half() const { return factor + WIDE; }
  int64_t factor_step() const { return WIDE + rw; }

  // H = L^-1 R P of the block, R its keys, or with weights its keys and after each its pseudo-key
  bool factorise() {
    const int64_t step = factor_step(), size = up(ROWS * n, 4);
    whole<SET, false>(up(n, 4), r, rw, added(), rw, inverse, rw, half(), ROWS * step);
    ahead(BLOCK / 4);
    if constexpr (FADES) add_pseudo_keys();
    multiply<SET, false>(size, half(), step, FADES ? rows_t : keys_t, WIDE, factor, step, [=](int64_t i, int64_t) { return Range{0, r, i / l * l, wide<F>(size)}; });
    for (int64_t i = 0; i < size; ++i) {
      factor[i * step + i] += FADES ? weights[i / ROWS] : F(1);
      std::memset(factor + i * step + wide<F>(size), 0, sizeof(F) * (WIDE - wide<F>(size)));
    }
    if (!eliminate(factor, step, size, step)) return false;
    ahead(BLOCK / 4);
    std::memset(factor + size * step, 0, sizeof(F) * (WIDE - size) * step);
    turn(half(), step, WIDE, r, half_t, WIDE);
    return true;
  }

  // every other row of H and column of R^T
  void add_pseudo_keys() {
    for (int64_t d = 0; d < r; ++d)
      for (int64_t i = 0; i < BLOCK; ++i) {
        rows_t[d * WIDE + 2 * i] = keys_t[d * BLOCK + i];
        rows_t[d * WIDE + 2 * i + 1] = 0;
      }
    for (int64_t i = 0; i < BLOCK; ++i) {
      const F root = static_cast<F>(weights[i] * std::sqrt(rho * back[i]));
      const F* from = inverse + directions[i] * rw;
      F* row = half() + (2 * i + 1) * factor_step();
      for (int64_t d = 0; d < rw; ++d) row[d] = root * from[d];
      rows_t[directions[i] * WIDE + 2 * i + 1] = root;
    }
  }

  // the block's keys into G, M and C
  void add_sums() {
    if (counted) product_above<ADD>(r, n, block_keys(), added(), rw, sums, rw);
    if (backwards) whole<ADD, true>(P, n, rw, values, Pw, added(), rw, cross, rw);
    else whole<ADD, true>(r, n, Pw, added(), rw, values, Pw, cross_t, Pw);
    if (c.power > 0) {
      whole<ADD, true>(r, n, rw, keys, rw, added(), rw, shift_t, rw);
      if (backwards) whole<ADD, true>(r, n, rw, added(), rw, keys, rw, shift, rw);
    }
    for (int64_t i = 0; FADES && i < n; ++i) {
      level[directions[i]] += weights[i] * back[i];
      trace += inner<F>(block_keys() + i * rw, added() + i * rw, r);
    }
    since += n;
  }

  // and into P
  Outcome advance() {
    add_sums();
    ahead(BLOCK / 4);
    if (since >= REMAKE) return remade();
    product_above<SUB>(r, ROWS * n, half(), half(), factor_step(), inverse, rw);
    mirror(inverse, r, rw);
    return GOOD;
  }

  // out (count, EACH BLOCK) = x against what is across, EACH rows a key, zeros where nothing is seen
  template <int EACH = 1>
  void near(const F* x, int64_t step, int64_t count, const F* across, int64_t inner, const Seen& seen, F* out) const {
    constexpr int64_t width = EACH * BLOCK;
    multiply<SET, false>(count, x, step, across, width, out, width, [&](int64_t, int64_t i) { return Range{0, inner, 0, wide<F>(EACH * seen.keys[i - 1])}; });
    for (int64_t i = 0; i < count; ++i) {
      const auto last = all(static_cast<F>(EACH * seen.keys[i]));
      for (int64_t j = 0; j < width; j += l) {
        auto& number = at(out + i * width + j);
        number = at(places + j) < last ? number : typename Lane<F>::Vector{};
      }
    }
  }

  // out (count, columns) += or -= such scores against rows of the block
  template <Into INTO, int EACH = 1>
  void weigh(const F* weights, int64_t count, const F* block, int64_t step, int64_t columns, const Seen& seen, F* out, int64_t out_step) const {
    multiply<INTO, false>(count, weights, EACH * BLOCK, block, step, out, out_step, [&](int64_t, int64_t i) { return Range{0, EACH * seen.keys[i - 1], 0, columns}; });
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
    near<ROWS>(x, rw, count, half_t, r, seen, scores);
    weigh<SUB, ROWS>(scores, count, half(), factor_step(), rw, seen, out, rw);
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
    }
  }

  // of the next queries and what they read, quarter ``part``
  void ahead_of(int64_t g, int64_t t0, int part) const {
    for (int64_t t = t0 + BLOCK + part * BLOCK / 4, end = std::min<int64_t>(t + BLOCK / 4, task.end); t < end; ++t) {
      fetch(task.query(g, t), r);
      if (!backwards) fetch<1>(c.y + task.row(g, t) * P, P);
    }
  }

  void read(const Span& span, int64_t g, int64_t t0, int64_t count) {
    const Seen seen(task, span, t0, count);
    put_queries(g, t0, count, rows);
    ahead_of(g, t0, 0);
    float* y = c.y + task.row(g, t0) * P;
    apply(rows, count, seen, more);
    ahead_of(g, t0, 1);
    for (int64_t k = 0; k < task.power(g); ++k) {
      move(more, count, seen, rows);
      apply(rows, count, seen, more);
    }
    F* out = rows;
    if constexpr (sizeof(F) == 4)
      if (P == Pw) out = y;
    whole<SET, false>(count, r, Pw, more, rw, cross_t, Pw, out, Pw);
    ahead_of(g, t0, 2);
    if (n > 0) {
      near(more, rw, count, keys_t, r, seen, scores);
      if (finite) weigh<ADD>(scores, count, values, Pw, Pw, seen, out, Pw);
      // rows that do not see a value must not take zero times what is no number
      else
        for (int64_t i = 0; i < count; ++i) whole<ADD, false>(1, seen.keys[i], Pw, scores + i * BLOCK, BLOCK, values, Pw, out + i * Pw, Pw);
    }
    ahead_of(g, t0, 3);
    if (static_cast<void*>(out) == y) return;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t p = 0; p < P; ++p) y[i * P + p] = static_cast<float>(out[i * Pw + p]);
  }
};

template <typename F, bool FADES>
Outcome forward_in(const Task& task, Scratch& room) {
  room.begin(Walk<F, FADES>::floats(task.c));
  Walk<F, FADES> walk(task, false, room);
  Outcome state = walk.begin();
  for (size_t i = 0; state == GOOD && i < task.spans.size(); ++i) {
    const Span& span = task.spans[i];
    walk.fade(span);
    walk.load_block(span.from, span.to, !span.far);
    if (span.far) {
      walk.add_sums();
      if (span.last) state = walk.remade();
      continue;
    }
    if (walk.fits() != GOOD) return DOUBLE;
    if (walk.n > 0 && !walk.factorise()) return INDEFINITE;
    for (int64_t g = 0; g < task.groups; ++g)
      for (int64_t t = span.t0; t < span.t1; t += BLOCK) walk.read(span, g, t, std::min<int64_t>(BLOCK, span.t1 - t));
    if (walk.n > 0 && i + 1 < task.spans.size()) state = walk.advance();
  }
  return state;
}

template <bool FADES>
Outcome forward_task(const Ridge& c, int64_t number, Scratch& room) {
  if (forward_in<float, FADES>(Task(c, number, GROWTH[GOOD]), room) == GOOD) return GOOD;
  return forward_in<double, FADES>(Task(c, number, GROWTH[DOUBLE]), room) == GOOD ? DOUBLE : INDEFINITE;
}

// ---- backward ----------------------------------------------------------------------------------------------------------------------------

// What backward keeps beside the state: x and u = P dx of every solve, (power + 1, groups, queries, rw) each, and running sums.
template <typename F, bool FADES>
struct Back {
  using Forward = Walk<F, FADES>;
  Forward& walk;
  const Ridge& c;
  const Task& task;
  const int64_t r, rw, P, Pw, queries;
  F *xs, *us, *dkeys, *dearlier, *dvalues, *dy, *dx, *own, *others;  // dearlier: of the key before each
  F *turned, *symmetric, *cross, *cross_t, *shift = nullptr, *shift_t = nullptr;  // sum of u x^T and that plus its transpose; dC, dM and theirs
  double* ridge;
  F dback[BLOCK];            // where the past fades: of what each key gives back of the ridge
  std::vector<double> along;  // of each key, what multiplying all that it adds does

  static int64_t floats(const Ridge& c, const Task& task) {
    const int64_t r = c.D, rw = up(r, 8), Pw = up(c.P, 8);
    const int64_t kept = 2 * (c.power + 1) * task.groups * (task.end - task.first) * rw;
    return Forward::doubles * (kept + (1 + FADES) * (BLOCK + 1) * rw + 3 * BLOCK * std::max(rw, Pw) + 2 * BLOCK * BLOCK + 2 * r * rw + c.P * rw + r * Pw + 2 * r * rw) + 16 * 20;
  }

  Back(Forward& of, Scratch& room)
      : walk(of), c(of.c), task(of.task), r(of.r), rw(of.rw), P(of.P), Pw(of.Pw), queries(of.task.end - of.task.first), ridge(c.dridge + of.task.number) {
    const int64_t kept = (c.power + 1) * task.groups * queries * rw;
    xs = reinterpret_cast<F*>(room.take(kept * Forward::doubles));  // every number is written before it is read
    us = reinterpret_cast<F*>(room.take(kept * Forward::doubles));
    const auto take = [&](int64_t n) { return Forward::template take<F>(room, n); };
    dkeys = take((BLOCK + 1) * rw);
    dearlier = FADES ? take(BLOCK * rw) : dkeys;
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
    if (FADES) along.resize(task.weights.size());
  }

  F* kept(F* all, int64_t stage, int64_t g, int64_t t) const { return all + ((stage * task.groups + g) * queries + t - task.first) * rw; }

  void put_gradients(int64_t g, int64_t t0, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float* from = c.dy + task.b * c.dys.batch + task.head(g) * c.dys.head + (t0 + i) * c.dys.token;
      for (int64_t p = 0; p < P; ++p) dy[i * Pw + p] = from[p];
    }
  }

  // forwards: gradients of some queries, and what they do to the keys of their own block
  void rows(const Span& span, int64_t g, int64_t t0, int64_t count) {
    const Seen seen(task, span, t0, count);
    const int64_t last = task.power(g), n = walk.n;
    F *dz = dkeys + rw, *z = walk.block_keys();
    F* x = kept(xs, 0, g, t0);
    walk.put_queries(g, t0, count, walk.rows);
    for (int part = 0; part < 4; ++part) walk.ahead_of(g, t0, part);
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
      if constexpr (FADES) give_back(u, x, count, seen);
      else
        for (int64_t i = 0; i < count; ++i) *ridge -= inner<F>(u + i * rw, x + i * rw, r);
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
        walk.template gather<ADD>(others, count, x, rw, rw, seen, dearlier, rw);
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

  // what some queries do to the ridge that the keys of their own block give back
  void give_back(const F* u, const F* x, int64_t count, const Seen& seen) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t s = 0; s < seen.keys[i]; ++s) dback[s] -= walk.weights[s] * u[i * rw + walk.directions[s]] * x[i * rw + walk.directions[s]];
  }

  // of the block's keys: what is not of themselves alone
  void give_rates(int32_t from, int32_t to) {
    for (int32_t s = from; s < to; ++s) {
      const int64_t i = s - from, place = s - task.start;
      const double taken = static_cast<double>(r) * dback[i];  // the gradient of what it takes of the past, over rho
      *ridge += taken * task.lost[place];
      if (c.ddecay != nullptr) {
        const F *z = walk.block_keys() + i * rw, *dz = dkeys + rw + i * rw;
        double sum = inner<F>(z, dz, r) + inner<F>(walk.values + i * Pw, dvalues + i * Pw, P);
        if (c.power > 0) sum += inner<F>(walk.keys + i * rw, dearlier + i * rw, r);
        along[place] += 0.5 * sum + walk.rho * taken * task.lost[place];
        c.ddecay[(task.b * c.Hkv + task.kv) * c.S + task.index[s]] -= walk.rho * taken * (1 - task.lost[place]);
      }
      for (int64_t d = 0; d < rw; ++d) dkeys[i * rw + d] += dearlier[i * rw + d];
    }
  }

  // gradients of the block's keys, with the one before them, and values, added to dk and dv
  void give(int32_t from, int32_t to) {
    if constexpr (FADES) give_rates(from, to);
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
    if constexpr (!FADES) return;
    std::memset(dearlier, 0, sizeof(F) * BLOCK * rw);
    std::memset(dback, 0, sizeof(dback));
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
      whole<ADD, false>(n, r, rw, z, rw, shift, rw, dearlier, rw);
    }
    for (int64_t i = 0; FADES && i < n; ++i) {
      const F weight = walk.weights[i];
      for (int64_t d = 0; d < rw; ++d) dz[i * rw + d] *= weight, dearlier[i * rw + d] *= weight;
      for (int64_t p = 0; p < Pw; ++p) dvalues[i * Pw + p] *= weight;
      dback[i] = -weight * turned[walk.directions[i] * rw + walk.directions[i]];
    }
    give(from, to);
  }

  // the sums of later queries as they are for the keys before a span
  void fade(const Span& span) {
    if (!FADES || span.keep == 1) return;
    const F keep = static_cast<F>(span.keep);
    for (int64_t i = 0; i < r * rw; ++i) turned[i] *= keep;
    for (int64_t i = 0; i < P * rw; ++i) cross[i] *= keep;
    for (int64_t i = 0; c.power > 0 && i < r * rw; ++i) shift[i] *= keep;
  }

  // of rates, which multiply all sums before a key; and of the ridge that there was before the first one
  void finish() const {
    const int64_t head = task.b * c.Hkv + task.kv;
    for (int64_t d = 0; d < r; ++d) {
      const double along = -turned[d * rw + d], level = c.level == nullptr ? 1 : c.level[head * r + d];
      *ridge += level * along;
      if (c.dlevel != nullptr) c.dlevel[head * r + d] = walk.rho * along;
    }
    if (c.ddecay == nullptr) return;
    double later = 0;
    for (int64_t s = static_cast<int64_t>(along.size()); s-- > 0;) {
      later += along[s];
      c.ddecay[head * c.S + task.index[task.start + s]] -= later;
    }
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

template <typename F, bool FADES>
void backward_in(const Task& task, Scratch& room) {
  room.begin(Walk<F, FADES>::floats(task.c) + Back<F, FADES>::floats(task.c, task));
  Walk<F, FADES> walk(task, true, room);
  Back<F, FADES> back(walk, room);
  walk.begin();
  for (size_t i = 0; i < task.spans.size(); ++i) {
    const Span& span = task.spans[i];
    walk.fade(span);
    walk.load_block(span.from, span.to, !span.far);
    if (span.far) {
      walk.add_sums();
      if (span.last) walk.remade();
      continue;
    }
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
      const Span& next = task.spans[i + 1];
      if (!next.far || next.keep != 1) back.prepare();
      back.keys(span.from, span.to);
    }
    back.add_queries(span);
    back.fade(span);
  }
  if (FADES) back.finish();
  if (!task.spans.empty()) back.shorten(task.start, task.spans.back().to);
  back.give_memory();
}

// dk and dv of key head ``number``
void clear_gradients(const Ridge& c, int64_t number) {
  clear(c.dk + number * c.S * c.D, c.S * c.D);
  clear(c.dv + number * c.S * c.P, c.S * c.P);
}

template <bool FADES>
void backward_task(const Ridge& c, int64_t number, Scratch& room) {
  const Task task(c, number, GROWTH[c.outcome[number]]);
  // what is added to is set to zero by who adds first, while it is near
  if (c.segments == 1) clear_gradients(c, number);
  if (c.outcome[number] == GOOD) backward_in<float, FADES>(task, room);
  else backward_in<double, FADES>(task, room);
}

// whether it takes longer than waking the other threads
bool long_enough(const Ridge& c) { return (c.B * c.H * c.T + c.B * c.Hkv * c.S) * c.D * (c.D + c.P) > (1 << 19); }

}  // namespace

extern "C" {

// Returns 0, 1 when memory ran out, or 2 where a matrix that is inverted is not positive definite or not a number.
int zonal_ridge_forward(const Ridge* call) {
  std::atomic<int> indefinite{0};
  const int failed = each_task<Scratch>(call->B * call->Hkv * call->segments, long_enough(*call), [&](int64_t i, Scratch& room) {
    const Outcome found = call->decay == nullptr ? forward_task<false>(*call, i, room) : forward_task<true>(*call, i, room);
    if (found == INDEFINITE) indefinite = 2;
    if (call->outcome != nullptr) call->outcome[i] = found;
  });
  return failed ? failed : indefinite.load();
}

// Returns 0, or 1 when memory ran out. outcome: as forward left it.
int zonal_ridge_backward(const Ridge* call) {
  for (int64_t i = 0; call->segments > 1 && i < call->B * call->Hkv; ++i) clear_gradients(*call, i);
  return each_task<Scratch>(call->B * call->Hkv * call->segments, long_enough(*call), [&](int64_t i, Scratch& room) {
    if (call->decay == nullptr) backward_task<false>(*call, i, room);
    else backward_task<true>(*call, i, room);
  });
}
}
