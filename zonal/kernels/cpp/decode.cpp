// Few tokens after a memory of sums over features, in one pass over its state: each token's key and value are taken in, M += phi(k) [v, 1]^T,
// and its queries read what is there, y = factor phi'(q)^T M. Where the past fades, M is multiplied by a number per token first. This is a decoder's step, for every link that is a polynomial of a dot
// product: the link itself is in phi', the features of a query times the coefficient of their power.
//
// The state of a key head (features x W) goes through the first cache strip by strip. Features stand in the order of
// features.SymmetricPowers, which is that of memories, so that they are made by products of neighbours alone.

#include "common.hpp"

namespace {

constexpr int SUMS = 8;            // of 16 registers, beside the values and what is at hand
constexpr int64_t STRIP = 4096;    // numbers of the state in one strip
constexpr int64_t TEAM = 1 << 16;  // numbers of the state from which on to wake the other threads is worth it

}  // namespace

extern "C" {

// What zonal/kernels/decode.py fills in once for an operator and a form of memory.
struct Decoder {
  const float* scale;    // (H): of a query's score
  const float* weights;  // (H or 1, F): the link's coefficient of each feature's power
  const float* roots;    // of powers two and up: the root of the number of ways to write a feature; null below degree three
  const int32_t* tails;  // (degree - 1, D): of power two and up, how many products begin with each number; null below degree three
  int64_t B, H, Hkv, D, P, F, degree, lowest, heads_weigh, anchor, positive, normalise, include_self;
};

struct Axes {  // what a step along each is, in numbers
  int64_t batch, head, token, last;
};

// And for each call. Last axes of q (B, H, T, D), k (B, Hkv, T, D), v (B, Hkv, T, P) have stride 1; all in bfloat16, or else in float32. before and
// after (B, Hkv, F, W), the same place or two that share nothing. count: tokens in the memory, of which padding (B) are none. y (B, H, T, P).
// keep (B, Hkv, T): what each token leaves of the state before it; null where nothing fades.
struct Step {
  const void *q, *k, *v;
  Axes qs, ks, vs;
  int64_t T, bfloat16;
  const float* before;
  float* after;
  int64_t count;
  const int64_t* padding;
  void* y;
  const float* keep;
};
}

namespace {

// ---- features ----------------------------------------------------------------------------------------------------------------------------

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

// Features of a vector x that is written twice, (2 D), into out (F). room (D).
void features(const Decoder& c, const float* x, float* room, float* out) {
  if (c.lowest == 0) *out++ = 1.f;
  std::copy_n(x, c.D, out);
  if (c.degree == 1) return;
  float* to = out + c.D;
  if (c.degree == 2) {  // by cyclic distance, the opposite point once
    product(x, x, c.D, to);
    scaled(x, std::sqrt(2.f), c.D, room);
    for (int64_t j = 1; 2 * j <= c.D; ++j) product(room, x + j, 2 * j == c.D ? j : c.D, to += c.D);
    return;
  }
  const float* end = to;  // of the power below
  for (int64_t power = 2; power <= c.degree; ++power) {
    const int32_t* tails = c.tails + (power - 2) * c.D;
    const float* below = end;
    for (int64_t i = 0; i < c.D; to += tails[i++]) scaled(below - tails[i], x[i], tails[i], to);
    end = to;
  }
  product(out + c.D, c.roots, to - out - c.D, out + c.D);
}

// ---- the state ---------------------------------------------------------------------------------------------------------------------------

// N vectors of every row, and with TAIL the number after them: M' = keep M + k v^T where UPDATES, sums += q^T M' where READS; keep is 1 unless
// it FADES. from and to: the rows, ``width`` numbers each.
template <bool FADES, bool UPDATES, bool READS, int N, bool TAIL>
APART void vectors(const float* from, float* to, int64_t width, int64_t rows, float keep, const float* k, const float* v, const float* q, float* sums) {
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
      float m = from[a * width + N * L];
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
template <bool FADES, bool UPDATES, bool READS>
APART void column(const float* from, float* to, int64_t width, int64_t rows, float keep, const float* k, float v, const float* q, float* sum_of) {
  float parts[L] = {};  // one sum would wait for itself
  int64_t a = 0;
  const auto row = [&](int64_t at, int i) {
    float m = from[at * width];
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

// N vectors from number p of every row on, as often as they fit; with the last of them goes a number that would be alone. Where it ends.
template <bool FADES, bool UPDATES, bool READS, int N>
int64_t pieces(int64_t p, const float* from, float* to, int64_t width, int64_t rows, float keep, const float* k, const float* v, const float* q,
               float* sums) {
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
template <bool FADES, bool UPDATES, bool READS>
void pass(const float* from, float* to, int64_t width, int64_t rows, float keep, const float* k, const float* v, const float* q, float* sums) {
  int64_t p = pieces<FADES, UPDATES, READS, 4>(0, from, to, width, rows, keep, k, v, q, sums);
  p = pieces<FADES, UPDATES, READS, 2>(p, from, to, width, rows, keep, k, v, q, sums);
  p = pieces<FADES, UPDATES, READS, 1>(p, from, to, width, rows, keep, k, v, q, sums);
  for (; p < width; ++p) column<FADES, UPDATES, READS>(from + p, to + p, width, rows, keep, k, v[p], q, sums + p);
}

// ---- a key head --------------------------------------------------------------------------------------------------------------------------

template <typename T>
void twice(const Decoder& c, const T* row, float scale, float* x) {
  if (c.normalise) scale *= inverse_norm(row, c.D);
  for (int64_t d = 0; d < c.D; ++d) x[d] = x[c.D + d] = number(row[d]) * scale;
}

template <typename T, bool FADES>
void head(const Decoder& c, const Step& step, int64_t task, Scratch& scratch) {
  const int64_t b = task / c.Hkv, kv = task % c.Hkv, groups = c.H / c.Hkv, width = c.P + (c.anchor == ROW), tokens = step.T;
  scratch.begin(3 * c.D + tokens * (1 + groups) * (c.F + width) + 16 * (3 + 3 * tokens * (1 + groups)));
  float *x = scratch.take(2 * c.D), *room = scratch.take(c.D), *keys = scratch.take(tokens * c.F), *values = scratch.take(tokens * width);
  float *queries = scratch.take(tokens * groups * c.F), *sums = scratch.take(tokens * groups * width);
  std::fill(sums, sums + tokens * groups * width, 0.f);
  for (int64_t t = 0; t < tokens; ++t) {
    twice(c, static_cast<const T*>(step.k) + b * step.ks.batch + kv * step.ks.head + t * step.ks.token, 1.f, x);
    features(c, x, room, keys + t * c.F);
    const T* v = static_cast<const T*>(step.v) + b * step.vs.batch + kv * step.vs.head + t * step.vs.token;
    for (int64_t p = 0; p < c.P; ++p) values[t * width + p] = number(v[p]);
    if (c.anchor == ROW) values[t * width + c.P] = 1.f;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t h = kv * groups + g;
      float* phi = queries + (t * groups + g) * c.F;
      twice(c, static_cast<const T*>(step.q) + b * step.qs.batch + h * step.qs.head + t * step.qs.token, c.scale[h], x);
      features(c, x, room, phi);
      product(phi, c.weights + (c.heads_weigh ? h * c.F : 0), c.F, phi);
    }
  }
  const int64_t strip = std::max<int64_t>(L, STRIP / width / L * L);
  for (int64_t a = 0; a < c.F; a += strip) {
    const int64_t rows = std::min(strip, c.F - a);
    const float* from = step.before + (task * c.F + a) * width;
    float* to = step.after + (task * c.F + a) * width;
    for (int64_t t = 0; t < tokens; ++t, from = to) {
      const float *k = keys + t * c.F + a, *v = values + t * width, *q = queries + t * groups * c.F + a;
      float* sum_of = sums + t * groups * width;
      const float keep = FADES ? step.keep[task * tokens + t] : 1.f;
      if (c.include_self) {
        pass<FADES, true, true>(from, to, width, rows, keep, k, v, q, sum_of);
        for (int64_t g = 1; g < groups; ++g) pass<false, false, true>(to, nullptr, width, rows, 1.f, nullptr, v, q + g * c.F, sum_of + g * width);
      } else {  // time passes before the query reads, although its own key is not seen
        for (int64_t g = 0; g < groups; ++g) pass<FADES, false, true>(from, nullptr, width, rows, keep, nullptr, v, q + g * c.F, sum_of + g * width);
        pass<FADES, true, false>(from, to, width, rows, keep, k, v, nullptr, nullptr);
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < groups; ++g) {
      const float* total = sums + (t * groups + g) * width;
      const int64_t seen = step.count - step.padding[b] + t + c.include_self;
      float factor = 1.f;
      if (c.anchor == ROW) {  // a positive link's row whose sum came out negative has cancelled to nothing but rounding
        const bool lost = c.positive && total[c.P] < 0.f;
        factor = lost ? std::numeric_limits<float>::quiet_NaN() : total[c.P] != 0.f ? 1.f / total[c.P] : 0.f;
      }
      if (c.anchor == COUNT) factor = seen > 0 ? 1.f / static_cast<float>(seen) : 0.f;
      T* y = static_cast<T*>(step.y) + ((b * c.H + kv * groups + g) * tokens + t) * c.P;
      for (int64_t p = 0; p < c.P; ++p) put(y + p, total[p] * factor);
    }
}

}  // namespace

extern "C" {

// Returns 0, or 1 when memory ran out; nothing of ``after`` is then to be used. 2: the environment has kernels switched off, nothing was done.
int zonal_decode(const Decoder* decoder, const Step* step) {
  if (switched_off()) return 2;
  const Decoder& c = *decoder;
  const int64_t tasks = c.B * c.Hkv;
  return each_short_task<Scratch>(tasks, tasks * c.F * c.P * step->T > TEAM, [&](int64_t i, Scratch& scratch) {
    if (step->bfloat16) (step->keep ? head<uint16_t, true> : head<uint16_t, false>)(c, *step, i, scratch);
    else (step->keep ? head<float, true> : head<float, false>)(c, *step, i, scratch);
  });
}
}
