// Sizes of blocks, and arithmetic of sizes.
#pragma once

#include "vectors.h"

namespace relpos {
namespace RELPOS_ISA {

constexpr int64_t BLOCK_Q = 64;   // queries in a block
constexpr int64_t BLOCK_K = 256;  // keys in a block, at most
constexpr int64_t SPLIT_K = 2048; // keys in a split (softmax.h)
constexpr int FEW = 4;            // queries that leave most lanes empty (few_queries.h)
// A matrix of pairs [BLOCK_K, BLOCK_Q] stands between margins of rows, which a product along diagonals may read.
constexpr int64_t MARGIN = BLOCK_Q - 1;
constexpr int64_t PAIRS_SIZE = (BLOCK_K + 2 * MARGIN + 1) * BLOCK_Q;
constexpr int64_t FARTHEST = int64_t(1) << 62;  // position of a first query, to either side

inline int64_t smaller_of(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t larger_of(int64_t x, int64_t y) { return x < y ? y : x; }
inline int64_t clamped(int64_t x, int64_t low, int64_t high) { return larger_of(low, smaller_of(x, high)); }

template <class S>
inline int64_t padded_to_vectors(int64_t columns) {
  return (columns + WIDTH<S> - 1) / WIDTH<S> * WIDTH<S>;
}

}  // namespace RELPOS_ISA
}  // namespace relpos
