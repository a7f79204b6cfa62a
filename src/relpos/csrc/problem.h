// One call as the kernel takes it: sizes and addresses, without any of torch's types.
#pragma once

#include <cstdint>

namespace relpos {

enum class Kind : int32_t { float32, float64, bfloat16, float16, boolean, int64, int32, int16, int8, uint8 };

// A tensor [batch, heads, rows, columns] that may be expanded, transposed or absent.
struct View {
  const void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};  // in elements
  Kind kind = Kind::float32;
};

// One call, filled in call.h. "Sum" is the type in which sums are kept: float, or double for float64.
struct Problem {
  // the operator's arguments
  int64_t batch, heads, kv_heads, queries, keys, d_k, d_v;
  int64_t left, right, labels;  // labels = left + right + 1
  View query, key, value;       // of one kind
  View relations;               // labels of pairs in place of distances, or absent
  View mask;                    // boolean or floating, or absent
  // Sum [labels, d] or [heads, labels, d], or absent; rows are padded with zeros to whole vectors
  const void* rel_k = nullptr;
  const void* rel_v = nullptr;
  int64_t rel_k_row = 0, rel_v_row = 0;    // elements from a row to the next
  int64_t rel_k_head = 0, rel_v_head = 0;  // from a head to the next; 0 where heads share a table
  const int64_t* starts = nullptr;         // [batch]: position of the first query among the keys, or absent:
  int64_t start = 0;                       // then this
  const int64_t* key_lengths = nullptr;    // [batch] or absent
  bool is_causal = false;
  double scale = 1, dropout_p = 0;
  uint64_t seed = 0;

  // the forward pass writes these, and the backward pass reads them
  View out;
  void* lse = nullptr;      // Sum [batch, heads, queries], contiguous
  void* partial = nullptr;  // Sum [batch * heads, splits, OnlineSoftmax::size], scratch where splits are tasks

  // the backward pass; a gradient that nobody asks for is absent, with all that belongs to it
  View grad_out;
  const void* grad_lse = nullptr;         // Sum [batch, heads, queries], contiguous, or absent
  View grad_query, grad_key, grad_value;  // written
  // Sum [batch * heads, keys, padded d], scratch where query heads share a key head: the part of each
  void* grad_key_by_head = nullptr;
  void* grad_value_by_head = nullptr;
  // Sum [parts, rows_reached, padded d], scratch: a part for each group of heads, or for each head if it has a table
  // of its own
  void* grad_rel_k_parts = nullptr;
  void* grad_rel_v_parts = nullptr;
  void* grad_rel_k = nullptr;  // as rel_k, not padded; written
  void* grad_rel_v = nullptr;
  int64_t groups = 0;                       // of neighbours among batch * heads heads: the tasks
  int64_t first_row = 0, rows_reached = 0;  // the rows of the tables that some pair may use
};

// The kernel as compiled for one instruction set. Tasks may run in any order and in parallel.
struct Kernel {
  const char* name;
  bool (*are_splits_tasks)(const Problem&);  // whether splits of the keys are tasks, to be merged
  int64_t (*partial_size)(const Problem&);   // Sums in `partial` where they are
  int64_t (*padded)(const Problem&, int64_t columns);
  int64_t (*forward_tasks)(const Problem&);
  void (*forward)(const Problem&, int64_t task);
  void (*merge_splits)(const Problem&, int64_t head);       // head of batch * heads
  void (*backward)(const Problem&, int64_t group);
  void (*sum_shared_heads)(const Problem&, int64_t head);   // head of batch * kv_heads
  void (*sum_tables)(const Problem&, int64_t row);          // row of rows_reached
};

const Kernel& kernel_baseline();
#if defined(__x86_64__)
const Kernel& kernel_avx2();
const Kernel& kernel_avx512();
#endif

}  // namespace relpos
