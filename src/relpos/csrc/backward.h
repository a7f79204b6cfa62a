// Gradients of one head of one sequence: weights are found again from the logits and their log-sum-exp.
#pragma once

#include "dropout.h"
#include "forward.h"
#include "queries.h"

namespace relpos {
namespace RELPOS_ISA {

// A gradient [rows, columns] to which products are added, kept in S: where it will lie, if it can lie so.
template <class T, class S>
class Accumulated {
  const View& view_;
  const int64_t b_, h_, count_, columns_;
  bool in_place_ = false;
  int64_t row_;
  S* data_ = nullptr;

 public:
  // by_head: where to leave it for a later sum over heads, or null
  Accumulated(const View& view, int64_t b, int64_t h, int64_t count, int64_t columns, S* by_head,
              Scratch& scratch)
      : view_(view), b_(b), h_(h), count_(count), columns_(columns), row_(padded_to_vectors<S>(columns)) {
    if (!view.data) return;
    if (by_head) {
      in_place_ = true;
      data_ = by_head;
    } else if constexpr (sizeof(T) == sizeof(S)) {
      if (view.stride[3] == 1 && columns % WIDTH<S> == 0) {
        in_place_ = true;
        data_ = reinterpret_cast<S*>(const_cast<T*>(at<T>(view, b, h, 0)));
        row_ = view.stride[2];
      }
    }
    if (!in_place_) data_ = scratch.take<S>(count * row_);
  }
  // the first products are written to rows [begin, end) and all later ones added; other rows begin with zeros
  void begin_with(int64_t begin, int64_t end) const {
    if (!data_) return;
    clear(0, begin);
    clear(end, count_);
  }
  void add(Scalars<S> a, Rows<const S> b, int64_t depth, const Span& span, bool is_first) const {
    if (!data_) return;
    Rows<S> target{data_ + span.first * row_, row_};
    product<S>(a, b, {is_first ? nullptr : target.data, row_}, target, depth, span.count,
               padded_to_vectors<S>(columns_) / WIDTH<S>);
  }
  void finish() const {
    if (in_place_ || !data_) return;
    for (int64_t j = 0; j < count_; j++) {
      T* target = const_cast<T*>(at<T>(view_, b_, h_, j));
      write_row(data_ + j * row_, columns_, S(1), target, view_.stride[3]);
    }
  }

 private:
  void clear(int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < end; j++)
      for (int64_t c = 0; c < padded_to_vectors<S>(columns_); c++) data_[j * row_ + c] = 0;
  }
};

template <class T, class S>
class Backward {
  using V = Vec<S>;
  static constexpr int W = WIDTH<S>;

  const Problem& p;
  const int64_t head;
  const int64_t row_k, row_v;     // padded d_k, d_v
  Accumulated<T, S> grad_key, grad_value;
  const bool needs_logits;        // whether anything asks for the gradients of the logits
  S* grad_rel_k;                  // [rows reached, padded d_k], or null where nobody asks for it
  S* grad_rel_v;

 public:
  Backward(const Problem& problem, int64_t head_of_all, int64_t group, bool is_first_of_group, Scratch& scratch)
      : p(problem),
        head(head_of_all),
        row_k(padded_to_vectors<S>(problem.d_k)),
        row_v(padded_to_vectors<S>(problem.d_v)),
        grad_key(problem.grad_key, head / p.heads, head % p.heads, p.keys, p.d_k,
                 part(p.grad_key_by_head, head, p.keys * row_k), scratch),
        grad_value(problem.grad_value, head / p.heads, head % p.heads, p.keys, p.d_v,
                   part(p.grad_value_by_head, head, p.keys * row_v), scratch),
        needs_logits(p.grad_query.data || p.grad_key.data || p.grad_rel_k_parts) {
    grad_rel_k = part(p.grad_rel_k_parts, p.rel_k_head ? head : group, p.rows_reached * row_k);
    grad_rel_v = part(p.grad_rel_v_parts, p.rel_v_head ? head : group, p.rows_reached * row_v);
    if (p.rel_k_head || is_first_of_group) zeroed(grad_rel_k, p.rows_reached * row_k);
    if (p.rel_v_head || is_first_of_group) zeroed(grad_rel_v, p.rows_reached * row_v);
  }

  void run(Scratch& scratch) {
    for (int64_t block = 0; block < blocks_of(p); block++) {
      const Scratch::Mark mark = scratch.mark();
      Block(*this, block, scratch).run(block == 0);
      scratch.back_to(mark);
    }
    grad_key.finish();
    grad_value.finish();
  }

 private:
  static S* part(void* parts, int64_t index, int64_t size) {
    return parts ? static_cast<S*>(parts) + index * size : nullptr;
  }
  static S* zeroed(S* x, int64_t size) {
    if (x)
      for (int64_t i = 0; i < size; i++) x[i] = 0;
    return x;
  }

  // One block of queries against all its keys.
  struct Block {
    Backward& of;
    const Problem& p;
    const int64_t row_k, row_v;
    QueryBlock<T, S> queries;
    const int rows, vectors;
    S *weights, *grad_logits;             // [span, LANES] between margins
    S* factors = nullptr;
    S *key_rows, *value_rows;
    S* grad_query;                        // [rows, row_k]
    S *query_rows, *grad_out_rows;        // [rows, row], the query scaled
    S* grad_out_t;                        // [d_v, LANES]
    S lse[LANES], share[LANES];           // a weight is exp(logit - lse) * share
    S delta[LANES];                       // sum over d_v of grad_out * out, less grad_lse
    S far_v[2 * LANES] = {};              // grad_out . rel_v, first row and last
    S far_weight[2 * LANES] = {}, far_grad[2 * LANES] = {};  // sums for those rows
    S *values_by_label = nullptr, *weight_by_label = nullptr, *grad_by_label = nullptr;  // [labels + 1, LANES]

    Block(Backward& backward, int64_t block, Scratch& scratch)
        : of(backward),
          p(backward.p),
          row_k(backward.row_k),
          row_v(backward.row_v),
          queries(backward.p, backward.head, block, scratch),
          rows(queries.rows),
          vectors(queries.vectors) {
      prefetch_rows<T>(p.grad_out, queries.b, queries.h, queries.first, rows, p.d_v);
      prefetch_rows<T>(p.out, queries.b, queries.h, queries.first, rows, p.d_v);
      weights = scratch.take<S>(SPAN_SIZE) + MARGIN * LANES;
      grad_logits = scratch.take<S>(SPAN_SIZE) + MARGIN * LANES;
      if (p.dropout_p > 0) factors = scratch.take<S>(CHUNK * LANES);
      key_rows = scratch.take<S>(CHUNK * row_k);
      value_rows = scratch.take<S>(CHUNK * row_v);
      grad_query = zeroed(scratch.take<S>(LANES * row_k), LANES * row_k);
      query_rows = copied(p.query, p.d_k, S(p.scale), scratch);
      grad_out_rows = copied(p.grad_out, p.d_v, S(1), scratch);
      grad_out_t = scratch.take<S>(p.d_v * LANES);
      queries.template transposed<T>(p.grad_out, 0, p.d_v, S(1), grad_out_t);
      find_delta();
      for (int i = 0; i < rows; i++)
        if (lse[i] == S(INFINITY)) forget(i);
      if (p.rel_v && !p.relations.data)
        queries.far_rows(p.rel_v, p.rel_v_head, p.rel_v_row, grad_out_t, p.d_v, far_v);
      if (p.relations.data) {
        if (p.rel_v) {
          values_by_label = zeroed(scratch.take<S>((p.labels + 1) * LANES), (p.labels + 1) * LANES);
          product<S>({queries.table(p.rel_v, p.rel_v_head), p.rel_v_row, 1}, {grad_out_t, LANES},
                     {nullptr, 0}, {values_by_label, LANES}, p.d_v, p.labels, vectors);
        }
        if (of.grad_rel_v)
          weight_by_label = zeroed(scratch.take<S>((p.labels + 1) * LANES), (p.labels + 1) * LANES);
        if (needs_rel_k()) grad_by_label = zeroed(scratch.take<S>((p.labels + 1) * LANES), (p.labels + 1) * LANES);
      }
    }

    void run(bool is_first) {
      if (is_first) {
        of.grad_key.begin_with(queries.key_begin, queries.key_end);
        of.grad_value.begin_with(queries.key_begin, queries.key_end);
      }
      if (needs_refining()) refine();
      queries.for_spans(0, p.keys, [&](const Span& span) { add(span, is_first); });
      add_tables();
      for (int i = 0; p.grad_query.data && i < rows; i++) {
        T* target = const_cast<T*>(at<T>(p.grad_query, queries.b, queries.h, queries.first + i));
        write_row(grad_query + i * row_k, p.d_k, S(p.scale), target, p.grad_query.stride[3]);
      }
    }

    S* copied(const View& x, int64_t columns, S factor, Scratch& scratch) const {
      const int64_t row = padded_to_vectors<S>(columns);
      S* copy = scratch.take<S>(LANES * row);
      for (int i = 0; i < rows; i++) {
        const T* source = at<T>(x, queries.b, queries.h, queries.first + i);
        copy_row(source, x.stride[3], columns, factor, copy + i * row);
      }
      return copy;
    }

    // a query without a key has no gradients, whatever comes in, not a number included
    void forget(int i) {
      delta[i] = 0;
      for (int64_t c = 0; c < row_v; c++) grad_out_rows[i * row_v + c] = 0;
      for (int64_t c = 0; c < p.d_v; c++) grad_out_t[c * LANES + i] = 0;
    }

    void find_delta() {
      const int64_t before = (queries.b * p.heads + queries.h) * p.queries + queries.first;
      const S* all_lse = static_cast<const S*>(p.lse) + before;
      const S* grad_lse = p.grad_lse ? static_cast<const S*>(p.grad_lse) + before : nullptr;
      for (int i = 0; i < LANES; i++) {
        // a lane without a query, or a query without a key, has no weights
        lse[i] = i < rows && all_lse[i] != -S(INFINITY) ? all_lse[i] : S(INFINITY);
        delta[i] = 0;
        share[i] = 1;
      }
      for (int i = 0; i < rows; i++) {
        const T* out = at<T>(p.out, queries.b, queries.h, queries.first + i);
        V sums = V{};
        const S* grad = grad_out_rows + i * row_v;
        int64_t c = 0;
        if constexpr (sizeof(T) == sizeof(S))
          for (; c + W <= p.d_v; c += W) sums += load(grad + c) * load(reinterpret_cast<const S*>(out) + c);
        S sum = 0;
        for (int w = 0; w < W; w++) sum += sums[w];
        for (; c < p.d_v; c++) sum += grad[c] * widened(out[c]);
        delta[i] = grad_lse ? sum - grad_lse[i] : sum;
      }
    }

    // Whether what the forward pass left of a query is too coarse: its output rounded to 16 bits, or a log-sum-exp so
    // large, as masks of large numbers make it, that the logarithm of the sum is lost beside the maximum.
    bool needs_refining(int i) const {
      return lse[i] != S(INFINITY) && (sizeof(T) != sizeof(S) || std::fabs(lse[i]) > S(1e3));
    }
    bool needs_refining() const {
      bool does_any = false;
      for (int i = 0; i < rows; i++) does_any |= needs_refining(i);
      return does_any;
    }

    // the sum of each query's weights, which should be 1, and delta, once more from the weights themselves
    void refine() {
      S sum[LANES] = {}, grad_sum[LANES] = {};
      queries.for_spans(0, p.keys, [&](const Span& span) {
        queries.logits(span, weights);
        if (of.needs_logits) find_grad_weights(span);
        find_factors(span);
        for (int v = 0; v < vectors; v++) {
          V total = load(sum + v * W), grad_total = load(grad_sum + v * W);
          for (int64_t j = 0; j < span.count; j++) {
            const int64_t at = j * LANES + v * W;
            const V softmax = exponential(load(weights + at) - load(lse + v * W));
            total += softmax;
            if (!of.needs_logits) continue;
            const V grad = load(grad_logits + at);
            grad_total += softmax * (factors ? grad * load(factors + at) : grad);
          }
          store(sum + v * W, total);
          store(grad_sum + v * W, grad_total);
        }
      });
      const int64_t before = (queries.b * p.heads + queries.h) * p.queries + queries.first;
      for (int i = 0; i < rows; i++) {
        if (!needs_refining(i)) continue;
        share[i] = 1 / sum[i];
        delta[i] = grad_sum[i] * share[i];
        if (p.grad_lse) delta[i] -= static_cast<const S*>(p.grad_lse)[before + i];
      }
    }

    void find_factors(const Span& span) {
      if (factors)
        dropout_factors<S>(factors, LANES, span.first, span.count, queries.first, vectors * W, of.head,
                           p.dropout_p, p.seed);
    }

    void add(const Span& span, bool is_first) {
      queries.logits(span, weights);
      if (of.needs_logits) find_grad_weights(span);
      differentiate(span);
      of.grad_value.add({weights, LANES, 1}, {grad_out_rows, row_v}, rows, span, is_first);
      of.grad_key.add({grad_logits, LANES, 1}, {query_rows, row_k}, rows, span, is_first);
      if (p.grad_query.data) {
        Rows<const S> keys =
            rows_of<T, S>(p.key, queries.b, queries.kv, span.first, span.count, p.d_k, true, key_rows);
        add_product<S>({grad_logits, 1, LANES}, keys, {grad_query, row_k}, span.count, rows, row_k / W);
      }
      if (span.region == Region::labelled) {
        if (grad_by_label) queries.sum_by_label(span, grad_logits, grad_by_label);
        if (weight_by_label) queries.sum_by_label(span, weights, weight_by_label);
      } else {
        add_relative(span);
      }
    }

    // grad_logits [span, LANES] = grad_out . (value + rel_v), the gradients of the weights
    void find_grad_weights(const Span& span) {
      Rows<const S> values =
          rows_of<T, S>(p.value, queries.b, queries.kv, span.first, span.count, p.d_v, false, value_rows);
      Rows<const S> init{nullptr, 0};
      if (span.region == Region::left)
        init = {far_v, 0};
      else if (span.region == Region::right)
        init = {far_v + LANES, 0};
      else if (span.region == Region::zone && p.rel_v) {
        queries.in_zone(span, p.rel_v, p.rel_v_head, p.rel_v_row, grad_out_t, p.d_v, far_v, grad_logits);
        init = {grad_logits, LANES};
      }
      product<S>({values.data, values.row, 1}, {grad_out_t, LANES}, init, {grad_logits, LANES}, p.d_v,
                 span.count, vectors);
      if (values_by_label) queries.add_by_label(span, values_by_label, grad_logits);
    }

    // logits and gradients of weights to weights and gradients of logits
    void differentiate(const Span& span) {
      find_factors(span);
      for (int v = 0; v < vectors; v++) {
        const V of_query = load(lse + v * W), too_much = load(delta + v * W), scaled_to = load(share + v * W);
        for (int64_t j = 0; j < span.count; j++) {
          S* weight = weights + j * LANES + v * W;
          S* grad = grad_logits + j * LANES + v * W;
          const V softmax = exponential(load(weight) - of_query) * scaled_to;
          if (!of.needs_logits) {
            store(weight, factors ? softmax * load(factors + j * LANES + v * W) : softmax);
          } else if (factors) {
            const V factor = load(factors + j * LANES + v * W);
            store(weight, softmax * factor);
            store(grad, softmax * (load(grad) * factor - too_much));
          } else {
            store(weight, softmax);
            store(grad, softmax * (load(grad) - too_much));
          }
        }
      }
    }

    void add_relative(const Span& span) {
      if (needs_rel_k()) queries.add_far(span, grad_logits, far_grad);
      if (of.grad_rel_v) queries.add_far(span, weights, far_weight);
      const int64_t count = span.region == Region::zone ? queries.distances(span) : 0;
      if (count == 0) return;
      const int64_t row = queries.first_distance(span) + p.left;
      if (needs_rel_k()) queries.clear_margins(span, grad_logits);
      if (p.rel_k && p.grad_query.data)
        add_product<S>(queries.by_query_and_distance(span, grad_logits),
                       {queries.table(p.rel_k, p.rel_k_head) + row * p.rel_k_row, p.rel_k_row},
                       {grad_query, row_k}, count, rows, row_k / W);
      add_to_table(of.grad_rel_k, row, row_k, queries.by_distance_and_query(span, grad_logits), query_rows, count);
      if (!of.grad_rel_v) return;
      queries.clear_margins(span, weights);
      add_to_table(of.grad_rel_v, row, row_v, queries.by_distance_and_query(span, weights), grad_out_rows, count);
    }

    // whether sums of the logits' gradients for each row of rel_k are of use
    bool needs_rel_k() const { return p.rel_k && (p.grad_query.data || of.grad_rel_k); }

    // what is known only when all keys have gone by
    void add_tables() {
      const S* rel_k = p.rel_k && p.grad_query.data ? queries.table(p.rel_k, p.rel_k_head) : nullptr;
      if (p.relations.data) {
        if (rel_k)
          add_product<S>({grad_by_label, 1, LANES}, {rel_k, p.rel_k_row}, {grad_query, row_k}, p.labels, rows,
                         row_k / W);
        add_to_table(of.grad_rel_k, 0, row_k, {grad_by_label, LANES, 1}, query_rows, p.labels);
        add_to_table(of.grad_rel_v, 0, row_v, {weight_by_label, LANES, 1}, grad_out_rows, p.labels);
        return;
      }
      if (rel_k) add_far_rows(far_grad, rel_k, p.labels, p.rel_k_row, rows, grad_query, row_k);
      add_far_to_table(of.grad_rel_k, row_k, far_grad, query_rows);
      add_far_to_table(of.grad_rel_v, row_v, far_weight, grad_out_rows);
    }

    void add_far_to_table(S* table, int64_t row, const S* far, const S* y) {
      add_to_table(table, 0, row, {far, LANES, 1}, y, 1);
      add_to_table(table, p.labels - 1, row, {far + LANES, LANES, 1}, y, 1);
    }

    // the table's rows from `first` on += x [row, query] times y [query, columns], if anybody asks for them; rows
    // that no pair of the whole call uses have no place and nothing to add
    void add_to_table(S* table, int64_t first, int64_t row, Scalars<S> x, const S* y, int64_t count) {
      if (!table) return;
      const int64_t begin = larger_of(first, p.first_row);
      const int64_t end = smaller_of(first + count, p.first_row + p.rows_reached);
      if (begin >= end) return;
      x.data += (begin - first) * x.row;
      add_product<S>(x, {y, row}, {table + (begin - p.first_row) * row, row}, rows, end - begin, row / W);
    }
  };
};

template <class T, class S>
void backward(const Problem& p, int64_t group) {
  const int64_t heads = p.batch * p.heads, first = group * heads / p.groups;
  for (int64_t head = first; head < (group + 1) * heads / p.groups; head++) {
    Scratch& scratch = Scratch::of_this_thread();
    Backward<T, S>(p, head, group, head == first, scratch).run(scratch);
  }
}

// Gradients of a key head that several query heads share, from the part of each, in their order.
template <class T, class S>
void sum_heads(const View& grad, const void* parts, int64_t b, int64_t kv, int64_t group, const Problem& p,
               int64_t columns) {
  const int64_t row = padded_to_vectors<S>(columns), size = p.keys * row;
  const S* first = static_cast<const S*>(parts) + (b * p.heads + kv * group) * size;
  for (int64_t j = 0; j < p.keys; j++) {
    T* target = const_cast<T*>(at<T>(grad, b, kv, j));
    for (int64_t c = 0; c < columns; c++) {
      S sum = 0;
      for (int64_t g = 0; g < group; g++) sum += first[g * size + j * row + c];
      target[c * grad.stride[3]] = narrowed<T>(sum);
    }
  }
}

template <class T, class S>
void sum_shared_heads(const Problem& p, int64_t head) {
  const int64_t b = head / p.kv_heads, kv = head % p.kv_heads, group = p.heads / p.kv_heads;
  if (p.grad_key.data) sum_heads<T, S>(p.grad_key, p.grad_key_by_head, b, kv, group, p, p.d_k);
  if (p.grad_value.data) sum_heads<T, S>(p.grad_value, p.grad_value_by_head, b, kv, group, p, p.d_v);
}

// One row of a table's gradient from all its parts, in their order.
template <class S>
void sum_table(const Problem& p, const void* parts, void* table, bool by_head, int64_t columns, int64_t row) {
  if (!parts) return;
  const int64_t padded = padded_to_vectors<S>(columns), size = p.rows_reached * padded;
  for (int64_t h = 0; h < (by_head ? p.heads : 1); h++) {
    S* target = static_cast<S*>(table) + (h * p.labels + p.first_row + row) * columns;
    constexpr int64_t WIDEST = 64;  // columns at a time
    for (int64_t first = 0; first < columns; first += WIDEST) {
      const int64_t width = smaller_of(WIDEST, columns - first);
      double sums[WIDEST] = {};
      for (int64_t part = h; part < (by_head ? p.batch * p.heads : p.groups); part += by_head ? p.heads : 1) {
        const S* x = static_cast<const S*>(parts) + part * size + row * padded + first;
        for (int64_t c = 0; c < width; c++) sums[c] += x[c];
      }
      for (int64_t c = 0; c < width; c++) target[first + c] = S(sums[c]);
    }
  }
}

template <class S>
void sum_tables(const Problem& p, int64_t row) {
  sum_table<S>(p, p.grad_rel_k_parts, p.grad_rel_k, p.rel_k_head != 0, p.d_k, row);
  sum_table<S>(p, p.grad_rel_v_parts, p.grad_rel_v, p.rel_v_head != 0, p.d_v, row);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
