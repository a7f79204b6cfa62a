// Gradients of the keys and values of one head, to which every block of queries adds.
#pragma once

#include "blocks.h"
#include "product.h"
#include "scratch.h"

namespace relpos {
namespace RELPOS_ISA {

// A gradient [keys, columns] kept in S: in torch's memory where that holds rows of whole vectors of S.
template <class T, class S>
class KeyGradient {
 public:
  // view: of the gradient, absent where nobody asks for it. parts: [batch * heads, keys, padded columns], the
  // gradient's place where query heads share a key head, or null.
  KeyGradient(const View& view, const Problem& p, int64_t head, int64_t columns, void* parts, Scratch& scratch)
      : view_(view),
        b_(head / p.heads),
        h_(head % p.heads),
        keys_(p.keys),
        columns_(columns),
        row_(padded_to_vectors<S>(columns)) {
    if (!view.data) return;
    if (parts) {
      is_in_place_ = true;
      data_ = static_cast<S*>(parts) + head * keys_ * row_;
    } else if constexpr (sizeof(T) == sizeof(S)) {
      if (view.stride[3] == 1 && columns % WIDTH<S> == 0) {
        is_in_place_ = true;
        data_ = reinterpret_cast<S*>(const_cast<T*>(at<T>(view, b_, h_, 0)));
        row_ = view.stride[2];
      }
    }
    if (!is_in_place_) data_ = scratch.take<S>(keys_ * row_);
  }

  // The first block of queries writes rows [begin, end) and later ones add to them; other rows begin with zeros.
  void begin_with(int64_t begin, int64_t end) const {
    if (!data_) return;
    clear(0, begin);
    clear(end, keys_);
  }

  // rows of `keys` += x [keys, query] times y [query, columns]
  void add(const KeyBlock& keys, Scalars<S> x, Rows<const S> y, int64_t queries, bool is_first) const {
    if (!data_) return;
    const Rows<S> target{data_ + keys.first * row_, row_};
    product<S>(x, y, {is_first ? nullptr : target.data, row_}, target, queries, keys.count,
               padded_to_vectors<S>(columns_) / WIDTH<S>);
  }

  void finish() const {
    if (is_in_place_ || !data_) return;
    for (int64_t j = 0; j < keys_; j++) {
      T* target = const_cast<T*>(at<T>(view_, b_, h_, j));
      write_row(data_ + j * row_, columns_, S(1), target, view_.stride[3]);
    }
  }

 private:
  const View& view_;
  const int64_t b_, h_, keys_, columns_;
  bool is_in_place_ = false;
  int64_t row_;  // elements from a row to the next
  S* data_ = nullptr;

  void clear(int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < end; j++)
      for (int64_t c = 0; c < padded_to_vectors<S>(columns_); c++) data_[j * row_ + c] = 0;
  }
};

// The gradient of a key head that query heads share: the sum of their parts, in order.
template <class T, class S>
void sum_parts_of_head(const Problem& p, const View& grad, const void* parts, int64_t b, int64_t kv,
                       int64_t columns) {
  const int64_t group = p.heads / p.kv_heads, row = padded_to_vectors<S>(columns), size = p.keys * row;
  const S* first = static_cast<const S*>(parts) + (b * p.heads + kv * group) * size;  // [group, keys, row]
  for (int64_t j = 0; j < p.keys; j++) {
    T* target = const_cast<T*>(at<T>(grad, b, kv, j));  // [columns]
    for (int64_t c = 0; c < columns; c++) {
      S sum = 0;
      for (int64_t g = 0; g < group; g++) sum += first[g * size + j * row + c];
      target[c * grad.stride[3]] = narrowed<T>(sum);
    }
  }
}

template <class T, class S>
void sum_shared_heads(const Problem& p, int64_t head) {
  const int64_t b = head / p.kv_heads, kv = head % p.kv_heads;
  if (p.grad_key.data) sum_parts_of_head<T, S>(p, p.grad_key, p.grad_key_by_head, b, kv, p.d_k);
  if (p.grad_value.data) sum_parts_of_head<T, S>(p, p.grad_value, p.grad_value_by_head, b, kv, p.d_v);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
