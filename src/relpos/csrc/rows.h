// Rows of torch's tensors: addressed, copied to the type of sums, transposed, written back.
#pragma once

#include "half.h"
#include "problem.h"
#include "product.h"
#include "sizes.h"

namespace relpos {
namespace RELPOS_ISA {

// address of x[b, h, i, c]
template <class T>
inline const T* at(const View& x, int64_t b, int64_t h, int64_t i, int64_t c = 0) {
  return static_cast<const T*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2] + c * x.stride[3];
}

// y[0, columns) = factor * x[0, columns), and zeros up to whole vectors
template <class T, class S>
inline void copy_row(const T* x, int64_t step, int64_t columns, S factor, S* y) {
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(S)) {
    if (step == 1)
      for (; c + WIDTH<S> <= columns; c += WIDTH<S>) store(y + c, load(reinterpret_cast<const S*>(x) + c) * factor);
  } else {
    if (step == 1)
      for (; c < columns; c++) y[c] = widened(x[c]) * factor;
  }
  for (; c < columns; c++) y[c] = widened(x[c * step]) * factor;
  for (; c % WIDTH<S>; c++) y[c] = 0;
}

// y[0, columns) = factor * x[0, columns)
template <class T, class S>
inline void write_row(const S* x, int64_t columns, S factor, T* y, int64_t step) {
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(S)) {
    if (step == 1)
      for (; c + WIDTH<S> <= columns; c += WIDTH<S>) store(reinterpret_cast<S*>(y) + c, load(x + c) * factor);
  } else {
    if (step == 1)
      for (; c < columns; c++) y[c] = narrowed<T>(x[c] * factor);
  }
  for (; c < columns; c++) y[c * step] = narrowed<T>(x[c] * factor);
}

// out [count, padded columns] = factor * rows [first, first + count) of one head
template <class T, class S>
inline void copy_rows(const View& x, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns, S factor,
                      S* out) {
  const T* from = at<T>(x, b, h, first);
  for (int64_t r = 0; r < count; r++)
    copy_row(from + r * x.stride[2], x.stride[3], columns, factor, out + r * padded_to_vectors<S>(columns));
}

// Rows [first, first + count) of one head as S, padded with zeros to whole vectors if `padded`: in place if they lie
// so in memory, otherwise copied to `scratch` [count, padded columns].
template <class T, class S>
Rows<const S> rows_of(const View& x, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns,
                      bool padded, S* scratch) {
  if constexpr (sizeof(T) == sizeof(S)) {
    if (x.stride[3] == 1 && (!padded || columns % WIDTH<S> == 0)) return {at<T>(x, b, h, first), x.stride[2]};
  }
  copy_rows<T>(x, b, h, first, count, columns, S(1), scratch);
  return {scratch, padded_to_vectors<S>(columns)};
}

// out [columns, BLOCK_Q]: out[c, i] = factor * x[b, h, first + i, column + c] for i in [0, rows). Lanes without a row
// hold zeros, up to a whole vector.
template <class X, class S>
void transpose_rows(const View& x, int64_t b, int64_t h, int64_t first, int rows, int64_t column, int64_t columns,
                    S factor, S* out) {
  constexpr int W = WIDTH<S>;
  const int vectors = (rows + W - 1) / W;
  int64_t whole = 0;
#ifdef RELPOS_HAS_SHUFFLES
  if (x.stride[3] == 1) whole = columns / W * W;
  for (int v = 0; v < vectors; v++)
    for (int64_t c = 0; c < whole; c += W) {
      Vec<S> square[W];
      for (int w = 0; w < W; w++) {
        const int i = v * W + w;
        square[w] = Vec<S>{};
        if (i < rows) {
          const X* source = at<X>(x, b, h, first + i, column + c);
          if constexpr (sizeof(X) == sizeof(S))
            square[w] = load(reinterpret_cast<const S*>(source)) * factor;
          else
            for (int l = 0; l < W; l++) square[w][l] = S(widened(source[l])) * factor;
        }
      }
      transpose<S>(square);
      for (int w = 0; w < W; w++) store(out + (c + w) * BLOCK_Q + v * W, square[w]);
    }
#endif
  for (int64_t c = whole; c < columns; c++)
    for (int i = 0; i < vectors * W; i++)
      out[c * BLOCK_Q + i] = i < rows ? S(widened(*at<X>(x, b, h, first + i, column + c))) * factor : S(0);
}

// Asks for rows before they are needed; worth it where they are few and the processor has not foretold them.
template <class T>
inline void prefetch_rows(const View& x, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns) {
  for (int64_t r = 0; r < count; r++) {
    const char* row = reinterpret_cast<const char*>(at<T>(x, b, h, first + r));
    for (int64_t byte = 0; byte < columns * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
  }
}

}  // namespace RELPOS_ISA
}  // namespace relpos
