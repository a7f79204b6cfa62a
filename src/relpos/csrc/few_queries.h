// Logits of so few queries that most lanes would be empty: keys are transposed and become lanes.
#pragma once

#include "product.h"
#include "sizes.h"

namespace relpos {
namespace RELPOS_ISA {

#ifdef RELPOS_HAS_SHUFFLES
template <class S>
inline bool are_few(int rows) {
  return rows <= FEW && WIDTH<S> >= 8;
}

// logits [count, BLOCK_Q] = init + keys [count, padded d_k] times query_t [d_k, BLOCK_Q]. Each logit is the same sum
// in the same order as in `product`, to the last bit.
template <class S>
void multiply_few(Rows<const S> keys, const S* query_t, Rows<const S> init, int64_t d_k, int64_t count, int rows,
                  S* logits) {
  constexpr int W = WIDTH<S>;
  using V = Vec<S>;
  const int64_t columns = padded_to_vectors<S>(d_k);
  for (int64_t j = 0; j < count; j += W) {
    const int group = int(smaller_of(W, count - j));
    V sums[FEW];  // of each query, over the lanes' keys
    for (int i = 0; i < rows; i++) {
      sums[i] = V{};
      for (int w = 0; init.data && w < group; w++) sums[i][w] = init.data[(j + w) * init.row + i];
    }
    for (int64_t c = 0; c < columns; c += W) {
      V square[W];  // [W keys, W columns], then transposed
      for (int w = 0; w < W; w++) square[w] = w < group ? load(keys.data + (j + w) * keys.row + c) : V{};
      transpose<S>(square);
      const int64_t real = smaller_of(W, d_k - c);
      for (int64_t w = 0; w < real; w++)
        for (int i = 0; i < rows; i++) sums[i] += square[w] * query_t[(c + w) * BLOCK_Q + i];
    }
    for (int w = 0; w < group; w++) {
      V row = V{};
      for (int i = 0; i < rows; i++) row[i] = sums[i][w];
      store(logits + (j + w) * BLOCK_Q, row);
    }
  }
}
#else
template <class S>
inline bool are_few(int) {
  return false;
}
template <class S>
void multiply_few(Rows<const S>, const S*, Rows<const S>, int64_t, int64_t, int, S*) {}
#endif

}  // namespace RELPOS_ISA
}  // namespace relpos
