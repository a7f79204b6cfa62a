// A block of queries of one head, and its keys in blocks: which keys it meets, and at which distances.
//
// Lanes are queries and rows are keys, so that a maximum or a sum over the keys needs nothing across lanes, and keys
// and values are used where they lie. Seen from a block of queries the keys fall into three regions (paper, section
// 3.2): far left, where every query has the table's first row; far right, where every query has its last row; and
// near, between them, where the distance decides.
#pragma once

#include "problem.h"
#include "rows.h"
#include "sizes.h"

namespace relpos {
namespace RELPOS_ISA {

enum class Region { far_left, near, far_right, labelled };

// Keys [first, first + count), at most BLOCK_K, all in one region.
struct KeyBlock {
  Region region;
  int64_t first, count;
};

template <class S>
class QueryBlock {
 public:
  const Problem& p;
  const int64_t b, h, kv, first;   // sequence, head, key head, first query
  const int rows, vectors;         // queries, and vectors of lanes that hold them
  int64_t position;                // of the first query among the keys
  int64_t key_begin = 0, key_end;  // no query of the block attends to a key outside

  QueryBlock(const Problem& problem, int64_t head, int64_t block)
      : p(problem),
        b(head / p.heads),
        h(head % p.heads),
        kv(h / (p.heads / p.kv_heads)),
        first(block * BLOCK_Q),
        rows(int(smaller_of(BLOCK_Q, p.queries - first))),
        vectors((rows + WIDTH<S> - 1) / WIDTH<S>) {
    // clamped, since a compiled call cannot check their values: no key outside the tensors is read
    position = clamped(p.starts ? p.starts[b] : p.start, -FARTHEST, FARTHEST) + first;
    key_end = p.key_lengths ? clamped(p.key_lengths[b], 0, p.keys) : p.keys;
    if (p.is_causal) key_end = clamped(position + rows, 0, key_end);
    skip_masked_ends();
  }

  // Calls f(keys) for each block of the keys in [begin, end).
  template <class F>
  void for_key_blocks(int64_t begin, int64_t end, F f) const {
    begin = larger_of(begin, key_begin);
    end = smaller_of(end, key_end);
    if (begin >= end) return;
    if (p.relations.data) return cut(Region::labelled, begin, end, f);
    if (!p.rel_k && !p.rel_v && !p.is_causal) return cut(Region::far_left, begin, end, f);
    // A causal block needs its whole diagonal to be near. The near keys are those of a full block, since a query's
    // sums must not depend on how many others stand beside it.
    const int64_t reach = larger_of(BLOCK_Q - 1 + p.right, p.is_causal ? BLOCK_Q : 0);
    const int64_t near_begin = clamped(position - p.left + 1, begin, end);
    const int64_t near_end = clamped(position + reach, near_begin, end);
    cut(Region::far_left, begin, near_begin, f);
    cut(Region::far_right, near_end, end, f);
    cut(Region::near, near_begin, near_end, f);
  }

  // The distances that near keys have and whose rows lie between a table's first and last: the lowest of them, and
  // their number.
  int64_t first_distance(const KeyBlock& keys) const {
    return larger_of(keys.first - position - (rows - 1), 1 - p.left);
  }
  int64_t num_distances(const KeyBlock& keys) const {
    if (keys.region != Region::near) return 0;
    const int64_t last = smaller_of(keys.first + keys.count - 1 - position, p.right - 1);
    return larger_of(0, last - first_distance(keys) + 1);
  }

 private:
  template <class F>
  static void cut(Region region, int64_t begin, int64_t end, F& f) {
    for (; begin < end; begin += BLOCK_K) f(KeyBlock{region, begin, smaller_of(BLOCK_K, end - begin)});
  }

  // A mask over keys alone, such as one of padding, may hide whole ends.
  void skip_masked_ends() {
    if (!p.mask.data || p.mask.kind != Kind::boolean || p.mask.stride[2] != 0) return;
    const uint8_t* allowed = at<uint8_t>(p.mask, b, h, 0);  // [keys]
    const int64_t step = p.mask.stride[3];
    while (key_begin < key_end && !allowed[key_begin * step]) key_begin++;
    while (key_begin < key_end && !allowed[(key_end - 1) * step]) key_end--;
  }
};

}  // namespace RELPOS_ISA
}  // namespace relpos
