// The gradient of a block's output, and lse and delta of its queries.
#pragma once

#include "blocks.h"
#include "scratch.h"

namespace relpos {
namespace RELPOS_ISA {

template <class T, class S>
class OutputGradient {
 public:
  S* rows;             // grad_out [rows, padded d_v]
  S* rows_t;           // grad_out [d_v, BLOCK_Q]
  S lse[BLOCK_Q];      // inf for a lane without a query, or a query without a key: it has no weights
  S inv_sum[BLOCK_Q];  // a weight is exp(logit - lse) * inv_sum
  S delta[BLOCK_Q];    // sum over d_v of grad_out * out, less grad_lse

  // `query_block` must outlive it
  OutputGradient(const QueryBlock<S>& query_block, Scratch& scratch)
      : p(query_block.p), block(query_block), row(padded_to_vectors<S>(p.d_v)) {
    prefetch_rows<T>(p.grad_out, block.b, block.h, block.first, block.rows, p.d_v);
    prefetch_rows<T>(p.out, block.b, block.h, block.first, block.rows, p.d_v);
    rows = scratch.take<S>(BLOCK_Q * row);
    copy_rows<T>(p.grad_out, block.b, block.h, block.first, block.rows, p.d_v, S(1), rows);
    rows_t = scratch.take<S>(p.d_v * BLOCK_Q);
    transpose_rows<T>(p.grad_out, block.b, block.h, block.first, block.rows, 0, p.d_v, S(1), rows_t);
    const int64_t before = (block.b * p.heads + block.h) * p.queries + block.first;
    const S* b_lse = static_cast<const S*>(p.lse) + before;  // [rows]
    if (p.grad_lse) grad_lse = static_cast<const S*>(p.grad_lse) + before;
    for (int i = 0; i < BLOCK_Q; i++) {
      lse[i] = i < block.rows && b_lse[i] != -S(INFINITY) ? b_lse[i] : S(INFINITY);
      inv_sum[i] = 1;
      delta[i] = 0;
    }
    find_delta();
    for (int i = 0; i < block.rows; i++)
      if (lse[i] == S(INFINITY)) clear(i);
  }

  // Whether the output or lse of a query is too coarse for its gradients: an output rounded to 16 bits, or an lse so
  // large, as masks of large numbers make it, that the logarithm of the sum is lost beside the maximum.
  bool needs_refining(int i) const {
    return lse[i] != S(INFINITY) && (sizeof(T) != sizeof(S) || std::fabs(lse[i]) > S(1e3));
  }
  bool needs_refining() const {
    bool does_any = false;
    for (int i = 0; i < block.rows; i++) does_any |= needs_refining(i);
    return does_any;
  }

  // Corrects inv_sum and delta by sums over the keys [BLOCK_Q]: of exp(logit - lse), and of that times the weight's
  // gradient.
  void refine(const S* sum, const S* grad_sum) {
    for (int i = 0; i < block.rows; i++) {
      if (!needs_refining(i)) continue;
      inv_sum[i] = 1 / sum[i];
      delta[i] = grad_sum[i] * inv_sum[i];
      if (grad_lse) delta[i] -= grad_lse[i];
    }
  }

 private:
  const Problem& p;
  const QueryBlock<S>& block;
  const int64_t row;            // padded d_v
  const S* grad_lse = nullptr;  // [rows]

  void find_delta() {
    constexpr int W = WIDTH<S>;
    for (int i = 0; i < block.rows; i++) {
      const T* out = at<T>(p.out, block.b, block.h, block.first + i);  // [d_v]
      const S* grad = rows + i * row;                                  // [d_v]
      Vec<S> sums = Vec<S>{};
      int64_t c = 0;
      if constexpr (sizeof(T) == sizeof(S))
        for (; c + W <= p.d_v; c += W) sums += load(grad + c) * load(reinterpret_cast<const S*>(out) + c);
      S sum = 0;
      for (int w = 0; w < W; w++) sum += sums[w];
      for (; c < p.d_v; c++) sum += grad[c] * widened(out[c]);
      delta[i] = grad_lse ? sum - grad_lse[i] : sum;
    }
  }

  // a query without a key has no gradients, whatever comes in, NaN included
  void clear(int i) {
    delta[i] = 0;
    for (int64_t c = 0; c < row; c++) rows[i * row + c] = 0;
    for (int64_t c = 0; c < p.d_v; c++) rows_t[c * BLOCK_Q + i] = 0;
  }
};

}  // namespace RELPOS_ISA
}  // namespace relpos
