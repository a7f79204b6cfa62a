// The kernel for the widest instructions of this processor.
#pragma once

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "problem.h"

namespace relpos {

// The best that this processor has, or what RELPOS_CPU names if it has that.
inline const Kernel& best_kernel() {
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

inline const Kernel& kernel() {
  static const Kernel& chosen = best_kernel();
  return chosen;
}

}  // namespace relpos
