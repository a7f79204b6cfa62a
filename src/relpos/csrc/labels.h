// Labels of pairs in place of distances: read for a block, values added by label, sums by label.
#pragma once

#include "blocks.h"

namespace relpos {
namespace RELPOS_ISA {

template <class L, class S>
void read_labels_of(const QueryBlock<S>& block, const KeyBlock& keys, int32_t* labels) {
  const Problem& p = block.p;
  const L* from = at<L>(p.relations, block.b, block.h, block.first, keys.first);  // [rows, keys]
  const int64_t down = p.relations.stride[2], across = p.relations.stride[3];
  for (int i = 0; i < block.rows; i++)
    for (int64_t j = 0; j < keys.count; j++) {
      const int64_t label = int64_t(from[i * down + j * across]);
      // a label without a row is none: a compiled call cannot check their values
      labels[j * BLOCK_Q + i] = int32_t(label < 0 || label > p.labels ? p.labels : label);
    }
}

// labels [keys, BLOCK_Q], p.labels for a pair without one
template <class S>
void read_labels(const QueryBlock<S>& block, const KeyBlock& keys, int32_t* labels) {
  switch (block.p.relations.kind) {
    case Kind::int64: return read_labels_of<int64_t>(block, keys, labels);
    case Kind::int32: return read_labels_of<int32_t>(block, keys, labels);
    case Kind::int16: return read_labels_of<int16_t>(block, keys, labels);
    case Kind::int8: return read_labels_of<int8_t>(block, keys, labels);
    default: return read_labels_of<uint8_t>(block, keys, labels);
  }
}

// x [keys, BLOCK_Q] += values [labels + 1, BLOCK_Q] at the label of each pair
template <class S>
void add_by_label(const QueryBlock<S>& block, const KeyBlock& keys, const int32_t* __restrict labels,
                  const S* __restrict values, S* __restrict x) {
  const int lanes = block.vectors * WIDTH<S>;
  for (int64_t j = 0; j < keys.count; j++)
    for (int i = 0; i < lanes; i++) x[j * BLOCK_Q + i] += values[labels[j * BLOCK_Q + i] * BLOCK_Q + i];
}

// sums [labels + 1, BLOCK_Q] += x [keys, BLOCK_Q] at the label of each pair
template <class S>
void sum_by_label(const QueryBlock<S>& block, const KeyBlock& keys, const int32_t* __restrict labels,
                  const S* __restrict x, S* __restrict sums) {
  const int rows = block.rows;
  for (int64_t j = 0; j < keys.count; j++)
    for (int i = 0; i < rows; i++) sums[labels[j * BLOCK_Q + i] * BLOCK_Q + i] += x[j * BLOCK_Q + i];
}

}  // namespace RELPOS_ISA
}  // namespace relpos
