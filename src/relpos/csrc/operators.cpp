// The kernel as torch's operators, through torch's stable ABI alone: one build serves torch 2.10 and newer.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "problem.h"
#include "scratch.h"

namespace relpos {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;


// The best that this processor has, or what RELPOS_CPU names if it has that.
const Kernel& best_kernel() {
  const char* wanted = std::getenv("RELPOS_CPU");
  if (wanted && *wanted && std::strcmp(wanted, "avx512") && std::strcmp(wanted, "avx2") &&
      std::strcmp(wanted, "baseline"))
    throw std::runtime_error("RELPOS_CPU must be one of avx512, avx2, baseline; got '" + std::string(wanted) +
                             "'. Unset it for the widest instructions of this processor.");
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const bool any = !wanted || !*wanted;
  if (has_avx512 && (any || !std::strcmp(wanted, "avx512"))) return kernel_avx512();
  if (has_avx2 && (any || !std::strcmp(wanted, "avx2"))) return kernel_avx2();
  if (!any && std::strcmp(wanted, "baseline")) {
    if (has_avx512) return kernel_avx512();
    if (has_avx2) return kernel_avx2();
  }
#else
  (void)wanted;
#endif
  return kernel_baseline();
}

const Kernel& kernel() {
  static const Kernel& chosen = best_kernel();
  return chosen;
}

Kind kind_of(const Tensor& x) {
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

// x as [batch, heads, rows, columns]; dimensions of size 1 serve every index
View view_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4, "relpos: expected four dimensions");
  View view;
  view.data = x.data_ptr();
  view.kind = kind_of(x);
  for (int d = 0; d < 4; d++) view.stride[d] = x.size(d) == 1 ? 0 : x.stride(d);
  // a row of one column has a step all the same, so that it counts as contiguous
  if (x.size(3) == 1) view.stride[3] = 1;
  return view;
}

View mask_view_of(const Tensor& x) {
  View view = view_of(x);
  if (x.size(3) == 1) view.stride[3] = 0;
  return view;
}

// Where there is no memory torch's stable ABI names its own function and nothing else.
[[noreturn]] void refuse_memory(const std::vector<int64_t>& sizes, size_t element) {
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

Tensor empty(const Tensor& like, std::vector<int64_t> sizes, std::optional<ScalarType> type = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {
    refuse_memory(sizes, !type ? like.element_size() : *type == ScalarType::Double ? 8 : 4);
  }
}

// [batch, heads, rows, columns], laid out as `like` is: heads beside one another if its heads are
Tensor empty_as(const Tensor& like, int64_t heads, int64_t rows, int64_t columns) {
  if (like.stride(1) < like.stride(2))
    return torch::stable::transpose(empty(like, {like.size(0), rows, heads, columns}), 1, 2);
  return empty(like, {like.size(0), heads, rows, columns});
}

template <class F>
void in_parallel(int64_t tasks, F run) {
  if (tasks <= 0) return;
  const int64_t threads = std::min<int64_t>(tasks, torch::stable::get_num_threads());
  // neighbours go to one thread, since the rows of one lie behind those of the other
  const int64_t turn = std::max<int64_t>(1, std::min<int64_t>(16, tasks / (8 * threads)));
  std::atomic<int64_t> next{0};
  std::atomic<bool> lacks_memory{false};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    try {
      for (int64_t thread = begin; thread < end; thread++)
        for (int64_t first = next.fetch_add(turn); first < tasks; first = next.fetch_add(turn))
          for (int64_t task = first; task < std::min(first + turn, tasks); task++) run(task);
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
    Scratch::trim();
  });
  if (lacks_memory) throw std::runtime_error("relpos: not enough memory for what the kernel keeps while at work");
}

struct Call {
  Problem p;
  std::vector<Tensor> kept;  // what p points into

  Call(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& rel_k,
       const Optional& rel_v, const Optional& relations, const Optional& mask, const Optional& starts,
       int64_t start, const Optional& key_lengths, int64_t left, int64_t right, bool is_causal,
       const Optional& seed, double dropout_p, double scale) {
    p.batch = query.size(0), p.heads = query.size(1), p.queries = query.size(2), p.d_k = query.size(3);
    p.kv_heads = key.size(1), p.keys = key.size(2), p.d_v = value.size(3);
    p.query = view_of(query), p.key = view_of(key), p.value = view_of(value);
    STD_TORCH_CHECK(!(relations && is_causal), "relpos: labels have no order to be causal in");
    p.left = left, p.right = right, p.labels = left + right + 1;
    if (relations) p.relations = mask_view_of(*relations);
    if (mask) p.mask = mask_view_of(*mask);
    if (starts) p.starts = numbers(*starts);
    p.start = start;
    if (key_lengths) p.key_lengths = numbers(*key_lengths);
    p.is_causal = is_causal, p.dropout_p = dropout_p, p.scale = scale;
    if (seed) p.seed = uint64_t(*numbers(*seed));
    if (rel_k) p.rel_k = table(*rel_k, p.rel_k_row, p.rel_k_head);
    if (rel_v) p.rel_v = table(*rel_v, p.rel_v_row, p.rel_v_head);
  }

  ScalarType sum_type() const {
    return p.query.kind == Kind::float64 ? ScalarType::Double : ScalarType::Float;
  }

  bool is_empty() const { return p.batch * p.heads * p.queries == 0; }

 private:
  const int64_t* numbers(const Tensor& x) {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long, "relpos: expected int64");
    kept.push_back(torch::stable::contiguous(x));
    return static_cast<const int64_t*>(kept.back().data_ptr());
  }

  // rows padded to whole vectors
  const void* table(const Tensor& rel, int64_t& row, int64_t& head) {
    STD_TORCH_CHECK(rel.scalar_type() == sum_type(), "relpos: tables have the dtype of the sums");
    const int64_t columns = rel.size(rel.dim() - 1);
    row = kernel().padded(p, columns);
    Tensor rows = torch::stable::contiguous(rel);
    if (row != columns) rows = torch::stable::pad(rows, std::vector<int64_t>{0, row - columns});
    head = rel.dim() == 3 ? p.labels * row : 0;
    kept.push_back(rows);
    return rows.data_ptr();
  }
};

std::tuple<Tensor, Tensor> attention(Tensor query, Tensor key, Tensor value, Optional rel_k, Optional rel_v,
                                     Optional relations, Optional mask, Optional starts, int64_t start,
                                     Optional key_lengths, int64_t left, int64_t right, bool is_causal,
                                     Optional seed, double dropout_p, double scale) {
  Call call(query, key, value, rel_k, rel_v, relations, mask, starts, start, key_lengths, left, right, is_causal,
            seed, dropout_p, scale);
  Problem& p = call.p;
  Tensor out = empty_as(query, p.heads, p.queries, p.d_v);
  Tensor lse = empty(query, {p.batch, p.heads, p.queries}, call.sum_type());
  if (call.is_empty()) return {out, lse};
  p.out = view_of(out), p.lse = lse.data_ptr();
  const Kernel& k = kernel();
  if (k.are_splits_tasks(p)) {
    call.kept.push_back(empty(query, {k.partial_size(p)}, call.sum_type()));
    p.partial = call.kept.back().data_ptr();
  }
  in_parallel(k.forward_tasks(p), [&](int64_t task) { k.forward(p, task); });
  if (k.are_splits_tasks(p)) in_parallel(p.batch * p.heads, [&](int64_t head) { k.merge_splits(p, head); });
  return {out, lse};
}

// which rows of the tables some pair of the call may use
void find_reach(Problem& p) {
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
  const int64_t nearest = std::max(-p.left, std::min(p.right, -(last + p.queries - 1)));
  const int64_t farthest = std::max(-p.left, std::min(p.right, p.keys - 1 - first));
  p.first_row = nearest + p.left;
  p.rows_reached = std::max<int64_t>(0, farthest - nearest + 1);
}

// Sums for a shared table are kept apart for each group of heads, and as many threads find work in the backward
// pass. Their number, and with it the order of the sums, depends on sizes alone, unless the tables are huge.
int64_t groups_of(const Problem& p, bool shares_rel_k, bool shares_rel_v) {
  constexpr int64_t MOST = 128, MOST_SUMS = 16 << 20;  // of all groups
  const int64_t sums = p.rows_reached * ((shares_rel_k ? p.d_k : 0) + (shares_rel_v ? p.d_v : 0));
  const int64_t affordable = std::max<int64_t>(torch::stable::get_num_threads(), MOST_SUMS / std::max<int64_t>(1, sums));
  return std::min({p.batch * p.heads, MOST, affordable});
}

// needs: bit i is set where the gradient of the i-th of query, key, value, rel_k and rel_v is asked for; the others
// come back empty
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor query, Tensor key, Tensor value, Optional rel_k, Optional rel_v, Optional relations, Optional mask,
    Optional starts, int64_t start, Optional key_lengths, int64_t left, int64_t right, bool is_causal,
    Optional seed, double dropout_p, double scale, Tensor out, Tensor lse, Tensor grad_out, Optional grad_lse,
    int64_t needs) {
  Call call(query, key, value, rel_k, rel_v, relations, mask, starts, start, key_lengths, left, right, is_causal,
            seed, dropout_p, scale);
  Problem& p = call.p;
  const auto is_needed = [needs](int i) { return (needs >> i & 1) == 1; };
  const auto none = [&] { return empty(query, {0}); };  // no two results share memory
  const Tensor grad_query = is_needed(0) ? empty_as(query, p.heads, p.queries, p.d_k) : none();
  const Tensor grad_key = is_needed(1) ? empty_as(key, p.kv_heads, p.keys, p.d_k) : none();
  const Tensor grad_value = is_needed(2) ? empty_as(value, p.kv_heads, p.keys, p.d_v) : none();
  const Tensor grad_rel_k = rel_k && is_needed(3) ? torch::stable::new_zeros(*rel_k, rel_k->sizes()) : none();
  const Tensor grad_rel_v = rel_v && is_needed(4) ? torch::stable::new_zeros(*rel_v, rel_v->sizes()) : none();
  const std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> grads{grad_query, grad_key, grad_value, grad_rel_k,
                                                                 grad_rel_v};
  if (call.is_empty()) {
    for (Tensor grad : {grad_key, grad_value}) torch::stable::zero_(grad);
    return grads;
  }
  if (out.size(3) > 1 && out.stride(3) != 1) out = torch::stable::contiguous(out);
  p.out = view_of(out), p.grad_out = view_of(grad_out);
  // torch may hand back what was saved in another layout
  call.kept.push_back(torch::stable::contiguous(lse));
  p.lse = call.kept.back().data_ptr();
  if (grad_lse) {
    call.kept.push_back(torch::stable::contiguous(*grad_lse));
    p.grad_lse = call.kept.back().data_ptr();
  }
  if (is_needed(0)) p.grad_query = view_of(grad_query);
  if (is_needed(1)) p.grad_key = view_of(grad_key);
  if (is_needed(2)) p.grad_value = view_of(grad_value);
  find_reach(p);
  const Kernel& k = kernel();
  const int64_t heads = p.batch * p.heads;
  p.groups = groups_of(p, rel_k && !p.rel_k_head, rel_v && !p.rel_v_head);
  const auto parts = [&](int64_t count, int64_t rows, int64_t columns) {
    call.kept.push_back(empty(query, {count, rows, k.padded(p, columns)}, call.sum_type()));
    return call.kept.back().data_ptr();
  };
  const bool are_shared = p.kv_heads != p.heads;
  if (are_shared && is_needed(1)) p.grad_key_by_head = parts(heads, p.keys, p.d_k);
  if (are_shared && is_needed(2)) p.grad_value_by_head = parts(heads, p.keys, p.d_v);
  if (rel_k && is_needed(3)) {
    p.grad_rel_k_parts = parts(p.rel_k_head ? heads : p.groups, p.rows_reached, p.d_k);
    p.grad_rel_k = grad_rel_k.data_ptr();
  }
  if (rel_v && is_needed(4)) {
    p.grad_rel_v_parts = parts(p.rel_v_head ? heads : p.groups, p.rows_reached, p.d_v);
    p.grad_rel_v = grad_rel_v.data_ptr();
  }
  in_parallel(p.groups, [&](int64_t group) { k.backward(p, group); });
  if (are_shared) in_parallel(p.batch * p.kv_heads, [&](int64_t head) { k.sum_shared_heads(p, head); });
  if (p.grad_rel_k || p.grad_rel_v) in_parallel(p.rows_reached, [&](int64_t row) { k.sum_tables(p, row); });
  return grads;
}

std::string instruction_set() { return kernel().name; }

// Goes up when a signature changes, and backends/cpu/backend.py's with it: an installation may hold an older build.
int64_t version() { return 1; }

#define RELPOS_PROBLEM                                                                                      \
  "Tensor query, Tensor key, Tensor value, Tensor? rel_k, Tensor? rel_v, Tensor? relations, Tensor? mask, " \
  "Tensor? starts, SymInt start, Tensor? key_lengths, SymInt left, SymInt right, bool is_causal, "          \
  "Tensor? seed, float dropout_p, float scale"

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(relpos, library) {
  library.def("cpu(" RELPOS_PROBLEM ") -> (Tensor, Tensor)");
  library.def("cpu_backward(" RELPOS_PROBLEM
              ", Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, int needs)"
              " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("cpu_instruction_set() -> str");
  library.def("cpu_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(relpos, CPU, library) {
  library.impl("cpu", TORCH_BOX(&attention));
  library.impl("cpu_backward", TORCH_BOX(&attention_backward));
}

STABLE_TORCH_LIBRARY_IMPL(relpos, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&instruction_set));
  library.impl("cpu_version", TORCH_BOX(&version));
}

}  // namespace relpos
