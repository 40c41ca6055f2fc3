// What the tile kernels share: vectors, the link, the call and its masks. Names of the template are explained in tile.cpp.
//
// The link comes as macros in front: ZONAL_LOG, ZONAL_CLAMP, ZONAL_LOW, ZONAL_HIGH and the expressions ZONAL_VALUE, ZONAL_DERIVATIVE,
// ZONAL_BASE of x, c, n: of K, or with ZONAL_LOG of log K, which is x itself unless ZONAL_MAP. ZONAL_LANES is the width of a vector. No header of torch is needed: OpenMP's team is the one torch has set up.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#ifdef _OPENMP
#include <omp.h>
#endif

#define APART __attribute__((noinline))  // on its own the compiler keeps all sums in registers; inside a larger function it spills one
#define INLINE inline __attribute__((always_inline))
#define EACH_ROW _Pragma("GCC unroll 16") for (int r = 0; r < N; ++r)

namespace {

constexpr int L = ZONAL_LANES;  // floats of a vector
constexpr int C = 2 * L;        // queries of a column
constexpr int COLUMNS = 16;     // columns of a task, forward

typedef float V __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * L), aligned(4), may_alias));

inline V load(const float* p) { return *reinterpret_cast<const V*>(p); }
typedef uint16_t Half __attribute__((vector_size(2 * L), aligned(2), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * L), aligned(4), may_alias));
inline V load(const uint16_t* p) {  // bfloat16 is the upper half of a float
  const U wide = __builtin_convertvector(*reinterpret_cast<const Half*>(p), U) << 16;
  return reinterpret_cast<const V&>(wide);
}
inline float number(float x) { return x; }
inline float number(uint16_t x) {
  const uint32_t wide = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline void store(float* p, V x) { *reinterpret_cast<V*>(p) = x; }
inline V spread(float x) {
#if ZONAL_LANES == 16
  return V{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#else
  return V{x, x, x, x, x, x, x, x};
#endif
}
inline V least(V a, V b) { return b < a ? b : a; }  // a NaN in a stays
inline V most(V a, V b) { return b > a ? b : a; }
inline V root(V x) {
  for (int i = 0; i < L; ++i) x[i] = std::sqrt(x[i]);
  return x;
}
inline float sum(V x) {
  float total = 0;
  for (int i = 0; i < L / 2; ++i) total += x[i] + x[i + L / 2];
  return total;
}

inline V horner(V x, const float* c, int n) {
  V out = spread(c[n - 1]);
  for (int k = n - 2; k >= 0; --k) out = out * x + c[k];
  return out;
}

inline V horner_derivative(V x, const float* c, int n) {
  V out = V{};
  for (int k = n - 1; k >= 1; --k) out = out * x + c[k] * k;
  return out;
}

// 2^x to two units in the last place; below -126 the least normal number
inline V exp2(V x) {
  const V low = least(most(x, spread(-126.f)), spread(127.f));
  const V shifted = low + 12582912.f;  // 1.5 * 2^23: rounds to the nearest whole number
  const V f = low - (shifted - 12582912.f);
  V p = spread(1.5403530393e-4f);
  p = p * f + 1.3333558146e-3f;
  p = p * f + 9.6181291076e-3f;
  p = p * f + 5.5504108665e-2f;
  p = p * f + 2.4022650696e-1f;
  p = p * f + 6.9314718056e-1f;
  p = p * f + 1.f;
  const I whole = __builtin_convertvector(shifted - 12582912.f, I);
  const I bits = (whole + 127) << 23;
  return p * reinterpret_cast<const V&>(bits);
}

inline V value(V x, const float* c, int n) { (void)c; (void)n; return ZONAL_VALUE; }
inline V derivative(V x, const float* c, int n) { (void)c; (void)n; return ZONAL_DERIVATIVE; }
template <int N>
INLINE void values(V (&x)[N], V (&y)[N], const float* c, int n) {
#ifdef ZONAL_HORNER
  // all at once: one chain of additions and multiplications alone would wait for itself
  V a[N], b[N];
  EACH_ROW a[r] = b[r] = spread(c[n - 1]);
  for (int k = n - 2; k >= 0; --k)
    EACH_ROW {
      a[r] = a[r] * x[r] + c[k];
      b[r] = b[r] * y[r] + c[k];
    }
  EACH_ROW {
    x[r] = a[r];
    y[r] = b[r];
  }
#else
  EACH_ROW {
    x[r] = value(x[r], c, n);
    y[r] = value(y[r], c, n);
  }
#endif
}
inline V base(V x, const float* c, int n) { (void)x; (void)c; (void)n; return V{} + (ZONAL_BASE); }

inline V in_domain(V x) {
#if ZONAL_CLAMP
  return most(least(x, spread(ZONAL_HIGH)), spread(ZONAL_LOW));
#else
  return x;
#endif
}

// f with the number of rows, 1 to MAX, as a constant
template <int MAX, typename F>
INLINE void with_rows(int64_t rows, const F& f) {
  if constexpr (MAX > 1) {
    if (rows < MAX) return with_rows<MAX - 1>(rows, f);
  }
  f(std::integral_constant<int, MAX>());
}

// a thread's buffers, kept from call to call: new pages cost more than the arithmetic
struct Scratch {
  float* data = nullptr;
  size_t size = 0, used = 0;
  ~Scratch() { std::free(data); }
  void begin(size_t floats) {
    floats += 16 * 16;  // rounding of each part
    if (floats > size) {
      std::free(data);
      data = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
      size = data == nullptr ? 0 : floats;
      if (data == nullptr) throw std::bad_alloc();
    }
    used = 0;
  }
  float* take(size_t floats) {
    float* at = data + used;
    used += (floats + 15) / 16 * 16;
    return at;
  }
};

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

extern "C" {

struct Strides {
  int64_t batch, head, token;
};

// What zonal/kernels/cpp/library.py fills in. Last axes have stride 1. index (B or 1, S): the keys that are there, in order; lo, hi (B or 1, T):
// intervals of places in it, hi >= lo. by_batch: 0 or 1, whether the three have a batch axis.
struct Call {
  const void *q, *k, *v;
  const float *scale, *coefficients;
  const int32_t *index, *lo, *hi;
  Strides qs, ks, vs;
  int64_t B, H, Hkv, T, S, D, P, by_batch, numbers, learned, anchor, normalise;
  float eps;
  float *y, *factor;  // (B, H, T, P) contiguous, (B, H, T)
  const float* dy;    // (B, H, T, P) contiguous, as all that follows
  float *dq, *dk, *dv;
  double *dscale, *dcoefficients;  // (tasks of backward, H), (tasks, H, learned) or null
  int64_t split;                   // parts of the queries that have dk, dv of their own, backward
};
}

namespace {

enum Anchor { ROW = 0, COUNT = 1, RAW = 2 };

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float UNIT = ZONAL_LOG && !ZONAL_MAP ? LOG2E : 1.f;  // of scores: in log space to base 2, but where a map takes them first

// to wake the other threads takes some ten microseconds, longer where the processor is busy
bool worth_a_team(const Call& c) { return c.B * c.H * up(c.T, C) * c.S * (c.D + c.P) > (1 << 19); }

// norms of keys: 1 / max(|k|, eps), or ones
template <typename T>
void key_scales(const Call& c, float* out) {
  const int64_t rows = c.B * c.Hkv * c.S;
#pragma omp parallel for schedule(static) if (worth_a_team(c))
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t b = i / (c.Hkv * c.S), h = i / c.S % c.Hkv, s = i % c.S;
    const T* k = static_cast<const T*>(c.k) + b * c.ks.batch + h * c.ks.head + s * c.ks.token;
    V a = V{};
    int64_t d = 0;
    for (; d + L <= c.D; d += L) a += load(k + d) * load(k + d);
    float total = sum(a);
    for (; d < c.D; ++d) total += number(k[d]) * number(k[d]);
    out[i] = 1.f / std::max(std::sqrt(total), c.eps);
  }
}

// the scales of all keys in ``room``, or nullptr where keys stay as they are
template <typename T>
const float* key_scales_in(const Call& c, Scratch& room) {
  if (!c.normalise || c.S == 0) return nullptr;
  room.begin(c.B * c.Hkv * c.S);
  float* scales = room.take(c.B * c.Hkv * c.S);
  key_scales<T>(c, scales);
  return scales;
}

template <typename T>
struct Head {  // where one head's things are
  const T *q, *k, *v;
  const float *key_scale, *coefficients;
  const int32_t *index, *lo, *hi;
  int64_t q_step, k_step, v_step;
  float scale;
};

template <typename T>
Head<T> head_of(const Call& c, int64_t b, int64_t h, const float* key_scales) {
  const int64_t kv = h / (c.H / c.Hkv), m = c.by_batch ? b : 0;
  Head<T> at;
  at.q = static_cast<const T*>(c.q) + b * c.qs.batch + h * c.qs.head;
  at.k = static_cast<const T*>(c.k) + b * c.ks.batch + kv * c.ks.head;
  at.v = static_cast<const T*>(c.v) + b * c.vs.batch + kv * c.vs.head;
  at.key_scale = key_scales == nullptr ? nullptr : key_scales + (b * c.Hkv + kv) * c.S;
  at.coefficients = c.coefficients + h * c.numbers;
  at.index = c.index + m * c.S;
  at.lo = c.lo + m * c.T;
  at.hi = c.hi + m * c.T;
  at.q_step = c.qs.token;
  at.k_step = c.ks.token;
  at.v_step = c.vs.token;
  at.scale = c.scale[h];
  return at;
}

template <typename T>
float query_scale(const Call& c, const T* q, float scale) {
  if (!c.normalise) return scale;
  float total = 0;
  for (int64_t d = 0; d < c.D; ++d) total += number(q[d]) * number(q[d]);
  return scale / std::max(std::sqrt(total), c.eps);
}

// one column: what its lanes see
struct Sight {
  I lo[2], hi[2];
  int32_t first, last, whole_first, whole_last;  // keys that some lane sees, keys that all lanes see
};

Sight sight_of(const int32_t* lows, const int32_t* highs, int64_t t0, int64_t T) {
  Sight s;
  s.first = std::numeric_limits<int32_t>::max();
  s.last = 0;
  s.whole_first = 0;
  s.whole_last = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < C; ++i) {
    const int64_t t = std::min(t0 + i, T - 1);  // lanes past the end see what the last one sees; nothing of theirs is kept
    const int32_t lo = lows[t], hi = highs[t];
    s.lo[i / L][i % L] = lo;
    s.hi[i / L][i % L] = hi;
    if (hi > lo) {
      s.first = std::min(s.first, lo);
      s.last = std::max(s.last, hi);
    }
    s.whole_first = std::max(s.whole_first, lo);
    s.whole_last = std::min(s.whole_last, hi);
  }
  if (s.last == 0) s.first = 0;
  return s;
}

inline I seen(const Sight& sight, int half, int32_t key) { return (sight.lo[half] <= key) & (sight.hi[half] > key); }

constexpr float NONE = -std::numeric_limits<float>::infinity();  // the logarithm of nothing

struct Column {  // the running sums of a column of queries: sum of K, and in log space the maximum taken out
  V mass[2] = {V{}, V{}}, top[2] = {spread(NONE), spread(NONE)};
};

struct Reach {  // the keys that any of several columns sees
  int32_t first = std::numeric_limits<int32_t>::max(), last = 0;
  void add(const Sight& sight) {
    if (sight.last == 0) return;
    first = std::min(first, sight.first);
    last = std::max(last, sight.last);
  }
};

// scores x, y of N keys from place s on through the link (in log space through its map), its mask and the column's sums, into weights (N, C)
template <int N>
INLINE void record(const Call& c, const float* coefficients, const Sight& sight, int32_t s, V (&x)[N], V (&y)[N], float* weights, Column& column) {
  const V nothing = ZONAL_LOG ? spread(NONE) : V{};
  values<N>(x, y, coefficients, static_cast<int>(c.numbers));
#if ZONAL_MAP
  EACH_ROW {
    x[r] *= LOG2E;
    y[r] *= LOG2E;
  }
#endif
  if (s < sight.whole_first || s + N > sight.whole_last)
    EACH_ROW {
      x[r] = seen(sight, 0, s + r) ? x[r] : nothing;
      y[r] = seen(sight, 1, s + r) ? y[r] : nothing;
    }
  EACH_ROW {
#if ZONAL_LOG
    column.top[0] = most(column.top[0], x[r]);
    column.top[1] = most(column.top[1], y[r]);
#else
    column.mass[0] += x[r];
    column.mass[1] += y[r];
#endif
    store(weights + r * C, x[r]);
    store(weights + r * C + L, y[r]);
  }
}

#if ZONAL_LOG
// scores into weights relative to the running maximum, which has just become column.top
void exponentials(const V (&before)[2], int64_t keys, int64_t value_dim, float* weights, float* out, Column& column) {
  const V none = spread(NONE);
  for (int j = 0; j < 2; ++j) {
    const V safe = column.top[j] > none ? column.top[j] : V{};
    if (sum(column.top[j] != before[j] ? spread(1.f) : V{}) != 0.f) {
      const V keep = before[j] > none ? exp2(before[j] - safe) : V{};
      column.mass[j] *= keep;
      for (int64_t p = 0; p < value_dim; ++p) store(out + p * C + j * L, load(out + p * C + j * L) * keep);
    }
    for (int64_t s = 0; s < keys; ++s) {
      const V x = load(weights + s * C + j * L);
      const V w = x == none ? V{} : exp2(x - safe);  // NaN stays
      column.mass[j] += w;
      store(weights + s * C + j * L, w);
    }
  }
}
#endif

// what a task has summed up, (columns, P, C), as rows of y and their factors
inline void finish(const Call& c, const int32_t* lows, const int32_t* highs, int64_t b, int64_t h, int64_t t0, int64_t t1, const Column* sums, const float* out) {
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t i = (t - t0) / C, lane = (t - t0) % C;
    const float mass = sums[i].mass[lane / L][lane % L];
    const int64_t row = (b * c.H + h) * c.T + t;
    float factor = 1.f;
    if (c.anchor == ROW) factor = mass != 0.f ? 1.f / mass : 0.f;
    if (c.anchor == COUNT) {
      const int32_t seen = highs[t] - lows[t];
      factor = seen > 0 ? 1.f / seen : 0.f;
    }
#if ZONAL_LOG
    const float top = sums[i].top[lane / L][lane % L];
    if (c.anchor == ROW) {
      c.factor[row] = mass == 0.f ? std::numeric_limits<float>::infinity() : (top + std::log2(mass)) * LN2;
    } else {  // the maximum that was taken out comes back
      const float whole = mass == 0.f ? 0.f : std::exp2(top);
      c.factor[row] = factor;
      factor *= whole;
    }
#else
    c.factor[row] = factor;
#endif
    float* y = c.y + row * c.P;
    const float* from = out + i * C * c.P + lane;
    for (int64_t p = 0; p < c.P; ++p) y[p] = from[p * C] * factor;
  }
}

int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// every task of the forward pass, shared out over the threads. Returns 0, or 1 when memory ran out.
template <typename T>
int run_forward(const Call& c, void (*task)(const Call&, int64_t, int64_t, int64_t, int64_t, const float*, Scratch&)) {
  if (c.B == 0 || c.H == 0 || c.T == 0) return 0;
  std::atomic<int> failed{0};
  try {
    Scratch keys;
    const float* scales = key_scales_in<T>(c, keys);
    // enough tasks to keep every thread busy to the end, the long ones first
    int64_t span = COLUMNS * C;
    while (span > C && c.B * c.H * ((c.T + span - 1) / span) < 8 * threads()) span = std::max<int64_t>(C, span / 2);
    const int64_t blocks = (c.T + span - 1) / span, tasks = c.B * c.H * blocks;
    std::atomic<int64_t> next{0};
#pragma omp parallel if (worth_a_team(c))
    {
      static thread_local Scratch scratch;
      try {
        for (int64_t i = next++; i < tasks; i = next++) {
          const int64_t block = blocks - 1 - i / (c.B * c.H), head = i % (c.B * c.H);
          task(c, head / c.H, head % c.H, block * span, std::min(c.T, (block + 1) * span), scales, scratch);
        }
      } catch (const std::bad_alloc&) {
        failed = 1;
      }
    }
  } catch (const std::bad_alloc&) {
    failed = 1;
  }
  return failed;
}

}  // namespace
