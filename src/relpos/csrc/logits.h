// Logits of a block of queries for a block of keys: query . (key + rel_k), masked.
#pragma once

#include "blocks.h"
#include "few_queries.h"
#include "labels.h"
#include "masks.h"
#include "relative.h"
#include "scratch.h"

namespace relpos {
namespace RELPOS_ISA {

template <class T, class S>
class Logits {
 public:
  S* by_distance;            // scratch of relative_part
  int32_t* labels = nullptr; // [BLOCK_K, BLOCK_Q] of the last block of keys, where pairs have labels

  // `query_block` must outlive it
  Logits(const QueryBlock<S>& query_block, Scratch& scratch)
      : p(query_block.p), block(query_block), rel_k(rel_k_of<S>(p, block.h)), is_few(are_few<S>(block.rows)) {
    prefetch_rows<T>(p.query, block.b, block.h, block.first, block.rows, p.d_k);
    if (p.keys <= BLOCK_K) {
      prefetch_rows<T>(p.key, block.b, block.kv, 0, p.keys, p.d_k);
      prefetch_rows<T>(p.value, block.b, block.kv, 0, p.keys, p.d_v);
    }
    query_t = scratch.take<S>(p.d_k * BLOCK_Q);
    transpose_rows<T>(p.query, block.b, block.h, block.first, block.rows, 0, p.d_k, S(p.scale), query_t);
    by_distance = scratch.take<S>((BLOCK_K + BLOCK_Q) * BLOCK_Q);
    key_rows = scratch.take<S>(BLOCK_K * padded_to_vectors<S>(p.d_k));
    if (p.mask.data && p.mask.kind != Kind::boolean) mask_t = scratch.take<S>(BLOCK_K * BLOCK_Q);
    if (p.relations.data)
      multiply_labels(scratch);
    else if (rel_k)
      multiply_far(rel_k, query_t, block.vectors, far_logits);
  }

  // logits [keys, BLOCK_Q], -inf where a query may not attend
  void compute(const KeyBlock& keys, S* logits) {
    const Rows<const S> init = relative_part(block, keys, rel_k, query_t, far_logits, by_distance, logits);
    // b_key: [keys, d_k]
    const Rows<const S> b_key =
        rows_of<T, S>(p.key, block.b, block.kv, keys.first, keys.count, p.d_k, is_few, key_rows);
    if (is_few)
      multiply_few(b_key, query_t, init, p.d_k, keys.count, block.rows, logits);
    else
      product<S>({b_key.data, b_key.row, 1}, {query_t, BLOCK_Q}, init, {logits, BLOCK_Q}, p.d_k, keys.count,
                 block.vectors);
    // after the product, since nothing that a masked key holds may come through
    if (p.is_causal && keys.region == Region::near) mask_later_keys(block, keys, logits);
    if (keys.region == Region::labelled) {
      read_labels(block, keys, labels);
      if (rel_k) add_by_label(block, keys, labels, logits_by_label, logits);
    }
    if (p.mask.data) apply_mask(block, keys, mask_t, logits);
  }

 private:
  const Problem& p;
  const QueryBlock<S>& block;
  const Table<S> rel_k;
  const bool is_few;
  S* query_t;                     // [d_k, BLOCK_Q], scaled
  S* key_rows;                    // [BLOCK_K, padded d_k]
  S* mask_t = nullptr;            // [BLOCK_K, BLOCK_Q]
  S* logits_by_label = nullptr;   // [labels + 1, BLOCK_Q], zeros for pairs without a label
  S far_logits[2 * BLOCK_Q];      // query times the table's first row and its last

  void multiply_labels(Scratch& scratch) {
    labels = scratch.take<int32_t>(BLOCK_K * BLOCK_Q);
    for (int64_t i = 0; i < BLOCK_K * BLOCK_Q; i++) labels[i] = 0;
    if (!rel_k) return;
    logits_by_label = scratch.take<S>((p.labels + 1) * BLOCK_Q);
    for (int i = 0; i < BLOCK_Q; i++) logits_by_label[p.labels * BLOCK_Q + i] = 0;
    multiply_table(rel_k, 0, p.labels, query_t, block.vectors, logits_by_label);
  }
};

}  // namespace RELPOS_ISA
}  // namespace relpos
