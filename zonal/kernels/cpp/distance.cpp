// Exact attention by distance: log K_ts = sum_f w_tf d_f(q_t, k_s) over parts of a vector, each with its own distance, or waves of that sum.
//
// Tiles, masks and the running softmax are tile.cpp's. What differs is that squared distances are summed from differences, never from products:
//
//   gap = |a - b|^2 (keys x C)          of points (plane), or of their directions (sphere, hyperbolic space), in registers
//   backward: dA^T += G^T (A - B)^T     G = dlog K w_f d(d_f)/d(gap); a slope is large where points are near, and their difference small
//
// so that nothing cancels where points are near. Directions are rounded, though: where two agree to some 0.03, or are opposite to some 0.2, their gap and
// its gradient are taken from the raw points in double, pair by pair. These are few, but for points on a line.
//
// A point is prepared once, queries and keys by the same code: its parts as the distance takes them, each padded to C numbers, and notes beside them.

#include "distance.hpp"

namespace {

constexpr int ROWS = 6;                                  // keys of a register tile of distances
constexpr int PULLED = ZONAL_REGISTERS == 32 ? 6 : 2;  // rows of one that holds what it subtracts from as well
constexpr int KEYS = 96;                               // keys of a block, a multiple of ROWS
constexpr int SPAN = 64;                               // queries of a block, backward

// ---- forward -------------------------------------------------------------------------------------------------------------------------------

template <int N>
APART void weigh(const Work& w, const Head<float>& at, const Keys& keys, const Sight& sight, const Queries& column, int32_t s, float* weights, Column& sums) {
  const Call& c = w.asked.call;
  float gap[MOST * N * C];
  Close close[MOST * N * C];
  measure<N>(w, at, keys, column, s, gap, close);
  V x[N], y[N];
  sum_up<N>(w, at, keys, column, s, gap, nullptr, x, y);
  EACH_ROW {
    if (w.asked.waves > 0) {
      V slope;
      x[r] = waves(at.coefficients, w.asked.waves, x[r], slope, nullptr);
      y[r] = waves(at.coefficients, w.asked.waves, y[r], slope, nullptr);
    }
    x[r] *= LOG2E;
    y[r] *= LOG2E;
  }
  record<true, N>(c, at, sight, s, x, y, weights, sums);
}

void forward_task(const Call& c, int64_t b, int64_t h, int64_t t0, int64_t t1, const Shared& shared, Scratch& scratch) {
  const Work& w = work_of(c);
  const Head<float> at = head_of<float>(c, b, h, shared);
  const Keys keys = keys_of(w, b, h);
  const int64_t columns = (t1 - t0 + C - 1) / C;
  scratch.begin(COLUMNS * (queries_size(w) + C * c.P) + C * (KEYS + w.width));
  float* rows = scratch.take(C * w.width);
  float* out = scratch.take(COLUMNS * C * c.P);
  float* weights = scratch.take(KEYS * C);
  Queries queries[COLUMNS];
  Sight sights[COLUMNS];
  Column sums[COLUMNS];
  Reach reach;
  for (int64_t i = 0; i < columns; ++i) {
    queries[i] = take_queries(w, scratch);
    queries[i].t0 = t0 + i * C;
    pack_queries(w, at, b, h, queries[i], rows);
    sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
    reach.add(sights[i]);
  }
  std::memset(out, 0, sizeof(float) * columns * C * c.P);
  for (int32_t from = reach.first; from < reach.last; from += KEYS)
    for (int64_t i = 0; i < columns; ++i) {
      const int32_t s0 = std::max(from, sights[i].first), s1 = std::min(std::min(from + KEYS, reach.last), sights[i].last);
      if (s0 >= s1) continue;
      const V before[2] = {sums[i].top[0], sums[i].top[1]};
      float* y = out + i * C * c.P;
      for (int32_t s = s0; s < s1; s += ROWS)
        with_rows<ROWS>(std::min<int>(ROWS, s1 - s), [&](auto n) {
          weigh<decltype(n)::value>(w, at, keys, sights[i], queries[i], s, weights + (s - s0) * C, sums[i]);
        });
      exponentials<true>(before, s1 - s0, c.P, weights, y, sums[i]);
      columns_by_columns(RowsAt<float, true>{at.v, at.v_step, at.index + s0}, c.P, weights, C, s1 - s0, y);
    }
  finish<float>(c, at.lo, at.hi, b, h, t0, t1, sums, out);
}

// ---- backward ------------------------------------------------------------------------------------------------------------------------------

constexpr int BANDS = SPAN / C;  // columns of a block

struct Block {  // the queries of a block
  Queries queries[BANDS];
  float *rows;                    // prepared queries (SPAN, width)
  float *dy_columns, *dy_rows;    // dY times the row's factor, (BANDS, P, C) and (SPAN, up(P, C))
  float *shared, *lse;            // dy . y times the factor, the row's log-sum-exp (base 2), (SPAN)
  float *dq, *dnotes;             // gradients of prepared queries as columns (BANDS, width, C), of their weights, and of radii in two sums: (BANDS, count, 3, C)
  float *weights, *grads;         // W^T (KEYS, SPAN), G of each part (count, KEYS, SPAN)
  float* dradius;                 // of keys, in two sums, over lanes that are summed up last: (count, KEYS, 2, L)
};

enum Sums { OF_WEIGHT, OF_STRAIGHT, OF_BENT, SUMS };

// sums (N rows of C) += G[i] (own[r] - numbers[index[i]][r]) over i < inner: queries pulled to keys, N neighbouring numbers of each
template <int N>
APART void pull_queries(const float* own, const float* keys, int64_t stride, const int32_t* index, const float* grads, int64_t inner, float* sums) {
  V x[N], y[N], u[N], v[N];
  EACH_ROW {
    x[r] = load(sums + r * C);
    y[r] = load(sums + r * C + L);
    u[r] = own == nullptr ? V{} : load(own + r * C);
    v[r] = own == nullptr ? V{} : load(own + r * C + L);
  }
  for (int64_t i = 0; i < inner; ++i) {
    const float* key = keys + index[i] * stride;
    const V first = load(grads), second = load(grads + L);
    EACH_ROW {
      const V number = spread(key[r]);
      x[r] += first * (u[r] - number);
      y[r] += second * (v[r] - number);
    }
    grads += SPAN;
  }
  EACH_ROW {
    store(sums + r * C, x[r]);
    store(sums + r * C + L, y[r]);
  }
}

// out (N rows of C) = sum_i tile[r][i] (own[r] - rows[i]) over the queries of a block: keys pulled to queries, C neighbouring numbers of each
template <int N>
APART void pull_keys(const float* const (&own)[N], bool product, const float* tile, const float* rows, int64_t stride, float* out) {
  V x[N], y[N], u[N], v[N];
  EACH_ROW {
    x[r] = y[r] = V{};
    u[r] = product ? V{} : load(own[r]);
    v[r] = product ? V{} : load(own[r] + L);
  }
  for (int64_t i = 0; i < SPAN; ++i) {
    const V first = load(rows), second = load(rows + L);
    EACH_ROW {
      const V number = spread(tile[r * SPAN + i]);
      x[r] += number * (u[r] - first);
      y[r] += number * (v[r] - second);
    }
    rows += stride;
  }
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
  }
}

void pack_block(const Work& w, const Head<float>& at, int64_t b, int64_t h, int64_t t0, Block& block) {
  const Call& c = w.asked.call;
  const int64_t P16 = up(c.P, C);
  const bool online = c.anchor == ROW;
  std::memset(block.rows, 0, sizeof(float) * SPAN * w.width);
  std::memset(block.dy_rows, 0, sizeof(float) * SPAN * P16);
  std::memset(block.dy_columns, 0, sizeof(float) * SPAN * c.P);
  std::memset(block.dq, 0, sizeof(float) * SPAN * w.width);
  std::memset(block.dnotes, 0, sizeof(float) * SPAN * w.asked.count * SUMS);
  for (int i = 0; i < SPAN; ++i) {
    block.shared[i] = 0;
    block.lse[i] = std::numeric_limits<float>::infinity();
    if (t0 + i >= c.T) continue;
    const int64_t row = (b * c.H + h) * c.T + t0 + i;
    const float *dy = static_cast<const float*>(c.dy) + b * c.dys.batch + h * c.dys.head + (t0 + i) * c.dys.token, *y = static_cast<const float*>(c.y) + row * c.P;
    const float factor = online ? 1.f : c.factor[row];
    block.lse[i] = online ? c.factor[row] * LOG2E : 0.f;
    if (online) block.shared[i] = dot(dy, y, c.P);
    for (int64_t p = 0; p < c.P; ++p) block.dy_rows[i * P16 + p] = dy[p] * factor;
  }
  for (int i = 0; i < BANDS && t0 + i * C < c.T; ++i) {
    block.queries[i].t0 = t0 + i * C;
    pack_queries(w, at, b, h, block.queries[i], block.rows + i * C * w.width);
    const int rows = static_cast<int>(std::min<int64_t>(C, c.T - t0 - i * C));
    as_column([&](int r) { return block.dy_rows + (i * C + r) * P16; }, ONES.at, rows, c.P, block.dy_columns + i * C * c.P);
  }
}

// W^T and G of N keys from place s on with one column; what pairs in ``close`` get is added to dq and dk at once
template <int N>
APART void gradients(
    const Work& w, const Head<float>& at, const Keys& keys, const Sight& sight, const Block& block, int band, int32_t s, int64_t place, float* dk, V* partial) {
  const Call& c = w.asked.call;
  const int64_t count = w.asked.count;
  const Queries& column = block.queries[band];
  float gap[MOST * N * C], d[MOST * N * C], along[MOST * N * C], straight[MOST * N * C], bent[MOST * N * C], changed[N * C];
  Close close[MOST * N * C];
  const int found = measure<N>(w, at, keys, column, s, gap, close);
  const float* rows[N];
  EACH_ROW rows[r] = at.v + at.index[s + r] * at.v_step;
  rows_by_columns<N>(rows, block.dy_columns + band * C * c.P, C, c.P, changed);
  V x[2][N];
  const Kept kept{d, along, straight, bent};
  sum_up<N>(w, at, keys, column, s, gap, &kept, x[0], x[1]);
  const bool whole = s >= sight.whole_first && s + N <= sight.whole_last;
  for (int j = 0; j < 2; ++j)
    EACH_ROW {
      V score = x[j][r], slope = V{}, pulls[3 * WAVES];
      if (w.asked.waves > 0) score = waves(at.coefficients, w.asked.waves, score, slope, partial == nullptr ? nullptr : pulls);
      V weight = weight_again(c, score * LOG2E - load(block.lse + band * C + j * L)), ds = load(changed + r * C + j * L) - load(block.shared + band * C + j * L);
      ds *= weight;
      if (!whole) {
        weight = seen(sight, j, s + r) ? weight : V{};
        ds = seen(sight, j, s + r) ? ds : V{};
      }
      store(block.weights + place + r * SPAN + j * L, weight);
      if (w.asked.waves > 0) {
        for (int64_t k = 0; partial != nullptr && k < c.learned; ++k) partial[k] += !whole ? (seen(sight, j, s + r) ? ds * pulls[k] : V{}) : ds * pulls[k];
        ds *= slope;
        if (!whole) ds = seen(sight, j, s + r) ? ds : V{};
      }
      x[j][r] = ds;
    }
  for (int64_t f = 0; f < count; ++f) {
    float* grads = block.grads + f * KEYS * SPAN + place;
    float* dnotes = block.dnotes + (band * count + f) * SUMS * C;
    const bool radial = w.asked.terms[f].kind == HYPERBOLIC;
    for (int j = 0; j < 2; ++j) {
      const V factor = load(column.lanes + f * LANES * C + j * L);
      V sums[SUMS] = {load(dnotes + j * L), load(dnotes + C + j * L), load(dnotes + 2 * C + j * L)};
      EACH_ROW {
        const int64_t from = (f * N + r) * C + j * L;
        V g = x[j][r] * factor;
        V mine = x[j][r] * load(d + from);
        V slope = g * load(along + from);
        if (!whole) {  // a key that is not finite makes NaN of 0 as well
          mine = seen(sight, j, s + r) ? mine : V{};
          g = seen(sight, j, s + r) ? g : V{};
          slope = seen(sight, j, s + r) ? slope : V{};
        }
        sums[OF_WEIGHT] += mine;
        store(grads + r * SPAN + j * L, slope);
        if (radial) {
          const V flat = g * load(straight + from), curved = g * load(bent + from);
          sums[OF_STRAIGHT] += flat;
          sums[OF_BENT] += curved;
          float* dradius = block.dradius + (f * KEYS + place / SPAN + r) * 2 * L;
          store(dradius, load(dradius) + flat);
          store(dradius + L, load(dradius + L) + curved);
        }
      }
      for (int k = 0; k < SUMS; ++k) store(dnotes + k * C + j * L, sums[k]);
    }
  }
  for (int i = 0; i < found; ++i) {
    const Close& pair = close[i];
    const Term& term = w.asked.terms[pair.part];
    float& slope = block.grads[pair.part * KEYS * SPAN + place + pair.row * SPAN + pair.lane];
    const Apart points = apart(w, at, keys, column, s, pair);
    float *to_q = block.dq + (band * w.width + w.at[pair.part]) * C + pair.lane, *to_k = dk + at.index[s + pair.row] * c.D + w.at[pair.part];
    for (int64_t n = 0; n < term.size && !pair.same; ++n) {
      // of u - v, with u and v opposite, all but -(u + v) is along u, where a direction cannot go
      const float change = static_cast<float>(slope * points[n]);
      to_q[n * C] += pair.opposite ? -change : change;
      to_k[n] -= change;
    }
    slope = 0;
  }
}

void backward_block(const Work& w, const Head<float>& at, int64_t b, int64_t h, int64_t t0, Block& block, const Part& part, float* rows, double* dc) {
  const Call& c = w.asked.call;
  const int64_t count = w.asked.count;
  const int bands = static_cast<int>((std::min<int64_t>(SPAN, c.T - t0) + C - 1) / C);
  const Keys keys = keys_of(w, b, h);
  pack_block(w, at, b, h, t0, block);
  Sight sights[BANDS];
  Reach reach;
  for (int i = 0; i < bands; ++i) {
    sights[i] = sight_of(at.lo, at.hi, t0 + i * C, c.T);
    reach.add(sights[i]);
  }
  V partial[3 * WAVES];
  for (int32_t s0 = reach.first; s0 < reach.last; s0 += KEYS) {
    const int32_t s1 = std::min(s0 + KEYS, reach.last);
    for (int k = 0; k < c.learned; ++k) partial[k] = V{};
    std::memset(block.dradius, 0, sizeof(float) * count * KEYS * 2 * L);
    for (int i = 0; i < BANDS; ++i) {
      const int32_t begin = i < bands ? std::max(s0, sights[i].first) : s1, end = i < bands ? std::min(s1, sights[i].last) : s0;
      for (int32_t s = s0; s < s1; ++s)  // what no lane of the column sees
        if (s < begin || s >= end) {
          std::memset(block.weights + (s - s0) * SPAN + i * C, 0, sizeof(float) * C);
          for (int64_t f = 0; f < count; ++f) std::memset(block.grads + (f * KEYS + s - s0) * SPAN + i * C, 0, sizeof(float) * C);
        }
      for (int32_t s = begin; s < end; s += ROWS)
        with_rows<ROWS>(std::min<int>(ROWS, end - s), [&](auto n) {
          gradients<decltype(n)::value>(w, at, keys, sights[i], block, i, s, (s - s0) * SPAN + i * C, part.dk, dc == nullptr ? nullptr : partial);
        });
      for (int64_t f = 0; f < count && begin < end; ++f) {
        const Term& term = w.asked.terms[f];
        for (int64_t d = 0; d < term.size; d += PULLED)
          with_rows<PULLED>(std::min<int64_t>(PULLED, term.size - d), [&](auto n) {
            const int64_t place = w.at[f] + d;
            const float *own = term.kind == PRODUCT ? nullptr : block.queries[i].parts + place * C, *grads = block.grads + (f * KEYS + begin - s0) * SPAN + i * C;
            pull_queries<decltype(n)::value>(own, keys.rows + place, w.width, at.index + begin, grads, end - begin, block.dq + (i * w.width + place) * C);
          });
      }
    }
    add_outer<SPAN>(block.weights, block.dy_rows, c.P, at.index + s0, s1 - s0, part.dv);
    for (int64_t f = 0; f < count; ++f) {
      const Term& term = w.asked.terms[f];
      for (int32_t s = s0; s < s1; s += PULLED)
        with_rows<PULLED>(std::min<int>(PULLED, s1 - s), [&](auto n) {
          constexpr int N = decltype(n)::value;
          float sums[N * C];
          for (int64_t d = 0; d < term.size; d += C) {
            const float* own[N];
            EACH_ROW own[r] = keys.rows + at.index[s + r] * w.width + w.at[f] + d;
            pull_keys<N>(own, term.kind == PRODUCT, block.grads + (f * KEYS + s - s0) * SPAN, block.rows + w.at[f] + d, w.width, sums);
            EACH_ROW add_row(part.dk + at.index[s + r] * c.D + w.at[f] + d, sums + r * C, C);
          }
        });
      for (int32_t s = s0; s < s1 && term.kind == HYPERBOLIC; ++s) {
        const float* dradius = block.dradius + (f * KEYS + s - s0) * 2 * L;
        part.dk[at.index[s] * c.D + w.width + f] += keys.notes[at.index[s] * count + f].coth * sum(load(dradius + L)) - sum(load(dradius));
      }
    }
    for (int k = 0; k < c.learned && dc != nullptr; ++k)
      for (int i = 0; i < L; ++i) dc[k] += partial[k][i];
  }
  for (int i = 0; i < bands; ++i) {
    const int64_t first = t0 + i * C, many = std::min<int64_t>(C, c.T - first);
    to_rows(block.dq + i * w.width * C, ONES.at, static_cast<int>(many), w.width, rows, w.width);
    for (int64_t lane = 0; lane < many; ++lane) {
      const int64_t row = (b * c.H + h) * c.T + first + lane;
      float* to = static_cast<float*>(c.dq) + row * w.asked.dim;
      std::fill(to, to + w.asked.dim, 0.f);
      for (int64_t f = 0; f < count; ++f) {
        const float* sums = block.dnotes + (i * count + f) * SUMS * C + lane;
        const Note& note = block.queries[i].notes[f * C + lane];
        const Term& term = w.asked.terms[f];
        const float* x = at.q + (first + lane) * at.q_step + term.start;
        finish_part(term, note, x, rows + lane * w.width + w.at[f], sums[OF_STRAIGHT * C] + note.coth * sums[OF_BENT * C], to + term.start);
        w.asked.dweights[row * count + f] = sums[OF_WEIGHT * C];
      }
    }
  }
}

void backward_task(const Call& c, const Part& part, Scratch& scratch) {
  const Work& w = work_of(c);
  const int64_t P16 = up(c.P, C), groups = c.H / c.Hkv, count = w.asked.count;
  scratch.begin(SPAN * (2 * w.width + c.P + P16 + 2 + count * SUMS) + (1 + count) * KEYS * SPAN + count * KEYS * 2 * L + C * w.width + BANDS * queries_size(w));
  Block block;
  for (Queries& queries : block.queries) queries = take_queries(w, scratch);
  block.rows = scratch.take(SPAN * w.width);
  block.dy_columns = scratch.take(SPAN * c.P);
  block.dy_rows = scratch.take(SPAN * P16);
  block.shared = scratch.take(SPAN);
  block.lse = scratch.take(SPAN);
  block.dq = scratch.take(SPAN * w.width);
  block.dnotes = scratch.take(SPAN * count * SUMS);
  block.weights = scratch.take(KEYS * SPAN);
  block.grads = scratch.take(count * KEYS * SPAN);
  block.dradius = scratch.take(count * KEYS * 2 * L);
  float* rows = scratch.take(C * w.width);
  for (int64_t h = part.kv * groups; h < (part.kv + 1) * groups; ++h) {
    const Head<float> at = head_of<float>(c, part.b, h, part.shared);
    double* dc = c.dcoefficients == nullptr ? nullptr : c.dcoefficients + ((part.part * c.B + part.b) * c.H + h) * c.learned;
    for (int64_t t0 = part.part * SPAN; t0 < c.T; t0 += c.split * SPAN) backward_block(w, at, part.b, h, t0, block, part, rows, dc);
  }
}

// sums of prepared keys s0 to s1 as gradients of raw ones, and of the values
void finish_prepared(const Call& c, int64_t b, int64_t kv, int64_t s0, int64_t s1, float* sums) {
  const Work& w = work_of(c);
  const float* keys = static_cast<const float*>(c.k) + b * c.ks.batch + kv * c.ks.head;
  for (int64_t s = s0; s < s1; ++s) {
    const int64_t row = (b * c.Hkv + kv) * c.S + s;
    const float *grad = sums + s * c.D, *dv = sums + c.S * c.D + s * c.P;
    float* to = static_cast<float*>(c.dk) + row * w.asked.dim;
    std::fill(to, to + w.asked.dim, 0.f);
    for (int64_t f = 0; f < w.asked.count; ++f) {
      const Term& term = w.asked.terms[f];
      const float* x = keys + s * c.ks.token + term.start;
      finish_part(term, w.notes[row * w.asked.count + f], x, grad + w.at[f], grad[w.width + f], to + term.start);
    }
    std::copy(dv, dv + c.P, static_cast<float*>(c.dv) + row * c.P);
  }
}

// ---- entry ---------------------------------------------------------------------------------------------------------------------------------

// a call with its keys prepared, in ``room``
Work prepare(const Distance& asked, Scratch& room) {
  Work w;
  w.asked = asked;
  w.width = 0;
  for (int64_t f = 0; f < asked.count; ++f) {
    const Term& term = asked.terms[f];
    const double eps = term.eps, square = term.kind == HYPERBOLIC ? eps * eps / 4 : eps * eps;
    w.at[f] = w.width;
    w.width += up(term.size, C);
    w.square[f] = static_cast<float>(std::max(square, 1e-30));
    w.least[f] = static_cast<float>(term.kind == SPHERE ? 2 * std::atan2(eps, std::sqrt(4 + eps * eps)) : term.kind == HYPERBOLIC ? 2 * std::asinh(eps / 2) : eps);
  }
  const Call& c = w.asked.call;
  const int64_t keys = c.B * c.Hkv * c.S;
  room.begin(keys * (w.width + 1 + asked.count * sizeof(Note) / 4));
  w.rows = room.take(keys * w.width);
  w.poison = room.take(keys);
  w.notes = reinterpret_cast<Note*>(room.take(keys * asked.count * sizeof(Note) / 4));
#pragma omp parallel for schedule(static) if (worth_a_team(c))
  for (int64_t i = 0; i < keys; ++i) {
    const float* key = static_cast<const float*>(c.k) + i / (c.Hkv * c.S) * c.ks.batch + i / c.S % c.Hkv * c.ks.head + i % c.S * c.ks.token;
    w.poison[i] = prepare_point(w, key, w.rows + i * w.width, w.notes + i * asked.count);
  }
  return w;
}

// run(call) with its keys prepared. Returns 0, or 1 when memory ran out.
template <typename F>
int with_prepared(const Distance& asked, const F& run) {
  try {
    Scratch room;
    const Work w = prepare(asked, room);
    return run(w.asked.call);
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

// How many numbers the gradient of a prepared key has: its parts, then its radii.
int64_t zonal_distance_width(const Distance* asked) { return width_of(*asked) + asked->count; }

// Both return 0, or 1 when memory ran out.
int zonal_distance_forward(const Distance* asked) {
  return with_prepared(*asked, [](const Call& call) { return run_forward<float>(call, forward_task); });
}
int zonal_distance_backward(const Distance* asked) {
  return with_prepared(*asked, [](const Call& call) { return run_backward<float>(call, backward_task, finish_prepared); });
}
}
