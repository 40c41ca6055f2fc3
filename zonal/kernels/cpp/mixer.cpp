// What stands before and behind a recurrence, each in one pass over the tokens: the short causal convolution with SiLU, and the gated norm.
//
//   convolution   y_t = f(b + sum_{i < w} a_i x_{t-i}), f the identity or SiLU, a filter a channel
//   gated norm    out = g u / sqrt(mean(u^2) + eps), u = (y + D v) SiLU(z), the mean over each of ``groups`` parts of a row
//
// Both are bound by memory, so that nothing between input and output is ever written: backward makes it again. Tokens go in ranges of
// RANGE, whatever the number of threads: sums over tokens are made range by range and added up in order.

#include "common.hpp"

#include <vector>

namespace {

constexpr int64_t RANGE = 128;  // tokens of a task
constexpr int64_t BAND = 1024;  // channels taken through a range at once, backward: whole rows where they fit, and their sums stay near

}  // namespace

extern "C" {

// A tensor (B, T, heads, width) with a last axis of stride 1.
struct Rows {
  float* data;
  int64_t batch, token, head;
};

// What zonal/kernels/mixer.py fills in. x (B, T, channels) through strides; tail (B, w - 1, channels), the tokens before the first, or null;
// taps (w, channels), the token's own first; bias (channels) or null. order (B, T): the tokens that are there, in order, then the others, and present
// (B): how many; null: all. reach (T): how many earlier tokens a token's document has; null: there is one document. The channels of y and dy
// come in parts, each of heads[i] heads of widths[i] numbers.
struct Convolution {
  Rows x;
  const float *tail, *taps, *bias;
  const int32_t *order, *present, *reach;
  int64_t B, T, channels, width, silu, parts;
  int64_t heads[3], widths[3];
  Rows y[3], dy[3];  // data of dy may be null: no gradient
  float *dx, *dtail, *sums;  // (B, T, channels), (B, w - 1, channels) or null, (B, ranges, w + 1, channels): of taps and bias
};

// y, v (B, T, heads, width) and z, dout rows of heads * width numbers; skip (heads), with v null where there is none; gain (heads * width).
struct Gated {
  Rows y, v, z, out, dy, dv, dz, dout;
  const float *skip, *gain;
  int64_t B, T, heads, width, groups;
  float eps;
  float *dgain, *dskip;  // (B, ranges, heads * width)
};
}

namespace {

inline V sigmoid(V x) { return 1.f / (1.f + exp2(x * -LOG2E)); }
inline float sigmoid(float x) { return sigmoid(spread(x))[0]; }

// f(d, loaded, kept) over n numbers, vectors first and then what is left one by one: the same arithmetic
template <typename F>
INLINE void each(int64_t n, const F& f) {
  int64_t d = 0;
  for (; d + L <= n; d += L) f(d, [](const float* p) { return load(p); }, [](float* p, V x) { store(p, x); });
  for (; d < n; ++d) f(d, [](const float* p) { return *p; }, [](float* p, float x) { *p = x; });
}

using Room = std::vector<float>;

// task(batch, range, room) for every range of tokens. Returns 0, or 1 when memory ran out.
template <typename F>
int each_range(int64_t batch, int64_t tokens, int64_t channels, const F& task) {
  const int64_t ranges = (tokens + RANGE - 1) / RANGE;
  return each_task<Room>(batch * ranges, batch * tokens * channels > (1 << 15), [&](int64_t i, Room& room) { task(i / ranges, i % ranges, room); });
}

// ---- convolution -------------------------------------------------------------------------------------------------------------------------

constexpr int64_t WIDEST = 64;

// where the tokens of one sequence are: place -> row, and what is there before the first
struct Places {
  const Convolution& c;
  const float* x;
  const float* tail;
  const float* nothing;
  const int32_t* order;
  int64_t count;

  Places(const Convolution& call, int64_t b, const float* zeros) : c(call), nothing(zeros) {
    x = c.x.data + b * c.x.batch;
    tail = c.tail == nullptr ? nullptr : c.tail + b * (c.width - 1) * c.channels;
    order = c.order == nullptr ? nullptr : c.order + b * c.T;
    count = c.order == nullptr ? c.T : c.present[b];
  }
  int64_t token(int64_t place) const { return order == nullptr ? place : order[place]; }
  // how many places back the window of a place reaches within its document; the tail is before all
  int64_t back(int64_t place) const { return c.reach == nullptr ? c.width - 1 : std::min<int64_t>(c.reach[place], c.width - 1); }
  const float* row(int64_t place) const {
    if (place >= 0) return x + token(place) * c.x.token;
    return tail == nullptr ? nothing : tail + (c.width - 1 + place) * c.channels;
  }
  void window(int64_t place, const float** rows) const {
    const int64_t far = back(place);
    for (int64_t i = 0; i < c.width; ++i) rows[i] = i <= far ? row(place - i) : nothing;
  }
};

// f(part, head, first channel there, first of all channels, how many) over the stretches of channels [c0, c1) that lie together in y
template <typename F>
INLINE void each_strip(const Convolution& c, int64_t c0, int64_t c1, const F& f) {
  int64_t channel = 0;
  for (int64_t part = 0; part < c.parts && channel < c1; channel += c.heads[part] * c.widths[part], ++part) {
    const int64_t end = std::min(c1 - channel, c.heads[part] * c.widths[part]);
    for (int64_t i = std::max<int64_t>(c0 - channel, 0); i < end;) {
      const int64_t head = i / c.widths[part], from = i % c.widths[part], width = std::min(c.widths[part] - from, end - i);
      f(part, head, from, channel + i, width);
      i += width;
    }
  }
}

inline float* at(const Rows& rows, int64_t b, int64_t t, int64_t head, int64_t from) { return rows.data + b * rows.batch + t * rows.token + head * rows.head + from; }

// f(i) for the taps from the ``first`` on, of which there are W, or any number where W is 0
template <int W, typename F>
INLINE void each_tap(const Convolution& c, int64_t first, const F& f) {
  const int64_t width = W > 0 ? W : c.width;
#pragma GCC unroll 8
  for (int64_t i = first; i < width; ++i) f(i);
}

// b + sum of taps over the window, at channel ``at`` = channel + d
template <int W, typename Load>
INLINE auto filtered(const Convolution& c, const float* const* rows, int64_t d, const Load& get) {
  auto sum = get(c.taps + d) * get(rows[0] + d);
  if (c.bias != nullptr) sum += get(c.bias + d);
  each_tap<W>(c, 1, [&](int64_t i) { sum += get(c.taps + i * c.channels + d) * get(rows[i] + d); });
  return sum;
}

template <int W>
void convolve(const Convolution& c, int64_t b, int64_t range, Room& zeros) {
  zeros.assign(c.channels, 0.f);
  const Places places(c, b, zeros.data());
  const int64_t t0 = range * RANGE, t1 = std::min(c.T, t0 + RANGE);
  const float* rows[WIDEST];
  for (int64_t place = t0; place < t1; ++place) {
    const int64_t t = places.token(place);
    const bool there = place < places.count;
    if (there) places.window(place, rows);
    each_strip(c, 0, c.channels, [&](int64_t part, int64_t head, int64_t from, int64_t channel, int64_t width) {
      float* y = at(c.y[part], b, t, head, from);
      if (!there) {
        std::memset(y, 0, sizeof(float) * width);
        return;
      }
      if (c.silu)
        each(width, [&](int64_t d, auto get, auto put) {
          const auto sum = filtered<W>(c, rows, channel + d, get);
          put(y + d, sum * sigmoid(sum));
        });
      else
        each(width, [&](int64_t d, auto get, auto put) { put(y + d, filtered<W>(c, rows, channel + d, get)); });
    });
  }
}

// Gradients of a range. Places a little past its end give gradients to its last tokens, and are made twice; their sums belong to their own range.
template <int W>
void convolve_back(const Convolution& c, int64_t b, int64_t range, Room& room) {
  const int64_t w = W > 0 ? W : c.width;
  room.assign(w * BAND + std::max(c.channels, BAND), 0.f);
  float *ring = room.data(), *zeros = ring + w * BAND;
  const Places places(c, b, zeros);
  const int64_t ranges = (c.T + RANGE - 1) / RANGE, t0 = range * RANGE, t1 = std::min(c.T, t0 + RANGE);
  float* sums = c.sums + (b * ranges + range) * (w + 1) * c.channels;
  const float* rows[WIDEST];
  for (int64_t band = 0; band < c.channels; band += BAND) {
    const int64_t size = std::min(BAND, c.channels - band);
    clear(ring, w * BAND);
    const auto kept = [&](int64_t place) { return ring + (place % w) * BAND; };
    // what place p's token gets from the windows it is in, p to p + w - 1, once their gradients are there
    const auto give = [&](int64_t p, float* to) {
      const float* from_window[WIDEST];
      for (int64_t i = 0; i < w; ++i) from_window[i] = p + i >= 0 && p + i < places.count && i <= places.back(p + i) ? kept(p + i) : zeros;
      each(size, [&](int64_t d, auto get, auto put) {
        auto sum = get(from_window[0] + d) * get(c.taps + band + d);
        each_tap<W>(c, 1, [&](int64_t i) { sum += get(from_window[i] + d) * get(c.taps + i * c.channels + band + d); });
        put(to + d, sum);
      });
    };
    for (int64_t place = t0; place < t1 + w - 1; ++place) {
      if (place < places.count) {
        places.window(place, rows);
        const bool own = place < t1;
        each_strip(c, band, band + size, [&](int64_t part, int64_t head, int64_t from, int64_t channel, int64_t width) {
          const float* dy = c.dy[part].data == nullptr ? zeros : at(c.dy[part], b, places.token(place), head, from);
          float *change = kept(place) + channel - band, *sum = sums + channel;
          each(width, [&](int64_t d, auto get, auto put) {
            auto g = get(dy + d);
            if (c.silu) {
              const auto x = filtered<W>(c, rows, channel + d, get);
              const auto s = sigmoid(x);
              g *= s * (1.f + x * (1.f - s));
            }
            put(change + d, g);
            if (!own) return;
            each_tap<W>(c, 0, [&](int64_t i) { put(sum + i * c.channels + d, get(sum + i * c.channels + d) + g * get(rows[i] + channel + d)); });
            put(sum + w * c.channels + d, get(sum + w * c.channels + d) + g);
          });
        });
      }
      const int64_t p = place - (w - 1);  // its last window has come
      if (p >= t0 && p < t1) {
        float* to = c.dx + (b * c.T + places.token(p)) * c.channels + band;
        if (p < places.count) give(p, to);
        else std::memset(to, 0, sizeof(float) * size);
      } else if (p < 0 && t0 == 0 && c.dtail != nullptr) {
        give(p, c.dtail + (b * (w - 1) + w - 1 + p) * c.channels + band);
      }
    }
  }
}

// ---- gated norm --------------------------------------------------------------------------------------------------------------------------

// f(first number of a row, head, first number of a head, how many) over the stretches of a group that lie together
template <typename F>
INLINE void each_stretch(const Gated& c, int64_t group, const F& f) {
  const int64_t size = c.heads * c.width / c.groups, end = (group + 1) * size;
  for (int64_t i = group * size; i < end;) {
    const int64_t head = i / c.width, from = i % c.width, n = std::min(c.width - from, end - i);
    f(i, head, from, n);
    i += n;
  }
}

constexpr int64_t BLOCK = 8;  // tokens at once: a head's rows of them lie together where the heads lie far from each other

// u of a group of ``count`` tokens from t on into rows of ``u``, and 1 / sqrt(mean(u^2) + eps) of each into r
void gate(const Gated& c, int64_t b, int64_t t, int64_t count, int64_t group, float* u, int64_t step, float* r) {
  V wide[BLOCK] = {};
  float narrow[BLOCK] = {};
  each_stretch(c, group, [&](int64_t i, int64_t head, int64_t from, int64_t n) {
    const float skip = c.v.data == nullptr ? 0.f : c.skip[head];
    for (int64_t j = 0; j < count; ++j) {
      const float *y = at(c.y, b, t + j, head, from), *v = c.v.data == nullptr ? nullptr : at(c.v, b, t + j, head, from);
      const float* z = c.z.data + b * c.z.batch + (t + j) * c.z.token + i;
      float* row = u + j * step + i;
      V squares = V{};
      float square = 0.f;
      each(n, [&](int64_t d, auto get, auto put) {
        auto x = get(y + d);
        if (v != nullptr) x += skip * get(v + d);
        const auto gates = get(z + d);
        x *= gates * sigmoid(gates);
        put(row + d, x);
        if constexpr (std::is_same_v<decltype(x), V>) squares += x * x;
        else square += x * x;
      });
      wide[j] += squares;
      narrow[j] += square;
    }
  });
  const int64_t size = c.heads * c.width / c.groups;
  for (int64_t j = 0; j < count; ++j) r[j] = 1.f / std::sqrt((sum(wide[j]) + narrow[j]) / size + c.eps);
}

void norm(const Gated& c, int64_t b, int64_t range) {
  const int64_t t1 = std::min(c.T, (range + 1) * RANGE), size = c.heads * c.width / c.groups;
  float r[BLOCK];
  for (int64_t t = range * RANGE; t < t1; t += BLOCK) {
    const int64_t count = std::min(BLOCK, t1 - t);
    float* out = c.out.data + b * c.out.batch + t * c.out.token;
    for (int64_t group = 0; group < c.groups; ++group) {
      gate(c, b, t, count, group, out, c.out.token, r);
      const float* gain = c.gain + group * size;
      for (int64_t j = 0; j < count; ++j) {
        float* row = out + j * c.out.token + group * size;
        each(size, [&](int64_t d, auto get, auto put) { put(row + d, get(row + d) * get(gain + d) * r[j]); });
      }
    }
  }
}

void norm_back(const Gated& c, int64_t b, int64_t range, Room& room) {
  const int64_t all = c.heads * c.width, size = all / c.groups, ranges = (c.T + RANGE - 1) / RANGE, t1 = std::min(c.T, (range + 1) * RANGE);
  room.resize(BLOCK * all);
  float *u = room.data(), *dgain = c.dgain + (b * ranges + range) * all, *dskip = c.dskip == nullptr ? nullptr : c.dskip + (b * ranges + range) * all;
  float r[BLOCK], back[BLOCK];
  for (int64_t t = range * RANGE; t < t1; t += BLOCK) {
    const int64_t count = std::min(BLOCK, t1 - t);
    const float* douts = c.dout.data + b * c.dout.batch + t * c.dout.token;
    for (int64_t group = 0; group < c.groups; ++group) {
      gate(c, b, t, count, group, u, all, r);
      for (int64_t j = 0; j < count; ++j) {
        V wide = V{};
        float narrow = 0.f;
        const float *row = u + j * all, *dout = douts + j * c.dout.token, scale = r[j];
        each(size, [&](int64_t d, auto get, auto put) {
          const int64_t i = group * size + d;
          const auto along = get(row + i) * get(dout + i);
          put(dgain + i, get(dgain + i) + along * scale);
          if constexpr (std::is_same_v<std::remove_const_t<decltype(along)>, V>) wide += along * get(c.gain + i);
          else narrow += along * get(c.gain + i);
        });
        back[j] = (sum(wide) + narrow) / size * scale * scale;
      }
      each_stretch(c, group, [&](int64_t i, int64_t head, int64_t from, int64_t n) {
        const float skip = c.v.data == nullptr ? 0.f : c.skip[head];
        for (int64_t j = 0; j < count; ++j) {
          const float *y = at(c.y, b, t + j, head, from), *v = c.v.data == nullptr ? nullptr : at(c.v, b, t + j, head, from);
          const float *z = c.z.data + b * c.z.batch + (t + j) * c.z.token + i, *row = u + j * all + i, *dout = douts + j * c.dout.token + i;
          float *dy = at(c.dy, b, t + j, head, from), *dv = v == nullptr ? nullptr : at(c.dv, b, t + j, head, from);
          float* dz = c.dz.data + b * c.dz.batch + (t + j) * c.dz.token + i;
          const float scale = r[j], along = back[j];
          each(n, [&](int64_t d, auto get, auto put) {
            const auto du = scale * (get(dout + d) * get(c.gain + i + d) - get(row + d) * along);
            const auto gates = get(z + d);
            const auto s = sigmoid(gates);
            auto x = get(y + d);
            if (v != nullptr) x += skip * get(v + d);
            const auto dx = du * gates * s;
            put(dz + d, du * x * s * (1.f + gates * (1.f - s)));
            put(dy + d, dx);
            if (v != nullptr) {
              put(dv + d, dx * skip);
              put(dskip + i + d, get(dskip + i + d) + dx * get(v + d));
            }
          });
        }
      });
    }
  }
}

template <int W>
int run(const Convolution& c, bool back) {
  return each_range(c.B, c.T, c.channels, [&](int64_t b, int64_t range, Room& room) {
    if (back) convolve_back<W>(c, b, range, room);
    else convolve<W>(c, b, range, room);
  });
}

int convolution(const Convolution& c, bool back) { return c.width == 4 ? run<4>(c, back) : run<0>(c, back); }

}  // namespace

extern "C" {

// All return 0, or 1 when memory ran out.
int zonal_convolution_forward(const Convolution* call) { return convolution(*call, false); }
int zonal_convolution_backward(const Convolution* call) { return convolution(*call, true); }

int zonal_gated_forward(const Gated* call) {
  return each_range(call->B, call->T, call->heads * call->width, [&](int64_t b, int64_t range, Room&) { norm(*call, b, range); });
}

int zonal_gated_backward(const Gated* call) {
  return each_range(call->B, call->T, call->heads * call->width, [&](int64_t b, int64_t range, Room& room) { norm_back(*call, b, range, room); });
}
}
