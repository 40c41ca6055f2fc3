// Attention to the largest of a few candidates of each query: softmax over its K largest scores among the keys that share a bucket with it.
//
// Tables hold the keys by bucket, in order of position within each; a query's candidates are an interval of places in every table, so that who sees
// whom is in the intervals. Queries are walked bucket by bucket: neighbours meet the same keys, which the cache still has. Backward makes
// candidates and scores again and keeps two numbers a row.
//
// Scores are dot products, or minus a weighted sum of distances, one a factor, on parts of a point. Distances come from sums of squared
// differences, not from products: near points lose no digits in float32.

#include "common.hpp"

#include <memory>
#include <vector>

extern "C" {

// What zonal/kernels/sparse.py fills in. Last axes of q (B, H, T, D + 3F), k (B, Hkv, S, D + 2F), v and dy have stride 1. Of F factors (0: dot
// products): kinds, sizes, eps; after the D numbers of its parts a query has F weights, F radii and their F sinh, a key F radii and F sinh. For
// an angle the radius is 1 where the direction is missing, else 0. order (B, Hkv, L, S): keys by table; start, stop (B, H, T, L): places in it; walk (B, H, T): queries in turn.
struct Sparse {
  const float *q, *k, *v;
  const int32_t *order, *start, *stop, *walk;
  const int64_t *kinds, *sizes;
  const float* eps;
  Strides qs, ks, vs, dys;
  int64_t B, H, Hkv, T, S, D, P, L, F, top;
  float *y, *least, *whole;  // (B, H, T, P); (B, H, T): the least score kept and log sum exp of those kept
  int32_t* met;              // (B, H, T): how many candidates there were, or null
  const float* dy;
  float *dq, *dk, *dv;       // contiguous, zeros
};

// Codes of queries (B, H, L, T) and keys (B, Hkv, L, S) in [0, 2^16); lo, hi, position (T): the keys that each query may see and where it stands, none
// of which ever falls;
// key_mask (B, S) or null; reach (L). Fills order, start, stop and walk of ``Sparse``; the walk goes by the codes of the last table.
struct Places {
  const int32_t *asked, *held, *lo, *hi, *position, *reach;
  const uint8_t* key_mask;
  int64_t B, H, Hkv, T, S, L;
  int32_t *order, *start, *stop, *walk;
};
}

namespace {

enum Kind { EUCLIDEAN = 0, SQUARED = 1, SPHERE = 2, HYPERBOLIC = 3 };
constexpr float OPPOSITE = 4.f - 4e-2f;  // a squared gap of directions beyond which that to the opposite point is taken
constexpr int64_t CODES = 1 << 16;
constexpr int64_t CHUNK = 256;  // queries of a task, forward
constexpr int64_t BLOCK = 32;   // tokens that are hashed together

// ln(1 + x) of x >= 0: what 1 + x loses is put back by its own derivative
inline V ln1p(V x) {
  const V u = x + 1.f;
  return logarithm(u) + (x - (u - 1.f)) / u;
}

// atan(y / x) of y, x > 0
inline V angle(V y, V x) {
  const I steep = y > x;
  const V small = steep ? x : y, large = steep ? y : x;
  const I wide = small > 0.41421356f * large;  // tan(pi / 8)
  const V t = (wide ? small - large : small) / (wide ? small + large : large), z = t * t;
  V p = spread(8.05374449538e-2f);
  p = p * z - 1.38776856032e-1f;
  p = p * z + 1.99777106478e-1f;
  p = p * z - 3.33329491539e-1f;
  const V a = p * z * t + t + (wide ? spread(0.785398163397f) : V{});
  return steep ? 1.57079632679f - a : a;
}

inline V sinh(V x) {
  const V z = x * x;
  const V series = x + x * z * (1.f / 6 + z * (1.f / 120 + z * (1.f / 5040)));
  const V grown = exp2(x * LOG2E), far = 0.5f * (grown - 1.f / grown);
  return z < 0.5f ? series : far;
}

// A distance and its derivative by the squared gap, or for hyperbolic space by delta.
struct Distance {
  V h, slope, delta;
};

// the angle or distance that eps alone makes
inline float by_eps(int64_t kind, float eps) { return kind == SPHERE ? 2.f * std::atan2(eps, std::sqrt(4.f + eps * eps)) : kind == HYPERBOLIC ? 2.f * std::asinh(0.5f * eps) : 0.f; }

// own: ``by_eps``
inline Distance distance(int64_t kind, float eps, float own, V gap, float a, float sinh_a, V b, V sinh_b) {
  if (kind == SQUARED) return {gap, spread(1.f), gap};
  if (kind == EUCLIDEAN) {
    const V r = root(gap + eps * eps);
    return {r - eps, 0.5f / r, gap};
  }
  if (kind == SPHERE) {
    // below zero it is that to the opposite point, negated; a missing direction is at a right angle to all
    const V g = gap < 0.f ? 4.f + gap : gap + (a + b);
    const V near = root(g + eps * eps), far = root((gap < 0.f ? -gap : most(4.f - g, V{})) + eps * eps);
    return {2.f * angle(near, far) - own, 1.f / (near * far), g};
  }
  const V half = sinh(0.5f * (a - b)), delta = half * half + sinh_a * sinh_b * gap * 0.25f + 0.25f * eps * eps;
  const V r = root(delta), one = root(1.f + delta);
  return {2.f * ln1p(r + delta / (1.f + one)) - own, 1.f / (r * one), delta};
}

// the sum of each of eight rows, in less than turning them into columns takes
INLINE V8 totals(const V (&rows)[8]) {
  V8 x[8];
  for (int i = 0; i < 8; ++i) x[i] = as_eight(rows[i]);
#if __has_builtin(__builtin_shufflevector)
  V8 y[4], z[2];
  for (int i = 0; i < 4; ++i)
    y[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int i = 0; i < 2; ++i)
    z[i] = __builtin_shufflevector(y[2 * i], y[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(y[2 * i], y[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(z[0], z[1], 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(z[0], z[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  transpose(x);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#endif
}

// sums over eight rows at once, of products or of squared differences
template <bool GAP>
INLINE void eight(const float* q, const float* const (&k)[8], int64_t n, float* out) {
  V x[8] = {};
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    const V a = load(q + i);
    _Pragma("GCC unroll 8") for (int r = 0; r < 8; ++r) {
      const V b = load(k[r] + i);
      if constexpr (GAP) {
        const V gap = a - b;
        x[r] += gap * gap;
      } else {
        x[r] += a * b;
      }
    }
  }
  V8 total = totals(x);
  for (; i < n; ++i) {
    V8 rest;
    for (int r = 0; r < 8; ++r) rest[r] = GAP ? (q[i] - k[r][i]) * (q[i] - k[r][i]) : q[i] * k[r][i];
    total += rest;
  }
  put8(out, total);
}

// A thread's room, and the candidates of the query at hand.
struct Room {
  std::vector<uint8_t> seen;  // in which turn, of 255, a key was last met: small enough for the nearest cache
  std::vector<int32_t> key;
  std::vector<float> score, gap, radius, sinh, own;  // own: ``by_eps`` of each factor
  uint8_t turn = 0;
  int64_t n = 0;

  Room(const Sparse& c, int64_t most)
      : seen(c.S, 0), key(most + 16), score(most + 16), gap(c.F ? (most + 16) * c.F : 0), radius(c.F ? (most + 16) * c.F : 0), sinh(c.F ? (most + 16) * c.F : 0) {
    for (int64_t f = 0; f < c.F; ++f) own.push_back(by_eps(c.kinds[f], c.eps[f]));
  }
  int64_t row() const { return static_cast<int64_t>(key.size()); }
};

// the most places that any query has
int64_t most_places(const Sparse& c) {
  int64_t most = 0;
  const int64_t rows = c.B * c.H;
#pragma omp parallel for schedule(static) reduction(max : most)
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t t = 0; t < c.T; ++t) {
      int64_t n = 0;
      for (int64_t l = (i * c.T + t) * c.L; l < (i * c.T + t + 1) * c.L; ++l) n += c.stop[l] - c.start[l];
      most = std::max(most, n);
    }
  return std::min(most, c.S);
}

const float* key_row(const Sparse& c, int64_t b, int64_t g, int64_t s) { return c.k + b * c.ks.batch + g * c.ks.head + s * c.ks.token; }

// each key once
void collect(const Sparse& c, Room& room, int64_t b, int64_t h, int64_t t) {
  const int64_t g = h / (c.H / c.Hkv);
  if (++room.turn == 0) {
    std::fill(room.seen.begin(), room.seen.end(), 0);
    room.turn = 1;
  }
  const uint8_t turn = room.turn;
  uint8_t* seen = room.seen.data();
  int32_t* key = room.key.data();
  const int64_t at = ((b * c.H + h) * c.T + t) * c.L;
  const int32_t* order = c.order + (b * c.Hkv + g) * c.L * c.S;
  for (int64_t l = 0; l < c.L; ++l)
    for (int32_t i = c.start[at + l]; i < c.stop[at + l]; i += 16) __builtin_prefetch(order + l * c.S + i);
  int64_t n = 0;
  for (int64_t l = 0; l < c.L; ++l, order += c.S)
    for (int32_t i = c.start[at + l]; i < c.stop[at + l]; ++i) {
      const int32_t s = order[i];
      key[n] = s;
      n += seen[s] != turn;
      seen[s] = turn;
    }
  room.n = n;
}

// f(i, rows of the candidates i to i + 7), of which the last ones stand in for what is past the end
template <typename F>
INLINE void by_eight(const Sparse& c, const Room& room, int64_t b, int64_t g, const F& f) {
  const int64_t n = room.n, width = c.D + 2 * c.F, token = c.ks.token;
  const float* first = key_row(c, b, g, 0);
  const int32_t* key = room.key.data();
  for (int64_t i = 0; i < n; i += 8) {
    const float* k[8];
    for (int r = 0; r < 8; ++r) k[r] = first + key[std::min(i + r, n - 1)] * token;
    if (i + 16 <= n)
      for (int r = 8; r < 16; ++r)
        for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(first + key[i + r] * token + d);
    f(i, k);
  }
}

void gaps(const Sparse& c, Room& room, int64_t b, int64_t g, const float* q) {
  const int64_t row = room.row();
  by_eight(c, room, b, g, [&](int64_t i, const float* const (&k)[8]) {
    int64_t from = 0;
    for (int64_t f = 0; f < c.F; from += c.sizes[f++]) {
      const float* part[8];
      for (int r = 0; r < 8; ++r) {
        part[r] = k[r] + from;
        if (c.kinds[f] < SPHERE) continue;
        room.radius[f * row + i + r] = k[r][c.D + f];
        room.sinh[f * row + i + r] = k[r][c.D + c.F + f];
      }
      float* gap = room.gap.data() + f * row + i;
      eight<true>(q + from, part, c.sizes[f], gap);
      if (c.kinds[f] != SPHERE) continue;
      for (int r = 0; r < 8; ++r) {
        if (!(gap[r] > OPPOSITE)) continue;
        float left = 0;
        for (int64_t d = 0; d < c.sizes[f]; ++d) left += (q[from + d] + part[r][d]) * (q[from + d] + part[r][d]);
        gap[r] = -std::max(left, std::numeric_limits<float>::min());
      }
    }
  });
}

Distance factor(const Sparse& c, const Room& room, const float* q, int64_t f, int64_t i) {
  const int64_t at = f * room.row() + i;
  return distance(c.kinds[f], c.eps[f], room.own[f], load(room.gap.data() + at), q[c.D + c.F + f], q[c.D + 2 * c.F + f], load(room.radius.data() + at), load(room.sinh.data() + at));
}

// scores of all candidates
void meet(const Sparse& c, Room& room, int64_t b, int64_t h, const float* q) {
  const int64_t g = h / (c.H / c.Hkv), n = room.n;
  float* score = room.score.data();
  if (c.F) {
    gaps(c, room, b, g, q);
    for (int64_t i = 0; i < n; i += L) {
      V total{};
      for (int64_t f = 0; f < c.F; ++f) total -= q[c.D + f] * factor(c, room, q, f, i).h;
      store(score + i, total);
    }
    return;
  }
  by_eight(c, room, b, g, [&](int64_t i, const float* const (&k)[8]) { eight<false>(q, k, c.D, score + i); });
}

int64_t at_least(const float* x, int64_t n, float bound) {  // n a multiple of L
  I less = {};
  for (int64_t i = 0; i < n; i += L) less += load(x + i) < bound;  // all ones are -1
  int64_t count = n;
  for (int lane = 0; lane < L; ++lane) count += less[lane];
  return count;
}

struct Range {
  float low, high;
  bool finite;
};

Range range(const float* x, int64_t n) {  // n a multiple of L
  V low = spread(-NONE), high = spread(NONE), odd = V{};
  for (int64_t i = 0; i < n; i += L) {
    const V a = load(x + i);
    low = least(a, low);
    high = most(a, high);
    odd += a - a;  // zero of what is finite
  }
  Range out{low[0], high[0], true};
  for (int lane = 0; lane < L; ++lane) {
    out.low = std::min(out.low, low[lane]);
    out.high = std::max(out.high, high[lane]);
    out.finite &= odd[lane] == 0;
  }
  return out;
}

// The top-th largest of more than ``top`` finite numbers, in places up to n, a multiple of L, whose rest is -FLT_MAX: by halving their range.
float least_kept(const float* x, int64_t n, int64_t top, float low, float high) {
  if (at_least(x, n, high) >= top) return high;
  for (;;) {
    const float middle = 0.5f * low + 0.5f * high;
    if (!(middle > low && middle < high)) return low;  // neighbours: of what is not below the upper one there is too little
    const int64_t count = at_least(x, n, middle);
    if (count == top) {
      V found = spread(high);
      for (int64_t i = 0; i < n; i += L) {
        const V a = load(x + i);
        found = ((a >= middle) & (a < found)) ? a : found;
      }
      return *std::min_element(&found[0], &found[0] + L);
    }
    (count > top ? low : high) = middle;
  }
}

// y (P) = sum of weight times value
void read(const Sparse& c, int64_t b, int64_t g, const int32_t* key, const float* weight, int64_t n, float* y) {
  const float* v = c.v + b * c.vs.batch + g * c.vs.head;
  const int64_t token = c.vs.token;
  int64_t p = 0;
  for (; p + 8 * L <= c.P; p += 8 * L) {
    V x[8] = {};
    for (int64_t i = 0; i < n; ++i) {
      const float* row = v + key[i] * token + p;
      if (i + 12 < n)
        for (int d = 0; d < 8 * L; d += 16) __builtin_prefetch(v + key[i + 12] * token + p + d);
      _Pragma("GCC unroll 8") for (int r = 0; r < 8; ++r) x[r] += weight[i] * load(row + r * L);
    }
    for (int r = 0; r < 8; ++r) store(y + p + r * L, x[r]);
  }
  for (; p + L <= c.P; p += L) {
    V x = {};
    for (int64_t i = 0; i < n; ++i) x += weight[i] * load(v + key[i] * token + p);
    store(y + p, x);
  }
  for (; p < c.P; ++p) {
    float x = 0;
    for (int64_t i = 0; i < n; ++i) x += weight[i] * v[key[i] * token + p];
    y[p] = x;
  }
}

void row_forward(const Sparse& c, Room& room, int64_t b, int64_t h, int64_t t) {
  const int64_t at = (b * c.H + h) * c.T + t, g = h / (c.H / c.Hkv);
  float* y = c.y + at * c.P;
  collect(c, room, b, h, t);
  const int64_t n = room.n;
  if (c.met != nullptr) c.met[at] = static_cast<int32_t>(n);
  if (n == 0) {
    std::fill(y, y + c.P, 0.f);
    c.least[at] = NONE;
    c.whole[at] = -NONE;  // exp(score - it) is 0
    return;
  }
  meet(c, room, b, h, c.q + b * c.qs.batch + h * c.qs.head + t * c.qs.token);
  float* score = room.score.data();
  const int64_t whole = up(n, L);
  for (int64_t i = n; i < whole; ++i) score[i] = score[0];
  const Range all = range(score, whole);
  if (!all.finite) {  // as every path has it: a row that meets what is not finite is not either
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill(y, y + c.P, nan);
    c.least[at] = c.whole[at] = nan;
    return;
  }
  for (int64_t i = n; i < whole; ++i) score[i] = -std::numeric_limits<float>::max();
  const float high = all.high, least = n > c.top ? least_kept(score, whole, c.top, all.low, high) : all.low;
  int32_t* key = room.key.data();
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float s = score[i];
    key[kept] = key[i];
    score[kept] = s;
    kept += s >= least;
  }
  V mass = V{};
  for (int64_t i = kept; i < up(kept, L); ++i) score[i] = NONE;
  for (int64_t i = 0; i < kept; i += L) {
    const V w = load(score + i) > NONE ? exp2((load(score + i) - high) * LOG2E) : V{};
    store(score + i, w);
    mass += w;
  }
  const float total = sum(mass);
  for (int64_t i = 0; i < kept; ++i) score[i] /= total;
  read(c, b, g, key, score, kept, y);
  c.least[at] = least;
  c.whole[at] = high + std::log(total);
}

// to += x * factor over n numbers
INLINE void add(float* to, const float* x, float factor, int64_t n) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(to + i, load(to + i) + factor * load(x + i));
  for (; i < n; ++i) to[i] += factor * x[i];
}

void row_backward(const Sparse& c, Room& room, std::vector<float>& slope, int64_t b, int64_t h, int64_t t) {
  const int64_t at = (b * c.H + h) * c.T + t, g = h / (c.H / c.Hkv), qn = c.D + 3 * c.F, kn = c.D + 2 * c.F;
  const float *q = c.q + b * c.qs.batch + h * c.qs.head + t * c.qs.token, *dy = c.dy + b * c.dys.batch + h * c.dys.head + t * c.dys.token, *y = c.y + at * c.P;
  float* dq = c.dq + at * qn;
  collect(c, room, b, h, t);
  if (room.n == 0) return;
  meet(c, room, b, h, q);
  float* score = room.score.data();
  const float least = c.least[at], whole = c.whole[at], shared = dot(dy, y, c.P);
  int64_t kept = 0;
  const int64_t row = room.row();
  for (int64_t i = 0; i < room.n; ++i) {
    if (score[i] < least) continue;
    room.key[kept] = room.key[i];
    for (int64_t f = 0; f < c.F; ++f)
      for (auto* x : {&room.gap, &room.radius, &room.sinh}) (*x)[f * row + kept] = (*x)[f * row + i];
    score[kept++] = score[i];
  }
  slope.resize(kept + L);
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t s = room.key[i];
    const float* v = c.v + b * c.vs.batch + g * c.vs.head + s * c.vs.token;
    const float w = std::exp(std::min(score[i] - whole, 0.f));  // which no weight exceeds, but for the rounding of large logarithms
    slope[i] = w * (dot(dy, v, c.P) - shared);
    add(c.dv + ((b * c.Hkv + g) * c.S + s) * c.P, dy, w, c.P);
  }
  if (!c.F) {
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t s = room.key[i];
      add(dq, key_row(c, b, g, s), slope[i], c.D);
      add(c.dk + ((b * c.Hkv + g) * c.S + s) * kn, q, slope[i], c.D);
    }
    return;
  }
  int64_t from = 0;
  for (int64_t f = 0; f < c.F; from += c.sizes[f++]) {
    const float weight = q[c.D + f], a = q[c.D + c.F + f], sinh_a = q[c.D + 2 * c.F + f];
    for (int64_t i0 = 0; i0 < kept; i0 += L) {
      const Distance all = factor(c, room, q, f, i0);
      const V half = sinh(a - load(room.radius.data() + f * row + i0)) * 0.5f;
      for (int64_t i = i0; i < std::min(i0 + L, kept); ++i) {
        const int64_t s = room.key[i], lane = i - i0;
        float *dk = c.dk + ((b * c.Hkv + g) * c.S + s) * kn, by = -slope[i] * weight * all.slope[lane];
        const float gap = room.gap[f * row + i], sinh_b = room.sinh[f * row + i];
        dq[c.D + f] -= slope[i] * all.h[lane];
        if (c.kinds[f] == HYPERBOLIC) {
          dq[c.D + c.F + f] += by * half[lane];
          dk[c.D + f] -= by * half[lane];
          dq[c.D + 2 * c.F + f] += by * sinh_b * gap * 0.25f;
          dk[c.D + c.F + f] += by * sinh_a * gap * 0.25f;
          by *= 0.25f * sinh_a * sinh_b;
        }
        const float* k = key_row(c, b, g, s);
        const bool opposite = c.kinds[f] == SPHERE && gap < 0;  // the squared gap is 4 - |q + k|^2
        for (int64_t d = from; d < from + c.sizes[f]; ++d) {
          const float apart = opposite ? -2.f * by * (q[d] + k[d]) : 2.f * by * (q[d] - k[d]);
          dq[d] += apart;
          dk[d] += opposite ? apart : -apart;
        }
      }
    }
  }
}

// of cells: odd, so that no digit is lost
inline uint32_t mixed(uint32_t code) { return code * 0x9E3779B1u; }

// which of at most sixteen numbers are positive, a bit each; reads sixteen
inline uint32_t signs(const float* x, int64_t n) {
#ifdef __AVX__
  const auto eight = [](const float* p) { return static_cast<uint32_t>(_mm256_movemask_ps((__m256)(load8(p) > 0.f))); };
  return (eight(x) | (n > 8 ? eight(x + 8) << 8 : 0)) & ((1u << n) - 1);
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits |= static_cast<uint32_t>(x[i] > 0) << i;
  return bits;
#endif
}

// the cell of a number; what is not finite lies in that of zero
inline uint32_t cell(float x) {
  constexpr float far = 2147483648.f;
  return std::isfinite(x) ? static_cast<uint32_t>(static_cast<int64_t>(std::floor(std::min(std::max(x, -far), far)))) : 0;
}

// A bucket's borders by code, and how many of its keys the sweep at hand has passed.
struct Counts {
  std::vector<int32_t> first, passed;
};

// For each query the place in its bucket of the first key that is not before at(t), which never falls: one sweep over both.
template <typename F, typename G>
void sweep(const Places& c, const int32_t* held, const uint8_t* mask, const int32_t* asked, Counts& counts, const F& at, const G& found) {
  std::copy(counts.first.begin(), counts.first.end(), counts.passed.begin());
  int64_t s = 0;
  for (int64_t t = 0; t < c.T; ++t) {
    for (const int64_t to = std::min<int64_t>(at(t), c.S); s < to; ++s)
      if (mask == nullptr || mask[s]) ++counts.passed[held[s]];
    found(t, counts.passed[asked[t]]);
  }
}

void table(const Places& c, int64_t b, int64_t g, int64_t l, Counts& counts) {
  const int32_t* held = c.held + ((b * c.Hkv + g) * c.L + l) * c.S;
  int32_t* order = c.order + ((b * c.Hkv + g) * c.L + l) * c.S;
  const uint8_t* mask = c.key_mask == nullptr ? nullptr : c.key_mask + b * c.S;
  auto &first = counts.first, &passed = counts.passed;
  std::fill(first.begin(), first.end(), 0);
  for (int64_t s = 0; s < c.S; ++s) first[1 + (mask == nullptr || mask[s] ? held[s] : CODES)]++;
  for (int64_t code = 0; code <= CODES; ++code) first[code + 1] += first[code];
  std::copy(first.begin(), first.end(), passed.begin());
  for (int64_t s = 0; s < c.S; ++s) order[passed[mask == nullptr || mask[s] ? held[s] : CODES]++] = static_cast<int32_t>(s);
  const bool from_start = c.T == 0 || c.lo[c.T - 1] == 0;
  bool own_last = true;
  for (int64_t t = 0; t < c.T; ++t) own_last &= c.hi[t] == c.position[t] + 1;
  const int64_t groups = c.H / c.Hkv, reach = c.reach[l];
  for (int64_t h = g * groups; h < (g + 1) * groups; ++h) {
    const int32_t* asked = c.asked + ((b * c.H + h) * c.L + l) * c.T;
    int32_t *start = c.start + (b * c.H + h) * c.T * c.L + l, *stop = c.stop + (b * c.H + h) * c.T * c.L + l;
    if (from_start)
      for (int64_t t = 0; t < c.T; ++t) start[t * c.L] = first[asked[t]];
    else
      sweep(c, held, mask, asked, counts, [&](int64_t t) { return c.lo[t]; }, [&](int64_t t, int32_t place) { start[t * c.L] = place; });
    sweep(c, held, mask, asked, counts, [&](int64_t t) { return c.hi[t]; }, [&](int64_t t, int32_t place) { stop[t * c.L] = place; });
    // the nearest in position: half of them before, where there are so many after
    const auto cut = [&](int64_t t, int64_t own) {
      const int64_t lo = start[t * c.L], hi = std::max(stop[t * c.L], start[t * c.L]), end = std::min(std::max(own - (reach + 1) / 2, lo) + reach, hi);
      stop[t * c.L] = static_cast<int32_t>(end);
      start[t * c.L] = static_cast<int32_t>(std::max(end - reach, lo));
    };
    if (own_last)
      for (int64_t t = 0; t < c.T; ++t) cut(t, stop[t * c.L]);
    else
      sweep(c, held, mask, asked, counts, [&](int64_t t) { return c.position[t] + 1; }, [&](int64_t t, int32_t place) { cut(t, std::min(place, stop[t * c.L])); });
  }
}

void walk(const Places& c, int64_t b, int64_t h, Counts& counts) {
  auto& first = counts.first;
  const int32_t* code = c.asked + ((b * c.H + h) * c.L + c.L - 1) * c.T;
  std::fill(first.begin(), first.end(), 0);
  for (int64_t t = 0; t < c.T; ++t) first[code[t] + 1]++;
  for (int64_t i = 0; i < CODES; ++i) first[i + 1] += first[i];
  for (int64_t t = 0; t < c.T; ++t) c.walk[(b * c.H + h) * c.T + first[code[t]]++] = static_cast<int32_t>(t);
}

// f(task) for each task with a room of its own thread; whether memory sufficed
template <typename F>
int in_turns(const Sparse& c, int64_t tasks, const F& f) {
  std::atomic<bool> failed{false};
  const int64_t most = most_places(c);
#pragma omp parallel
  {
    std::unique_ptr<Room> room;
    try {
      room = std::make_unique<Room>(c, most);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      if (failed) continue;
      try {
        f(task, *room);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
  }
  return failed;
}

}  // namespace

extern "C" {

// One function of the hash tables into codes (heads, 1 + tables, tokens), of which the first table, of one bucket, stays as it is; tokens ``first`` and
// ``count`` more of heads * tokens. Their numbers for table l begin at x + i * row + l * step, and sixteen are read at a time. Without offsets
// (tables, numbers): the signs of the numbers, together one cell; with them: as many cells, floor(number / width + offset). Cells are mixed into codes.
void zonal_sparse_hash(
    const float* x, int64_t row, int64_t step, int64_t numbers, const float* offsets, float width, int64_t first, int64_t count, int64_t tokens, int64_t tables, uint32_t* codes) {
#pragma omp parallel for schedule(static)
  for (int64_t from = 0; from < count; from += BLOCK) {
    const int64_t n = std::min(BLOCK, count - from);
    uint32_t* place[BLOCK];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = first + from + i, head = at / tokens;
      place[i] = codes + (head * (1 + tables) + 1) * tokens + (at - head * tokens);
    }
    // table by table: places of a token lie a power of two apart, often, and would push one another out of the cache
    for (int64_t l = 0; l < tables; ++l)
      for (int64_t i = 0; i < n; ++i) {
        const float* at = x + (from + i) * row + l * step;
        uint32_t& code = place[i][l * tokens];
        if (offsets == nullptr) code = mixed(code) + signs(at, numbers);
        else
          for (int64_t j = 0; j < numbers; ++j) code = mixed(code) + cell(at[j] / width + offsets[l * numbers + j]);
      }
  }
}

// Codes of ``cells`` cells each, as many as ``count`` tables have tokens, brought below CODES.
void zonal_sparse_fold(int64_t cells, int64_t count, uint32_t* codes) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) codes[i] = cells > 1 ? mixed(codes[i]) >> 16 : codes[i] & (CODES - 1);
}

int zonal_sparse_places(const Places* call) {
  const Places& c = *call;
  const int64_t tables = c.B * c.Hkv * c.L;
  return each_task<Counts>(tables + c.B * c.H, true, [&](int64_t task, Counts& counts) {
    counts.first.resize(CODES + 2);
    counts.passed.resize(CODES + 2);
    if (task < tables) table(c, task / c.L / c.Hkv, task / c.L % c.Hkv, task % c.L, counts);
    else walk(c, (task - tables) / c.H, (task - tables) % c.H, counts);
  });
}

int zonal_sparse_forward(const Sparse* call) {
  const Sparse& c = *call;
  const int64_t chunks = (c.T + CHUNK - 1) / CHUNK;
  return in_turns(c, c.B * c.H * chunks, [&](int64_t task, Room& room) {
    const int64_t i = task / chunks, from = task % chunks * CHUNK;
    for (int64_t w = from; w < std::min(from + CHUNK, c.T); ++w) row_forward(c, room, i / c.H, i % c.H, c.walk[i * c.T + w]);
  });
}

// a key head is a task: its gradients are its own
int zonal_sparse_backward(const Sparse* call) {
  const Sparse& c = *call;
  const int64_t groups = c.H / c.Hkv;
  return in_turns(c, c.B * c.Hkv, [&](int64_t task, Room& room) {
    std::vector<float> slope;
    const int64_t b = task / c.Hkv, g = task % c.Hkv;
    for (int64_t h = g * groups; h < (g + 1) * groups; ++h)
      for (int64_t w = 0; w < c.T; ++w) row_backward(c, room, slope, b, h, c.walk[(b * c.H + h) * c.T + w]);
  });
}
}
