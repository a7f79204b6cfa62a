// The exponential of vectors.
#pragma once

#include "vectors.h"

namespace relpos {
namespace RELPOS_ISA {

// y * 2^n for an integer n, which the last bits of `shifted` hold; NaN stays NaN
inline Vec<float> scaled(Vec<float> y, [[maybe_unused]] Vec<float> n, [[maybe_unused]] Vec<float> shifted) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, n);
#else
  // as unsigned numbers, whose bits may be shifted out
  using Bits = typename Vectors<float>::Bits;
  Vec<float> product = bits_as<Vec<float>>(bits_as<Bits>(y) + (bits_as<Bits>(shifted) << 23));
  return y == y ? product : y;
#endif
}
inline Vec<double> scaled(Vec<double> y, [[maybe_unused]] Vec<double> n, [[maybe_unused]] Vec<double> shifted) {
#if defined(__AVX512F__)
  return _mm512_scalef_pd(y, n);
#else
  using Bits = typename Vectors<double>::Bits;
  Vec<double> product = bits_as<Vec<double>>(bits_as<Bits>(y) + (bits_as<Bits>(shifted) << 52));
  return y == y ? product : y;
#endif
}

// exp(x) for x at most a little above 0, within two units in the last place; 0 where it would be smaller than
// the smallest normal number; NaN stays NaN. Cephes' method: x = n ln 2 + r, |r| <= ln 2 / 2, a
// polynomial for exp(r), n into the exponent.
inline Vec<float> exponential(Vec<float> x) {
  using V = Vec<float>;
  const V lowest = all(-87.3365402f), shift = all(12582912.0f);  // 1.5 * 2^23
  const V bounded = larger<float>(x, lowest);
  const V shifted = bounded * 1.44269504f + shift;
  const V n = shifted - shift;
  V r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  return x < lowest ? V{} : scaled(y, n, shifted);
}

inline Vec<double> exponential(Vec<double> x) {
  using V = Vec<double>;
  const V lowest = all(-708.0), shift = all(6755399441055744.0);  // 1.5 * 2^52
  const V bounded = larger<double>(x, lowest);
  const V shifted = bounded * 1.4426950408889634 + shift;
  const V n = shifted - shift;
  V r = bounded - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  // the series to r^13: its rest is below 5e-18
  V y = all(1.0 / 6227020800.0);
  y = y * r + 1.0 / 479001600.0;
  y = y * r + 1.0 / 39916800.0;
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 0.5;
  y = y * (r * r) + r + 1.0;
  return x < lowest ? V{} : scaled(y, n, shifted);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
