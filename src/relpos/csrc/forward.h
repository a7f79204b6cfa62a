// Attention of one block of queries: softmax as the keys go by, weights summed for each row of the values' table.
#pragma once

#include "dropout.h"
#include "queries.h"

namespace relpos {
namespace RELPOS_ISA {

// So many keys are one softmax of its own, and those of several are merged in their order: for few queries against
// many keys each is a task, so that there is work for every thread. A result depends neither on the number of queries
// nor on which of both ways it went.
constexpr int64_t KEYS_OF_SPLIT = 2048;

inline int64_t blocks_of(const Problem& p) { return (p.queries + LANES - 1) / LANES; }
inline int64_t splits_of(const Problem& p) {
  return larger_of(1, (p.keys + KEYS_OF_SPLIT - 1) / KEYS_OF_SPLIT);
}
inline bool are_splits_tasks(const Problem& p) { return p.queries <= LANES && splits_of(p) > 1; }

// Running sums of one block: outputs [rows, padded d_v] not yet divided, maxima and sums of weights [LANES].
template <class S>
struct Sums {
  S* out;
  S* most;
  S* weight;
  static int64_t out_size(const Problem& p) {
    return smaller_of(p.queries, LANES) * padded_to_vectors<S>(p.d_v);
  }
  static int64_t size(const Problem& p) { return out_size(p) + 2 * LANES; }
  explicit Sums(S* memory) : out(memory + 2 * LANES), most(memory), weight(memory + LANES) {}
  void clear(const Problem& p) {
    for (int64_t i = 0; i < LANES; i++) {
      most[i] = -S(INFINITY);
      weight[i] = 0;
    }
    for (int64_t i = 0; i < out_size(p); i++) out[i] = 0;
  }
  // one softmax out of two
  void merge(const Sums& other, int64_t queries, int64_t columns) {
    for (int64_t i = 0; i < queries; i++) {
      if (other.weight[i] == 0) continue;  // a weight that is NaN is merged
      const S both = most[i] > other.most[i] ? most[i] : other.most[i];
      // where all logits of other are not numbers, its maximum is still -inf, and so is its factor no number
      const S of_this = most[i] == both ? S(1) : std::exp(most[i] - both);
      const S of_other = other.most[i] == both && both != -S(INFINITY) ? S(1) : std::exp(other.most[i] - both);
      weight[i] = weight[i] * of_this + other.weight[i] * of_other;
      most[i] = both;
      for (int64_t c = 0; c < columns; c++)
        out[i * columns + c] = out[i * columns + c] * of_this + other.out[i * columns + c] * of_other;
    }
  }
};

template <class T, class S>
void write_out(const Problem& p, int64_t b, int64_t h, int64_t first, int rows, const Sums<S>& sums) {
  const int64_t out_row = padded_to_vectors<S>(p.d_v);
  S* lse = static_cast<S*>(p.lse) + (b * p.heads + h) * p.queries + first;
  for (int i = 0; i < rows; i++) {
    const S weight = sums.weight[i];
    lse[i] = weight == 0 ? -S(INFINITY) : sums.most[i] + std::log(weight);
    const S inverse = weight == 0 ? S(0) : 1 / weight;
    write_row(sums.out + i * out_row, p.d_v, inverse, const_cast<T*>(at<T>(p.out, b, h, first + i)), int64_t(1));
  }
}

template <class T, class S>
class Forward {
  using V = Vec<S>;
  static constexpr int W = WIDTH<S>;

  const Problem& p;
  QueryBlock<T, S> queries;
  Sums<S> sums;
  const int64_t out_row;
  S* weights;               // [span, LANES] between margins
  S* factors = nullptr;     // of dropout, [span, LANES]
  S* value_rows;
  S* weight_by_label = nullptr;  // [labels + 1, LANES]
  S far_weight[2 * LANES];  // sums of weights with the table's first row, and with its last
  S shrink[LANES];          // what the last span did to the sums before it
  S total[LANES];           // weights of the last span, none of them dropped

 public:
  Forward(const Problem& problem, int64_t head, int64_t block, S* memory, Scratch& scratch)
      : p(problem),
        queries(problem, head, block, scratch),
        sums(memory ? memory : scratch.take<S>(Sums<S>::size(problem))),
        out_row(padded_to_vectors<S>(problem.d_v)) {
    weights = scratch.take<S>(SPAN_SIZE) + MARGIN * LANES;
    value_rows = scratch.take<S>(CHUNK * out_row);
    if (p.dropout_p > 0) factors = scratch.take<S>(CHUNK * LANES);
    if (p.relations.data && p.rel_v) weight_by_label = scratch.take<S>((p.labels + 1) * LANES);
  }

  // all keys, one range after the other
  void attend(Scratch& scratch) {
    attend(0);
    if (p.keys <= KEYS_OF_SPLIT) return;
    const Sums<S> all = sums;
    sums = Sums<S>(scratch.take<S>(Sums<S>::size(p)));
    for (int64_t split = 1; split < splits_of(p) && split * KEYS_OF_SPLIT < queries.key_end; split++) {
      attend(split);
      Sums<S>(all).merge(sums, queries.rows, out_row);
    }
    sums = all;
  }

  // one range of keys
  void attend(int64_t split) {
    sums.clear(p);
    for (S& x : far_weight) x = 0;
    if (weight_by_label)
      for (int64_t i = 0; i < (p.labels + 1) * LANES; i++) weight_by_label[i] = 0;
    queries.for_spans(split * KEYS_OF_SPLIT, (split + 1) * KEYS_OF_SPLIT, [this](const Span& span) { add(span); });
    if (!p.rel_v) return;
    const S* rel_v = queries.table(p.rel_v, p.rel_v_head);
    if (weight_by_label) return add_rows({weight_by_label, 1, LANES}, rel_v, p.labels);
    add_far_rows(far_weight, rel_v, p.labels, p.rel_v_row, queries.rows, sums.out, out_row);
  }

  void write() const { write_out<T, S>(p, queries.b, queries.h, queries.first, queries.rows, sums); }

 private:
  // sums.out += weights [query, n] times n rows
  void add_rows(Scalars<S> of_query, const S* rows, int64_t n) {
    add_product<S>(of_query, {rows, p.rel_v_row}, {sums.out, out_row}, n, queries.rows, out_row / W);
  }

  void add(const Span& span) {
    queries.logits(span, weights);
    soften(span);
    if (factors) drop(span);
    if (p.rel_v) add_relative(span);
    Rows<const S> values =
        rows_of<T, S>(p.value, queries.b, queries.kv, span.first, span.count, p.d_v, true, value_rows);
    add_product<S>({weights, 1, LANES}, values, {sums.out, out_row}, span.count, queries.rows, out_row / W);
  }

  // logits to weights relative to the largest so far; what was summed before shrinks to the same measure
  void soften(const Span& span) {
    int v = 0;
    for (; v + 4 <= queries.vectors; v += 4) soften_lanes<4>(span, v * W);
    for (; v < queries.vectors; v++) soften_lanes<1>(span, v * W);
    bool is_any_shrunk = false;
    for (int i = 0; i < queries.rows; i++) {
      if (shrink[i] == 1) continue;
      is_any_shrunk = true;
      S* out = sums.out + i * out_row;
      for (int64_t c = 0; c < out_row; c += W) store(out + c, load(out + c) * shrink[i]);
    }
    if (!is_any_shrunk) return;
    shrink_rows(far_weight, 2);
    if (weight_by_label) shrink_rows(weight_by_label, p.labels);
  }

  // rows [n, LANES] of sums of weights
  void shrink_rows(S* rows, int64_t n) const {
    for (int64_t r = 0; r < n; r++)
      for (int v = 0; v < queries.vectors; v++) {
        S* x = rows + r * LANES + v * W;
        store(x, load(x) * load(shrink + v * W));
      }
  }

  template <int VECTORS>
  void soften_lanes(const Span& span, int lane) {
    S* column = weights + lane;
    V most[VECTORS], measure[VECTORS], sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) most[v] = load(sums.most + lane + v * W);
    for (int64_t j = 0; j < span.count; j++)
      for (int v = 0; v < VECTORS; v++) most[v] = larger<S>(most[v], load(column + j * LANES + v * W));
    for (int v = 0; v < VECTORS; v++) {
      // where every logit is -inf any other measure will do
      measure[v] = most[v] == -S(INFINITY) ? V{} : most[v];
      sum[v] = V{};
    }
    for (int64_t j = 0; j < span.count; j++)
      for (int v = 0; v < VECTORS; v++) {
        S* weight = column + j * LANES + v * W;
        const V x = exponential(load(weight) - measure[v]);
        store(weight, x);
        sum[v] += x;
      }
    for (int v = 0; v < VECTORS; v++) {
      const int at = lane + v * W;
      const V factor = exponential(load(sums.most + at) - measure[v]);
      store(sums.weight + at, load(sums.weight + at) * factor + sum[v]);
      store(total + at, sum[v]);
      store(sums.most + at, most[v]);
      store(shrink + at, factor);
    }
  }

  void drop(const Span& span) {
    dropout_factors<S>(factors, LANES, span.first, span.count, queries.first, queries.vectors * W,
                       queries.b * p.heads + queries.h, p.dropout_p, p.seed);
    for (int64_t j = 0; j < span.count; j++)
      for (int v = 0; v < queries.vectors; v++) {
        S* x = weights + j * LANES + v * W;
        store(x, load(x) * load(factors + j * LANES + v * W));
      }
  }

  // Weights for each row of the values' table, times those rows. In the zone a query has one key for each distance:
  // its diagonal already is [query, row of the table].
  void add_relative(const Span& span) {
    if (span.region == Region::labelled) return queries.sum_by_label(span, weights, weight_by_label);
    if (span.region == Region::zone || factors) {
      queries.add_far(span, weights, far_weight);
    } else {
      S* sum = span.region == Region::left ? far_weight : far_weight + LANES;
      for (int v = 0; v < queries.vectors; v++) store(sum + v * W, load(sum + v * W) + load(total + v * W));
    }
    const int64_t count = span.region == Region::zone ? queries.distances(span) : 0;
    if (count == 0) return;
    queries.clear_margins(span, weights);
    const S* rel_v = queries.table(p.rel_v, p.rel_v_head);
    add_rows(queries.by_query_and_distance(span, weights),
             rel_v + (queries.first_distance(span) + p.left) * p.rel_v_row, count);
  }
};

template <class T, class S>
void forward(const Problem& p, int64_t task) {
  Scratch& scratch = Scratch::of_this_thread();
  if (are_splits_tasks(p)) {
    S* memory = static_cast<S*>(p.partial) + task * Sums<S>::size(p);
    Forward<T, S>(p, task / splits_of(p), 0, memory, scratch).attend(task % splits_of(p));
  } else {
    Forward<T, S> attention(p, task / blocks_of(p), task % blocks_of(p), nullptr, scratch);
    attention.attend(scratch);
    attention.write();
  }
}

// One softmax out of those over each range of keys, in their order.
template <class T, class S>
void merge_splits(const Problem& p, int64_t head) {
  const int64_t splits = splits_of(p), size = Sums<S>::size(p);
  S* memory = static_cast<S*>(p.partial) + head * splits * size;
  Sums<S> merged(memory);
  for (int64_t split = 1; split < splits; split++)
    merged.merge(Sums<S>(memory + split * size), p.queries, padded_to_vectors<S>(p.d_v));
  write_out<T, S>(p, head / p.heads, head % p.heads, 0, int(p.queries), merged);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
