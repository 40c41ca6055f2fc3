// Distances for distance.cpp: points prepared once, elementary functions by polynomials, distances with their slopes, and gaps summed from differences.
//
// Directions are rounded: where two agree to some 0.03, or are opposite to some 0.2, their gap is taken from the raw points in double, pair by pair.
// These are few, but for points on a line; backward gets a list of them, and takes their gradients from the raw points as well.

#include "common.hpp"
#include "products.hpp"

namespace {

constexpr int MOST = 8, WAVES = 8;    // parts, and waves
constexpr float NEAR = 1e-3f, OPPOSITE = 4e-2f;  // squared, from where on directions are looked at in double
constexpr double SAME = 1e-30;        // squared: nearer than that are directions of float vectors only by rounding
constexpr double RADIUS = 40.0;       // beyond it sinh(a) sinh(b) leaves float
constexpr double ORIGIN = 1e-6;       // where a direction is smooth
enum Kind { EUCLIDEAN, SQUARED, SPHERE, HYPERBOLIC, PRODUCT };

}  // namespace

extern "C" {

struct Term {  // a distance of the numbers [start, start + size) of a point; scale: what a hyperbolic point is multiplied by
  int64_t kind, start, size;
  double eps, scale;
};

// What zonal/kernels/distance.py fills in. call: as for a tile kernel, but that D is ``zonal_distance_width``, since sums holds keys as they are
// prepared; coefficients (H, 3 waves): amplitudes, decays and frequencies. weights (B, H, T, count), as dweights, which is contiguous.
struct Distance {
  Call call;
  const Term* terms;
  const float* weights;
  Strides weighs;
  int64_t count, dim, waves;  // dim: numbers of a point
  float* dweights;
};
}

namespace {

struct Note {  // of a prepared part. direction = point * inverse
  float missing;                               // 1 for a vector without direction on the sphere
  float half, rest, up, down, sinh, coth, free;  // of the radius r: r / 2 in two numbers, e^(r/2), e^(-r/2), sinh r, coth r; free: d(r) / d|point|
  double inverse;
};

struct Work {  // a call with all that its tasks share; first comes what a task is given
  Distance asked;
  int64_t at[MOST], width;  // where a part begins in a prepared point, and its numbers in all
  float square[MOST], least[MOST];
  float *rows, *poison;     // prepared keys (B, Hkv, S, width); NaN where a key is not finite, else 0
  Note* notes;              // (B, Hkv, S, count)
};

const Work& work_of(const Call& c) { return reinterpret_cast<const Work&>(c); }

int64_t width_of(const Distance& asked) {
  int64_t width = 0;
  for (int64_t f = 0; f < asked.count; ++f) width += up(asked.terms[f].size, C);
  return width;
}

// ---- points ------------------------------------------------------------------------------------------------------------------------------

Note prepare_part(const Term& term, const float* x, float* out) {
  Note note{};
  const bool directed = term.kind == SPHERE || term.kind == HYPERBOLIC;
  double square = 0;
  for (int64_t i = 0; directed && i < term.size; ++i) square += static_cast<double>(x[i]) * x[i];
  if (term.kind == SPHERE) {
    note.missing = square > 1e-24 ? 0.f : 1.f;
    note.inverse = square > 1e-24 ? 1 / std::sqrt(square) : 0;
  } else if (term.kind == HYPERBOLIC) {
    const double length = std::sqrt(square * term.scale * term.scale + ORIGIN * ORIGIN), radius = std::min(length, RADIUS), half = std::exp(radius / 2);
    note.inverse = term.scale / length;
    note.half = static_cast<float>(radius / 2);
    note.rest = static_cast<float>(radius / 2 - note.half);
    note.up = static_cast<float>(half);
    note.down = static_cast<float>(1 / half);
    const double sinh = radius < 0.1 ? std::sinh(radius) : (half * half - 1 / (half * half)) / 2;
    note.sinh = static_cast<float>(sinh);
    note.coth = static_cast<float>(std::sqrt(1 + sinh * sinh) / sinh);
    note.free = length <= RADIUS ? static_cast<float>(term.scale) : 0.f;
  }
  for (int64_t i = 0; i < term.size; ++i) out[i] = directed ? static_cast<float>(x[i] * note.inverse) : x[i];
  for (int64_t i = term.size; i < up(term.size, C); ++i) out[i] = 0;
  return note;
}

// A point's parts and notes. One that is not finite becomes zeros, for 0 times NaN would reach what does not see it; returns NaN then, else 0.
float prepare_point(const Work& w, const float* x, float* out, Note* notes) {
  float sum = 0;
  for (int64_t f = 0; f < w.asked.count; ++f) {
    const Term& term = w.asked.terms[f];
    for (int64_t i = 0; i < term.size; ++i) sum += 0.f * x[term.start + i];
    notes[f] = prepare_part(term, x + term.start, out + w.at[f]);
  }
  if (sum == 0) return 0;
  std::fill(out, out + w.width, 0.f);
  std::fill(notes, notes + w.asked.count, Note{});
  return std::numeric_limits<float>::quiet_NaN();
}

// the gradient of a raw part, from that of its prepared form and of its radius; added to ``to``
void finish_part(const Term& term, const Note& note, const float* x, const float* grad, float radial, float* to) {
  if (term.kind != SPHERE && term.kind != HYPERBOLIC) {
    for (int64_t i = 0; i < term.size; ++i) to[i] += grad[i];
    return;
  }
  double along = 0;
  for (int64_t i = 0; i < term.size; ++i) along += grad[i] * (x[i] * note.inverse);
  const double back = along * note.inverse - static_cast<double>(radial) * note.free;
  for (int64_t i = 0; i < term.size; ++i) to[i] += static_cast<float>(grad[i] * note.inverse - back * (x[i] * note.inverse));
}

// ---- functions -----------------------------------------------------------------------------------------------------------------------------

constexpr float ASIN[] = {1.f, 1.666660162e-1f, 7.503296518e-2f, 4.400412778e-2f, 3.650977654e-2f, -1.001800296e-2f, 1.145460045e-1f, -1.447772836e-1f, 1.283731246e-1f};
constexpr float ASINH[] = {1.f, -1.666663402e-1f, 7.498430582e-2f, -4.436385282e-2f, 2.808537599e-2f, -1.311456426e-2f};
constexpr float SINH[] = {1.f, 1.666666643e-1f, 8.333352593e-3f, 1.983581245e-4f, 2.818523940e-6f};
constexpr float SINE[] = {1.f, -1.666665461e-1f, 8.332160873e-3f, -1.951529589e-4f};
constexpr float COSINE[] = {1.f, -0.5f, 4.166664568e-2f, -1.388731625e-3f, 2.443315711e-5f};

// cosine and sine of x >= 0, to rounding of x (up to 1e5; what is further has faded)
inline void circular(V x, V& cosine, V& sine) {
  const V shifted = least(x, spread(4e6f)) * 0.6366197723675814f + 12582912.f, quarters = shifted - 12582912.f;  // 1.5 * 2^23: rounds to a whole number
  V r = x - quarters * 1.5703125f;
  r -= quarters * 4.837512969970703125e-4f;
  r -= quarters * 7.549789954891e-8f;
  const V square = r * r, s = r * polynomial(square, SINE), c = polynomial(square, COSINE);
  const I turn = __builtin_convertvector(quarters, I), odd = (turn & 1) != 0;
  const V a = odd ? s : c, b = odd ? c : s;
  cosine = ((turn + 1) & 2) != 0 ? -a : a;
  sine = (turn & 2) != 0 ? -b : b;
}

// ---- distances -----------------------------------------------------------------------------------------------------------------------------

enum Lane { WEIGHT, MISSING, HALF, REST, UP, DOWN, SINH4, LANES };  // notes of a column of queries, C of each; SINH4: sinh r / 4

struct Queries {  // a column of queries
  float *parts, *lanes;  // (width, C), (count, LANES, C)
  Note* notes;           // (count, C)
  int64_t t0;
};

struct Slopes {  // of a distance: d(d)/du = along (u - v) for what gap is a difference of, and d(d)/da = straight + coth(a) bent for a radius
  V along, straight, bent;
};

// a distance and its slopes, from the gap of a column's lanes (from ``lanes`` on) and a key
template <int KIND>
INLINE V distance(float square, float shift, V gap, const float* lanes, const Note& key, Slopes& slopes) {
  if constexpr (KIND == EUCLIDEAN) {
    const V x = least(gap, spread(1e38f)) + square, inverse = inverse_root(x);
    slopes.along = inverse;
    return x * inverse - shift;
  } else if constexpr (KIND == SQUARED) {
    slopes.along = spread(2.f);
    return gap;
  } else if constexpr (KIND == SPHERE) {
    // a gap below zero is that to the opposite point
    const V summed = gap + (load(lanes + MISSING * C) + key.missing);
    const V near = (gap < 0.f ? 4.f + gap : summed) + square, far = (gap < 0.f ? -gap : 4.f - summed) + square;
    const V part = least(near, far) * (1.f / (4.f + 2.f * square));
    const V half = part * inverse_root(part) * polynomial(part, ASIN);
    slopes.along = 2.f * inverse_root(near * far);
    return (near > far ? 3.14159265358979f - 2.f * half : 2.f * half) - shift;
  } else if constexpr (KIND == HYPERBOLIC) {
    const V middle = (load(lanes + HALF * C) - key.half) + (load(lanes + REST * C) - key.rest), flat = middle * middle;
    const V steep = 0.5f * (load(lanes + UP * C) * key.down - load(lanes + DOWN * C) * key.up);
    const V sinh = flat < 1.f ? middle * polynomial(flat, SINH) : steep;
    const V size = load(lanes + SINH4 * C) * key.sinh, level = sinh * sinh;
    const V x = gap * size + (level + square), low = inverse_root(x), high = inverse_root(1.f + x), slope = low * high;
    const V rise = x * low, whole = (1.f + x) * high;
    slopes.bent = least(size * slope, spread(1e34f));  // more where far points coincide: infinity times their difference were NaN
    slopes.along = 2.f * slopes.bent;
    slopes.bent *= gap;
    slopes.straight = slope * sinh * ((1.f + level) * inverse_root(1.f + level));
    return 2.f * (x < 0.25f ? rise * polynomial(x, ASINH) : logarithm(rise + whole)) - shift;
  } else {
    slopes.along = spread(-1.f);
    return gap;
  }
}

template <typename F>
INLINE void with_kind(int64_t kind, const F& f) {
  switch (kind) {
    case EUCLIDEAN: return f(std::integral_constant<int, EUCLIDEAN>());
    case SQUARED: return f(std::integral_constant<int, SQUARED>());
    case SPHERE: return f(std::integral_constant<int, SPHERE>());
    case HYPERBOLIC: return f(std::integral_constant<int, HYPERBOLIC>());
    default: return f(std::integral_constant<int, PRODUCT>());
  }
}

// squared differences of N rows and a column
template <int N>
APART void gaps(const float* const (&rows)[N], const float* column, int64_t inner, float* out) {
  V x[N], y[N];
  EACH_ROW x[r] = y[r] = V{};
  for (int64_t i = 0; i < inner; ++i) {
    const V first = load(column), second = load(column + L);
    EACH_ROW {
      const V number = spread(rows[r][i]), a = first - number, b = second - number;
      x[r] += a * a;
      y[r] += b * b;
    }
    column += C;
  }
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
  }
}

struct Close {  // a pair whose directions agree, or are opposite
  int32_t part, row, lane;
  bool opposite, same;
};

struct Keys {  // where the prepared keys of one head are
  const float *rows, *poison;
  const Note* notes;
};

Keys keys_of(const Work& w, int64_t b, int64_t h) {
  const Call& c = w.asked.call;
  const int64_t first = (b * c.Hkv + h / (c.H / c.Hkv)) * c.S;
  return {w.rows + first * w.width, w.poison + first, w.notes + first * w.asked.count};
}

// u - v, or u + v, number by number in double: nothing, to the bit, where the points are the same
struct Apart {
  const float *q, *k;
  double ratio, inverse;  // of the inverse lengths; of the query
  double operator[](int64_t i) const { return (q[i] - k[i] * ratio) * inverse; }
};

Apart apart(const Work& w, const Head<float>& at, const Keys& keys, const Queries& column, int32_t s, const Close& pair) {
  const Term& term = w.asked.terms[pair.part];
  const int64_t key = at.index[s + pair.row];
  const double mine = column.notes[pair.part * C + pair.lane].inverse, other = keys.notes[key * w.asked.count + pair.part].inverse;
  const double ratio = mine > 0 ? other / mine : 0;  // two vectors without direction are close, too
  return {at.q + (column.t0 + pair.lane) * at.q_step + term.start, at.k + key * at.k_step + term.start, pair.opposite ? -ratio : ratio, mine};
}

// gaps of all parts of N keys from place s on, (count, N, C), and the pairs that were near: how many there are, the first of them in ``close``
template <int N>
int measure(const Work& w, const Head<float>& at, const Keys& keys, const Queries& column, int32_t s, float* gap, Close* close) {
  const Call& c = w.asked.call;
  int found = 0;
  for (int64_t f = 0; f < w.asked.count; ++f, gap += N * C) {
    const Term& term = w.asked.terms[f];
    const float* rows[N];
    EACH_ROW rows[r] = keys.rows + at.index[s + r] * w.width + w.at[f];
    const float* parts = column.parts + w.at[f] * C;
    if (term.kind == PRODUCT) {
      rows_by_columns<N>(rows, parts, C, term.size, gap);
      continue;
    }
    gaps<N>(rows, parts, term.size, gap);
    if (term.kind != SPHERE && term.kind != HYPERBOLIC) continue;
    const float opposite = term.kind == SPHERE ? 4.f - OPPOSITE : 8.f;
    I some = I{};
    for (int i = 0; i < N * C; i += L) some |= (load(gap + i) < NEAR) | (load(gap + i) > opposite);
    if (!any(some)) continue;
    for (int i = 0; i < N * C; ++i) {
      Close pair{static_cast<int32_t>(f), i / C, i % C, gap[i] > opposite, false};
      if (!(gap[i] < NEAR || pair.opposite) || column.t0 + pair.lane >= c.T) continue;
      const Apart points = apart(w, at, keys, column, s, pair);
      double sum = 0;
      for (int64_t d = 0; d < term.size; ++d) sum += points[d] * points[d];
      pair.same = sum < SAME;
      gap[i] = static_cast<float>(pair.opposite ? -std::max(sum, SAME) : pair.same ? 0 : sum);
      close[found++] = pair;
    }
  }
  return found;
}

// log K of a sum of weighed distances x where waves are made of it; its slope, and where ``pulls`` is given, V of each coefficient's
INLINE V waves(const float* coefficients, int64_t n, V x, V& slope, V* pulls) {
  const V d = x < 0.f ? -x : (x == x ? V{} : x);
  V value = V{};
  slope = V{};
  for (int64_t k = 0; k < n; ++k) {
    const float a = coefficients[k], b = coefficients[n + k], frequency = coefficients[2 * n + k];
    V even, odd;
    circular(d * std::abs(frequency), even, odd);
    const V fade = d * b < 100.f ? exp2(d * (-b * LOG2E)) : (x == x ? V{} : x);
    // of a distance past all turns cosine and sine are nothing, and so is the wave
    even = fade > 0.f ? even * fade : fade;
    odd = fade > 0.f ? odd * (frequency < 0 ? -fade : fade) : fade;
    value += a * even;
    slope += a * (b * even + frequency * odd);
    if (pulls != nullptr) {
      pulls[k] = even;
      pulls[n + k] = -a * d * even;
      pulls[2 * n + k] = -a * d * odd;
    }
  }
  slope = x > 0.f ? V{} : slope;
  return value;
}

// queries t0 … as a column
void pack_queries(const Work& w, const Head<float>& at, int64_t b, int64_t h, Queries& column, float* rows) {
  const Distance& asked = w.asked;
  const int count = static_cast<int>(std::min<int64_t>(C, asked.call.T - column.t0));
  std::memset(column.lanes, 0, sizeof(float) * asked.count * LANES * C);
  if (count < C) std::memset(column.parts, 0, sizeof(float) * w.width * C);
  Note notes[MOST];
  for (int i = 0; i < count; ++i) {
    const float poison = prepare_point(w, at.q + (column.t0 + i) * at.q_step, rows + i * w.width, notes);
    const float* weights = asked.weights + b * asked.weighs.batch + h * asked.weighs.head + (column.t0 + i) * asked.weighs.token;
    for (int64_t f = 0; f < asked.count; ++f) {
      const Note& note = column.notes[f * C + i] = notes[f];
      const float values[LANES] = {weights[f] + poison, note.missing, note.half, note.rest, note.up, note.down, note.sinh / 4};
      for (int k = 0; k < LANES; ++k) column.lanes[(f * LANES + k) * C + i] = values[k];
    }
  }
  as_column([&](int i) { return rows + i * w.width; }, ONES.at, count, w.width, column.parts);
}

Queries take_queries(const Work& w, Scratch& scratch) {
  Queries column;
  column.parts = scratch.take(w.width * C);
  column.lanes = scratch.take(w.asked.count * LANES * C);
  column.notes = reinterpret_cast<Note*>(scratch.take(w.asked.count * C * sizeof(Note) / 4));
  return column;
}

size_t queries_size(const Work& w) { return C * (w.width + w.asked.count * (LANES + sizeof(Note) / 4)) + 64; }

// sums of weighed distances of N keys from place s on, x and y, natural logarithms; d and slopes are kept, (count, N, C) each, where asked for
struct Kept {
  float *d, *along, *straight, *bent;
};

template <int N>
INLINE void sum_up(const Work& w, const Head<float>& at, const Keys& keys, const Queries& column, int32_t s, const float* gap, const Kept* kept, V (&x)[N], V (&y)[N]) {
  EACH_ROW x[r] = y[r] = spread(keys.poison[at.index[s + r]]);
  for (int64_t f = 0; f < w.asked.count; ++f)
    with_kind(w.asked.terms[f].kind, [&](auto kind) {
      const float* lanes = column.lanes + f * LANES * C;
      for (int r = 0; r < N; ++r)
        for (int j = 0; j < 2; ++j) {
          const Note& note = keys.notes[at.index[s + r] * w.asked.count + f];
          const int64_t place = (f * N + r) * C + j * L;
          Slopes slopes;
          const V d = distance<decltype(kind)::value>(w.square[f], w.least[f], load(gap + place), lanes + j * L, note, slopes);
          (j ? y[r] : x[r]) += load(lanes + WEIGHT * C + j * L) * d;
          if (kept == nullptr) continue;
          store(kept->d + place, d);
          store(kept->along + place, slopes.along);
          if (decltype(kind)::value == HYPERBOLIC) {
            store(kept->straight + place, slopes.straight);
            store(kept->bent + place, slopes.bent);
          }
        }
    });
}

}  // namespace
