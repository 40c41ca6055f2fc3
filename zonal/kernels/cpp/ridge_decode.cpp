// Few tokens after a memory of ridge or Koopman read-outs, in O(r^2) each: a token's query reads y = C P (M P)^power q, its key and value are
// taken in, G += z z^T, C += v z^T, M += z z'^T with z' the key before, and P -= g g^T with g = P z / sqrt(1 + z . P z). All in float64, as the
// memory is. This is a decoder's step; P comes in, and whoever calls makes it again from G every so often.
//
// To write four matrices at each token takes several times as long as to read what is needed of them. So the last few tokens stay beside the
// sums, a row [z, v, g] each: a read-out goes through both, and only every so often the rows are added to the sums.
//
// Where the past fades, each token multiplies all sums before it by a rate l, and gives back r rho (1 - l) of the ridge in one direction e. A
// read-out does not change when all sums are multiplied by one number: so a token after the sums has a weight w instead, which grows as
// the past fades, and P -= g g^T + h h^T with g = sqrt(w) P z / sqrt(1 + w z . P z), and h alike of the pseudo-key. The row ends with h, w and
// r (1 - l). When rows are added to the sums, these are divided by the last weight. P stays symmetric to the last bit: what is not
// would be divided by every rate.

#include "common.hpp"

namespace {

constexpr int D = 4;               // doubles of a vector
constexpr int64_t TEAM = 1 << 18;  // numbers of the state from which on to wake the other threads is worth it (some ten microseconds)
constexpr int64_t SETTLED = 1;     // tokens that as much is read for as to write all sums
constexpr int64_t TOKENS = 16;     // of a call, at most
typedef double VD __attribute__((vector_size(32), aligned(8), may_alias));
inline VD& lanes(double* p) { return *reinterpret_cast<VD*>(p); }
inline const VD& lanes(const double* p) { return *reinterpret_cast<const VD*>(p); }

}  // namespace

extern "C" {

constexpr int64_t LATE = 16;  // tokens that stay beside the sums, at most

// What zonal/kernels/ridge_decode.py fills in. Last axes of q (B, H, T, r), k (B, Hkv, T, r), v (B, Hkv, T, P)
// have stride 1; all in bfloat16, or else in float32. Of the memory, contiguous: gram, cross, inverse, and for powers past 0 shift, first,
// last (else null), of count tokens, of which padding (B) are none; then the rows of ``late`` tokens more (B, Hkv, 2 r + P). The rows of
// the new tokens go to now (T, B, Hkv, 2 r + P), or, where there is after, all are added to the sums there, which share nothing with those before.
// Where the past fades: level (B, Hkv, r), what is left of the ridge in units of ridge (Hkv); decay (B, Hkv, T), log rates; and
// rows are longer by r + 2. Without tokens (T = 0) the late rows are added to the sums.
struct Step {
  const void *q, *k, *v;
  Axes qs, ks, vs;
  int64_t B, H, Hkv, T, r, P, power, bfloat16, include_self;
  double limit;         // longer keys are shortened to it; 0: none
  const double* scale;  // (H) of the queries
  const int64_t* powers;  // (H); power: whether any is past 0
  const double *ridge, *decay;
  const double *gram, *cross, *inverse, *shift, *first, *last, *level;
  double *gram_after, *cross_after, *inverse_after, *shift_after, *first_after, *last_after, *level_after;
  int64_t count;
  const int64_t* padding;
  int64_t late;
  const double* rows[LATE];
  double* now;
  void* y;  // (B, H, T, P)
};
}

namespace {

// X rows of out (X, rows) = x (X, n) a^T: a (rows, n) is read once for all of them
template <int X>
APART void times(const double* a, const double* x, int64_t rows, int64_t n, double* out) {
  constexpr int N = 8 / X;  // so many sums that none waits for itself
  int64_t i = 0;
  for (; i + N <= rows; i += N) {
    VD sums[X][N] = {};
    int64_t j = 0;
    for (; j + D <= n; j += D) {
      VD numbers[X];
      _Pragma("GCC unroll 2") for (int k = 0; k < X; ++k) numbers[k] = lanes(x + k * n + j);
      EACH_ROW {
        const VD row = lanes(a + (i + r) * n + j);
        _Pragma("GCC unroll 2") for (int k = 0; k < X; ++k) sums[k][r] += row * numbers[k];
      }
    }
    _Pragma("GCC unroll 2") for (int k = 0; k < X; ++k) EACH_ROW {
      const VD& found = sums[k][r];
      double total = (found[0] + found[1]) + (found[2] + found[3]);
      for (int64_t t = j; t < n; ++t) total += a[(i + r) * n + t] * x[k * n + t];
      out[k * rows + i + r] = total;
    }
  }
  for (; i < rows; ++i)
    for (int k = 0; k < X; ++k) {
      double total = 0;
      for (int64_t j = 0; j < n; ++j) total += a[i * n + j] * x[k * n + j];
      out[k * rows + i] = total;
    }
}

// x . y
double inner(const double* x, const double* y, int64_t n) {
  VD sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * D <= n; i += 2 * D) {
    sums[0] += lanes(x + i) * lanes(y + i);
    sums[1] += lanes(x + i + D) * lanes(y + i + D);
  }
  const VD both = sums[0] + sums[1];
  double total = (both[0] + both[1]) + (both[2] + both[3]);
  for (; i < n; ++i) total += x[i] * y[i];
  return total;
}

// to += factor x
void add(const double* x, double factor, int64_t n, double* to) {
  const VD all = VD{} + factor;
  int64_t i = 0;
  for (; i + D <= n; i += D) lanes(to + i) += all * lanes(x + i);
  for (; i < n; ++i) to[i] += factor * x[i];
}

// to (rows, n) = from + sum_k a_k b_k^T times a sign: column i of all a at a[i * count], row k of all b at b[k]
APART void add_outer(const double* from, const double* a, const double* const* b, int64_t count, double sign, int64_t rows, int64_t n, double* to) {
  for (int64_t i = 0; i < rows; ++i, a += count, from += n, to += n) {
    int64_t j = 0;
    while (j + D <= n)
      with_rows<8>((n - j) / D, [&](auto vectors) {
        constexpr int N = decltype(vectors)::value;
        VD sums[N];
        EACH_ROW sums[r] = lanes(from + j + r * D);
        for (int64_t k = 0; k < count; ++k) {
          const VD all = VD{} + sign * a[k];
          EACH_ROW sums[r] += all * lanes(b[k] + j + r * D);
        }
        EACH_ROW lanes(to + j + r * D) = sums[r];
        j += N * D;
      });
    for (; j < n; ++j) {
      double total = from[j];
      for (int64_t k = 0; k < count; ++k) total += sign * a[k] * b[k][j];
      to[j] = total;
    }
  }
}

// numbers of a token's row
int64_t width(const Step& c) { return 2 * c.r + c.P + (c.level == nullptr ? 0 : c.r + 2); }

// x times a number
void scale(double* x, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// A head's sums, and the tokens after them: rows of keys, the keys before them, values, and what the inverse has lost by them.
struct State {
  const Step& c;
  const bool fades;
  const int64_t real;  // tokens in the sums
  const double *gram, *cross, *inverse, *shift, *last;
  int64_t n = 0;
  const double *z[LATE + TOKENS], *before[LATE + TOKENS], *v[LATE + TOKENS], *g[LATE + TOKENS], *h[LATE + TOKENS];
  double weights[LATE + TOKENS];

  State(const Step& step, int64_t task)
      : c(step), fades(c.level != nullptr), real(c.count - c.padding[task / c.Hkv]), gram(c.gram + task * c.r * c.r), cross(c.cross + task * c.P * c.r), inverse(c.inverse + task * c.r * c.r),
        shift(c.power > 0 ? c.shift + task * c.r * c.r : nullptr), last(c.power > 0 ? c.last + task * c.r : nullptr) {
    for (int64_t i = 0; i < c.late; ++i) take(c.rows[i] + task * width(c));
  }

  void take(const double* row) {
    before[n] = n > 0 ? z[n - 1] : last;
    z[n] = row;
    v[n] = row + c.r;
    g[n] = row + c.r + c.P;
    h[n] = g[n] + c.r;
    weights[n] = fades ? h[n][c.r] : 1;
    ++n;
  }

  double weight() const { return n > 0 ? weights[n - 1] : 1; }
  int64_t direction(int64_t i) const { return (real + i) % c.r; }

  // out = P x, from what the inverse of the sums makes of x
  void solved(const double* x, double* out) const {
    for (int64_t i = 0; i < n; ++i) {
      add(g[i], -inner(g[i], x, c.r), c.r, out);
      if (fades) add(h[i], -inner(h[i], x, c.r), c.r, out);
    }
  }

  // what the inverse loses by the pseudo-key of the newest token, whose squared length times its weight is ``amount``
  void give_back(double amount, double* out) const {
    const int64_t d = direction(n - 1);
    std::memcpy(out, inverse + d * c.r, sizeof(double) * c.r);
    for (int64_t i = 0; i < n; ++i) {
      add(g[i], -g[i][d], c.r, out);
      if (i + 1 < n) add(h[i], -h[i][d], c.r, out);
    }
    scale(out, std::sqrt(amount / (1 + amount * out[d])), c.r);
  }

  // y of query head h, whose scaled query is x, and with the inverse of the sums y
  template <typename T>
  void read(int64_t b, int64_t h, int64_t t, double* x, double* y, double* room) const {
    solved(x, y);
    for (int64_t k = 0; k < c.powers[h]; ++k) {
      times<1>(shift, y, c.r, c.r, x);
      for (int64_t i = 0; i < n; ++i) add(z[i], weights[i] * inner(before[i], y, c.r), c.r, x);
      times<1>(inverse, x, c.r, c.r, y);
      solved(x, y);
    }
    times<1>(cross, y, c.P, c.r, room);
    for (int64_t i = 0; i < n; ++i) add(v[i], weights[i] * inner(z[i], y, c.r), c.P, room);
    T* out = static_cast<T*>(c.y) + ((b * c.H + h) * c.T + t) * c.P;
    for (int64_t p = 0; p < c.P; ++p) put(out + p, static_cast<float>(room[p]));
  }

  // all rows into the sums
  void settle(int64_t task, double* room) const {
    const int64_t square = c.r * c.r;
    double *gram_after = c.gram_after + task * square, *cross_after = c.cross_after + task * c.P * c.r;
    double* inverse_after = c.inverse_after + task * square;
    turn(g, c.r, room);
    add_outer(inverse, room, g, n, -1, c.r, c.r, inverse_after);
    if (fades) {
      turn(h, c.r, room);
      add_outer(inverse_after, room, h, n, -1, c.r, c.r, inverse_after);
    }
    turn(v, c.P, room, weights);
    add_outer(cross, room, z, n, 1, c.P, c.r, cross_after);
    turn(z, c.r, room, weights);
    add_outer(gram, room, z, n, 1, c.r, c.r, gram_after);
    const double keep = 1 / weight();
    if (fades) {
      scale(gram_after, keep, square);
      scale(cross_after, keep, c.P * c.r);
      scale(inverse_after, weight(), square);
      for (int64_t i = 0; i < c.r; ++i)
        for (int64_t j = 0; j < i; ++j) inverse_after[i * c.r + j] = inverse_after[j * c.r + i];
      double* level = c.level_after + task * c.r;
      std::memcpy(level, c.level + task * c.r, sizeof(double) * c.r);
      for (int64_t i = 0; i < n; ++i) level[direction(i)] += weights[i] * h[i][c.r + 1];
      scale(level, keep, c.r);
    }
    if (c.power == 0) return;
    double *shift_after = c.shift_after + task * square, *first_after = c.first_after + task * c.r;
    add_outer(shift, room, before, n, 1, c.r, c.r, shift_after);
    std::memcpy(first_after, real > 0 ? c.first + task * c.r : z[0], sizeof(double) * c.r);
    std::memcpy(c.last_after + task * c.r, z[n - 1], sizeof(double) * c.r);
    if (!fades) return;
    scale(shift_after, keep, square);
    scale(first_after, real > 0 ? keep : keep * weights[0], c.r);
  }

  // rows as columns, times a factor each where there are some
  void turn(const double* const* rows, int64_t numbers, double* to, const double* factors = nullptr) const {
    for (int64_t i = 0; i < numbers; ++i)
      for (int64_t k = 0; k < n; ++k) to[i * n + k] = factors == nullptr ? rows[k][i] : factors[k] * rows[k][i];
  }
};

template <typename T>
void head(const Step& c, int64_t task, Scratch& scratch) {
  const int64_t b = task / c.Hkv, kv = task % c.Hkv, groups = c.H / c.Hkv, most = std::max(c.r, c.P), size = width(c);
  const bool settles = c.gram_after != nullptr;
  const int64_t numbers = (LATE + c.T) * most, all = (groups + 1) * c.r;
  scratch.begin(2 * (numbers + 2 * all + c.T * size));
  const auto take = [&](int64_t n) { return reinterpret_cast<double*>(scratch.take(2 * n)); };
  double *room = take(numbers), *xs = take(all), *ys = take(all);  // the key and the queries of a token, and with the inverse of the sums
  double* rows = settles ? take(c.T * size) : c.now + task * size;
  const int64_t step = settles ? size : c.B * c.Hkv * size;
  State state(c, task);
  for (int64_t t = 0; t < c.T; ++t) {
    const T* k = static_cast<const T*>(c.k) + b * c.ks.batch + kv * c.ks.head + t * c.ks.token;
    const T* value = static_cast<const T*>(c.v) + b * c.vs.batch + kv * c.vs.head + t * c.vs.token;
    double *z = rows + t * step, *v = z + c.r, *g = v + c.P;
    for (int64_t d = 0; d < c.r; ++d) xs[d] = number(k[d]);
    const double norm = std::sqrt(inner(xs, xs, c.r));
    if (c.limit > 0 && !(norm <= c.limit))
      for (int64_t d = 0; d < c.r; ++d) xs[d] *= c.limit / norm;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t h = kv * groups + i;
      const T* q = static_cast<const T*>(c.q) + b * c.qs.batch + h * c.qs.head + t * c.qs.token;
      for (int64_t d = 0; d < c.r; ++d) xs[(i + 1) * c.r + d] = c.scale[h] * number(q[d]);
    }
    int64_t i = 0;
    for (; i + 2 <= groups + 1; i += 2) times<2>(state.inverse, xs + i * c.r, c.r, c.r, ys + i * c.r);
    if (i <= groups) times<1>(state.inverse, xs + i * c.r, c.r, c.r, ys + i * c.r);
    const auto read = [&] {
      for (int64_t j = 0; j < groups; ++j) state.read<T>(b, kv * groups + j, t, xs + (j + 1) * c.r, ys + (j + 1) * c.r, room);
    };
    if (!c.include_self) read();
    state.solved(xs, ys);
    const double log_rate = state.fades ? c.decay[task * c.T + t] : 0, weight = state.weight() * std::exp(-log_rate);
    const double lost = std::sqrt(weight / (1 + weight * inner(xs, ys, c.r)));
    for (int64_t d = 0; d < c.r; ++d) {
      z[d] = xs[d];
      g[d] = ys[d] * lost;
    }
    for (int64_t p = 0; p < c.P; ++p) v[p] = number(value[p]);
    if (state.fades) {
      double* tail = g + 2 * c.r;
      tail[0] = weight;
      tail[1] = -std::expm1(log_rate) * static_cast<double>(c.r);
    }
    state.take(z);
    if (state.fades) state.give_back(weight * c.ridge[kv] * g[2 * c.r + 1], g + c.r);
    if (c.include_self) read();
  }
  if (settles) state.settle(task, room);
}

}  // namespace

extern "C" {

// Returns 0, or 1 when memory ran out; nothing of what comes after is then to be used. 2: the environment has kernels switched off, and
// nothing was done with the tokens.
int zonal_ridge_step(const Step* step) {
  if (step->T > 0 && switched_off()) return 2;
  const Step& c = *step;
  const int64_t tasks = c.B * c.Hkv, rounds = c.T + (c.gram_after == nullptr ? 0 : SETTLED);
  return each_short_task<Scratch>(tasks, tasks * c.r * (3 * c.r + c.P) * rounds > TEAM, [&](int64_t i, Scratch& scratch) {
    if (c.bfloat16) head<uint16_t>(c, i, scratch);
    else head<float>(c, i, scratch);
  });
}
}
