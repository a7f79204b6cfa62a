// Dropout by Philox4x32-10 (Salmon et al. 2011): one random number for each pair decides whether its weight is dropped.
#pragma once

#include "vectors.h"

namespace relpos {
namespace RELPOS_ISA {

// factors [count, row]: 0 where a weight is dropped, otherwise 1 / (1 - p), for `lanes` queries from `query` on and
// keys [first, first + count). The counter is (query, key / 4, head), whose four numbers belong to four keys.
template <class S>
__attribute__((noinline)) void dropout_factors(S* factors, int64_t row, int64_t first, int64_t count,
                                               int64_t query, int lanes, int64_t head, double p,
                                               uint64_t seed) {
  const uint64_t threshold = uint64_t(p * 4294967296.0 + 0.5);
  const S kept = p < 1 ? S(1 / (1 - p)) : S(0);
  uint32_t numbers[4][64];
  for (int64_t four = first >> 2; four * 4 < first + count; four++) {
    for (int lane = 0; lane < lanes; lane++) {
      uint32_t c0 = uint32_t(query + lane), c1 = uint32_t(four), c2 = uint32_t(head);
      uint32_t c3 = uint32_t(uint64_t(query) >> 32) ^ uint32_t(uint64_t(four) >> 32) << 16;
      uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
      for (int round = 0; round < 10; round++) {
        uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1);
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      numbers[0][lane] = c0;
      numbers[1][lane] = c1;
      numbers[2][lane] = c2;
      numbers[3][lane] = c3;
    }
    for (int part = 0; part < 4; part++) {
      int64_t j = four * 4 + part - first;
      if (j < 0 || j >= count) continue;
      for (int lane = 0; lane < lanes; lane++)
        factors[j * row + lane] = numbers[part][lane] >= threshold ? kept : S(0);
    }
  }
}

}  // namespace RELPOS_ISA
}  // namespace relpos
