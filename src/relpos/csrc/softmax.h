// Online softmax of a block of queries: running maxima, sums and outputs; merged over splits of the keys.
#pragma once

#include "rows.h"
#include "sizes.h"

namespace relpos {
namespace RELPOS_ISA {

// A split is SPLIT_K keys with a softmax of its own, and splits are merged in their order. Where queries are few and
// keys are many each split is a task, so that there is work for every thread. A result depends neither on the number
// of queries nor on whether splits were tasks.
inline int64_t num_splits(const Problem& p) { return larger_of(1, (p.keys + SPLIT_K - 1) / SPLIT_K); }
inline bool are_splits_tasks(const Problem& p) { return p.queries <= BLOCK_Q && num_splits(p) > 1; }
inline int64_t num_query_blocks(const Problem& p) { return (p.queries + BLOCK_Q - 1) / BLOCK_Q; }

template <class S>
struct OnlineSoftmax {
  S* acc;      // [rows, padded d_v], sums of weights times values, not yet divided by row_sum
  S* row_max;  // [BLOCK_Q], the largest logit
  S* row_sum;  // [BLOCK_Q], the sum of exp(logit - row_max)

  static int64_t acc_size(const Problem& p) {
    return smaller_of(p.queries, BLOCK_Q) * padded_to_vectors<S>(p.d_v);
  }
  static int64_t size(const Problem& p) { return acc_size(p) + 2 * BLOCK_Q; }

  explicit OnlineSoftmax(S* memory) : acc(memory + 2 * BLOCK_Q), row_max(memory), row_sum(memory + BLOCK_Q) {}

  void clear(const Problem& p) {
    for (int64_t i = 0; i < BLOCK_Q; i++) {
      row_max[i] = -S(INFINITY);
      row_sum[i] = 0;
    }
    for (int64_t i = 0; i < acc_size(p); i++) acc[i] = 0;
  }

  // one softmax out of two
  void merge(const OnlineSoftmax& other, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) {
      if (other.row_sum[i] == 0) continue;  // a sum that is NaN is merged
      const S both = row_max[i] > other.row_max[i] ? row_max[i] : other.row_max[i];
      // where all logits of other are NaN, its row_max is still -inf: alpha_other is NaN, as it should be
      const S alpha = row_max[i] == both ? S(1) : std::exp(row_max[i] - both);
      const S alpha_other =
          other.row_max[i] == both && both != -S(INFINITY) ? S(1) : std::exp(other.row_max[i] - both);
      row_sum[i] = row_sum[i] * alpha + other.row_sum[i] * alpha_other;
      row_max[i] = both;
      for (int64_t c = 0; c < columns; c++)
        acc[i * columns + c] = acc[i * columns + c] * alpha + other.acc[i * columns + c] * alpha_other;
    }
  }

  // Writes out and lse of queries [first, first + rows).
  template <class T>
  void write(const Problem& p, int64_t b, int64_t h, int64_t first, int rows) const {
    const int64_t columns = padded_to_vectors<S>(p.d_v);
    S* lse = static_cast<S*>(p.lse) + (b * p.heads + h) * p.queries + first;  // [rows]
    for (int i = 0; i < rows; i++) {
      const S sum = row_sum[i];
      lse[i] = sum == 0 ? -S(INFINITY) : row_max[i] + std::log(sum);
      const S inverse = sum == 0 ? S(0) : 1 / sum;
      T* out = const_cast<T*>(at<T>(p.out, b, h, first + i));  // [d_v]
      write_row(acc + i * columns, p.d_v, inverse, out, int64_t(1));
    }
  }
};

}  // namespace RELPOS_ISA
}  // namespace relpos
