// torch's tensors as the kernel sees them, and memory for new ones.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"

namespace relpos {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Kind kind_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return Kind::float64;
    case ScalarType::Float: return Kind::float32;
    case ScalarType::BFloat16: return Kind::bfloat16;
    case ScalarType::Half: return Kind::float16;
    case ScalarType::Bool: return Kind::boolean;
    case ScalarType::Long: return Kind::int64;
    case ScalarType::Int: return Kind::int32;
    case ScalarType::Short: return Kind::int16;
    case ScalarType::Char: return Kind::int8;
    case ScalarType::Byte: return Kind::uint8;
    default: STD_TORCH_CHECK(false, "relpos: a dtype that the kernel does not know");
  }
}

// x as [batch, heads, rows, columns]; a dimension of size 1 is broadcast
inline View view_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4, "relpos: expected four dimensions");
  View view;
  view.data = x.data_ptr();
  view.kind = kind_of(x);
  for (int d = 0; d < 4; d++) view.stride[d] = x.size(d) == 1 ? 0 : x.stride(d);
  // except columns, so that rows of one column count as contiguous
  if (x.size(3) == 1) view.stride[3] = 1;
  return view;
}

// x [batch, heads, query, key], a mask or labels; every dimension of size 1 is broadcast
inline View pairs_view_of(const Tensor& x) {
  View view = view_of(x);
  if (x.size(3) == 1) view.stride[3] = 0;
  return view;
}

// Says how much memory is missing: torch's stable ABI would only name the function that failed.
[[noreturn]] inline void refuse_memory(const std::vector<int64_t>& sizes, size_t element) {
  double bytes = double(element);
  std::string text;
  for (const int64_t size : sizes) {
    bytes *= double(size);
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  char number[64];
  std::snprintf(number, sizeof number, "%.0f", bytes);
  throw std::runtime_error("relpos: backend \"cpu\" ran out of memory. A tensor [" + text + "] needs " + number +
                           " bytes, and there are not as many: give fewer queries, heads or sequences at a time.");
}

inline Tensor empty(const Tensor& like, std::vector<int64_t> sizes, std::optional<ScalarType> type = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {
    refuse_memory(sizes, !type ? like.element_size() : *type == ScalarType::Double ? 8 : 4);
  }
}

// [batch, heads, rows, columns], with heads side by side in memory if those of `like` are
inline Tensor empty_as(const Tensor& like, int64_t heads, int64_t rows, int64_t columns) {
  if (like.stride(1) < like.stride(2))
    return torch::stable::transpose(empty(like, {like.size(0), rows, heads, columns}), 1, 2);
  return empty(like, {like.size(0), heads, rows, columns});
}

}  // namespace relpos
