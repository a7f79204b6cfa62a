// The backward pass: one task goes over the heads of a group, each block of queries over its blocks of keys.
//
// Weights are computed again from the logits and their log-sum-exp:
//
//     weights = exp(logits - lse)
//     grad_weights = grad_out . (value + rel_v)
//     grad_logits = weights * (grad_weights - delta)
#pragma once

#include "dropout.h"
#include "exponential.h"
#include "key_gradient.h"
#include "logits.h"
#include "output_gradient.h"
#include "softmax.h"
#include "table_gradient.h"

namespace relpos {
namespace RELPOS_ISA {

// Gradients to which all blocks of a head add.
template <class T, class S>
struct HeadGradients {
  const KeyGradient<T, S> key, value;
  const TableGradient<S> rel_k, rel_v;

  HeadGradients(const Problem& p, int64_t head, int64_t group, bool is_first_of_group, Scratch& scratch)
      : key(p.grad_key, p, head, p.d_k, p.grad_key_by_head, scratch),
        value(p.grad_value, p, head, p.d_v, p.grad_value_by_head, scratch),
        rel_k(p, p.grad_rel_k_parts, p.rel_k_head ? head : group, p.rel_k_head || is_first_of_group, p.d_k),
        rel_v(p, p.grad_rel_v_parts, p.rel_v_head ? head : group, p.rel_v_head || is_first_of_group, p.d_v) {}
};

template <class T, class S>
class BackwardBlock {
 public:
  BackwardBlock(const Problem& problem, const HeadGradients<T, S>& gradients, int64_t head, int64_t query_block,
                Scratch& scratch)
      : p(problem),
        grads(gradients),
        block(problem, head, query_block),
        logits(block, scratch),
        grad_out(block, scratch),
        rel_k(rel_k_of<S>(problem, block.h)),
        rel_v(rel_v_of<S>(problem, block.h)),
        row_k(padded_to_vectors<S>(problem.d_k)),
        row_v(padded_to_vectors<S>(problem.d_v)),
        needs_logits(p.grad_query.data || p.grad_key.data || p.grad_rel_k_parts),
        needs_rel_k(rel_k && (p.grad_query.data || grads.rel_k)) {
    weights = scratch.take<S>(PAIRS_SIZE) + MARGIN * BLOCK_Q;
    grad_logits = scratch.take<S>(PAIRS_SIZE) + MARGIN * BLOCK_Q;
    if (p.dropout_p > 0) dropout = scratch.take<S>(BLOCK_K * BLOCK_Q);
    key_rows = scratch.take<S>(BLOCK_K * row_k);
    value_rows = scratch.take<S>(BLOCK_K * row_v);
    grad_query = zeros(BLOCK_Q * row_k, scratch);
    query_rows = scratch.take<S>(BLOCK_Q * row_k);
    copy_rows<T>(p.query, block.b, block.h, block.first, block.rows, p.d_k, S(p.scale), query_rows);
    if (p.relations.data)
      prepare_labels(scratch);
    else if (rel_v)
      multiply_far(rel_v, grad_out.rows_t, block.vectors, far_values);
  }

  void run(bool is_first) {
    if (is_first) {
      grads.key.begin_with(block.key_begin, block.key_end);
      grads.value.begin_with(block.key_begin, block.key_end);
    }
    if (grad_out.needs_refining()) refine();
    block.for_key_blocks(0, p.keys, [&](const KeyBlock& keys) { add(keys, is_first); });
    add_sums();
    for (int i = 0; p.grad_query.data && i < block.rows; i++) {
      T* target = const_cast<T*>(at<T>(p.grad_query, block.b, block.h, block.first + i));  // [d_k]
      write_row(grad_query + i * row_k, p.d_k, S(p.scale), target, p.grad_query.stride[3]);
    }
  }

 private:
  using V = Vec<S>;
  static constexpr int W = WIDTH<S>;

  const Problem& p;
  const HeadGradients<T, S>& grads;
  const QueryBlock<S> block;
  Logits<T, S> logits;
  OutputGradient<T, S> grad_out;
  const Table<S> rel_k, rel_v;
  const int64_t row_k, row_v;          // padded d_k, d_v
  const bool needs_logits;             // whether anything asks for the gradients of the logits
  const bool needs_rel_k;              // and for their sums by row of rel_k
  S *weights, *grad_logits;            // [BLOCK_K, BLOCK_Q] between margins
  S* dropout = nullptr;                // [BLOCK_K, BLOCK_Q]: 0 where a weight is dropped, otherwise 1 / (1 - p)
  S *key_rows, *value_rows;            // [BLOCK_K, row_k], [BLOCK_K, row_v]
  S *query_rows, *grad_query;          // [rows, row_k], the query scaled
  S far_values[2 * BLOCK_Q];           // grad_out times the first row of rel_v and its last
  S far_weights[2 * BLOCK_Q] = {}, far_grads[2 * BLOCK_Q] = {};  // sums of weights and of grad_logits for those rows
  S *label_values = nullptr, *label_weights = nullptr, *label_grads = nullptr;  // the same, [labels + 1, BLOCK_Q]

  static S* zeros(int64_t size, Scratch& scratch) {
    S* x = scratch.take<S>(size);
    for (int64_t i = 0; i < size; i++) x[i] = 0;
    return x;
  }

  void prepare_labels(Scratch& scratch) {
    const int64_t size = (p.labels + 1) * BLOCK_Q;
    if (rel_v) {
      label_values = zeros(size, scratch);
      multiply_table(rel_v, 0, p.labels, grad_out.rows_t, block.vectors, label_values);
    }
    if (grads.rel_v) label_weights = zeros(size, scratch);
    if (needs_rel_k) label_grads = zeros(size, scratch);
  }

  // the sum of each query's weights, which should be 1, and delta, once more from the weights themselves
  void refine() {
    S sum[BLOCK_Q] = {}, grad_sum[BLOCK_Q] = {};
    block.for_key_blocks(0, p.keys, [&](const KeyBlock& keys) {
      logits.compute(keys, weights);
      if (needs_logits) compute_grad_weights(keys);
      draw_dropout(keys);
      for (int v = 0; v < block.vectors; v++) {
        const V lse = load(grad_out.lse + v * W);
        V total = load(sum + v * W), grad_total = load(grad_sum + v * W);
        for (int64_t j = 0; j < keys.count; j++) {
          const int64_t at = j * BLOCK_Q + v * W;
          const V softmax = exponential(load(weights + at) - lse);
          total += softmax;
          if (!needs_logits) continue;
          const V grad = load(grad_logits + at);
          grad_total += softmax * (dropout ? grad * load(dropout + at) : grad);
        }
        store(sum + v * W, total);
        store(grad_sum + v * W, grad_total);
      }
    });
    grad_out.refine(sum, grad_sum);
  }

  void add(const KeyBlock& keys, bool is_first) {
    logits.compute(keys, weights);
    if (needs_logits) compute_grad_weights(keys);
    softmax_backward(keys);
    grads.value.add(keys, {weights, BLOCK_Q, 1}, {grad_out.rows, row_v}, block.rows, is_first);
    grads.key.add(keys, {grad_logits, BLOCK_Q, 1}, {query_rows, row_k}, block.rows, is_first);
    if (p.grad_query.data) {
      // b_key: [keys, d_k]
      const Rows<const S> b_key =
          rows_of<T, S>(p.key, block.b, block.kv, keys.first, keys.count, p.d_k, true, key_rows);
      add_product<S>({grad_logits, 1, BLOCK_Q}, b_key, {grad_query, row_k}, keys.count, block.rows, row_k / W);
    }
    if (keys.region == Region::labelled) {
      if (label_grads) sum_by_label(block, keys, logits.labels, grad_logits, label_grads);
      if (label_weights) sum_by_label(block, keys, logits.labels, weights, label_weights);
    } else {
      add_relative(keys);
    }
  }

  // grad_logits [keys, BLOCK_Q] = grad_out . (value + rel_v): gradients of the weights, for now
  void compute_grad_weights(const KeyBlock& keys) {
    // b_value: [keys, d_v]
    const Rows<const S> b_value =
        rows_of<T, S>(p.value, block.b, block.kv, keys.first, keys.count, p.d_v, false, value_rows);
    const Rows<const S> init =
        relative_part(block, keys, rel_v, grad_out.rows_t, far_values, logits.by_distance, grad_logits);
    product<S>({b_value.data, b_value.row, 1}, {grad_out.rows_t, BLOCK_Q}, init, {grad_logits, BLOCK_Q}, p.d_v,
               keys.count, block.vectors);
    if (label_values) add_by_label(block, keys, logits.labels, label_values, grad_logits);
  }

  void draw_dropout(const KeyBlock& keys) {
    if (dropout)
      dropout_factors<S>(dropout, BLOCK_Q, keys.first, keys.count, block.first, block.vectors * W,
                         block.b * p.heads + block.h, p.dropout_p, p.seed);
  }

  // logits to weights, and gradients of weights to gradients of logits
  void softmax_backward(const KeyBlock& keys) {
    draw_dropout(keys);
    for (int v = 0; v < block.vectors; v++) {
      const int lane = v * W;
      const V lse = load(grad_out.lse + lane), delta = load(grad_out.delta + lane);
      const V inv_sum = load(grad_out.inv_sum + lane);
      for (int64_t j = 0; j < keys.count; j++) {
        S* weight = weights + j * BLOCK_Q + lane;
        S* grad = grad_logits + j * BLOCK_Q + lane;
        const V softmax = exponential(load(weight) - lse) * inv_sum;
        if (!needs_logits) {
          store(weight, dropout ? softmax * load(dropout + j * BLOCK_Q + lane) : softmax);
        } else if (dropout) {
          const V factor = load(dropout + j * BLOCK_Q + lane);
          store(weight, softmax * factor);
          store(grad, softmax * (load(grad) * factor - delta));
        } else {
          store(weight, softmax);
          store(grad, softmax * (load(grad) - delta));
        }
      }
    }
  }

  // Far keys are summed for each query, near ones meet the rows of their distances at once.
  void add_relative(const KeyBlock& keys) {
    if (needs_rel_k) sum_far(block, keys, grad_logits, far_grads);
    if (grads.rel_v) sum_far(block, keys, weights, far_weights);
    const int64_t count = block.num_distances(keys);
    if (count == 0) return;
    const int64_t first = block.first_distance(keys) + p.left;  // row
    if (needs_rel_k) {
      const Scalars<S> x = by_query_and_distance(block, keys, grad_logits);  // [rows, count]
      if (p.grad_query.data)
        add_product<S>(x, {rel_k.row_at(first), rel_k.row}, {grad_query, row_k}, count, block.rows, row_k / W);
      grads.rel_k.add(first, count, transposed(x), query_rows, block.rows);
    }
    if (grads.rel_v) {
      const Scalars<S> x = by_query_and_distance(block, keys, weights);  // [rows, count]
      grads.rel_v.add(first, count, transposed(x), grad_out.rows, block.rows);
    }
  }

  // Sums over all keys, for each label or for the first row and the last, meet the tables.
  void add_sums() {
    const bool needs_query = rel_k && p.grad_query.data;
    if (p.relations.data) {
      if (needs_query)
        add_product<S>({label_grads, 1, BLOCK_Q}, {rel_k.data, rel_k.row}, {grad_query, row_k}, p.labels, block.rows,
                       row_k / W);
      grads.rel_k.add(0, p.labels, {label_grads, BLOCK_Q, 1}, query_rows, block.rows);
      grads.rel_v.add(0, p.labels, {label_weights, BLOCK_Q, 1}, grad_out.rows, block.rows);
      return;
    }
    if (needs_query) add_far_rows(far_grads, rel_k, block.rows, grad_query, row_k);
    grads.rel_k.add_far(far_grads, query_rows, block.rows);
    grads.rel_v.add_far(far_weights, grad_out.rows, block.rows);
  }
};

template <class T, class S>
void backward(const Problem& p, int64_t group) {
  const int64_t heads = p.batch * p.heads, first = group * heads / p.groups;
  for (int64_t head = first; head < (group + 1) * heads / p.groups; head++) {
    Scratch& scratch = Scratch::of_this_thread();
    const HeadGradients<T, S> grads(p, head, group, head == first, scratch);
    for (int64_t block = 0; block < num_query_blocks(p); block++) {
      const Scratch::Mark mark = scratch.mark();
      BackwardBlock<T, S>(p, grads, head, block, scratch).run(block == 0);
      scratch.back_to(mark);
    }
    grads.key.finish();
    grads.value.finish();
  }
}

}  // namespace RELPOS_ISA
}  // namespace relpos
