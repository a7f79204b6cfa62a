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
constexpr int64_t CHUNK = 256;  // keys in a span, at most
constexpr int64_t MARGIN = LANES - 1;
constexpr int FEW = 4;          // queries that leave most lanes without one
constexpr int64_t FARTHEST = int64_t(1) << 62;  // position of a first query, from either side
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

// y[0, columns) = factor * x[0, columns), and zeros up to whole vectors
template <class T, class S>
inline void copy_row(const T* x, int64_t step, int64_t columns, S factor, S* y) {
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(S)) {
    if (step == 1)
      for (; c + WIDTH<S> <= columns; c += WIDTH<S>) store(y + c, load(reinterpret_cast<const S*>(x) + c) * factor);
  } else {
    if (step == 1)
      for (; c < columns; c++) y[c] = widened(x[c]) * factor;
  }
  for (; c < columns; c++) y[c] = widened(x[c * step]) * factor;
  for (; c % WIDTH<S>; c++) y[c] = 0;
}

// y[0, columns) = factor * x[0, columns)
template <class T, class S>
inline void write_row(const S* x, int64_t columns, S factor, T* y, int64_t step) {
  int64_t c = 0;
  if constexpr (sizeof(T) == sizeof(S)) {
    if (step == 1)
      for (; c + WIDTH<S> <= columns; c += WIDTH<S>) store(reinterpret_cast<S*>(y) + c, load(x + c) * factor);
  } else {
    if (step == 1)
      for (; c < columns; c++) y[c] = narrowed<T>(x[c] * factor);
  }
  for (; c < columns; c++) y[c * step] = narrowed<T>(x[c] * factor);
}

// sums [query, row] += what far [2, LANES] has for a query times the first and the last of the table's rows
template <class S>
inline void add_far_rows(const S* far, const S* table, int64_t labels, int64_t row, int queries, S* sums,
                         int64_t sums_row) {
  const S* last = table + (labels - 1) * row;
  for (int i = 0; i < queries; i++)
    for (int64_t c = 0; c < sums_row; c += WIDTH<S>) {
      S* sum = sums + i * sums_row + c;
      store(sum, load(sum) + far[i] * load(table + c) + far[LANES + i] * load(last + c));
    }
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
  for (int64_t r = 0; r < count; r++)
    copy_row(from + r * x.stride[2], x.stride[3], columns, S(1), scratch + r * row);
  return {scratch, row};
}

// asks for rows before they are needed; worth it where they are few and nothing has foretold them
template <class T>
inline void prefetch_rows(const View& x, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns) {
  for (int64_t r = 0; r < count; r++) {
    const char* row = reinterpret_cast<const char*>(at<T>(x, b, h, first + r));
    for (int64_t byte = 0; byte < columns * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
  }
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
  S* logits_by_label = nullptr;          // [labels + 1, LANES], where pairs have labels; zeros for pairs without one
  int32_t* labels = nullptr;      // [CHUNK, LANES] of the last span, p.labels for none
  S far_logits[2 * LANES];               // query times the table's first row and its last

  QueryBlock(const Problem& problem, int64_t head, int64_t block, Scratch& scratch)
      : p(problem),
        b(head / p.heads),
        h(head % p.heads),
        kv(h / (p.heads / p.kv_heads)),
        first(block * LANES),
        rows(int(smaller_of(LANES, p.queries - first))),
        vectors((rows + W - 1) / W) {
    prefetch_rows<T>(p.query, b, h, first, rows, p.d_k);
    if (p.keys <= CHUNK) {
      prefetch_rows<T>(p.key, b, kv, 0, p.keys, p.d_k);
      prefetch_rows<T>(p.value, b, kv, 0, p.keys, p.d_v);
    }
    // what a compiled call has not looked at cannot leave the memory of the tensors
    position = clamped(p.starts ? p.starts[b] : p.start, -FARTHEST, FARTHEST) + first;
    key_end = p.key_lengths ? clamped(p.key_lengths[b], 0, p.keys) : p.keys;
    if (p.is_causal) key_end = clamped(position + rows, 0, key_end);
    skip_masked_ends();
    query_t = scratch.take<S>(p.d_k * LANES);
    transposed<T>(p.query, 0, p.d_k, S(p.scale), query_t);
#ifdef RELPOS_HAS_SHUFFLES
    are_few_ = rows <= FEW && W >= 8;
#endif
    by_distance_ = scratch.take<S>((CHUNK + LANES) * LANES);
    key_rows_ = scratch.take<S>(CHUNK * padded_to_vectors<S>(p.d_k));
    if (p.mask.data && p.mask.kind != Kind::boolean) mask_t_ = scratch.take<S>(CHUNK * LANES);
    if (p.relations.data) {
      labels = scratch.take<int32_t>(CHUNK * LANES);
      for (int64_t i = 0; i < CHUNK * LANES; i++) labels[i] = 0;
      if (p.rel_k) {
        logits_by_label = scratch.take<S>((p.labels + 1) * LANES);
        for (int i = 0; i < LANES; i++) logits_by_label[p.labels * LANES + i] = 0;
        product<S>({table(p.rel_k, p.rel_k_head), p.rel_k_row, 1}, {query_t, LANES}, {nullptr, 0},
                   {logits_by_label, LANES}, p.d_k, p.labels, vectors);
      }
    } else if (!p.rel_k) {
      for (S& x : far_logits) x = 0;
    } else {
      far_rows(p.rel_k, p.rel_k_head, p.rel_k_row, query_t, p.d_k, far_logits);
    }
  }

  // this head's rows of a table
  const S* table(const void* rows_of_all, int64_t head_stride) const {
    return static_cast<const S*>(rows_of_all) + h * head_stride;
  }

  // out[c, i] = factor * x[first + i, column + c]; lanes without a query hold zeros
  template <class X>
  void transposed(const View& x, int64_t column, int64_t columns, S factor, S* out) const {
    int64_t whole = 0;
#ifdef RELPOS_HAS_SHUFFLES
    if (x.stride[3] == 1) whole = columns / W * W;
    for (int v = 0; v < vectors; v++)
      for (int64_t c = 0; c < whole; c += W) {
        V square[W];
        for (int w = 0; w < W; w++) {
          const int i = v * W + w;
          square[w] = V{};
          if (i < rows) {
            const X* source = at<X>(x, b, h, first + i, column + c);
            if constexpr (sizeof(X) == sizeof(S))
              square[w] = load(reinterpret_cast<const S*>(source)) * factor;
            else
              for (int l = 0; l < W; l++) square[w][l] = S(widened(source[l])) * factor;
          }
        }
        transpose<S>(square);
        for (int w = 0; w < W; w++) store(out + (c + w) * LANES + v * W, square[w]);
      }
#endif
    for (int64_t c = whole; c < columns; c++)
      for (int i = 0; i < vectors * W; i++)
        out[c * LANES + i] = i < rows ? S(widened(*at<X>(x, b, h, first + i, column + c))) * factor : S(0);
  }

  // far [2, LANES] = the table's first row and its last times x_t [columns, LANES]
  void far_rows(const void* rel, int64_t head_stride, int64_t row, const S* x_t, int64_t columns, S* far) const {
    product<S>({table(rel, head_stride), (p.labels - 1) * row, 1}, {x_t, LANES}, {nullptr, 0}, {far, LANES},
               columns, 2, vectors);
  }

  // calls f(span) for the block's keys in [begin, end)
  template <class F>
  void for_spans(int64_t begin, int64_t end, F f) const {
    begin = larger_of(begin, key_begin);
    end = smaller_of(end, key_end);
    if (begin >= end) return;
    if (p.relations.data) return cut(Region::labelled, begin, end, f);
    if (!p.rel_k && !p.rel_v && !p.is_causal) return cut(Region::left, begin, end, f);
    // Right of the zone's end every pair is "right or more"; a causal block needs its whole diagonal. The zone is
    // that of a full block, since a query's sums must not depend on how many others stand beside it.
    const int64_t width = larger_of(LANES - 1 + p.right, p.is_causal ? LANES : 0);
    const int64_t zone_begin = clamped(position - p.left + 1, begin, end);
    const int64_t zone_end = clamped(position + width, zone_begin, end);
    cut(Region::left, begin, zone_begin, f);
    cut(Region::right, zone_end, end, f);
    cut(Region::zone, zone_begin, zone_end, f);
  }

  // Logits [span, LANES], -inf where a query may not attend. The sums of query . key begin with the relative part,
  // so that beyond the zone adding it costs nothing.
  void logits(const Span& span, S* s) {
    Rows<const S> init{nullptr, 0};
    if (span.region == Region::left)
      init = {far_logits, 0};
    else if (span.region == Region::right)
      init = {far_logits + LANES, 0};
    else if (span.region == Region::zone) {
      in_zone(span, p.rel_k, p.rel_k_head, p.rel_k_row, query_t, p.d_k, far_logits, s);
      init = {s, LANES};
    }
    Rows<const S> keys = rows_of<T, S>(p.key, b, kv, span.first, span.count, p.d_k, are_few_, key_rows_);
    if (are_few_)
      few_logits(keys, init, span.count, s);
    else
      product<S>({keys.data, keys.row, 1}, {query_t, LANES}, init, {s, LANES}, p.d_k, span.count, vectors);
    // after the product, since nothing that a hidden key holds may come through
    if (p.is_causal && span.region == Region::zone) hide_later(span, s);
    if (span.region == Region::labelled) {
      read_labels(span);
      if (p.rel_k) add_by_label(span, logits_by_label, s);
    }
    if (p.mask.data) apply_mask(span, s);
  }

  // e[j, i] = x_t[:, i] . rel[row of (i, j)] for a span in the zone
  void in_zone(const Span& span, const void* rel, int64_t head_stride, int64_t row, const S* x_t,
               int64_t columns, const S* far_of_x, S* e) const {
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
        store(target + v * W, is_left ? load(far_of_x + v * W) : load(far_of_x + LANES + v * W));
      }
      const int64_t begin = larger_of(0, u + j - p.right + 1), end = smaller_of(rows, left_from);
      for (int64_t i = begin; i < end; i++) target[i] = by_distance_[(u + j - i - nearest) * LANES + i];
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

  // far_sums [2, LANES] += x [span, LANES] over the keys for which a query has the table's first row, its last
  void add_far(const Span& span, const S* x, S* far_sums) const {
    const int64_t u = span.first - position;
    const Ints<S> zero{};
    using I = typename IntOf<S>::type;
    for (int v = 0; v < vectors; v++) {
      V left_sum = load(far_sums + v * W), right_sum = load(far_sums + LANES + v * W);
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
      store(far_sums + v * W, left_sum);
      store(far_sums + LANES + v * W, right_sum);
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

  // x [span, LANES] with margins as a matrix [query, distance]: a query and a distance have one key
  Scalars<S> by_query_and_distance(const Span& span, const S* x) const {
    return {x + (first_distance(span) + position - span.first) * LANES, LANES + 1, LANES};
  }
  Scalars<S> by_distance_and_query(const Span& span, const S* x) const {
    Scalars<S> turned = by_query_and_distance(span, x);
    return {turned.data, turned.step, turned.row};
  }

  // x [span, LANES] += values [labels + 1, LANES] at the label of each pair
  void add_by_label(const Span& span, const S* __restrict values, S* __restrict x) const {
    const int32_t* __restrict of_pair = labels;
    for (int64_t j = 0; j < span.count; j++)
      for (int i = 0; i < vectors * W; i++) x[j * LANES + i] += values[of_pair[j * LANES + i] * LANES + i];
  }

  // sums [labels + 1, LANES] += x [span, LANES] at the label of each pair
  void sum_by_label(const Span& span, const S* __restrict x, S* __restrict sums) const {
    for (int64_t j = 0; j < span.count; j++)
      for (int i = 0; i < rows; i++) sums[labels[j * LANES + i] * LANES + i] += x[j * LANES + i];
  }

 private:
  S* by_distance_;
  S* key_rows_;
  S* mask_t_ = nullptr;      // [CHUNK, LANES]
  bool are_few_ = false;

  // Logits of so few queries that most lanes would idle: keys are turned and become lanes. Each logit is the same
  // sum in the same order as in `product`, to the last bit.
  void few_logits(Rows<const S> keys, Rows<const S> init, int64_t count, S* s) const {
#ifdef RELPOS_HAS_SHUFFLES
    const int64_t columns = padded_to_vectors<S>(p.d_k);
    for (int64_t j = 0; j < count; j += W) {
      const int group = int(smaller_of(W, count - j));
      V sums[FEW];  // of each query, over the lanes' keys
      for (int i = 0; i < rows; i++) {
        sums[i] = V{};
        for (int w = 0; init.data && w < group; w++) sums[i][w] = init.data[(j + w) * init.row + i];
      }
      for (int64_t c = 0; c < columns; c += W) {
        V square[W];
        for (int w = 0; w < W; w++) square[w] = w < group ? load(keys.data + (j + w) * keys.row + c) : V{};
        transpose<S>(square);
        const int64_t real = smaller_of(W, p.d_k - c);
        for (int64_t w = 0; w < real; w++)
          for (int i = 0; i < rows; i++) sums[i] += square[w] * query_t[(c + w) * LANES + i];
      }
      for (int w = 0; w < group; w++) {
        V row = V{};
        for (int i = 0; i < rows; i++) row[i] = sums[i][w];
        store(s + (j + w) * LANES, row);
      }
    }
#endif
  }

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
    uint8_t turned[CHUNK * LANES];  // [span, LANES]: bytes are cheaper to turn than numbers
    for (int i = 0; i < rows; i++)
      for (int64_t j = 0; j < span.count; j++) turned[j * LANES + i] = allowed[i * down + j * across];
    for (int64_t j = 0; j < span.count; j++)
      for (int i = 0; i < rows; i++) {
        const S x = s[j * LANES + i];
        s[j * LANES + i] = turned[j * LANES + i] ? x : -S(INFINITY);
      }
  }

  template <class M>
  void add_mask(const Span& span, S* s) const {
    transposed<M>(p.mask, span.first, span.count, S(1), mask_t_);
    for (int64_t j = 0; j < span.count; j++)
      for (int v = 0; v < vectors; v++) {
        S* x = s + j * LANES + v * W;
        const V added = load(mask_t_ + j * LANES + v * W);
        store(x, added == -S(INFINITY) ? added : load(x) + added);
      }
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
        labels[j * LANES + i] = int32_t(label < 0 || label > p.labels ? p.labels : label);
      }
  }
};

}  // namespace RELPOS_ISA
}  // namespace relpos
