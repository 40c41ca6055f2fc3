// Few tokens after a memory of sums over features, in one pass over its state: each token's key and value are taken
// in, M += phi(k) [v, 1]^T, and its queries read what is there, y = factor phi'(q)^T M. Where the past fades, M is
// multiplied by a number per token first. This is a decoder's step, for every link that is a polynomial of a dot
// product: the link itself is in phi', the features of a query times the coefficient of their power. The vectors of
// these products may be features of one layer themselves (Map).
//
// With a window, the last keys and values are kept one by one and read through the exponential. The key that leaves the
// window is taken into M, and both parts are divided by one sum.
//
// The state of a key head (features x W) goes through the first cache strip by strip. Features stand in the order of
// features.SymmetricPowers, which is that of memories, so that they are made by products of neighbours alone.

#include "activations.hpp"

namespace {

constexpr int SUMS = 8;            // of 16 registers, beside the values and what is at hand
constexpr int64_t STRIP = 4096;    // numbers of the state in one strip
constexpr int64_t TEAM = 1 << 16;  // numbers of states and windows from which on other threads are worth waking

}  // namespace

extern "C" {

// A feature map of one layer, or none where blocks is null: its ``made`` numbers are gain g(z), or gain times the
// softmax of all z. With left > 0 they are [a, b_1, ..., b_nodes], ``left`` of them in a, and the features are the
// products of a with each b_i. weight (heads, D, rows): the matrix, transposed; null where z is made of the vector
// itself. unit: of x / |x|. guarded: it is an error that all features are 0.
struct Map {
  const float* weight;
  const Block* blocks;
  int64_t heads, rows, count, made, unit, softmax, left, nodes, guarded;
};

// What zonal/kernels/decode.py fills in once for an operator and a form of memory.
struct Decoder {
  const float* scale;    // (H): of a query before its features are made
  const float* weights;  // (H or 1, F): the link's coefficient of each feature's power
  // Of powers two and up: the root of the number of ways to write a feature, and (degree - 1, E) how many products
  // begin with each number. Null below degree three.
  const float* roots;
  const int32_t* tails;
  Map query, key;
  // E: numbers of a vector whose powers are the features, D without a Map
  int64_t B, H, Hkv, D, E, P, F, degree, lowest, heads_weigh, anchor, positive, normalise, include_self;
  // window: how many of the last keys are read one by one, 0 = none. first: how many of the first keys. near (H): the
  // factor of these scores. share (H): the factor of the sums.
  int64_t window, first;
  const float *near, *share;
  float key_scale;  // of a key before its features are made
};

// And for each call. Last axes of q (B, H, T, D), k (B, Hkv, T, D), v (B, Hkv, T, P) have stride 1; all of one ``type``
// (enum Type). before and after (B, Hkv, F, W), the same place or two that share nothing. count: tokens in the memory,
// of which padding (B) are padding. y (B, H, T, P). keep (B, Hkv, T): what each token leaves of the state before it;
// null where nothing fades.
//
// With a window, held_k and held_v (B, Hkv, room, .) have its keys and values before place ``end``, of which held (B)
// are real; the new ones go behind them. opening_k, opening_v (B, Hkv, first, .): the first keys that have left it,
// opened (B) of them. A step adds its tokens to held and opened.
struct Step {
  const void *q, *k, *v;
  Axes qs, ks, vs;
  int64_t T, type;
  const float* before;
  float* after;
  int64_t count;
  const int64_t* padding;
  void* y;
  const float* keep;
  void *held_k, *held_v, *opening_k, *opening_v;
  int64_t *held, *opened;
  int64_t room, end;
};
}

namespace {

// ---- powers ---------------------------------------------------------------------------------------------------------

// out = a x over n numbers
INLINE void scaled(const float* x, float a, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(out + i, load(x + i) * a);
  for (; i < n; ++i) out[i] = x[i] * a;
}

// out = a * b over n numbers
INLINE void product(const float* a, const float* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(out + i, load(a + i) * load(b + i));
  for (; i < n; ++i) out[i] = a[i] * b[i];
}

// Features of a vector x that is written twice, (2 E), into out (F). room (E).
void features(const Decoder& c, const float* x, float* room, float* out) {
  if (c.lowest == 0) *out++ = 1.f;
  std::copy_n(x, c.E, out);
  if (c.degree == 1) return;
  float* to = out + c.E;
  if (c.degree == 2) {  // by cyclic distance, the opposite point once
    product(x, x, c.E, to);
    scaled(x, std::sqrt(2.f), c.E, room);
    for (int64_t j = 1; 2 * j <= c.E; ++j) product(room, x + j, 2 * j == c.E ? j : c.E, to += c.E);
    return;
  }
  const float* end = to;  // of the power below
  for (int64_t power = 2; power <= c.degree; ++power) {
    const int32_t* tails = c.tails + (power - 2) * c.E;
    const float* below = end;
    for (int64_t i = 0; i < c.E; to += tails[i++]) scaled(below - tails[i], x[i], tails[i], to);
    end = to;
  }
  product(out + c.E, c.roots, to - out - c.E, out + c.E);
}

// ---- the state ------------------------------------------------------------------------------------------------------

// N vectors of every row, and with TAIL the number after them: M' = keep M + k v^T where UPDATES, sums += q^T M' where
// READS; keep is 1 unless it FADES. from and to: the rows, ``width`` numbers each.
template <bool FADES, bool UPDATES, bool READS, int N, bool TAIL, typename S>
APART void vectors(const S* from, float* to, int64_t width, int64_t rows, float keep, const float* k, const float* v,
                   const float* q, float* sums) {
  constexpr int GROUP = SUMS / N;  // rows with sums of their own: one sum would wait for itself
  V value[N], total[GROUP][N];
  float tails[GROUP] = {};
  EACH_ROW {
    if (UPDATES) value[r] = load(v + r * L);
    for (int i = 0; i < GROUP; ++i) total[i][r] = V{};
  }
  const float last = UPDATES && TAIL ? v[N * L] : 0.f;
  const V kept = spread(keep);
  const auto row = [&](int64_t a, int i) {
    const float one = UPDATES ? k[a] : 0.f, other = READS ? q[a] : 0.f;
    const V key = spread(one), query = spread(other);
    EACH_ROW {
      V m = load(from + a * width + r * L);
      if (FADES) m *= kept;
      if (UPDATES) {
        m += key * value[r];
        store(to + a * width + r * L, m);
      }
      if (READS) total[i][r] += query * m;
    }
    if (TAIL) {
      float m = number(from[a * width + N * L]);
      if (FADES) m *= keep;
      if (UPDATES) to[a * width + N * L] = m += one * last;
      if (READS) tails[i] += other * m;
    }
  };
  int64_t a = 0;
  for (; a + GROUP <= rows; a += GROUP) {
    _Pragma("GCC unroll 8") for (int i = 0; i < GROUP; ++i) row(a + i, i);
  }
  for (; a < rows; ++a) row(a, 0);
  if (READS) {
    EACH_ROW {
      V sum_of = load(sums + r * L);
      for (int i = 0; i < GROUP; ++i) sum_of += total[i][r];
      store(sums + r * L, sum_of);
    }
    if (TAIL)
      for (int i = 0; i < GROUP; ++i) sums[N * L] += tails[i];
  }
}

// the same of one column, whose value is v
template <bool FADES, bool UPDATES, bool READS, typename S>
APART void column(const S* from, float* to, int64_t width, int64_t rows, float keep, const float* k, float v,
                  const float* q, float* sum_of) {
  float parts[L] = {};  // one sum would wait for itself
  int64_t a = 0;
  const auto row = [&](int64_t at, int i) {
    float m = number(from[at * width]);
    if (FADES) m *= keep;
    if (UPDATES) to[at * width] = m += k[at] * v;
    if (READS) parts[i] += q[at] * m;
  };
  for (; a + L <= rows; a += L)
    for (int i = 0; i < L; ++i) row(a + i, i);
  for (; a < rows; ++a) row(a, 0);
  if (READS)
    for (int i = 0; i < L; ++i) *sum_of += parts[i];
}

// N vectors from number p of every row on, as often as they fit; with the last of them goes a number that would be
// alone. Returns where it ends.
template <bool FADES, bool UPDATES, bool READS, int N, typename S>
int64_t pieces(int64_t p, const S* from, float* to, int64_t width, int64_t rows, float keep, const float* k,
               const float* v, const float* q, float* sums) {
  for (; p + N * L <= width; p += N * L) {
    if (p + N * L + 1 == width) {
      vectors<FADES, UPDATES, READS, N, true>(from + p, to + p, width, rows, keep, k, v + p, q, sums + p);
      return width;
    }
    vectors<FADES, UPDATES, READS, N, false>(from + p, to + p, width, rows, keep, k, v + p, q, sums + p);
  }
  return p;
}

// one token and one query over a strip
template <bool FADES, bool UPDATES, bool READS, typename S>
void pass(const S* from, float* to, int64_t width, int64_t rows, float keep, const float* k, const float* v,
          const float* q, float* sums) {
  int64_t p = pieces<FADES, UPDATES, READS, 4>(0, from, to, width, rows, keep, k, v, q, sums);
  p = pieces<FADES, UPDATES, READS, 2>(p, from, to, width, rows, keep, k, v, q, sums);
  p = pieces<FADES, UPDATES, READS, 1>(p, from, to, width, rows, keep, k, v, q, sums);
  for (; p < width; ++p)
    column<FADES, UPDATES, READS>(from + p, to + p, width, rows, keep, k, UPDATES ? v[p] : 0.f, q, sums + p);
}

// sums (width) += q^T rows
template <typename S>
void read(const S* rows, int64_t width, int64_t count, const float* q, float* sums) {
  pass<false, false, true>(rows, nullptr, width, count, 1.f, nullptr, nullptr, q, sums);
}

// ---- feature maps of one layer --------------------------------------------------------------------------------------

// f(kind as a constant)
template <typename Function>
INLINE void with_kind(int64_t kind, const Function& f) {
  if (kind == EXP) f(std::integral_constant<int, EXP>());
  else if (kind == SQUARE) f(std::integral_constant<int, SQUARE>());
  else if (kind == ELU1) f(std::integral_constant<int, ELU1>());
  else if (kind == RELU) f(std::integral_constant<int, RELU>());
  else f(std::integral_constant<int, SILU>());
}

// places for the numbers of a map, which are written vector by vector
inline int64_t places(const Map& map) { return up(map.made, 16) + 16; }

// The numbers of a map for a row of key head kv, into out (places(map)); whether they make a feature that is not 0.
// room (up(D, 16) + rows).
template <typename T>
bool apply(const Decoder& c, const Map& map, int64_t kv, const T* row, float factor, float* room, float* out) {
  float *u = room, *z = u, square = 0.f;
  widen(row, c.D, map.unit ? inverse_norm(row, c.D) : factor, u);
  if (map.weight != nullptr) {
    z = room + up(c.D, 16);
    clear(z, map.rows);
    read(map.weight + kv * map.heads / c.Hkv * c.D * map.rows, map.rows, c.D, u, z);
  }
  float* to = out;
  for (int64_t k = 0; k < map.count; to += map.blocks[k++].count) {
    const Block& block = map.blocks[k];
    if (block.norm != 0.f) square = dot(u, u, c.D);
    const float shift = block.norm != 0.f ? block.offset - block.norm * square : block.offset;
    for (int64_t i = 0; i < block.count; ++i) to[i] = block.factor * z[block.start + i] + shift;
    if (map.softmax) continue;
    // the last vector ends behind the block, where the next one is written later
    with_kind(block.kind, [&](auto kind) {
      for (int64_t i = 0; i < block.count; i += L)
        store(to + i, block.gain * activated<decltype(kind)::value>(load(to + i)));
    });
  }
  if (map.softmax) {
    std::fill(to, out + up(map.made, L), -std::numeric_limits<float>::infinity());
    V highest = load(out), total = V{};
    for (int64_t i = L; i < map.made; i += L) highest = most(highest, load(out + i));
    float top = highest[0];
    for (int i = 1; i < L; ++i) top = std::max(top, highest[i]);
    for (int64_t i = 0; i < map.made; i += L) {
      const V power = exponential(load(out + i) - top);
      total += power;
      store(out + i, power);
    }
    const float inverse = 1.f / sum(total);
    to = out;
    for (int64_t k = 0; k < map.count; to += map.blocks[k++].count)
      for (int64_t i = 0; i < map.blocks[k].count; ++i) to[i] *= map.blocks[k].gain * inverse;
  }
  const auto some = [&](int64_t from, int64_t until) {
    bool found = false;
    for (int64_t i = from; i < until; ++i) found |= out[i] != 0.f;
    return found;
  };
  return (map.left == 0 || some(0, map.left)) && some(map.left, map.made);
}

// the features of a map from its numbers, twice, into x (2 E)
void twice(const Decoder& c, const Map& map, const float* numbers, float* x) {
  const int64_t left = map.left, each = (map.made - left) / std::max<int64_t>(map.nodes, 1);
  if (left == 0) {
    std::copy_n(numbers, c.E, x);
  } else {
    for (int64_t node = 0; node < map.nodes; ++node)
      for (int64_t i = 0; i < left; ++i)
        scaled(numbers + left + node * each, numbers[i], each, x + (node * left + i) * each);
  }
  std::copy_n(x, c.E, x + c.E);
}

// a row times a factor, or of length one, twice
template <typename T>
void twice(const Decoder& c, const T* row, float scale, float* x) {
  if (c.normalise) scale *= inverse_norm(row, c.D);
  for (int64_t d = 0; d < c.D; ++d) x[d] = x[c.D + d] = number(row[d]) * scale;
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

template <typename T>
const T* row_of(const void* x, const Axes& axes, int64_t b, int64_t h, int64_t t) {
  return static_cast<const T*>(x) + b * axes.batch + h * axes.head + t * axes.token;
}

// place t of kept rows (B, Hkv, room, width)
template <typename T>
T* kept(void* rows, int64_t task, int64_t room, int64_t t, int64_t width) {
  return static_cast<T*>(rows) + (task * room + t) * width;
}

// the first token of a step with which a key is added to the sums: the key that leaves the window, or else its own
inline int64_t first_summed(const Decoder& c, const Step& step, int64_t b) {
  if (c.window == 0) return 0;
  return std::min(step.T, c.window - step.held[b] + c.first - step.opened[b]);
}

// new keys and values go behind those of the window, and the first that leave it into the opening
template <typename T>
void append(const Decoder& c, const Step& step, int64_t task) {
  const int64_t b = task / c.Hkv, kv = task % c.Hkv, space = c.window - step.held[b];
  for (int64_t t = 0; t < step.T; ++t) {
    std::copy_n(row_of<T>(step.k, step.ks, b, kv, t), c.D, kept<T>(step.held_k, task, step.room, step.end + t, c.D));
    std::copy_n(row_of<T>(step.v, step.vs, b, kv, t), c.P, kept<T>(step.held_v, task, step.room, step.end + t, c.P));
    const int64_t leaving = step.end + t - c.window, place = step.opened[b] + t - space;
    if (t < space || place >= c.first) continue;
    std::copy_n(kept<T>(step.held_k, task, step.room, leaving, c.D), c.D,
                kept<T>(step.opening_k, task, c.first, place, c.D));
    std::copy_n(kept<T>(step.held_v, task, step.room, leaving, c.P), c.P,
                kept<T>(step.opening_v, task, c.first, place, c.P));
  }
}

// the key that is added to the sums with token t, and its value
template <typename T>
const T* summed_key(const Decoder& c, const Step& step, int64_t task, int64_t t) {
  if (c.window > 0) return kept<T>(step.held_k, task, step.room, step.end + t - c.window, c.D);
  return row_of<T>(step.k, step.ks, task / c.Hkv, task % c.Hkv, t);
}

template <typename T>
const T* summed_value(const Decoder& c, const Step& step, int64_t task, int64_t t) {
  if (c.window > 0) return kept<T>(step.held_v, task, step.room, step.end + t - c.window, c.P);
  return row_of<T>(step.v, step.vs, task / c.Hkv, task % c.Hkv, t);
}

// The numbers of the maps for all keys of a key head that are added to the sums, and then all its queries. Whether each
// guarded vector has a feature that is not 0.
template <typename T>
bool layers(const Decoder& c, const Step& step, int64_t task, float* out, Scratch& scratch) {
  const int64_t b = task / c.Hkv, kv = task % c.Hkv, groups = c.H / c.Hkv, first = first_summed(c, step, b);
  scratch.begin(up(c.D, 16) + std::max(c.query.rows, c.key.rows));
  float* room = scratch.take(up(c.D, 16) + std::max(c.query.rows, c.key.rows));
  bool good = true;
  for (int64_t t = 0; t < step.T; ++t, out += places(c.key)) {
    if (t < first) continue;
    const T* key = summed_key<T>(c, step, task, t);
    good &= apply(c, c.key, kv, key, c.key_scale, room, out) || !c.key.guarded;
  }
  for (int64_t t = 0; t < step.T; ++t)
    for (int64_t g = 0; g < groups; ++g, out += places(c.query)) {
      const int64_t h = kv * groups + g;
      const T* query = row_of<T>(step.q, step.qs, b, h, t);
      good &= apply(c, c.query, kv, query, c.scale[h], room, out) || !c.query.guarded;
    }
  return good;
}

// ---- the window -----------------------------------------------------------------------------------------------------

// out (n) = x . each of n rows
template <typename T>
void scores(const float* x, const T* rows, int64_t n, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8, rows += 8 * width) {
    V sums[8] = {};
    int64_t d = 0;
    for (; d + L <= width; d += L) {
      const V part = load(x + d);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sums[j] += part * load(rows + j * width + d);
    }
    V8 eight[8];
    for (int j = 0; j < 8; ++j) eight[j] = as_eight(sums[j]);
    transpose(eight);
    V8 total = ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]));
    for (; d < width; ++d)
      for (int j = 0; j < 8; ++j) total[j] += x[d] * number(rows[j * width + d]);
    put8(out + i, total);
  }
  for (; i < n; ++i, rows += width) out[i] = dot(x, rows, width);
}

// The row of a query from ``sums`` (P + 1), what it read of the state: the exponentials of the opening and of the
// window are added, and all is divided by one sum. Both parts are multiplied by e^-M, with M the larger one of the
// largest score and the logarithm of the other sum. A sum that is not positive counts as none. x (D) and weights
// (first + window + 16) are room.
template <typename T>
void windowed(const Decoder& c, const Step& step, int64_t task, int64_t t, const T* query, int64_t h, float* sums,
              float* x, float* weights) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  const int64_t b = task / c.Hkv, after = step.held[b] + t + 1, window = std::min(after, c.window);
  const int64_t opening = std::min(c.first, step.opened[b] + after - window), n = opening + window;
  const int64_t start = step.end + t + 1 - window;
  widen(query, c.D, c.near[h], x);
  scores(x, kept<T>(step.opening_k, task, c.first, 0, c.D), opening, c.D, weights);
  scores(x, kept<T>(step.held_k, task, step.room, start, c.D), window, c.D, weights + opening);
  std::fill(weights + n, weights + up(n, L), none);
  float top = none;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, weights[i]);
  const float mass = sums[c.P] * c.share[h];
  // sums below e^-80 are not scaled up to one, which would overflow
  if (mass > 0.f) top = std::max(top, std::max(std::log(mass), -80.f));
  if (top == none) top = 0.f;
  const float scale = mass > 0.f ? std::exp(-top) : 0.f;
  V total = V{};
  for (int64_t i = 0; i < n; i += L) {
    const V weight = exponential(load(weights + i) - top);
    total += weight;
    store(weights + i, weight);
  }
  const float whole = sum(total) + scale * mass;
  scaled(sums, scale * c.share[h], c.P, sums);
  read(kept<T>(step.opening_v, task, c.first, 0, c.P), c.P, opening, weights, sums);
  read(kept<T>(step.held_v, task, step.room, start, c.P), c.P, window, weights + opening, sums);
  scaled(sums, whole == 0.f ? 0.f : 1.f / whole, c.P, sums);
}

// ---- a key head -----------------------------------------------------------------------------------------------------

// made: what ``layers`` has written, without maps null
template <typename T, bool FADES>
void head(const Decoder& c, const Step& step, int64_t task, const float* made, Scratch& scratch) {
  const int64_t b = task / c.Hkv, kv = task % c.Hkv, groups = c.H / c.Hkv, width = c.P + (c.anchor == ROW);
  const int64_t tokens = step.T, first = first_summed(c, step, b), near = c.window > 0 ? c.first + c.window + 16 : 0;
  scratch.begin(3 * c.E + c.D + near + tokens * (1 + groups) * (c.F + width) + 16 * (6 + 3 * tokens * (1 + groups)));
  float *x = scratch.take(2 * c.E), *room = scratch.take(c.E), *keys = scratch.take(tokens * c.F);
  float *values = scratch.take(tokens * width), *queries = scratch.take(tokens * groups * c.F);
  float *sums = scratch.take(tokens * groups * width), *query = scratch.take(c.D), *weights = scratch.take(near);
  std::fill(sums, sums + tokens * groups * width, 0.f);
  for (int64_t t = 0; t < tokens; ++t) {
    if (t >= first) {
      if (made != nullptr) twice(c, c.key, made + t * places(c.key), x);
      else twice(c, summed_key<T>(c, step, task, t), c.key_scale, x);
      features(c, x, room, keys + t * c.F);
      widen(summed_value<T>(c, step, task, t), c.P, 1.f, values + t * width);
      if (c.anchor == ROW) values[t * width + c.P] = 1.f;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t h = kv * groups + g;
      float* phi = queries + (t * groups + g) * c.F;
      if (made != nullptr) twice(c, c.query, made + tokens * places(c.key) + (t * groups + g) * places(c.query), x);
      else twice(c, row_of<T>(step.q, step.qs, b, h, t), c.scale[h], x);
      features(c, x, room, phi);
      product(phi, c.weights + (c.heads_weigh ? h * c.F : 0), c.F, phi);
    }
  }
  const int64_t strip = std::max<int64_t>(L, STRIP / width / L * L);
  for (int64_t a = 0; a < c.F; a += strip) {
    const int64_t rows = std::min(strip, c.F - a);
    const float* from = step.before + (task * c.F + a) * width;
    float* to = step.after + (task * c.F + a) * width;
    if (first == tokens && from != to) std::copy_n(from, rows * width, to);
    for (int64_t t = 0; t < tokens; ++t) {
      const float *k = keys + t * c.F + a, *v = values + t * width, *q = queries + t * groups * c.F + a;
      float* sum_of = sums + t * groups * width;
      const float keep = FADES ? step.keep[task * tokens + t] : 1.f;
      if (t < first) {
        for (int64_t g = 0; g < groups; ++g) read(from, width, rows, q + g * c.F, sum_of + g * width);
      } else if (c.include_self) {
        pass<FADES, true, true>(from, to, width, rows, keep, k, v, q, sum_of);
        for (int64_t g = 1; g < groups; ++g) read(to, width, rows, q + g * c.F, sum_of + g * width);
      } else {  // time passes before the query reads, although its own key is not seen
        for (int64_t g = 0; g < groups; ++g)
          pass<FADES, false, true>(from, nullptr, width, rows, keep, nullptr, v, q + g * c.F, sum_of + g * width);
        pass<FADES, true, false>(from, to, width, rows, keep, k, v, nullptr, nullptr);
      }
      if (t >= first) from = to;
    }
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < groups; ++g) {
      float* total = sums + (t * groups + g) * width;
      const int64_t seen = step.count - step.padding[b] + t + c.include_self, h = kv * groups + g;
      float factor = 1.f;
      if (c.window > 0) {
        windowed(c, step, task, t, row_of<T>(step.q, step.qs, b, h, t), h, total, query, weights);
      } else if (c.anchor == ROW) {  // a positive link's row whose sum came out negative has cancelled to rounding
        const bool lost = c.positive && total[c.P] < 0.f;
        factor = lost ? std::numeric_limits<float>::quiet_NaN() : inverse_sum(total[c.P]);
      }
      if (c.anchor == COUNT) factor = seen > 0 ? 1.f / static_cast<float>(seen) : 0.f;
      T* y = static_cast<T*>(step.y) + ((b * c.H + kv * groups + g) * tokens + t) * c.P;
      for (int64_t p = 0; p < c.P; ++p) put(y + p, total[p] * factor);
    }
}

enum Outcome { DONE = 0, NO_MEMORY = 1, OFF = 2, LOST = 3 };

template <typename T>
int run(const Decoder& c, const Step& step) {
  static thread_local Scratch scratch;
  const int64_t tasks = c.B * c.Hkv;
  if (c.window > 0)
    for (int64_t i = 0; i < tasks; ++i) append<T>(c, step, i);
  float* made = nullptr;
  const int64_t each = step.T * (places(c.key) + c.H / c.Hkv * places(c.query));
  if (c.query.blocks != nullptr) {  // all of them before a state is changed: a step that is refused changes none
    try {
      scratch.begin(tasks * each);
    } catch (const std::bad_alloc&) {
      return NO_MEMORY;
    }
    made = scratch.take(tasks * each);
    std::atomic<bool> good{true};
    const bool team = c.B * c.H * step.T * c.D * std::max<int64_t>(c.query.rows, 1) > 4 * TEAM;
    const int failed = each_short_task<Scratch>(tasks, team, [&](int64_t i, Scratch& own) {
      if (!layers<T>(c, step, i, made + i * each, own)) good = false;
    });
    if (failed) return failed;
    if (!good) return LOST;
  }
  const bool team = tasks * (c.F + c.window) * c.P * step.T > TEAM;
  const int failed = each_short_task<Scratch>(tasks, team, [&](int64_t i, Scratch& own) {
    const float* own_made = made == nullptr ? nullptr : made + i * each;
    (step.keep ? head<T, true> : head<T, false>)(c, step, i, own_made, own);
  });
  for (int64_t b = 0; c.window > 0 && !failed && b < c.B; ++b) {
    const int64_t after = step.held[b] + step.T;
    step.opened[b] = std::min(c.first, step.opened[b] + std::max<int64_t>(after - c.window, 0));
    step.held[b] = std::min(after, c.window);
  }
  return failed;
}

}  // namespace

extern "C" {

// Returns an Outcome. NO_MEMORY: nothing of ``after`` is to be used. OFF: the environment has kernels switched off.
// LOST: all features of a guarded vector are 0. After the last two nothing has changed.
int zonal_decode(const Decoder* decoder, const Step* step) {
  if (switched_off()) return OFF;
  return (step->type == FLOAT ? run<float> : step->type == BFLOAT ? run<uint16_t> : run<Float16>)(*decoder, *step);
}
}
