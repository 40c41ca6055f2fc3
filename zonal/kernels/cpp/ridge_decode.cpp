// Few tokens after a memory of ridge or Koopman read-outs, in O(r^2) each: a token's query reads y = C P (M P)^power q, its key and value are
// taken in, G += z z^T, C += v z^T, M += z z'^T with z' the key before, and P -= (P z)(P z)^T / (1 + z . P z). All in float64, as the
// memory is. This is a decoder's step; P comes in, and whoever calls makes it again from G every so often.

#define ZONAL_LANES 8
#define ZONAL_ROUNDED 0
#include "common.hpp"

namespace {

constexpr int D = 4;               // doubles of a vector
constexpr int64_t TEAM = 1 << 18;  // numbers of the state from which on to wake the other threads is worth it (some ten microseconds)
typedef double VD __attribute__((vector_size(32), aligned(8), may_alias));
inline VD& lanes(double* p) { return *reinterpret_cast<VD*>(p); }
inline const VD& lanes(const double* p) { return *reinterpret_cast<const VD*>(p); }

}  // namespace

extern "C" {

struct Axes {  // what a step along each is, in numbers
  int64_t batch, head, token, last;
};

// What zonal/kernels/cpp/ridge_decode_library.py fills in for each call. Last axes of q (B, H, T, r), k (B, Hkv, T, r), v (B, Hkv, T, P)
// have stride 1; all in bfloat16, or else in float32. Of the memory, contiguous, before and after, which share nothing: gram, cross, inverse,
// and for powers past 0 shift, first, last (else null). count: tokens in the memory, of which padding (B) are none.
struct Step {
  const void *q, *k, *v;
  Axes qs, ks, vs;
  int64_t B, H, Hkv, T, r, P, power, bfloat16, include_self;
  double limit;         // longer keys are shortened to it; 0: none
  const double* scale;  // (H) of the queries
  const int64_t* powers;  // (H); power: whether any is past 0
  const double *gram, *cross, *inverse, *shift, *first, *last;
  double *gram_after, *cross_after, *inverse_after, *shift_after, *first_after, *last_after;
  int64_t count;
  const int64_t* padding;
  void* y;  // (B, H, T, P)
};
}

namespace {

// out (rows) = a (rows, n) x
APART void times(const double* a, const double* x, int64_t rows, int64_t n, double* out) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    VD sums[4] = {};
    int64_t j = 0;
    for (; j + D <= n; j += D) {
      const VD number = lanes(x + j);
      _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r) sums[r] += lanes(a + (i + r) * n + j) * number;
    }
    for (int r = 0; r < 4; ++r) {
      double total = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
      for (int64_t t = j; t < n; ++t) total += a[(i + r) * n + t] * x[t];
      out[i + r] = total;
    }
  }
  for (; i < rows; ++i) {
    double total = 0;
    for (int64_t j = 0; j < n; ++j) total += a[i * n + j] * x[j];
    out[i] = total;
  }
}

// to (rows, n) = from + a b^T times a number
APART void add_outer(const double* from, const double* a, const double* b, double factor, int64_t rows, int64_t n, double* to) {
  for (int64_t i = 0; i < rows; ++i, from += n, to += n) {
    const double number = factor * a[i];
    const VD all = VD{} + number;
    int64_t j = 0;
    for (; j + D <= n; j += D) lanes(to + j) = lanes(from + j) + all * lanes(b + j);
    for (; j < n; ++j) to[j] = from[j] + number * b[j];
  }
}

struct Now {  // a head's memory as it is now, and where its next state goes
  const double *gram, *cross, *inverse, *shift, *last;
};

template <typename T>
void read(const Step& c, const Now& now, int64_t b, int64_t h, int64_t t, double* room) {
  double *x = room, *y = room + std::max(c.r, c.P);
  const T* q = static_cast<const T*>(c.q) + b * c.qs.batch + h * c.qs.head + t * c.qs.token;
  for (int64_t d = 0; d < c.r; ++d) y[d] = c.scale[h] * number(q[d]);
  times(now.inverse, y, c.r, c.r, x);
  for (int64_t k = 0; k < c.powers[h]; ++k) {
    times(now.shift, x, c.r, c.r, y);
    times(now.inverse, y, c.r, c.r, x);
  }
  times(now.cross, x, c.P, c.r, y);
  T* out = static_cast<T*>(c.y) + ((b * c.H + h) * c.T + t) * c.P;
  for (int64_t p = 0; p < c.P; ++p) put(out + p, static_cast<float>(y[p]));
}

template <typename T>
void head(const Step& c, int64_t task, Scratch& scratch) {
  const int64_t b = task / c.Hkv, kv = task % c.Hkv, groups = c.H / c.Hkv, square = c.r * c.r, most = std::max(c.r, c.P);
  scratch.begin(2 * (4 * most + 16));
  double* room = reinterpret_cast<double*>(scratch.take(2 * 2 * most));
  double *z = reinterpret_cast<double*>(scratch.take(2 * most)), *v = reinterpret_cast<double*>(scratch.take(2 * most));
  Now now{c.gram + task * square, c.cross + task * c.P * c.r, c.inverse + task * square, nullptr, nullptr};
  if (c.power > 0) {
    now.shift = c.shift + task * square;
    now.last = c.last + task * c.r;
    std::memcpy(c.first_after + task * c.r, c.first + task * c.r, sizeof(double) * c.r);
  }
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t g = 0; !c.include_self && g < groups; ++g) read<T>(c, now, b, kv * groups + g, t, room);
    const T* k = static_cast<const T*>(c.k) + b * c.ks.batch + kv * c.ks.head + t * c.ks.token;
    const T* value = static_cast<const T*>(c.v) + b * c.vs.batch + kv * c.vs.head + t * c.vs.token;
    double square_of = 0;
    for (int64_t d = 0; d < c.r; ++d) {
      z[d] = number(k[d]);
      square_of += z[d] * z[d];
    }
    const double norm = std::sqrt(square_of);
    if (c.limit > 0 && !(norm <= c.limit))
      for (int64_t d = 0; d < c.r; ++d) z[d] *= c.limit / norm;
    for (int64_t p = 0; p < c.P; ++p) v[p] = number(value[p]);
    times(now.inverse, z, c.r, c.r, room);
    double seen = 1;
    for (int64_t d = 0; d < c.r; ++d) seen += z[d] * room[d];
    double *gram = c.gram_after + task * square, *cross = c.cross_after + task * c.P * c.r, *inverse = c.inverse_after + task * square;
    add_outer(now.inverse, room, room, -1 / seen, c.r, c.r, inverse);
    add_outer(now.gram, z, z, 1, c.r, c.r, gram);
    add_outer(now.cross, v, z, 1, c.P, c.r, cross);
    now.inverse = inverse;
    now.gram = gram;
    now.cross = cross;
    if (c.power > 0) {
      double *shift = c.shift_after + task * square, *last = c.last_after + task * c.r;
      add_outer(now.shift, z, now.last, 1, c.r, c.r, shift);
      std::memcpy(last, z, sizeof(double) * c.r);
      if (t == 0 && c.count == c.padding[b]) std::memcpy(c.first_after + task * c.r, z, sizeof(double) * c.r);
      now.shift = shift;
      now.last = last;
    }
    for (int64_t g = 0; c.include_self && g < groups; ++g) read<T>(c, now, b, kv * groups + g, t, room);
  }
}

}  // namespace

extern "C" {

int64_t zonal_version() { return 6; }

// Returns 0, or 1 when memory ran out; nothing of what comes after is then to be used.
int zonal_ridge_step(const Step* step) {
  const Step& c = *step;
  const int64_t tasks = c.B * c.Hkv;
  std::atomic<int> failed{0};
#pragma omp parallel for schedule(static) if (tasks > 1 && tasks * c.r * (3 * c.r + c.P) * c.T > TEAM)
  for (int64_t i = 0; i < tasks; ++i) {
    static thread_local Scratch scratch;
    try {
      if (c.bfloat16) head<uint16_t>(c, i, scratch);
      else head<float>(c, i, scratch);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  }
  return failed;
}
}
