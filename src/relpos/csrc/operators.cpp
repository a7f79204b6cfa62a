// The kernel as torch's operators, through torch's stable ABI alone: one build serves torch 2.10 and newer.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <string>

#include "arguments.h"
#include "call.h"
#include "instructions.h"
#include "parallel.h"
#include "tensors.h"

namespace relpos {
namespace {

// Goes up when a signature changes, as in backends/cpu/backend.py: an installation may hold an older build.
constexpr int64_t VERSION = 1;

std::array<Tensor, 2> attention(const Arguments& given) {
  Call call(given);
  Problem& p = call.problem;
  Tensor out = empty_as(given.query, p.heads, p.queries, p.d_v);
  Tensor lse = empty(given.query, {p.batch, p.heads, p.queries}, call.sum_type());
  if (call.is_empty()) return {out, lse};
  p.out = view_of(out), p.lse = lse.data_ptr();
  const Kernel& k = kernel();
  if (k.are_splits_tasks(p)) p.partial = call.keep_sums({k.partial_size(p)});
  in_parallel(k.forward_tasks(p), [&](int64_t task) { k.forward(p, task); });
  if (k.are_splits_tasks(p)) in_parallel(p.batch * p.heads, [&](int64_t head) { k.merge_splits(p, head); });
  return {out, lse};
}

// How many groups of heads there are: each is a task of the backward pass and sums gradients of shared tables. Their
// number, and with it the order of the sums, depends on sizes alone, unless the tables are huge.
int64_t num_groups(const Problem& p) {
  constexpr int64_t MOST = 128, MOST_SUMS = 16 << 20;  // of all groups
  const bool shares_rel_k = p.rel_k && !p.rel_k_head, shares_rel_v = p.rel_v && !p.rel_v_head;
  const int64_t sums = p.rows_reached * ((shares_rel_k ? p.d_k : 0) + (shares_rel_v ? p.d_v : 0));
  const int64_t affordable = MOST_SUMS / std::max<int64_t>(1, sums);
  return std::min({p.batch * p.heads, MOST, std::max<int64_t>(torch::stable::get_num_threads(), affordable)});
}

// Gradients of query, key, value, rel_k and rel_v; tensors of no size where nobody asks for them.
struct Gradients {
  const int64_t needs;
  const Tensor query, key, value, rel_k, rel_v;

  Gradients(const Arguments& given, int64_t bits, const Problem& p)
      : needs(bits),
        query(is_needed(0) ? empty_as(given.query, p.heads, p.queries, p.d_k) : none(given)),
        key(is_needed(1) ? empty_as(given.key, p.kv_heads, p.keys, p.d_k) : none(given)),
        value(is_needed(2) ? empty_as(given.value, p.kv_heads, p.keys, p.d_v) : none(given)),
        rel_k(given.rel_k && is_needed(3) ? zeros_as(*given.rel_k) : none(given)),
        rel_v(given.rel_v && is_needed(4) ? zeros_as(*given.rel_v) : none(given)) {}

  bool is_needed(int i) const { return (needs >> i & 1) == 1; }
  std::array<Tensor, 5> all() const { return {query, key, value, rel_k, rel_v}; }

  // Has the kernel write them, with memory for the sums of each head or group.
  void enter(Call& call) const {
    Problem& p = call.problem;
    const auto parts = [&](int64_t count, int64_t rows, int64_t columns) {
      return call.keep_sums({count, rows, kernel().padded(p, columns)});
    };
    const int64_t heads = p.batch * p.heads;
    if (is_needed(0)) p.grad_query = view_of(query);
    if (is_needed(1)) p.grad_key = view_of(key);
    if (is_needed(2)) p.grad_value = view_of(value);
    if (is_needed(1) && p.kv_heads != p.heads) p.grad_key_by_head = parts(heads, p.keys, p.d_k);
    if (is_needed(2) && p.kv_heads != p.heads) p.grad_value_by_head = parts(heads, p.keys, p.d_v);
    if (p.rel_k && is_needed(3)) {
      p.grad_rel_k = rel_k.data_ptr();
      p.grad_rel_k_parts = parts(p.rel_k_head ? heads : p.groups, p.rows_reached, p.d_k);
    }
    if (p.rel_v && is_needed(4)) {
      p.grad_rel_v = rel_v.data_ptr();
      p.grad_rel_v_parts = parts(p.rel_v_head ? heads : p.groups, p.rows_reached, p.d_v);
    }
  }

 private:
  // no two results share memory
  static Tensor none(const Arguments& given) { return empty(given.query, {0}); }
  // rows of a table that no pair reaches are not written
  static Tensor zeros_as(const Tensor& table) { return torch::stable::new_zeros(table, table.sizes()); }
};

std::array<Tensor, 5> attention_backward(const Arguments& given, const BackwardArguments& saved) {
  Call call(given);
  Problem& p = call.problem;
  const Gradients grads(given, saved.needs, p);
  if (call.is_empty()) {
    for (Tensor grad : {grads.key, grads.value}) torch::stable::zero_(grad);
    return grads.all();
  }
  Tensor out = saved.out;
  if (out.size(3) > 1 && out.stride(3) != 1) out = torch::stable::contiguous(out);
  p.out = view_of(out), p.grad_out = view_of(saved.grad_out);
  // torch may return saved tensors in another layout
  p.lse = call.keep(torch::stable::contiguous(saved.lse));
  if (saved.grad_lse) p.grad_lse = call.keep(torch::stable::contiguous(*saved.grad_lse));
  call.find_reach();
  p.groups = num_groups(p);
  grads.enter(call);
  const Kernel& k = kernel();
  in_parallel(p.groups, [&](int64_t group) { k.backward(p, group); });
  if (p.kv_heads != p.heads)
    in_parallel(p.batch * p.kv_heads, [&](int64_t head) { k.sum_shared_heads(p, head); });
  if (p.grad_rel_k || p.grad_rel_v) in_parallel(p.rows_reached, [&](int64_t row) { k.sum_tables(p, row); });
  return grads.all();
}

std::string instruction_set() { return kernel().name; }
int64_t version() { return VERSION; }

// torch calls an operator with a stack: its arguments, in whose place the results go.
template <size_t N>
void write_results(StableIValue* stack, const std::array<Tensor, N>& results) {
  for (const Tensor& result : results) *stack++ = torch::stable::detail::from(result);
}

void run_attention(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given{stack};
  write_results(stack, attention(given));
}

void run_attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given{stack};
  BackwardArguments saved{given.stack};
  write_results(stack, attention_backward(given, saved));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(relpos, library) {
  const std::string results = " -> (Tensor, Tensor)", gradients = " -> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  library.def(("cpu(" + schema_of_arguments() + ")" + results).c_str());
  library.def(("cpu_backward(" + schema_of_backward_arguments() + ")" + gradients).c_str());
  library.def("cpu_instruction_set() -> str");
  library.def("cpu_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(relpos, CPU, library) {
  library.impl("cpu", &run_attention);
  library.impl("cpu_backward", &run_attention_backward);
}

STABLE_TORCH_LIBRARY_IMPL(relpos, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&instruction_set));
  library.impl("cpu_version", TORCH_BOX(&version));
}

}  // namespace relpos
