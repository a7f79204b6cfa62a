// Masks: logits of pairs that may not attend become -inf; a floating mask is added.
#pragma once

#include "blocks.h"

namespace relpos {
namespace RELPOS_ISA {

// -inf where a key comes after its query
template <class S>
void mask_later_keys(const QueryBlock<S>& block, const KeyBlock& keys, S* logits) {
  for (int64_t j = 0; j < keys.count; j++) {
    const int64_t masked = smaller_of(block.rows, keys.first + j - block.position);  // the first queries
    for (int64_t i = 0; i < masked; i++) logits[j * BLOCK_Q + i] = -S(INFINITY);
  }
}

template <class S>
void apply_boolean_mask(const QueryBlock<S>& block, const KeyBlock& keys, S* logits) {
  constexpr int W = WIDTH<S>;
  const View& mask = block.p.mask;
  const uint8_t* allowed = at<uint8_t>(mask, block.b, block.h, block.first, keys.first);  // [rows, keys]
  const int64_t down = mask.stride[2], across = mask.stride[3];
  if (down == 0) {
    for (int64_t j = 0; j < keys.count; j++)
      if (!allowed[j * across])
        for (int v = 0; v < block.vectors; v++) store(logits + j * BLOCK_Q + v * W, Vec<S>{} - S(INFINITY));
    return;
  }
  uint8_t allowed_t[BLOCK_K * BLOCK_Q];  // [keys, BLOCK_Q]: bytes are cheaper to transpose than numbers
  for (int i = 0; i < block.rows; i++)
    for (int64_t j = 0; j < keys.count; j++) allowed_t[j * BLOCK_Q + i] = allowed[i * down + j * across];
  for (int64_t j = 0; j < keys.count; j++)
    for (int i = 0; i < block.rows; i++) {
      const S x = logits[j * BLOCK_Q + i];
      logits[j * BLOCK_Q + i] = allowed_t[j * BLOCK_Q + i] ? x : -S(INFINITY);
    }
}

// mask_t: scratch [BLOCK_K, BLOCK_Q]
template <class M, class S>
void add_mask(const QueryBlock<S>& block, const KeyBlock& keys, S* mask_t, S* logits) {
  constexpr int W = WIDTH<S>;
  transpose_rows<M>(block.p.mask, block.b, block.h, block.first, block.rows, keys.first, keys.count, S(1), mask_t);
  for (int64_t j = 0; j < keys.count; j++)
    for (int v = 0; v < block.vectors; v++) {
      S* x = logits + j * BLOCK_Q + v * W;
      const Vec<S> added = load(mask_t + j * BLOCK_Q + v * W);
      // -inf even where the logit is NaN
      store(x, added == -S(INFINITY) ? added : load(x) + added);
    }
}

template <class S>
void apply_mask(const QueryBlock<S>& block, const KeyBlock& keys, S* mask_t, S* logits) {
  switch (block.p.mask.kind) {
    case Kind::boolean: return apply_boolean_mask(block, keys, logits);
    case Kind::float64: return add_mask<double>(block, keys, mask_t, logits);
    case Kind::float32: return add_mask<float>(block, keys, mask_t, logits);
    case Kind::bfloat16: return add_mask<bfloat16>(block, keys, mask_t, logits);
    default: return add_mask<float16>(block, keys, mask_t, logits);
  }
}

}  // namespace RELPOS_ISA
}  // namespace relpos
