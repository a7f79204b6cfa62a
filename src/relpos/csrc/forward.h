// The forward pass: one block of queries goes over its blocks of keys with an online softmax.
//
// The values' table is met by sums of weights: of all far keys at its first row or its last, of near keys at the row
// of each distance, of labelled pairs at the row of each label.
#pragma once

#include "dropout.h"
#include "exponential.h"
#include "logits.h"
#include "softmax.h"

namespace relpos {
namespace RELPOS_ISA {

template <class T, class S>
class Forward {
 public:
  // memory: of the softmax, if it is to outlive this
  Forward(const Problem& problem, int64_t head, int64_t query_block, S* memory, Scratch& scratch)
      : p(problem),
        block(problem, head, query_block),
        logits(block, scratch),
        rel_v(rel_v_of<S>(problem, block.h)),
        softmax(memory ? memory : scratch.take<S>(OnlineSoftmax<S>::size(problem))),
        acc_row(padded_to_vectors<S>(problem.d_v)) {
    weights = scratch.take<S>(PAIRS_SIZE) + MARGIN * BLOCK_Q;
    value_rows = scratch.take<S>(BLOCK_K * acc_row);
    if (p.dropout_p > 0) dropout = scratch.take<S>(BLOCK_K * BLOCK_Q);
    if (p.relations.data && rel_v) label_weights = scratch.take<S>((p.labels + 1) * BLOCK_Q);
  }

  // All keys, one split after the other.
  void attend(Scratch& scratch) {
    attend_split(0);
    if (p.keys <= SPLIT_K) return;
    const OnlineSoftmax<S> all = softmax;
    softmax = OnlineSoftmax<S>(scratch.take<S>(OnlineSoftmax<S>::size(p)));
    for (int64_t split = 1; split < num_splits(p) && split * SPLIT_K < block.key_end; split++) {
      attend_split(split);
      OnlineSoftmax<S>(all).merge(softmax, block.rows, acc_row);
    }
    softmax = all;
  }

  void attend_split(int64_t split) {
    softmax.clear(p);
    for (S& x : far_weights) x = 0;
    if (label_weights)
      for (int64_t i = 0; i < (p.labels + 1) * BLOCK_Q; i++) label_weights[i] = 0;
    block.for_key_blocks(split * SPLIT_K, (split + 1) * SPLIT_K, [this](const KeyBlock& keys) { add(keys); });
    if (!rel_v) return;
    if (label_weights)
      add_table_rows({label_weights, 1, BLOCK_Q}, 0, p.labels);
    else
      add_far_rows(far_weights, rel_v, block.rows, softmax.acc, acc_row);
  }

  void write() const { softmax.template write<T>(p, block.b, block.h, block.first, block.rows); }

 private:
  using V = Vec<S>;
  static constexpr int W = WIDTH<S>;

  const Problem& p;
  const QueryBlock<S> block;
  Logits<T, S> logits;
  const Table<S> rel_v;
  OnlineSoftmax<S> softmax;
  const int64_t acc_row;         // padded d_v
  S* weights;                    // [BLOCK_K, BLOCK_Q] between margins: logits, then weights
  S* value_rows;                 // [BLOCK_K, padded d_v]
  S* dropout = nullptr;          // [BLOCK_K, BLOCK_Q]: 0 where a weight is dropped, otherwise 1 / (1 - p)
  S* label_weights = nullptr;    // [labels + 1, BLOCK_Q], sums of weights
  S far_weights[2 * BLOCK_Q];    // sums of weights, far left and far right
  S alpha[BLOCK_Q];              // exp(old row_max - new row_max) of the last block of keys
  S block_sum[BLOCK_Q];          // its part of row_sum

  void add(const KeyBlock& keys) {
    logits.compute(keys, weights);
    update_softmax(keys);
    if (dropout) drop(keys);
    if (rel_v) add_relative(keys);
    // b_value: [keys, d_v]
    const Rows<const S> b_value =
        rows_of<T, S>(p.value, block.b, block.kv, keys.first, keys.count, p.d_v, true, value_rows);
    add_product<S>({weights, 1, BLOCK_Q}, b_value, {softmax.acc, acc_row}, keys.count, block.rows, acc_row / W);
  }

  // Logits to weights exp(logit - row_max); all earlier sums are rescaled by alpha.
  void update_softmax(const KeyBlock& keys) {
    int v = 0;
    for (; v + 4 <= block.vectors; v += 4) update_lanes<4>(keys, v * W);
    for (; v < block.vectors; v++) update_lanes<1>(keys, v * W);
    bool is_rescaled = false;
    for (int i = 0; i < block.rows; i++) {
      if (alpha[i] == 1) continue;
      is_rescaled = true;
      S* acc = softmax.acc + i * acc_row;
      for (int64_t c = 0; c < acc_row; c += W) store(acc + c, load(acc + c) * alpha[i]);
    }
    if (!is_rescaled) return;
    rescale(far_weights, 2);
    if (label_weights) rescale(label_weights, p.labels);
  }

  template <int VECTORS>
  void update_lanes(const KeyBlock& keys, int lane) {
    S* column = weights + lane;
    V row_max[VECTORS], shift[VECTORS], sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) row_max[v] = load(softmax.row_max + lane + v * W);
    for (int64_t j = 0; j < keys.count; j++)
      for (int v = 0; v < VECTORS; v++) row_max[v] = larger<S>(row_max[v], load(column + j * BLOCK_Q + v * W));
    for (int v = 0; v < VECTORS; v++) {
      // where every logit is -inf, any other number serves
      shift[v] = row_max[v] == -S(INFINITY) ? V{} : row_max[v];
      sum[v] = V{};
    }
    for (int64_t j = 0; j < keys.count; j++)
      for (int v = 0; v < VECTORS; v++) {
        S* weight = column + j * BLOCK_Q + v * W;
        const V x = exponential(load(weight) - shift[v]);
        store(weight, x);
        sum[v] += x;
      }
    for (int v = 0; v < VECTORS; v++) {
      const int at = lane + v * W;
      const V factor = exponential(load(softmax.row_max + at) - shift[v]);
      store(softmax.row_sum + at, load(softmax.row_sum + at) * factor + sum[v]);
      store(block_sum + at, sum[v]);
      store(softmax.row_max + at, row_max[v]);
      store(alpha + at, factor);
    }
  }

  // sums [n, BLOCK_Q] *= alpha
  void rescale(S* sums, int64_t n) const {
    for (int64_t r = 0; r < n; r++)
      for (int v = 0; v < block.vectors; v++) {
        S* x = sums + r * BLOCK_Q + v * W;
        store(x, load(x) * load(alpha + v * W));
      }
  }

  void drop(const KeyBlock& keys) {
    dropout_factors<S>(dropout, BLOCK_Q, keys.first, keys.count, block.first, block.vectors * W,
                       block.b * p.heads + block.h, p.dropout_p, p.seed);
    for (int64_t j = 0; j < keys.count; j++)
      for (int v = 0; v < block.vectors; v++) {
        S* x = weights + j * BLOCK_Q + v * W;
        store(x, load(x) * load(dropout + j * BLOCK_Q + v * W));
      }
  }

  // Weights summed for each row of rel_v; those of near keys meet their rows at once.
  void add_relative(const KeyBlock& keys) {
    if (keys.region == Region::labelled) return sum_by_label(block, keys, logits.labels, weights, label_weights);
    if (keys.region == Region::near || dropout) {
      sum_far(block, keys, weights, far_weights);
    } else {
      S* sum = keys.region == Region::far_left ? far_weights : far_weights + BLOCK_Q;
      for (int v = 0; v < block.vectors; v++) store(sum + v * W, load(sum + v * W) + load(block_sum + v * W));
    }
    const int64_t count = block.num_distances(keys);
    if (count == 0) return;
    add_table_rows(by_query_and_distance(block, keys, weights), block.first_distance(keys) + p.left, count);
  }

  // acc += sums [query, count] times rows [first, first + count) of rel_v
  void add_table_rows(Scalars<S> sums, int64_t first, int64_t count) {
    add_product<S>(sums, {rel_v.row_at(first), rel_v.row}, {softmax.acc, acc_row}, count, block.rows, acc_row / W);
  }
};

template <class T, class S>
void forward(const Problem& p, int64_t task) {
  Scratch& scratch = Scratch::of_this_thread();
  if (are_splits_tasks(p)) {
    S* memory = static_cast<S*>(p.partial) + task * OnlineSoftmax<S>::size(p);
    Forward<T, S>(p, task / num_splits(p), 0, memory, scratch).attend_split(task % num_splits(p));
  } else {
    Forward<T, S> attention(p, task / num_query_blocks(p), task % num_query_blocks(p), nullptr, scratch);
    attention.attend(scratch);
    attention.write();
  }
}

// One softmax out of those of each split, in their order.
template <class T, class S>
void merge_splits(const Problem& p, int64_t head) {
  const int64_t splits = num_splits(p), size = OnlineSoftmax<S>::size(p);
  S* memory = static_cast<S*>(p.partial) + head * splits * size;  // [splits, size]
  OnlineSoftmax<S> merged(memory);
  for (int64_t split = 1; split < splits; split++)
    merged.merge(OnlineSoftmax<S>(memory + split * size), p.queries, padded_to_vectors<S>(p.d_v));
  merged.template write<T>(p, head / p.heads, head % p.heads, 0, int(p.queries));
}

}  // namespace RELPOS_ISA
}  // namespace relpos
