// Exact attention y_t = factor_t sum_s l(S_ts) v_s by tiles that live in registers and the first cache.
//
// Queries lie across the lanes of two vectors, C to a column; keys are read where they are, one word at a time, and
// broadcast. A row's sum and maximum need no horizontal step, and a mask is an interval of keys for each lane. Key
// padding is a list of the keys that are there.
//
//   S^T (keys x C)   = K Q^T           R x C numbers in registers, link applied there, stored as W^T
//   Y^T (P x C)     += V^T W^T
//   backward: dW^T = V dY^T, dS^T = (dW^T - D) l'(S^T), dQ^T += K^T dS^T, dK += dS^T Q, dV += W^T dY
//
// Tokens lie in memory as float32, bfloat16 or float16 (S). T, what is multiplied, is float, to which blocks of shorter
// tokens are widened, or bfloat16 where the instruction set multiplies it in pairs, with float32 sums: two neighbouring
// coordinates for S^T and dW^T, two neighbouring keys for Y^T and dQ^T, two neighbouring queries for dV and dK. In pairs
// queries and keys enter as they are, so that scores carry no rounding but that of their inputs: scale and norms follow
// in float32, and so does the link. Only W and dS are rounded to bfloat16. A row's sum is that of the rounded weights:
// y is then a mean of values, and where all of them agree it is theirs.

#include "common.hpp"
#include "products.hpp"

namespace {

constexpr int KEYS = 96;         // keys of a block, a multiple of R: K and V of a block stay in the second cache
constexpr int SPAN = 64;         // queries of a block, backward
constexpr int BANDS = SPAN / C;  // columns of them

struct Counting {
  int32_t at[KEYS];
  constexpr Counting() : at() {
    for (int i = 0; i < KEYS; ++i) at[i] = i;
  }
};
constexpr Counting COUNTING;  // the index of rows that lie one after another

template <typename T>
struct Tile {
  static constexpr int W = PER_WORD<T>;
  static constexpr bool PAIRS = W == 2;
  using Rows = RowsAt<T, !PAIRS>;

  struct Keys {  // the keys of a block from place ``from`` on, or their values
    RowsAt<T, true> rows;
    int32_t from;
    const T* operator()(int32_t s) const { return rows(s - from); }
  };

  template <typename N = T>
  static N* take(Scratch& scratch, int64_t numbers) {
    return reinterpret_cast<N*>(scratch.take((numbers * sizeof(N) + 3) / 4));
  }

  // A column of queries. numbers: words of it (D / W, C); gain (C): what their scores are multiplied by, in pairs.
  struct Queries {
    T* numbers;
    float* gain;
    Prior prior;
  };

  // scores of N keys from place s on with a column, in the domain of the link
  template <int N>
  static INLINE void scores(
      const Call& c, const HeadRules& at, const Keys& keys, const Queries& q, int32_t s, V (&x)[N], V (&y)[N]) {
    const T* rows[N];
    EACH_ROW {
      rows[r] = keys(s + r);
      x[r] = y[r] = V{};
    }
    add_rows<N>(rows, q.numbers, W * C, c.D / W, x, y);
    EACH_ROW {
      if (PAIRS) {
        x[r] *= load(q.gain);
        y[r] *= load(q.gain + L);
      }
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
  static APART void weigh(
      const Call& c, const HeadRules& at, const Keys& keys, const Sight& sight, const Queries& q, int32_t s,
      float* weights, Column& column) {
    V x[N], y[N];
    scores<N>(c, at, keys, q, s, x, y);
    record<!PAIRS, N>(c, at, sight, s, x, y, weights, column);
  }

  // Rows at places [s0, s1), at most KEYS of them: where they are, or widened in ``out``
  template <typename S>
  static RowsAt<T, true> rows_of(
      const S* rows, int64_t step, const int32_t* index, int32_t s0, int32_t s1, int64_t width, T* out) {
    if constexpr (std::is_same_v<S, T>) {
      return {rows, step, index + s0};
    } else {
      for (int32_t s = s0; s < s1; ++s) widen(rows + index[s] * step, width, 1.f, out + (s - s0) * width);
      return {out, width, COUNTING.at};
    }
  }

  // Such rows as products sum over them. In pairs they are turned into ``out`` (width, KEYS), where the numbers of
  // neighbouring keys are neighbours; an odd last one is paired with zeros.
  template <typename S>
  static Rows by_keys(
      const S* rows, int64_t step, const int32_t* index, int32_t s0, int32_t s1, int64_t width, T* out) {
    if constexpr (PAIRS) {
      const auto row = [&](int32_t s) { return rows + index[s] * step; };
      int32_t s = s0;
      for (; s + 8 <= s1; s += 8) turn_eight(row, s, width, out + (s - s0));
      for (; s < s1; ++s)
        for (int64_t p = 0; p < width; ++p) out[p * KEYS + s - s0] = row(s)[p];
      for (int64_t p = 0; p < width && (s1 - s0) % 2; ++p) out[p * KEYS + s1 - s0] = 0;
      return {out, KEYS, nullptr};
    } else {
      return rows_of(rows, step, index, s0, s1, width, out);
    }
  }

  // eight rows of pairs from the s-th on become columns of ``out``, whose rows are KEYS numbers apart; the width is even
  template <typename F>
  static INLINE void turn_eight(const F& row, int32_t s, int64_t width, T* out) {
    int64_t p = 0;
    for (; p + 16 <= width; p += 16) {
      V8 x[8];
      for (int j = 0; j < 8; ++j) std::memcpy(&x[j], row(s + j) + p, sizeof(V8));
      transpose(x);  // eight words, which are two numbers each, of eight rows
      for (int j = 0; j < 8; ++j) {
        const U8& both = reinterpret_cast<const U8&>(x[j]);
        T* to = out + (p + 2 * j) * KEYS;
        *reinterpret_cast<Half8*>(to) = __builtin_convertvector(both & 0xffffu, Half8);
        *reinterpret_cast<Half8*>(to + KEYS) = __builtin_convertvector(both >> 16, Half8);
      }
    }
    for (; p < width; ++p)
      for (int j = 0; j < 8; ++j) out[p * KEYS + j] = row(s + j)[p];
  }

  // such rows from the ``keys``-th on, an even one
  static Rows from(const Rows& rows, int64_t keys) {
    if constexpr (PAIRS) return {rows.at + keys, rows.step, nullptr};
    else return {rows.at, rows.step, rows.index + keys};
  }

  // sums (width, C) += such rows of ``keys`` keys, times columns that lie ``step`` numbers apart
  static void add_products(
      const Rows& rows, int64_t width, const T* cols, int64_t step, int64_t keys, float* sums) {
    if constexpr (PAIRS) {
      with_each_tile(width, [&](int64_t p, auto n) {
        constexpr int N = decltype(n)::value;
        const T* a[N];
        EACH_ROW a[r] = rows(p + r);
        add_rows_by_columns<N>(a, cols, step, (keys + 1) / 2, sums + p * C);
      });
    } else {
      columns_by_columns(rows, width, cols, step, keys, sums);
    }
  }

  // weights (keys, C) as columns for values; in pairs they are rounded into ``out``, and their sums are taken
  static const T* as_columns(const float* weights, int64_t keys, T* out, Column& column) {
    if constexpr (PAIRS) {
      for (int j = 0; j < 2; ++j)
        for (int64_t s = 0; s < keys; s += 2) {
          const V second = s + 1 < keys ? load(weights + (s + 1) * C + j * L) : V{};
          const U both = paired(load(weights + s * C + j * L), second);
          store_words(out + s * C + j * 2 * L, both);
          column.mass[j] = add_product(column.mass[j], both, 0x3f803f80u - U{});  // times one
        }
      return out;
    } else {
      return weights;
    }
  }

  struct Room {  // of a thread, forward: W^T of a block (KEYS, C), and that as words
    float* weights;
    T* words;
  };

  // The prior comes to W^T of keys [s0, s1), and the column's maximum or mass (``sums``) is taken again from what it was
  // ``before``. It is a pass of its own, so that the products of other calls are compiled without it. Masked again,
  // as the prior of keys that a lane does not see may not be finite.
  static APART void tilt(
      const HeadRules& at, const Prior& prior, const Sight& sight, int32_t s0, int32_t s1, float* weights,
      const V (&before)[2], V (&sums)[2]) {
    for (int j = 0; j < 2; ++j) sums[j] = before[j];
    for (int32_t s = s0; s < s1; ++s, weights += C) {
      const int32_t key = at.index[s];
      const float shared = prior.of_key(key);
      const bool whole = s >= sight.whole_first && s < sight.whole_last;
      for (int j = 0; j < 2; ++j) {
        V w = load(weights + j * L);
#if ZONAL_LOG
        w += prior(j, key, shared);
        if (!whole) w = seen(sight, j, s) ? w : spread(NONE);
        sums[j] = most(sums[j], w);
#else
        w *= prior_value(prior(j, key, shared));
        if (!whole) w = seen(sight, j, s) ? w : V{};
        if (!PAIRS) sums[j] += w;
#endif
        store(weights + j * L, w);
      }
    }
  }

  // a block of keys up to place ``to``, of values ``values``, into a column's sums out (P, C)
  static void absorb(
      const Call& c, const HeadRules& at, const Keys& block, const Sight& sight, const Queries& q, int32_t to,
      const Rows& values, const Room& room, float* out, Column& column) {
    const int32_t from = block.from, skipped = std::max(0, sight.first - from) / W * W, s0 = from + skipped;
    const int32_t s1 = std::min(to, sight.last), keys = s1 - s0;
    if (keys <= 0) return;
    V(&sums)[2] = ZONAL_LOG ? column.top : column.mass;
    const V before[2] = {sums[0], sums[1]};
    for (int32_t s = s0; s < s1; s += R)
      with_rows<R>(std::min<int>(R, s1 - s), [&](auto n) {
        weigh<decltype(n)::value>(c, at, block, sight, q, s, room.weights + (s - s0) * C, column);
      });
    if (q.prior.there) tilt(at, q.prior, sight, s0, s1, room.weights, before, sums);
#if ZONAL_LOG
    exponentials<!PAIRS>(before, keys, c.P, room.weights, out, column);
#endif
    const T* columns = as_columns(room.weights, keys, room.words, column);
    add_products(Tile::from(values, skipped), c.P, columns, W * C, keys, out);
  }

  // queries t0 … as a column; lanes past the end are zeros
  template <typename S>
  static void pack_queries(const Call& c, const Head<S>& at, int64_t t0, const Queries& to) {
    const int count = static_cast<int>(std::min<int64_t>(C, c.T - t0));
    const auto row = [&](int i) { return at.q + (t0 + i) * at.q_step; };
    float factors[C] = {};
    for (int i = 0; i < count; ++i) factors[i] = query_scale(c, row(i), at.scale) * UNIT;
    if (count < C) std::memset(to.numbers, 0, sizeof(T) * C * c.D);
    if constexpr (PAIRS) {
      std::copy_n(factors, C, to.gain);
      for (int i = 0; i < count; ++i) as_lane(row(i), c.D, i, to.numbers);
    } else {
      as_column(row, factors, count, c.D, to.numbers);
    }
  }

  // a row of pairs as lane i of a column
  static void as_lane(const T* row, int64_t width, int i, T* column) {
    for (int64_t d = 0; d < width; d += 2) std::memcpy(column + d * C + 2 * i, row + d, 2 * sizeof(T));
  }

  template <typename S>
  static void forward(
      const Call& c, int64_t b, int64_t h, int64_t t0, int64_t t1, const Shared& shared, Scratch& scratch) {
    const TileRegisters registers;
    const Head<S> at = head_of<S>(c, b, h, shared);
    constexpr bool WIDENS = !std::is_same_v<S, T>;
    const int64_t columns = (t1 - t0 + C - 1) / C;
    scratch.begin(COLUMNS * C * (c.D + c.P + 1) + KEYS * (2 * C + c.P + c.D));
    T* numbers = take(scratch, COLUMNS * C * c.D);
    float* gains = scratch.take(COLUMNS * C);
    Queries queries[COLUMNS];
    Sight sights[COLUMNS];
    Column sums[COLUMNS];
    Reach reach;
    for (int64_t i = 0; i < columns; ++i) {
      queries[i] = {numbers + i * C * c.D, gains + i * C, prior_of(c, at, t0 + i * C)};
      pack_queries(c, at, t0 + i * C, queries[i]);
      sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
      reach.add(sights[i]);
    }
    float* out = scratch.take(COLUMNS * C * c.P);
    std::memset(out, 0, sizeof(float) * columns * C * c.P);
    const Room room = {scratch.take(KEYS * C), PAIRS ? take(scratch, KEYS * C) : nullptr};
    T* value_room = PAIRS || WIDENS ? take(scratch, KEYS * c.P) : nullptr;
    T* key_room = WIDENS ? take(scratch, KEYS * c.D) : nullptr;
    for (int32_t s = reach.first; s < reach.last; s += KEYS) {
      const int32_t end = std::min(s + KEYS, reach.last);
      const Keys keys = {rows_of(at.k, at.k_step, at.index, s, end, c.D, key_room), s};
      const Rows values = by_keys(at.v, at.v_step, at.index, s, end, c.P, value_room);
      for (int64_t i = 0; i < columns; ++i)
        absorb(c, at, keys, sights[i], queries[i], end, values, room, out + i * C * c.P, sums[i]);
    }
    finish<S>(c, at.lo, at.hi, b, h, t0, t1, sums, out);
  }

  // ---- backward ----------------------------------------------------------------------------------------------------

  struct Block {            // the queries of a block
    Queries queries[BANDS]; // their columns
    T* rows;                // and words of neighbours, (SPAN / W, up(D, C), W)
    T *dy_columns, *dy_rows;             // dY alike, (BANDS, P / W, C, W) and (SPAN / W, up(P, C), W)
    float *factor, *shared, *lse;        // the row's factor, dy . y times it, its log-sum-exp (base 2), (SPAN)
    float *inverse, *dq;                 // 1 / norm of the query; as columns (BANDS, D, C)
    T *keys, *values;                    // room for keys and values of a block that are widened, (KEYS, D), (KEYS, P)
    T *weights, *grads, *changes;        // W^T and dS^T (KEYS, SPAN) as sums over queries take them; dS^T over keys
  };

  // Scales, norms and factors of queries are in the numbers of a block already, but for pairs.
  template <typename S>
  static void pack_block(const Call& c, const Head<S>& at, int64_t b, int64_t h, int64_t t0, const Block& block) {
    const int64_t D16 = up(c.D, C), P16 = up(c.P, C);
    const bool online = ZONAL_LOG && c.anchor == ROW;
    const int count = static_cast<int>(std::min<int64_t>(SPAN, c.T - t0));
    if (count < SPAN || D16 != c.D || P16 != c.P) {
      std::memset(block.rows, 0, sizeof(T) * SPAN * D16);
      std::memset(block.dy_rows, 0, sizeof(T) * SPAN * P16);
      for (const Queries& column : block.queries) std::memset(column.numbers, 0, sizeof(T) * C * c.D);
      std::memset(block.dy_columns, 0, sizeof(T) * SPAN * c.P);
    }
    std::memset(block.dq, 0, sizeof(float) * SPAN * c.D);
    for (int i = 0; i < SPAN; ++i) {
      const Queries& column = block.queries[i / C];
      block.factor[i] = block.shared[i] = block.inverse[i] = 0;
      block.lse[i] = std::numeric_limits<float>::infinity();
      column.gain[i % C] = 0;
      if (i >= count) continue;
      const int64_t row = (b * c.H + h) * c.T + t0 + i;
      const S *q = at.q + (t0 + i) * at.q_step, *y = static_cast<const S*>(c.y) + row * c.P;
      const S* dy = static_cast<const S*>(c.dy) + b * c.dys.batch + h * c.dys.head + (t0 + i) * c.dys.token;
      const S* rest = static_cast<const S*>(c.rest);
      block.inverse[i] = query_scale(c, q, 1.f);
      const float gain = at.scale * block.inverse[i], factor = online ? 1.f : c.factor[row];
      block.factor[i] = factor;
      if (ZONAL_LOG) block.lse[i] = online ? c.factor[row] * LOG2E : 0.f;
      if (c.anchor == ROW)
        block.shared[i] = (dot(dy, y, c.P) + (rest == nullptr ? 0.f : dot(dy, rest + row * c.P, c.P))) * factor;
      column.gain[i % C] = gain;
      if constexpr (PAIRS) {
        as_lane(q, c.D, i % C, column.numbers);
        as_lane(dy, c.P, i % C, block.dy_columns + i / C * C * c.P);
        T *to = block.rows + i / W * W * D16 + i % W, *dy_to = block.dy_rows + i / W * W * P16 + i % W;
        for (int64_t d = 0; d < c.D; ++d) to[d * W] = q[d];
        for (int64_t p = 0; p < c.P; ++p) dy_to[p * W] = dy[p];
      } else {
        widen(q, c.D, gain, block.rows + i * D16);
        widen(dy, c.P, factor, block.dy_rows + i * P16);
      }
    }
    if constexpr (!PAIRS) {
      for (int i = 0; i < count; i += C) {
        const int rows = std::min(C, count - i);
        as_column([&](int r) { return block.rows + (i + r) * D16; }, ONES.at, rows, c.D, block.queries[i / C].numbers);
        as_column([&](int r) { return block.dy_rows + (i + r) * P16; }, ONES.at, rows, c.P, block.dy_columns + i * c.P);
      }
    }
  }

  template <int N>
  static APART void scores_apart(
      const Call& c, const HeadRules& at, const Keys& keys, const Queries& q, int32_t s, float* out) {
    V x[N], y[N];
    scores<N>(c, at, keys, q, s, x, y);
    EACH_ROW {
      store(out + r * C, x[r]);
      store(out + r * C + L, y[r]);
    }
  }

  struct Others {         // gradients that are summed up beside those of q, k and v, each null where nobody asks
    double *scale, *c;    // of the head's scale and learned coefficients
    double *row, *col;    // of its log prior: of all its queries, of all its keys
    V* partial;           // those of the coefficients of some keys, over the lanes
    V* lanes;             // those of the rows of a block and some keys, (2 BANDS)
  };

  // W^T and dS^T of N keys from place s on, an even one in pairs, with one column: into ``place`` of the block's tiles,
  // and as pairs of keys into ``changes``. TILTED: there is a log prior.
  template <int N, bool TILTED>
  static APART void gradients(
      const Call& c, const HeadRules& at, const Keys& keys, const Keys& values, const Sight& sight, const Block& block,
      int band, int32_t s, int64_t place, T* changes, const Others& others) {
    float scored[N * C], changed[N * C];
    const Queries& q = block.queries[band];
    const Prior& prior = q.prior;
    scores_apart<N>(c, at, keys, q, s, scored);
    const T* rows[N];
    EACH_ROW rows[r] = values(s + r);
    rows_by_columns<N>(rows, block.dy_columns + band * C * c.P, W * C, c.P / W, changed);
    const bool whole = s >= sight.whole_first && s + N <= sight.whole_last;
    const int n = static_cast<int>(c.numbers);
    (void)n;
    EACH_ROW {
      const int32_t key = at.index[s + r];
      const float shared = TILTED ? prior.of_key(key) : 0.f;
      for (int j = 0; j < 2; ++j) {
        const int lane = band * C + j * L;
        const V score = load(scored + r * C + j * L);
        V ds = load(changed + r * C + j * L);
        if (PAIRS) ds *= load(block.factor + lane);
        ds -= load(block.shared + lane);
#if ZONAL_LOG
        V power = value(score, at.coefficients, n) * LOG2E - load(block.lse + lane);
        if (TILTED) power += prior(j, key, shared);
        V w = weight_again(c, power);
        if (!whole) w = seen(sight, j, s + r) ? w : V{};
        ds *= w;
        if (TILTED) add_to_prior(others, ds, band, j, key);
#else
        const V b = TILTED ? prior_value(prior(j, key, shared)) : V{};
        V w = value(score, at.coefficients, n);
        if (TILTED) w *= b;
        if (!whole) {
          w = seen(sight, j, s + r) ? w : V{};
          ds = seen(sight, j, s + r) ? ds : V{};
        }
        if (TILTED) {
          add_to_prior(others, ds * w, band, j, key);
          ds *= b;
        }
#endif
#if !ZONAL_LOG || ZONAL_MAP
        if (others.partial != nullptr) {
          V term = ds * base(score, at.coefficients, n);
          for (int k = 0; k < c.learned; ++k) {
            others.partial[k] += term;
            term *= score;
          }
        }
        ds *= derivative(score, at.coefficients, n);
#endif
        if (at.key_scale != nullptr) ds *= at.key_scale[at.index[s + r]];
        T *weights = block.weights + place + r * SPAN + j * L, *grads = block.grads + place + r * SPAN + j * L;
        if constexpr (PAIRS) {
          store_rounded(weights, w * load(block.factor + lane));
          store_rounded(grads, ds * load(q.gain + j * L));
          store(changed + r * C + j * L, ds);
        } else {
          store(weights, w);
          store(grads, ds);
        }
      }
    }
    if constexpr (PAIRS)
      for (int r = 0; r < N; r += 2)
        for (int j = 0; j < 2; ++j) {
          const V second = r + 1 < N ? load(changed + (r + 1) * C + j * L) : V{};
          store_words(changes + r * C + j * 2 * L, paired(load(changed + r * C + j * L), second));
        }
  }

  // the gradient of the logarithms of W of one key and half of a column
  static inline void add_to_prior(const Others& others, V change, int band, int half, int32_t key) {
    if (others.row != nullptr) others.lanes[2 * band + half] += change;
    if (others.col != nullptr) others.col[key] += sum(change);
  }

  // ``pairs``: all keys as ``by_keys`` turns them, a block of KEYS after the other
  template <typename S>
  static void backward_block(
      const Call& c, const Head<S>& at, const Part& part, int64_t h, int64_t t0, Block& block, const Rows& pairs,
      Others others) {
    const int bands = static_cast<int>((std::min<int64_t>(SPAN, c.T - t0) + C - 1) / C);
    pack_block(c, at, part.b, h, t0, block);
    for (int i = 0; i < bands; ++i) block.queries[i].prior = prior_of(c, at, t0 + i * C);
    Sight sights[BANDS];
    Reach reach;
    for (int i = 0; i < bands; ++i) {
      sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
      reach.add(sights[i]);
    }
    std::vector<V> partial(c.learned);
    V lanes[2 * BANDS];
    if (others.c != nullptr) others.partial = partial.data();
    others.lanes = lanes;
    for (int32_t s0 = reach.first / W * W, s1; s0 < reach.last; s0 = s1) {
      s1 = std::min(s0 / KEYS * KEYS + KEYS, reach.last);
      const Keys keys = {rows_of(at.k, at.k_step, at.index, s0, s1, c.D, block.keys), s0};
      const Keys values = {rows_of(at.v, at.v_step, at.index, s0, s1, c.P, block.values), s0};
      for (int k = 0; k < c.learned; ++k) partial[k] = V{};
      for (int i = 0; i < 2 * BANDS; ++i) lanes[i] = V{};  // a reference would promise more alignment than V has
      for (int i = 0; i < BANDS; ++i) {
        const int32_t begin = i < bands ? std::max(s0, sights[i].first / W * W) : s1;
        const int32_t end = i < bands ? std::min(s1, sights[i].last) : s0;
        for (int32_t s = s0; s < s1; ++s)  // what no lane of the column sees
          if (s < begin || s >= end) {
            std::fill_n(block.weights + (s - s0) * SPAN + i * C, C, T(0));
            std::fill_n(block.grads + (s - s0) * SPAN + i * C, C, T(0));
          }
        for (int32_t s = begin; s < end; s += R)
          with_rows<R>(std::min<int>(R, end - s), [&](auto n) {
            constexpr int N = decltype(n)::value;
            const auto run = block.queries[i].prior.there ? gradients<N, true> : gradients<N, false>;
            run(c, at, keys, values, sights[i], block, i, s, (s - s0) * SPAN + i * C,
                PAIRS ? block.changes + (s - begin) * C : nullptr, others);
          });
        if (begin >= end) continue;
        const T* changes = PAIRS ? block.changes : block.grads + (begin - s0) * SPAN + i * C;
        Rows rows;
        if constexpr (PAIRS) rows = {pairs.at + begin / KEYS * KEYS * c.D + begin % KEYS, KEYS, nullptr};
        else rows = Tile::from(keys.rows, begin - s0);
        add_products(rows, c.D, changes, PAIRS ? 2 * C : SPAN, end - begin, block.dq + i * C * c.D);
      }
      add_outer<SPAN>(block.weights, block.dy_rows, c.P, at.index + s0, s1 - s0, part.dv);
      add_outer<SPAN>(block.grads, block.rows, c.D, at.index + s0, s1 - s0, part.dk);
      for (int k = 0; k < c.learned && others.c != nullptr; ++k)
        for (int i = 0; i < L; ++i) others.c[k] += partial[k][i];
      for (int64_t i = 0; i < std::min<int64_t>(SPAN, c.T - t0) && others.row != nullptr; ++i)
        others.row[t0 + i] += lanes[i / L][i % L];
    }
    for (int64_t t = t0; t < std::min(t0 + SPAN, c.T); t += C) {
      const int count = static_cast<int>(std::min<int64_t>(C, c.T - t));
      const float *dq = block.dq + (t - t0) * c.D, *inverse = block.inverse + (t - t0);
      finish_queries(c, at, part.b, h, t, count, dq, inverse, at.scale, others.scale);
    }
  }

  template <typename S>
  static void backward(const Call& c, const Part& part, Scratch& scratch) {
    const TileRegisters registers;
    constexpr bool WIDENS = !std::is_same_v<S, T>;
    const int64_t D16 = up(c.D, C), P16 = up(c.P, C), groups = c.H / c.Hkv;
    scratch.begin(
        SPAN * (2 * c.D + c.P + D16 + P16 + 5) + KEYS * (2 * SPAN + C) +
        (PAIRS ? up(c.S, KEYS) * c.D : WIDENS ? KEYS * (c.D + c.P) : 0));
    Block block;
    T* numbers = take(scratch, SPAN * c.D);
    float* gains = scratch.take(SPAN);
    for (int i = 0; i < BANDS; ++i) block.queries[i] = {numbers + i * C * c.D, gains + i * C, Prior()};
    block.rows = take(scratch, SPAN * D16);
    block.dy_columns = take(scratch, SPAN * c.P);
    block.dy_rows = take(scratch, SPAN * P16);
    for (float** each : {&block.factor, &block.shared, &block.lse, &block.inverse}) *each = scratch.take(SPAN);
    block.dq = scratch.take(SPAN * c.D);
    block.weights = take(scratch, KEYS * SPAN);
    block.grads = take(scratch, KEYS * SPAN);
    block.changes = PAIRS ? take(scratch, KEYS * C) : nullptr;
    block.keys = WIDENS ? take(scratch, KEYS * c.D) : nullptr;
    block.values = WIDENS ? take(scratch, KEYS * c.P) : nullptr;
    Rows pairs = {};
    if constexpr (PAIRS) {
      const Head<S> first = head_of<S>(c, part.b, part.kv * groups, part.shared);
      T* room = take(scratch, up(c.S, KEYS) * c.D);
      for (int32_t s = 0; s < c.S; s += KEYS)
        by_keys(
            first.k, first.k_step, first.index, s, static_cast<int32_t>(std::min<int64_t>(s + KEYS, c.S)), c.D,
            room + s * c.D);
      pairs = {room, KEYS, nullptr};
    }
    for (int64_t h = part.kv * groups; h < (part.kv + 1) * groups; ++h) {
      const Head<S> at = head_of<S>(c, part.b, h, part.shared);
      const int64_t place = (part.part * c.B + part.b) * c.H + h;
      Others others = {};
      if (c.dscale != nullptr) others.scale = c.dscale + place;
      if (c.dcoefficients != nullptr) others.c = c.dcoefficients + place * c.learned;
      if (c.drow != nullptr) others.row = c.drow + (part.b * c.H + h) * c.T;
      if (c.dcol != nullptr) others.col = c.dcol + place * c.S;
      for (int64_t t0 = part.part * SPAN; t0 < c.T; t0 += c.split * SPAN)
        backward_block(c, at, part, h, t0, block, pairs, others);
    }
  }
};

// f of the numbers that tokens are made of
template <typename F>
int with_type(const Call& c, const F& f) {
#if ZONAL_PAIRS
  return f(uint16_t());
#else
  return c.type == BFLOAT ? f(uint16_t()) : c.type == FLOAT16 ? f(Float16()) : f(float());
#endif
}

using Products = Tile<std::conditional_t<ZONAL_PAIRS, uint16_t, float>>;

}  // namespace

extern "C" {

// Both return 0, or 1 when memory ran out. In pairs the type is bfloat16, D is even, and for backward so is P.
int zonal_forward(const Call* call) {
  return with_type(*call, [&](auto zero) {
    using S = decltype(zero);
    return run_forward<S>(*call, Products::forward<S>);
  });
}
int zonal_backward(const Call* call) {
  return with_type(*call, [&](auto zero) {
    using S = decltype(zero);
    return run_backward<S>(*call, Products::backward<S>);
  });
}
}
