// Products of small matrices without packing: numbers of the left one are broadcast, columns of the right one are
// lanes.
#pragma once

#include "vectors.h"

namespace relpos {
namespace RELPOS_ISA {

// Elements that are read one at a time: element (r, t) is at data[r * row + t * step].
template <class S>
struct Scalars {
  const S* data;
  int64_t row, step;
};

// Rows of lanes: row r begins at data + r * row.
template <class S>
struct Rows {
  S* data;
  int64_t row;
};

template <int ROWS, int VECTORS, class S>
inline void tile(Scalars<S> a, Rows<const S> b, Rows<const S> init, Rows<S> c, int64_t depth) {
  constexpr int W = WIDTH<S>;
  Vec<S> sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++)
      sums[r][v] = init.data ? load(init.data + r * init.row + v * W) : Vec<S>{};
  for (int64_t t = 0; t < depth; t++) {
    Vec<S> row[VECTORS];
    for (int v = 0; v < VECTORS; v++) row[v] = load(b.data + t * b.row + v * W);
    const S* column = a.data + t * a.step;
    for (int r = 0; r < ROWS; r++) {
      Vec<S> x = all(column[r * a.row]);
      for (int v = 0; v < VECTORS; v++) sums[r][v] += x * row[v];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(c.data + r * c.row + v * W, sums[r][v]);
}

// at most ROWS rows
template <int ROWS, int VECTORS, class S>
inline void last_tile(Scalars<S> a, Rows<const S> b, Rows<const S> init, Rows<S> c, int64_t depth, int rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      tile<ROWS, VECTORS, S>(a, b, init, c, depth);
    else
      last_tile<ROWS - 1, VECTORS, S>(a, b, init, c, depth, rows);
  }
}

// the largest tile of vectors and rows whose sums the registers hold
constexpr int MOST_VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int rows_beside(int vectors) {
  return REGISTERS == 32 ? (vectors == 1 ? 14 : vectors == 2 ? 12 : vectors == 3 ? 8 : 6)
                         : (vectors == 1 ? 10 : 6);
}

template <int VECTORS, class S>
__attribute__((noinline)) void strip(Scalars<S> a, Rows<const S> b, Rows<const S> init, Rows<S> c,
                                     int64_t depth, int64_t rows) {
  constexpr int ROWS = rows_beside(VECTORS);
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) {
    tile<ROWS, VECTORS, S>(a, b, init, c, depth);
    a.data += ROWS * a.row;
    c.data += ROWS * c.row;
    if (init.data) init.data += ROWS * init.row;
  }
  if (r < rows) last_tile<ROWS - 1, VECTORS, S>(a, b, init, c, depth, int(rows - r));
}

template <int VECTORS, class S>
inline void last_strip(Scalars<S> a, Rows<const S> b, Rows<const S> init, Rows<S> c, int64_t depth,
                       int64_t rows, int64_t vectors) {
  if constexpr (VECTORS > 0) {
    if (vectors == VECTORS)
      strip<VECTORS, S>(a, b, init, c, depth, rows);
    else
      last_strip<VECTORS - 1, S>(a, b, init, c, depth, rows, vectors);
  }
}

// c = init + a b: `rows` rows of `vectors` vectors, `depth` products a sum. init.data may be null, for zero,
// or c's own. Each element is one sum in the order of the depth, however the rest is cut.
template <class S>
void product(Scalars<S> a, Rows<const S> b, Rows<const S> init, Rows<S> c, int64_t depth, int64_t rows,
             int64_t vectors) {
  constexpr int64_t WIDEST = MOST_VECTORS * WIDTH<S>;
  while (vectors >= MOST_VECTORS) {
    strip<MOST_VECTORS, S>(a, b, init, c, depth, rows);
    vectors -= MOST_VECTORS;
    b.data += WIDEST;
    c.data += WIDEST;
    if (init.data) init.data += WIDEST;
  }
  if (vectors > 0) last_strip<MOST_VECTORS - 1, S>(a, b, init, c, depth, rows, vectors);
}

template <class S>
void add_product(Scalars<S> a, Rows<const S> b, Rows<S> c, int64_t depth, int64_t rows, int64_t vectors) {
  product<S>(a, b, {c.data, c.row}, c, depth, rows, vectors);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
