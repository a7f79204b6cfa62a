// A block of queries of one head: their logits for a span of keys, with positions and masks.
//
// Lanes are queries and rows are keys, so that a maximum or a sum over the keys needs nothing across lanes, and
// keys and values are used where they lie. Seen from a block of queries the keys fall into three regions
// (paper, section 3.2): those so far left that every query has the table's first row for them, those so far
// right that every query has its last row, and a zone between, in which the distance decides.
#pragma once

#include "problem.h"
#include "product.h"
#include "scratch.h"

namespace relpos {
namespace RELPOS_ISA {

constexpr int64_t LANES = 64;   // queries in a block
constexpr int64_t CHUNK = 128;  // keys in a span, at most
constexpr int64_t MARGIN = LANES - 1;
// a span's matrix [keys, LANES] stands between margins of rows that a product along diagonals may read
constexpr int64_t SPAN_SIZE = (CHUNK + 2 * MARGIN + 1) * LANES;

inline int64_t smaller_of(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t larger_of(int64_t x, int64_t y) { return x < y ? y : x; }
inline int64_t clamped(int64_t x, int64_t low, int64_t high) { return larger_of(low, smaller_of(x, high)); }

template <class S>
inline int64_t padded_to_vectors(int64_t columns) {
  return (columns + WIDTH<S> - 1) / WIDTH<S> * WIDTH<S>;
}

template <class T>
inline const T* at(const View& x, int64_t b, int64_t h, int64_t i, int64_t c = 0) {
  return static_cast<const T*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2] + c * x.stride[3];
}

// Rows [first, first + count) of one head as S, padded with zeros to whole vectors if `padded`: where they lie
// if they lie so, otherwise copied to `scratch`, [count, padded_to_vectors(columns)].
template <class T, class S>
Rows<const S> rows_of(const View& x, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns,
                      bool padded, S* scratch) {
  const T* from = at<T>(x, b, h, first);
  if constexpr (sizeof(T) == sizeof(S)) {
    if (x.stride[3] == 1 && (!padded || columns % WIDTH<S> == 0)) return {from, x.stride[2]};
  }
  const int64_t row = padded_to_vectors<S>(columns);
  for (int64_t r = 0; r < count; r++) {
    const T* source = from + r * x.stride[2];
    S* target = scratch + r * row;
    if (x.stride[3] == 1)
      for (int64_t c = 0; c < columns; c++) target[c] = widened(source[c]);
    else
      for (int64_t c = 0; c < columns; c++) target[c] = widened(source[c * x.stride[3]]);
    for (int64_t c = columns; c < row; c++) target[c] = 0;
  }
  return {scratch, row};
}

enum class Region { left, right, zone, labelled };

struct Span {
  Region region;
  int64_t first, count;
};

template <class T, class S>
class QueryBlock {
 public:
  using V = Vec<S>;
  static constexpr int W = WIDTH<S>;

  const Problem& p;
  const int64_t b, h, kv, first;  // sequence, head, key head, first query
  const int rows, vectors;        // queries, and vectors of lanes that hold them
  int64_t position;               // of the first query among the keys
  int64_t key_begin = 0, key_end; // no query of the block attends to a key outside
  S* query_t;                     // [d_k, LANES], scaled
  S* by_label = nullptr;          // [labels, LANES], where pairs have labels
  int32_t* labels = nullptr;      // [CHUNK, LANES] of the last span
  S far_left[LANES] = {}, far_right[LANES] = {};

  QueryBlock(const Problem& problem, int64_t head, int64_t block, Scratch& scratch)
      : p(problem),
        b(head / p.heads),
        h(head % p.heads),
        kv(h / (p.heads / p.kv_heads)),
        first(block * LANES),
        rows(int(smaller_of(LANES, p.queries - first))),
        vectors((rows + W - 1) / W) {
    position = (p.starts ? p.starts[b] : p.start) + first;
    key_end = p.key_lengths ? p.key_lengths[b] : p.keys;
    if (p.is_causal) key_end = clamped(position + rows, 0, key_end);
    skip_masked_ends();
    query_t = scratch.take<S>(p.d_k * LANES);
    transposed(p.query, first, p.d_k, S(p.scale), query_t);
    by_distance_ = scratch.take<S>((CHUNK + LANES) * LANES);
    key_rows_ = scratch.take<S>(CHUNK * padded_to_vectors<S>(p.d_k));
    if (p.relations.data) {
      labels = scratch.take<int32_t>(CHUNK * LANES);
      if (p.rel_k) {
        by_label = scratch.take<S>(p.labels * LANES);
        product<S>({table(p.rel_k, p.rel_k_head), p.rel_k_row, 1}, {query_t, LANES}, {nullptr, 0},
                   {by_label, LANES}, p.d_k, p.labels, vectors);
      }
    } else if (p.rel_k) {
      far_rows(p.rel_k, p.rel_k_head, p.rel_k_row, query_t, p.d_k, far_left, far_right);
    }
  }

  // this head's rows of a table
  const S* table(const void* rows_of_all, int64_t head_stride) const {
    return static_cast<const S*>(rows_of_all) + h * head_stride;
  }

  // out[c, i] = factor * x[first + i, c]; lanes without a query hold zeros
  void transposed(const View& x, int64_t from, int64_t columns, S factor, S* out) const {
    const int lanes = vectors * W;
    const int64_t step = x.stride[3];
    for (int64_t c = 0; c < columns; c++)
      for (int i = rows; i < lanes; i++) out[c * LANES + i] = 0;
    for (int i = 0; i < rows; i++) {
      const T* source = at<T>(x, b, h, from + i);
      for (int64_t c = 0; c < columns; c++) out[c * LANES + i] = widened(source[c * step]) * factor;
    }
  }

  // x_t [columns, LANES] times the table's first row and its last
  void far_rows(const void* rel, int64_t head_stride, int64_t row, const S* x_t, int64_t columns, S* on_left,
                S* on_right) const {
    const S* rel_rows = table(rel, head_stride);
    product<S>({rel_rows, row, 1}, {x_t, LANES}, {nullptr, 0}, {on_left, LANES}, columns, 1, vectors);
    product<S>({rel_rows + (p.labels - 1) * row, row, 1}, {x_t, LANES}, {nullptr, 0}, {on_right, LANES},
               columns, 1, vectors);
  }

  // calls f(span) for all keys of the block
  template <class F>
  void for_spans(int64_t begin, int64_t end, F f) const {
    begin = larger_of(begin, key_begin);
    end = smaller_of(end, key_end);
    if (begin >= end) return;
    if (p.relations.data) return cut(Region::labelled, begin, end, f);
    if (!p.rel_k && !p.rel_v && !p.is_causal) return cut(Region::left, begin, end, f);
    // right of the zone's end every pair is "right or more"; a causal block needs its whole diagonal
    const int64_t width = larger_of(rows - 1 + p.right, p.is_causal ? rows : 0);
    const int64_t zone_begin = clamped(position - p.left + 1, begin, end);
    const int64_t zone_end = clamped(position + width, zone_begin, end);
    cut(Region::left, begin, zone_begin, f);
    cut(Region::right, zone_end, end, f);
    cut(Region::zone, zone_begin, zone_end, f);
  }

  // logits [span, LANES], -inf where a query may not attend
  void logits(const Span& span, S* s) {
    Rows<const S> init{nullptr, 0};
    if (span.region == Region::left)
      init = {far_left, 0};
    else if (span.region == Region::right)
      init = {far_right, 0};
    else if (span.region == Region::zone) {
      in_zone(span, p.rel_k, p.rel_k_head, p.rel_k_row, query_t, p.d_k, far_left, far_right, s);
      if (p.is_causal) hide_later(span, s);
      init = {s, LANES};
    }
    Rows<const S> keys = rows_of<T, S>(p.key, b, kv, span.first, span.count, p.d_k, false, key_rows_);
    product<S>({keys.data, keys.row, 1}, {query_t, LANES}, init, {s, LANES}, p.d_k, span.count, vectors);
    if (span.region == Region::labelled) {
      read_labels(span);
      if (p.rel_k) add_by_label(span, by_label, s);
    }
    if (p.mask.data) apply_mask(span, s);
  }

  // e[j, i] = x_t[:, i] . rel[row of (i, j)] for a span in the zone
  void in_zone(const Span& span, const void* rel, int64_t head_stride, int64_t row, const S* x_t,
               int64_t columns, const S* on_left, const S* on_right, S* e) const {
    const int64_t u = span.first - position;  // distance from the block's first query
    const Ints<S> lane = count_up<S>();
    const int64_t nearest = first_distance(span), count = distances(span);
    if (rel && count > 0)
      product<S>({table(rel, head_stride) + (nearest + p.left) * row, row, 1}, {x_t, LANES}, {nullptr, 0},
                 {by_distance_, LANES}, columns, count, vectors);
    for (int64_t j = 0; j < span.count; j++) {
      S* target = e + j * LANES;
      if (!rel) {
        for (int v = 0; v < vectors; v++) store(target + v * W, V{});
        continue;
      }
      // lanes from here on see the key at the left or farther
      const int64_t left_from = clamped(u + j + p.left, 0, LANES);
      for (int v = 0; v < vectors; v++) {
        Ints<S> is_left = lane + v * W >= Ints<S>{} + typename IntOf<S>::type(left_from);
        store(target + v * W, is_left ? load(on_left + v * W) : load(on_right + v * W));
      }
      const int64_t begin = larger_of(0, u + j - p.right + 1), end = smaller_of(rows, left_from);
      const S* diagonal = by_distance_ + (u + j - nearest) * LANES;
      for (int64_t i = begin; i < end; i++) target[i] = diagonal[i * (1 - LANES)];
    }
  }

  // the first distance in the span with a row of the table between its first and its last
  int64_t first_distance(const Span& span) const {
    return larger_of(span.first - position - (rows - 1), 1 - p.left);
  }
  // how many there are
  int64_t distances(const Span& span) const {
    const int64_t last = smaller_of(span.first + span.count - 1 - position, p.right - 1);
    return larger_of(0, last - first_distance(span) + 1);
  }

  // sums of x [span, LANES] over the keys of each query that have the table's first row, and its last
  void add_far(const Span& span, const S* x, S* on_left, S* on_right) const {
    const int64_t u = span.first - position;
    const Ints<S> zero{};
    using I = typename IntOf<S>::type;
    for (int v = 0; v < vectors; v++) {
      V left_sum = load(on_left + v * W), right_sum = load(on_right + v * W);
      const Ints<S> lane = count_up<S>() + v * W;
      for (int64_t j = 0; j < span.count; j++) {
        V weights = load(x + j * LANES + v * W);
        if (span.region == Region::left) {
          left_sum += weights;
        } else if (span.region == Region::right) {
          right_sum += weights;
        } else {
          Ints<S> is_left = lane >= zero + I(clamped(u + j + p.left, 0, LANES));
          Ints<S> is_right = lane <= zero + I(clamped(u + j - p.right, -1, LANES));
          left_sum += is_left ? weights : V{};
          right_sum += is_right & ~is_left ? weights : V{};
        }
      }
      store(on_left + v * W, left_sum);
      store(on_right + v * W, right_sum);
    }
  }

  // zeros around x [span, LANES], as far as diagonals reach
  void clear_margins(const Span& span, S* x) const {
    for (int64_t j = 1; j < rows; j++)
      for (int v = 0; v < vectors; v++) {
        store(x - j * LANES + v * W, V{});
        store(x + (span.count + j - 1) * LANES + v * W, V{});
      }
  }

  // x [span, LANES] with margins as a matrix [query, distance]
  Scalars<S> by_query_and_distance(const Span& span, const S* x) const {
    return {x + (first_distance(span) + position - span.first) * LANES, LANES + 1, LANES};
  }
  Scalars<S> by_distance_and_query(const Span& span, const S* x) const {
    Scalars<S> turned = by_query_and_distance(span, x);
    return {turned.data, turned.step, turned.row};
  }

  // x [span, LANES] += values [labels, LANES] at the label of each pair
  void add_by_label(const Span& span, const S* values, S* x) const {
    for (int64_t j = 0; j < span.count; j++)
      for (int i = 0; i < rows; i++) {
        const int32_t label = labels[j * LANES + i];
        if (label >= 0) x[j * LANES + i] += values[label * LANES + i];
      }
  }

  // sums [labels, LANES] += x [span, LANES] at the label of each pair
  void sum_by_label(const Span& span, const S* x, S* sums) const {
    for (int64_t j = 0; j < span.count; j++)
      for (int i = 0; i < rows; i++) {
        const int32_t label = labels[j * LANES + i];
        if (label >= 0) sums[label * LANES + i] += x[j * LANES + i];
      }
  }

 private:
  S* by_distance_;
  S* key_rows_;

  template <class F>
  static void cut(Region region, int64_t begin, int64_t end, F& f) {
    for (; begin < end; begin += CHUNK) f(Span{region, begin, smaller_of(CHUNK, end - begin)});
  }

  void hide_later(const Span& span, S* s) const {
    for (int64_t j = 0; j < span.count; j++) {
      const int64_t hidden = smaller_of(rows, span.first + j - position);
      for (int64_t i = 0; i < hidden; i++) s[j * LANES + i] = -S(INFINITY);
    }
  }

  // a mask over keys alone, as of padding, may hide whole ends
  void skip_masked_ends() {
    if (!p.mask.data || p.mask.kind != Kind::boolean || p.mask.stride[2] != 0) return;
    const uint8_t* allowed = at<uint8_t>(p.mask, b, h, 0);
    const int64_t step = p.mask.stride[3];
    while (key_begin < key_end && !allowed[key_begin * step]) key_begin++;
    while (key_begin < key_end && !allowed[(key_end - 1) * step]) key_end--;
  }

  void apply_mask(const Span& span, S* s) const {
    switch (p.mask.kind) {
      case Kind::boolean: return hide(span, s);
      case Kind::float64: return add_mask<double>(span, s);
      case Kind::float32: return add_mask<float>(span, s);
      case Kind::bfloat16: return add_mask<bfloat16>(span, s);
      default: return add_mask<float16>(span, s);
    }
  }

  void hide(const Span& span, S* s) const {
    const uint8_t* allowed = at<uint8_t>(p.mask, b, h, first, span.first);
    const int64_t down = p.mask.stride[2], across = p.mask.stride[3];
    if (down == 0) {
      for (int64_t j = 0; j < span.count; j++)
        if (!allowed[j * across])
          for (int v = 0; v < vectors; v++) store(s + j * LANES + v * W, V{} - S(INFINITY));
      return;
    }
    for (int i = 0; i < rows; i++)
      for (int64_t j = 0; j < span.count; j++) {
        S* x = s + j * LANES + i;
        *x = allowed[i * down + j * across] ? *x : -S(INFINITY);
      }
  }

  template <class M>
  void add_mask(const Span& span, S* s) const {
    const M* mask = at<M>(p.mask, b, h, first, span.first);
    const int64_t down = p.mask.stride[2], across = p.mask.stride[3];
    for (int i = 0; i < rows; i++)
      for (int64_t j = 0; j < span.count; j++) s[j * LANES + i] += S(widened(mask[i * down + j * across]));
  }

  void read_labels(const Span& span) {
    switch (p.relations.kind) {
      case Kind::int64: return read_labels_of<int64_t>(span);
      case Kind::int32: return read_labels_of<int32_t>(span);
      case Kind::int16: return read_labels_of<int16_t>(span);
      case Kind::int8: return read_labels_of<int8_t>(span);
      default: return read_labels_of<uint8_t>(span);
    }
  }

  template <class L>
  void read_labels_of(const Span& span) {
    const L* from = at<L>(p.relations, b, h, first, span.first);
    const int64_t down = p.relations.stride[2], across = p.relations.stride[3];
    for (int i = 0; i < rows; i++)
      for (int64_t j = 0; j < span.count; j++) {
        const int64_t label = int64_t(from[i * down + j * across]);
        // a label that no row has cannot be read; where it could be, it was refused
        labels[j * LANES + i] = label < p.labels ? int32_t(larger_of(label, -1)) : -1;
      }
  }
};

}  // namespace RELPOS_ISA
}  // namespace relpos
