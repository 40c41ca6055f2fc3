// Products by tiles in registers: rows are read where they are and broadcast word by word against columns of C queries.
// A word is one float, or two neighbouring bfloat16 (simd.hpp).

namespace {

#if ZONAL_TILES
// the distance between neighbours of some rows, or 0 where they lie unevenly
template <int N, typename T>
INLINE int64_t distance_of(const T* const (&rows)[N]) {
  const int64_t distance = rows[1] - rows[0];
  bool even = true;
  for (int r = 2; r < N; ++r) even &= rows[r] - rows[r - 1] == distance;
  return even ? distance : 0;
}
#endif

// x[r], y[r] += rows[r] * cols over ``inner`` words of each row, against columns that lie ``step`` numbers apart
template <int N, typename T>
INLINE void add_rows(const T* const (&rows)[N], const T* cols, int64_t step, int64_t inner, V (&x)[N], V (&y)[N]) {
  int64_t i = 0;
#if ZONAL_TILES
  if constexpr (N == TILE && PER_WORD<T> == 2) {  // as many words as fill tiles
    const int64_t distance = inner < TILE ? 0 : distance_of(rows);
    if (distance != 0) {
      alignas(64) float out[TILE * C];
      tile_products(rows[0], distance, cols, step, inner / TILE, out);
      EACH_ROW {
        x[r] += load(out + r * C);
        y[r] += load(out + r * C + L);
      }
      i = inner / TILE * TILE;
      cols += i * step;
    }
  }
#endif
  for (; i < inner; ++i) {
    const auto first = words(cols), second = words(cols + L * PER_WORD<T>);
    EACH_ROW {
      const auto both = word(rows[r] + i * PER_WORD<T>);
      x[r] = add_product(x[r], both, first);
      y[r] = add_product(y[r], both, second);
    }
    cols += step;
  }
}

// out (N, C) = rows * cols, as above
template <int N, typename T>
APART void rows_by_columns(const T* const (&rows)[N], const T* cols, int64_t step, int64_t inner, float* out) {
  V x[N] = {}, y[N] = {};
  add_rows<N>(rows, cols, step, inner, x, y);
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
  }
}

// Rows of numbers, ``step`` apart. INDEXED: row i is at index[i] * step.
template <typename T, bool INDEXED>
struct RowsAt {
  const T* at;
  int64_t step;
  const int32_t* index;
  const T* operator()(int64_t i) const { return at + (INDEXED ? index[i] : i) * step; }
};

// f(first row, their number as a constant) for tiles of nearly the same height
template <typename F>
INLINE void with_each_tile(int64_t rows, const F& f) {
  const int64_t tiles = (rows + R - 1) / R;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = tile * rows / tiles;
    with_rows<R>((tile + 1) * rows / tiles - first, [&](auto n) { f(first, n); });
  }
}

// sums (N, C) += N neighbouring numbers of each of ``inner`` rows, from number p on, times that row's column
template <int N, bool INDEXED>
APART void numbers_by_columns(
    RowsAt<float, INDEXED> rows, int64_t p, const float* cols, int64_t step, int64_t inner, float* sums) {
  V x[N], y[N];
  EACH_ROW {
    x[r] = load(sums + r * C);
    y[r] = load(sums + r * C + L);
  }
  rows.at += p;
  for (int64_t i = 0; i < inner; ++i) {
    const float* row = rows(i);
    const V first = load(cols), second = load(cols + L);
    EACH_ROW {
      const V both = spread(row[r]);
      x[r] += both * first;
      y[r] += both * second;
    }
    cols += step;
  }
  EACH_ROW {
    store(sums + r * C, x[r]);
    store(sums + r * C + L, y[r]);
  }
}

// sums (width, C) += ``inner`` rows of ``width`` numbers times their columns
template <bool INDEXED>
void columns_by_columns(
    RowsAt<float, INDEXED> rows, int64_t width, const float* cols, int64_t step, int64_t inner, float* sums) {
  with_each_tile(width, [&](int64_t p, auto n) {
    numbers_by_columns<decltype(n)::value>(rows, p, cols, step, inner, sums + p * C);
  });
}

// sums (N, C) += rows * cols, as ``rows_by_columns``
template <int N, typename T>
APART void add_rows_by_columns(const T* const (&rows)[N], const T* cols, int64_t step, int64_t inner, float* sums) {
  V x[N], y[N];
  EACH_ROW {
    x[r] = load(sums + r * C);
    y[r] = load(sums + r * C + L);
  }
  add_rows<N>(rows, cols, step, inner, x, y);
  EACH_ROW {
    store(sums + r * C, x[r]);
    store(sums + r * C + L, y[r]);
  }
}

// to += from, fewer than C numbers: the end of a row
APART void add_few(float* to, const float* from, int64_t numbers) {
  for (int64_t i = 0; i < numbers; ++i) to[i] += from[i];
}

// to (width numbers) += from (C numbers), as far as the width goes
INLINE void add_row(float* to, const float* from, int64_t width) {
  if (width < C) return add_few(to, from, width);
  store(to, load(to) + load(from));
  store(to + L, load(to + L) + load(from + L));
}

// into (rows of ``width`` numbers, by index) += tile^T rows: the keys of a block, R at a time, against SPAN queries.
// tile (keys, SPAN); rows: words of queries, (SPAN / PER_WORD, up(width, C))
template <int SPAN, typename T>
void add_outer(const T* tile, const T* rows, int64_t width, const int32_t* index, int64_t keys, float* into) {
  const int64_t padded = up(width, C) * PER_WORD<T>;
  for (int64_t s = 0; s < keys; s += R)
    with_rows<R>(std::min<int64_t>(R, keys - s), [&](auto count) {
      constexpr int N = decltype(count)::value;
      const T* a[N];
      EACH_ROW a[r] = tile + (s + r) * SPAN;
      float sums[N * C];
      for (int64_t p = 0; p < width; p += C) {
        rows_by_columns<N>(a, rows + p * PER_WORD<T>, padded, SPAN / PER_WORD<T>, sums);
        EACH_ROW add_row(into + index[s + r] * width + p, sums + r * C, width - p);
      }
    });
}

}  // namespace
