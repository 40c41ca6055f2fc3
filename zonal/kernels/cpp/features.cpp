// Feature maps of one layer: y_i = gain g(z_i) with z_i = factor w_i . u + offset - norm |u|^2, for vectors u = x or
// x / |x| and the rows w_i of a matrix; or gain times the softmax of all z.
//
// The tokens of a column lie across the lanes of vectors. A column's features are made in one pass, and made again in
// backward, so that only x and y are ever in memory.

#include "activations.hpp"
#include "products.hpp"

extern "C" {

// What zonal/kernels/features.py fills in. Last axes have stride 1.
struct Layer {
  const float *x, *weight, *dy;  // (B, H, T, D), (heads, rows, D), (B, H, T, F)
  const Block* blocks;
  Strides xs, dys;
  int64_t B, H, T, D, F, heads, rows, count, unit, softmax;  // count: of blocks
  int64_t tokens, parts;    // tokens of a task, tasks of a head
  float *y, *dx, *dweight;  // (B, H, T, F), (B, H, T, D), (B, H, parts, rows, D) or null
  uint8_t* lost;            // (1), 0 at first: 1 where all features of some vector are 0
};
}

namespace {

template <int KIND>
INLINE V slope(V z) {
  return KIND == EXP ? exponential(z) : 2.f * z;
}

struct Buffers {
  float *u, *products, *z, *du, *dproducts, *dy, *rows, *dsquare;
  int32_t* index;
};

Buffers buffers(const Layer& c, Scratch& scratch, bool backward) {
  scratch.begin(C * (2 * c.D + 2 * c.rows + 2 * c.F + up(c.D, C) + 1) + c.rows);
  Buffers at;
  at.u = scratch.take(c.D * C);
  at.products = scratch.take(c.rows * C);
  at.z = scratch.take(c.F * C);
  if (!backward) return at;
  at.du = scratch.take(c.D * C);
  at.dproducts = scratch.take(c.rows * C);
  at.dy = scratch.take(c.F * C);
  at.dsquare = scratch.take(C);
  at.rows = scratch.take(up(c.D, C) * C);
  at.index = reinterpret_cast<int32_t*>(scratch.take(c.rows));
  for (int32_t i = 0; i < c.rows; ++i) at.index[i] = i;
  return at;
}

struct Lanes {  // up to C tokens of a head
  const float *x, *weight;
  int64_t first, count;  // first: the number of its first token among all (B, H, T)
  float factors[C];      // of x in u; 0 in lanes without a token
};

// u, its products with the matrix, |u|^2 and z of a column
void make(const Layer& c, const Lanes& column, const Buffers& at) {
  const auto row = [&](int64_t i) { return column.x + std::min(i, column.count - 1) * c.xs.token; };
  as_column(row, column.factors, C, c.D, at.u);
  for (int64_t i = 0; i < c.rows; i += R)
    with_rows<R>(c.rows - i, [&](auto n) {
      constexpr int N = decltype(n)::value;
      const float* rows[N];
      EACH_ROW rows[r] = column.weight + (i + r) * c.D;
      rows_by_columns<N>(rows, at.u, C, c.D, at.products + i * C);
    });
  for (int j = 0; j < C; j += L) {
    V square = V{};
    for (int64_t d = 0; d < c.D; ++d) square += load(at.u + d * C + j) * load(at.u + d * C + j);
    float* z = at.z + j;
    for (int64_t k = 0; k < c.count; ++k) {
      const Block& block = c.blocks[k];
      const float* from = at.products + block.start * C + j;
      const V shift = block.norm != 0.f ? block.offset - block.norm * square : spread(block.offset);
      for (int64_t i = 0; i < block.count; ++i, z += C) store(z, block.factor * load(from + i * C) + shift);
    }
  }
}

// z of a column becomes its softmax, without gains
void normalise(const Layer& c, float* z) {
  for (int j = 0; j < C; j += L) {
    V top = load(z + j), total = V{};
    for (int64_t i = 1; i < c.F; ++i) top = most(top, load(z + i * C + j));
    for (int64_t i = 0; i < c.F; ++i) {
      const V power = exponential(load(z + i * C + j) - top);
      total += power;
      store(z + i * C + j, power);
    }
    for (int64_t i = 0; i < c.F; ++i) store(z + i * C + j, load(z + i * C + j) / total);
  }
}

// f(function, block, number of its first feature), for all blocks
template <typename Function>
INLINE void each_block(const Layer& c, const Function& f) {
  int64_t place = 0;
  for (int64_t k = 0; k < c.count; place += c.blocks[k++].count) {
    if (c.blocks[k].kind == EXP) f(std::integral_constant<int, EXP>(), c.blocks[k], place);
    else f(std::integral_constant<int, SQUARE>(), c.blocks[k], place);
  }
}

void forward_column(const Layer& c, const Lanes& column, const Buffers& at) {
  make(c, column, at);
  if (c.softmax) normalise(c, at.z);
  I found[2] = {};
  each_block(c, [&](auto kind, const Block& block, int64_t place) {
    for (float *z = at.z + place * C, *end = z + block.count * C; z < end; z += C)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const V from = load(z + j * L), y = block.gain * (c.softmax ? from : activated<decltype(kind)::value>(from));
        found[j] |= y != 0.f;
        store(z + j * L, y);
      }
  });
  for (int64_t i = 0; i < column.count; ++i)
    if (!found[i / L][i % L]) *c.lost = 1;
  to_rows(at.z, ONES.at, static_cast<int>(column.count), c.F, c.y + column.first * c.F, c.F);
}

// dweight: (rows, D), to which the column's part is added; or null
void backward_column(const Layer& c, const Lanes& column, const float* dy, const Buffers& at, float* dweight) {
  make(c, column, at);
  if (c.softmax) normalise(c, at.z);
  float there[C];
  for (int64_t i = 0; i < C; ++i) there[i] = i < column.count;
  as_column([&](int64_t i) { return dy + std::min(i, column.count - 1) * c.dys.token; }, there, C, c.F, at.dy);
  V along[2] = {};  // a softmax does not change where all its inputs grow alike
  each_block(c, [&](auto, const Block& block, int64_t place) {
    for (int64_t i = place * C; c.softmax && i < (place + block.count) * C; i += C)
      for (int j = 0; j < C; j += L) along[j / L] += block.gain * load(at.z + i + j) * load(at.dy + i + j);
  });
  clear(at.du, c.D * C);
  clear(at.dproducts, c.rows * C);
  clear(at.dsquare, C);
  each_block(c, [&](auto kind, const Block& block, int64_t place) {
    float* to = at.dproducts + block.start * C;
    V total[2] = {};
    for (int64_t i = place * C; i < (place + block.count) * C; i += C, to += C)
      for (int j = 0; j < C; j += L) {
        const V z = load(at.z + i + j), g = block.gain * load(at.dy + i + j);
        const V dz = c.softmax ? z * (g - along[j / L]) : slope<decltype(kind)::value>(z) * g;
        store(to + j, load(to + j) + block.factor * dz);
        total[j / L] += dz;
      }
    for (int j = 0; block.norm != 0.f && j < C; j += L)
      store(at.dsquare + j, load(at.dsquare + j) - block.norm * total[j / L]);
  });
  const RowsAt<float, false> rows{column.weight, c.D, nullptr};
  columns_by_columns(rows, c.D, at.dproducts, C, c.rows, at.du);
  for (int64_t d = 0; d < c.D * C; d += L)
    store(at.du + d, load(at.du + d) + 2.f * load(at.dsquare + d % C) * load(at.u + d));
  if (dweight != nullptr) {
    const int64_t step = up(c.D, C);
    clear(at.rows, step * C);
    for (int64_t i = 0; i < column.count; ++i)
      for (int64_t d = 0; d < c.D; ++d) at.rows[i * step + d] = column.x[i * c.xs.token + d] * column.factors[i];
    add_outer<C>(at.dproducts, at.rows, c.D, at.index, c.rows, dweight);
  }
  float* dx = c.dx + column.first * c.D;
  to_rows(at.du, column.factors, static_cast<int>(column.count), c.D, dx, c.D);
  for (int64_t i = 0; c.unit && i < column.count; ++i) {  // a unit vector does not change along itself
    const float* x = column.x + i * c.xs.token;
    const float inverse = column.factors[i], back = dot(dx + i * c.D, x, c.D) * inverse;
    for (int64_t d = 0; d < c.D; ++d) dx[i * c.D + d] -= back * (x[d] * inverse);
  }
}

// f(column) for all columns of a task
template <typename Function>
void each_column(const Layer& c, int64_t task, const Function& f) {
  const int64_t head = task / c.parts, b = head / c.H, h = head % c.H;
  const int64_t first = task % c.parts * c.tokens, last = std::min(first + c.tokens, c.T);
  for (int64_t t = first; t < last; t += C) {
    Lanes column;
    column.x = c.x + b * c.xs.batch + h * c.xs.head + t * c.xs.token;
    column.weight = c.weight + h / (c.H / c.heads) * c.rows * c.D;
    column.first = head * c.T + t;
    column.count = std::min<int64_t>(C, last - t);
    for (int64_t i = 0; i < C; ++i)
      column.factors[i] = i >= column.count ? 0.f : c.unit ? inverse_norm(column.x + i * c.xs.token, c.D) : 1.f;
    f(column, b, h, t);
  }
}

int each_part(const Layer& c, bool backward) {
  const bool team = c.B * c.H * c.T * (c.rows * c.D + 8 * c.F) > (1 << 18);
  return each_task<Scratch>(c.B * c.H * c.parts, team, [&](int64_t task, Scratch& scratch) {
    const Buffers at = buffers(c, scratch, backward);
    float* dweight = c.dweight == nullptr ? nullptr : c.dweight + task * c.rows * c.D;
    each_column(c, task, [&](const Lanes& column, int64_t b, int64_t h, int64_t t) {
      const float* dy = c.dy + b * c.dys.batch + h * c.dys.head + t * c.dys.token;
      if (backward) backward_column(c, column, dy, at, dweight);
      else forward_column(c, column, at);
    });
  });
}

}  // namespace

extern "C" {

// Both return 0, or 1 when memory ran out.
int zonal_features_forward(const Layer* call) { return each_part(*call, false); }
int zonal_features_backward(const Layer* call) { return each_part(*call, true); }
}
