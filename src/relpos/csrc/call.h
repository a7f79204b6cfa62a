// One call of an operator: its arguments as the kernel takes them. `Problem` is filled here alone.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "instructions.h"
#include "tensors.h"

namespace relpos {

class Call {
 public:
  Problem problem;

  explicit Call(const Arguments& given) : like_(given.query) {
    Problem& p = problem;
    STD_TORCH_CHECK(!(given.relations && given.is_causal), "relpos: labels have no order to be causal in");
    p.batch = given.query.size(0), p.heads = given.query.size(1), p.kv_heads = given.key.size(1);
    p.queries = given.query.size(2), p.keys = given.key.size(2);
    p.d_k = given.query.size(3), p.d_v = given.value.size(3);
    p.query = view_of(given.query), p.key = view_of(given.key), p.value = view_of(given.value);
    p.left = given.left, p.right = given.right, p.labels = given.left + given.right + 1;
    if (given.rel_k) p.rel_k = table(*given.rel_k, p.rel_k_row, p.rel_k_head);
    if (given.rel_v) p.rel_v = table(*given.rel_v, p.rel_v_row, p.rel_v_head);
    if (given.relations) p.relations = pairs_view_of(*given.relations);
    if (given.mask) p.mask = pairs_view_of(*given.mask);
    if (given.starts) p.starts = integers(*given.starts);
    p.start = given.start;
    if (given.key_lengths) p.key_lengths = integers(*given.key_lengths);
    p.is_causal = given.is_causal;
    if (given.seed) p.seed = uint64_t(*integers(*given.seed));
    p.dropout_p = given.dropout_p, p.scale = given.scale;
  }

  // the dtype of sums, tables and lse
  ScalarType sum_type() const {
    return problem.query.kind == Kind::float64 ? ScalarType::Double : ScalarType::Float;
  }

  bool is_empty() const { return problem.batch * problem.heads * problem.queries == 0; }

  // memory of x as long as the call lives
  void* keep(const Tensor& x) {
    kept_.push_back(x);
    return x.data_ptr();
  }

  // memory for sums, as long as the call lives
  void* keep_sums(std::vector<int64_t> sizes) { return keep(empty(like_, std::move(sizes), sum_type())); }

  // Sets first_row and rows_reached: the rows of the tables that some pair of the call may use.
  void find_reach() {
    Problem& p = problem;
    p.first_row = 0, p.rows_reached = p.labels;
    if (p.relations.data) return;
    // as in the kernel, no start is farther
    constexpr int64_t FARTHEST = int64_t(1) << 62;
    int64_t first = FARTHEST, last = -FARTHEST;
    for (int64_t b = 0; b < p.batch; b++) {
      const int64_t start = std::max(-FARTHEST, std::min(FARTHEST, p.starts ? p.starts[b] : p.start));
      first = std::min(first, start);
      last = std::max(last, start);
    }
    const int64_t lowest = std::max(-p.left, std::min(p.right, -(last + p.queries - 1)));
    const int64_t highest = std::max(-p.left, std::min(p.right, p.keys - 1 - first));
    p.first_row = lowest + p.left;
    p.rows_reached = std::max<int64_t>(0, highest - lowest + 1);
  }

 private:
  const Tensor& like_;
  std::vector<Tensor> kept_;

  const int64_t* integers(const Tensor& x) {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long, "relpos: expected int64");
    return static_cast<const int64_t*>(keep(torch::stable::contiguous(x)));
  }

  // rel [labels, d] or [heads, labels, d] with rows padded to whole vectors
  const void* table(const Tensor& rel, int64_t& row, int64_t& head) {
    STD_TORCH_CHECK(rel.scalar_type() == sum_type(), "relpos: tables have the dtype of the sums");
    const int64_t columns = rel.size(rel.dim() - 1);
    row = kernel().padded(problem, columns);
    head = rel.dim() == 3 ? problem.labels * row : 0;
    const Tensor rows = torch::stable::contiguous(rel);
    if (row == columns) return keep(rows);
    return keep(torch::stable::pad(rows, std::vector<int64_t>{0, row - columns}));
  }
};

}  // namespace relpos
