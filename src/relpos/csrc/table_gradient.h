// Gradients of the tables: each group of heads sums its part, and the parts are summed in their order.
#pragma once

#include "product.h"
#include "sizes.h"

namespace relpos {
namespace RELPOS_ISA {

// The part of one table's gradient that a group sums, or a head where each has a table of its own; null where nobody
// asks for it.
template <class S>
class TableGradient {
 public:
  // parts: [groups or batch * heads, rows_reached, padded columns]
  TableGradient(const Problem& p, void* parts, int64_t part, bool is_new, int64_t columns)
      : p_(p), row_(padded_to_vectors<S>(columns)) {
    const int64_t size = p.rows_reached * row_;
    if (!parts) return;
    data_ = static_cast<S*>(parts) + part * size;
    for (int64_t i = 0; is_new && i < size; i++) data_[i] = 0;
  }

  explicit operator bool() const { return data_; }

  // rows [first, first + count) of the table += x [count, query] times y [query, padded columns]. Rows that no pair of
  // the call uses have no place and nothing to add.
  void add(int64_t first, int64_t count, Scalars<S> x, const S* y, int queries) const {
    if (!data_) return;
    const int64_t begin = larger_of(first, p_.first_row);
    const int64_t end = smaller_of(first + count, p_.first_row + p_.rows_reached);
    if (begin >= end) return;
    x.data += (begin - first) * x.row;
    add_product<S>(x, {y, row_}, {data_ + (begin - p_.first_row) * row_, row_}, queries, end - begin,
                   row_ / WIDTH<S>);
  }

  // the first row and the last += far_sums [2, BLOCK_Q] times y [query, padded columns]
  void add_far(const S* far_sums, const S* y, int queries) const {
    add(0, 1, {far_sums, BLOCK_Q, 1}, y, queries);
    add(p_.labels - 1, 1, {far_sums + BLOCK_Q, BLOCK_Q, 1}, y, queries);
  }

 private:
  const Problem& p_;
  const int64_t row_;  // padded columns
  S* data_ = nullptr;  // [rows_reached, padded columns]
};

// One row of a table's gradient, of each head if `by_head`, from all parts in their order.
template <class S>
void sum_table(const Problem& p, const void* parts, void* table, bool by_head, int64_t columns, int64_t row) {
  if (!parts) return;
  const int64_t padded = padded_to_vectors<S>(columns), size = p.rows_reached * padded;
  for (int64_t h = 0; h < (by_head ? p.heads : 1); h++) {
    S* target = static_cast<S*>(table) + (h * p.labels + p.first_row + row) * columns;  // [columns]
    constexpr int64_t WIDEST = 64;  // columns at a time
    for (int64_t first = 0; first < columns; first += WIDEST) {
      const int64_t width = smaller_of(WIDEST, columns - first);
      double sums[WIDEST] = {};
      for (int64_t part = h; part < (by_head ? p.batch * p.heads : p.groups); part += by_head ? p.heads : 1) {
        const S* x = static_cast<const S*>(parts) + part * size + row * padded + first;  // [width]
        for (int64_t c = 0; c < width; c++) sums[c] += x[c];
      }
      for (int64_t c = 0; c < width; c++) target[first + c] = S(sums[c]);
    }
  }
}

template <class S>
void sum_tables(const Problem& p, int64_t row) {
  sum_table<S>(p, p.grad_rel_k_parts, p.grad_rel_k, p.rel_k_head != 0, p.d_k, row);
  sum_table<S>(p, p.grad_rel_v_parts, p.grad_rel_v, p.rel_v_head != 0, p.d_v, row);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
