// Products by tiles in registers, of rows that are read where they are and broadcast number by number against columns of C queries.

namespace {

// x[r], y[r] += rows[r][i] * cols[i] over i < inner: rows of numbers against a stream of columns
template <int N>
INLINE void rows_by_columns(const float* const (&rows)[N], const float* cols, int64_t step, int64_t inner, V (&x)[N], V (&y)[N]) {
  for (int64_t i = 0; i < inner; ++i) {
    const V first = load(cols), second = load(cols + L);
    EACH_ROW {
      const V number = spread(rows[r][i]);
      x[r] += number * first;
      y[r] += number * second;
    }
    cols += step;
  }
}

// sums (N rows of C) += a[index[i]][r] * cols[i] over i < inner: N neighbouring numbers of each row against that row's column
template <int N>
APART void numbers_by_columns(const float* a, int64_t stride, const int32_t* index, const float* cols, int64_t step, int64_t inner, float* sums) {
  V x[N], y[N];
  EACH_ROW {
    x[r] = load(sums + r * C);
    y[r] = load(sums + r * C + L);
  }
  for (int64_t i = 0; i < inner; ++i) {
    const float* row = a + index[i] * stride;
    const V first = load(cols), second = load(cols + L);
    EACH_ROW {
      const V number = spread(row[r]);
      x[r] += number * first;
      y[r] += number * second;
    }
    cols += step;
  }
  EACH_ROW {
    store(sums + r * C, x[r]);
    store(sums + r * C + L, y[r]);
  }
}

template <int N>
APART void products_apart(const float* const (&rows)[N], const float* cols, int64_t step, int64_t inner, float* out) {
  V x[N], y[N];
  EACH_ROW x[r] = y[r] = V{};
  rows_by_columns<N>(rows, cols, step, inner, x, y);
  EACH_ROW {
    store(out + r * C, x[r]);
    store(out + r * C + L, y[r]);
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

// into (rows of keys) += tile^T rows: the keys of a block against the SPAN rows of queries, R keys at a time
template <int R, int SPAN>
void outer(const float* tile, const float* rows, int64_t width, const int32_t* index, int64_t keys, float* into) {
  const int64_t padded = up(width, C);
  for (int64_t s = 0; s < keys; s += R)
    with_rows<R>(std::min<int64_t>(R, keys - s), [&](auto count) {
      constexpr int N = decltype(count)::value;
      const float* a[N];
      EACH_ROW a[r] = tile + (s + r) * SPAN;
      float sums[N * C];
      for (int64_t p = 0; p < width; p += C) {
        products_apart<N>(a, rows + p, padded, SPAN, sums);
        EACH_ROW add_row(into + index[s + r] * width + p, sums + r * C, width - p);
      }
    });
}

}  // namespace
