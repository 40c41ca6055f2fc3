// Products by tiles in registers: rows are read where they are and broadcast word by word against columns of C queries.
// A word is one float, or two neighbouring bfloat16 (simd.hpp).

namespace {

// x[r], y[r] += rows[r] * cols over ``inner`` words of each row, against columns that lie ``step`` numbers apart
template <int N, typename T>
INLINE void add_rows(const T* const (&rows)[N], const T* cols, int64_t step, int64_t inner, V (&x)[N], V (&y)[N]) {
  for (int64_t i = 0; i < inner; ++i) {
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

// sums (N, C) += N neighbouring words of each of ``inner`` rows, from word p on, times that row's column
template <int N, typename T, bool INDEXED>
APART void numbers_by_columns(
    RowsAt<T, INDEXED> rows, int64_t p, const T* cols, int64_t step, int64_t inner, float* sums) {
  V x[N], y[N];
  EACH_ROW {
    x[r] = load(sums + r * C);
    y[r] = load(sums + r * C + L);
  }
  rows.at += p * PER_WORD<T>;
  for (int64_t i = 0; i < inner; ++i) {
    const T* row = rows(i);
    const auto first = words(cols), second = words(cols + L * PER_WORD<T>);
    EACH_ROW {
      const auto both = word(row + r * PER_WORD<T>);
      x[r] = add_product(x[r], both, first);
      y[r] = add_product(y[r], both, second);
    }
    cols += step;
  }
  EACH_ROW {
    store(sums + r * C, x[r]);
    store(sums + r * C + L, y[r]);
  }
}

// sums (width, C) += ``inner`` rows of ``width`` words times their columns, in tiles of nearly the same height
template <typename T, bool INDEXED>
void columns_by_columns(
    RowsAt<T, INDEXED> rows, int64_t width, const T* cols, int64_t step, int64_t inner, float* sums) {
  const int64_t tiles = (width + R - 1) / R;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t p = tile * width / tiles;
    with_rows<R>((tile + 1) * width / tiles - p, [&](auto n) {
      numbers_by_columns<decltype(n)::value>(rows, p, cols, step, inner, sums + p * C);
    });
  }
}

// to (width numbers) += from (C numbers), as far as the width goes
INLINE void add_row(float* to, const float* from, int64_t width) {
  if (width >= C) {
    store(to, load(to) + load(from));
    store(to + L, load(to + L) + load(from + L));
  } else {
    for (int64_t i = 0; i < width; ++i) to[i] += from[i];
  }
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
