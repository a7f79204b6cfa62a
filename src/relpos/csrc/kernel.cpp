// Compiled once for each instruction set, with RELPOS_ISA as its name.
#include "backward.h"
#include "forward.h"

namespace relpos {
namespace RELPOS_ISA {

#define RELPOS_TEXT_OF(x) #x
#define RELPOS_TEXT(x) RELPOS_TEXT_OF(x)
#define RELPOS_JOINED_OF(x, y) x##y
#define RELPOS_JOINED(x, y) RELPOS_JOINED_OF(x, y)

// f<T, S>(...) for the kind of the query
#define RELPOS_FOR_KIND(f, index)                                       \
  switch (p.query.kind) {                                               \
    case Kind::float64: return f<double, double>(p, index);             \
    case Kind::float32: return f<float, float>(p, index);               \
    case Kind::bfloat16: return f<bfloat16, float>(p, index);           \
    default: return f<float16, float>(p, index);                        \
  }

static bool is_double(const Problem& p) { return p.query.kind == Kind::float64; }

static int64_t partial_size(const Problem& p) {
  if (!are_splits_tasks(p)) return 0;
  const int64_t size = is_double(p) ? OnlineSoftmax<double>::size(p) : OnlineSoftmax<float>::size(p);
  return p.batch * p.heads * num_splits(p) * size;
}

static int64_t padded(const Problem& p, int64_t columns) {
  return is_double(p) ? padded_to_vectors<double>(columns) : padded_to_vectors<float>(columns);
}

static int64_t forward_tasks(const Problem& p) {
  return p.batch * p.heads * (are_splits_tasks(p) ? num_splits(p) : num_query_blocks(p));
}

static void run_forward(const Problem& p, int64_t task) { RELPOS_FOR_KIND(forward, task) }
static void run_merge_splits(const Problem& p, int64_t head) { RELPOS_FOR_KIND(merge_splits, head) }
static void run_backward(const Problem& p, int64_t group) { RELPOS_FOR_KIND(backward, group) }
static void run_sum_shared_heads(const Problem& p, int64_t head) { RELPOS_FOR_KIND(sum_shared_heads, head) }
static void run_sum_tables(const Problem& p, int64_t row) {
  return is_double(p) ? sum_tables<double>(p, row) : sum_tables<float>(p, row);
}

}  // namespace RELPOS_ISA

const Kernel& RELPOS_JOINED(kernel_, RELPOS_ISA)() {
  static const Kernel kernel{RELPOS_TEXT(RELPOS_ISA),
                             RELPOS_ISA::are_splits_tasks,
                             RELPOS_ISA::partial_size,
                             RELPOS_ISA::padded,
                             RELPOS_ISA::forward_tasks,
                             RELPOS_ISA::run_forward,
                             RELPOS_ISA::run_merge_splits,
                             RELPOS_ISA::run_backward,
                             RELPOS_ISA::run_sum_shared_heads,
                             RELPOS_ISA::run_sum_tables};
  return kernel;
}

}  // namespace relpos
