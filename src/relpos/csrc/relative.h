// Relative positions by distance: products with a table's rows for each pair, and sums of pairs for each row.
//
// A far block of keys needs one product for each query, a near one a product for each query and distance.
#pragma once

#include "blocks.h"
#include "product.h"

namespace relpos {
namespace RELPOS_ISA {

// rel_k or rel_v as one head has it; `data` is null where there is none.
template <class S>
struct Table {
  const S* data;  // [labels, columns]
  int64_t row;    // elements from a row to the next
  int64_t labels, columns;

  explicit operator bool() const { return data; }
  const S* row_at(int64_t label) const { return data + label * row; }
};

template <class S>
Table<S> rel_k_of(const Problem& p, int64_t h) {
  return {p.rel_k ? static_cast<const S*>(p.rel_k) + h * p.rel_k_head : nullptr, p.rel_k_row, p.labels, p.d_k};
}
template <class S>
Table<S> rel_v_of(const Problem& p, int64_t h) {
  return {p.rel_v ? static_cast<const S*>(p.rel_v) + h * p.rel_v_head : nullptr, p.rel_v_row, p.labels, p.d_v};
}

// out [count, BLOCK_Q] = rows [first, first + count) of the table times x_t [columns, BLOCK_Q]
template <class S>
void multiply_table(const Table<S>& table, int64_t first, int64_t count, const S* x_t, int vectors, S* out) {
  product<S>({table.row_at(first), table.row, 1}, {x_t, BLOCK_Q}, {nullptr, 0}, {out, BLOCK_Q}, table.columns, count,
             vectors);
}

// far [2, BLOCK_Q] = the table's first row and its last times x_t [columns, BLOCK_Q]
template <class S>
void multiply_far(const Table<S>& table, const S* x_t, int vectors, S* far) {
  product<S>({table.data, (table.labels - 1) * table.row, 1}, {x_t, BLOCK_Q}, {nullptr, 0}, {far, BLOCK_Q},
             table.columns, 2, vectors);
}

// out [near keys, BLOCK_Q] = x_t [columns, BLOCK_Q] times the table's row of each pair.
// by_distance: scratch [BLOCK_K + BLOCK_Q, BLOCK_Q].
template <class S>
void multiply_near(const QueryBlock<S>& block, const KeyBlock& keys, const Table<S>& table, const S* x_t,
                   const S* far, S* by_distance, S* out) {
  constexpr int W = WIDTH<S>;
  const Problem& p = block.p;
  const int rows = block.rows, vectors = block.vectors;
  const int64_t u = keys.first - block.position;  // distance of the first key from the first query
  const Ints<S> lane = count_up<S>();
  const int64_t lowest = block.first_distance(keys), count = block.num_distances(keys);
  if (count > 0) multiply_table(table, lowest + p.left, count, x_t, vectors, by_distance);
  for (int64_t j = 0; j < keys.count; j++) {
    S* target = out + j * BLOCK_Q;
    // for lanes from here on the key is far left
    const int64_t left_from = clamped(u + j + p.left, 0, BLOCK_Q);
    for (int v = 0; v < vectors; v++) {
      Ints<S> is_left = lane + v * W >= Ints<S>{} + typename IntOf<S>::type(left_from);
      store(target + v * W, is_left ? load(far + v * W) : load(far + BLOCK_Q + v * W));
    }
    const int64_t begin = larger_of(0, u + j - p.right + 1), end = smaller_of(rows, left_from);
    for (int64_t i = begin; i < end; i++) target[i] = by_distance[(u + j - i - lowest) * BLOCK_Q + i];
  }
}

// The part of each pair that distances add, as the first summand of a product over the columns: so it costs nothing
// beyond the near keys. Written to `out` only where the keys are near.
template <class S>
Rows<const S> relative_part(const QueryBlock<S>& block, const KeyBlock& keys, const Table<S>& table, const S* x_t,
                            const S* far, S* by_distance, S* out) {
  if (!table || keys.region == Region::labelled) return {nullptr, 0};
  if (keys.region == Region::far_left) return {far, 0};
  if (keys.region == Region::far_right) return {far + BLOCK_Q, 0};
  multiply_near(block, keys, table, x_t, far, by_distance, out);
  return {out, BLOCK_Q};
}

// far_sums [2, BLOCK_Q] += x [keys, BLOCK_Q] over the keys for which a query has a table's first row, and its last
template <class S>
void sum_far(const QueryBlock<S>& block, const KeyBlock& keys, const S* x, S* far_sums) {
  constexpr int W = WIDTH<S>;
  using I = typename IntOf<S>::type;
  const int64_t u = keys.first - block.position, left = block.p.left, right = block.p.right;
  const Ints<S> zero{};
  for (int v = 0; v < block.vectors; v++) {
    Vec<S> left_sum = load(far_sums + v * W), right_sum = load(far_sums + BLOCK_Q + v * W);
    const Ints<S> lane = count_up<S>() + v * W;
    for (int64_t j = 0; j < keys.count; j++) {
      const Vec<S> of_key = load(x + j * BLOCK_Q + v * W);
      if (keys.region == Region::far_left) {
        left_sum += of_key;
      } else if (keys.region == Region::far_right) {
        right_sum += of_key;
      } else {
        Ints<S> is_left = lane >= zero + I(clamped(u + j + left, 0, BLOCK_Q));
        Ints<S> is_right = lane <= zero + I(clamped(u + j - right, -1, BLOCK_Q));
        left_sum += is_left ? of_key : Vec<S>{};
        right_sum += is_right & ~is_left ? of_key : Vec<S>{};
      }
    }
    store(far_sums + v * W, left_sum);
    store(far_sums + BLOCK_Q + v * W, right_sum);
  }
}

// acc [rows, acc_row] += far_sums [2, BLOCK_Q] of each query times the table's first row and its last
template <class S>
inline void add_far_rows(const S* far_sums, const Table<S>& table, int rows, S* acc, int64_t acc_row) {
  const S *first = table.data, *last = table.row_at(table.labels - 1);
  for (int i = 0; i < rows; i++)
    for (int64_t c = 0; c < acc_row; c += WIDTH<S>) {
      S* sum = acc + i * acc_row + c;
      store(sum, load(sum) + far_sums[i] * load(first + c) + far_sums[BLOCK_Q + i] * load(last + c));
    }
}

// Near pairs x [keys, BLOCK_Q] between margins as a matrix [query, distance]: a query has one key at each distance,
// so that the diagonals of x are its columns. Clears the margins that it reads.
template <class S>
Scalars<S> by_query_and_distance(const QueryBlock<S>& block, const KeyBlock& keys, S* x) {
  constexpr int W = WIDTH<S>;
  for (int64_t j = 1; j < block.rows; j++)
    for (int v = 0; v < block.vectors; v++) {
      store(x - j * BLOCK_Q + v * W, Vec<S>{});
      store(x + (keys.count + j - 1) * BLOCK_Q + v * W, Vec<S>{});
    }
  return {x + (block.first_distance(keys) + block.position - keys.first) * BLOCK_Q, BLOCK_Q + 1, BLOCK_Q};
}

// the same as [distance, query]
template <class S>
Scalars<S> transposed(const Scalars<S>& x) {
  return {x.data, x.step, x.row};
}

}  // namespace RELPOS_ISA
}  // namespace relpos
