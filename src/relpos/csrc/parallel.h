// Tasks in parallel, by torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>

#include "scratch.h"

namespace relpos {

// Calls run(task) for each of `tasks`, in any order.
template <class F>
void in_parallel(int64_t tasks, F run) {
  if (tasks <= 0) return;
  const int64_t threads = std::min<int64_t>(tasks, torch::stable::get_num_threads());
  // neighbours go to one thread, since their rows lie side by side
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

}  // namespace relpos
