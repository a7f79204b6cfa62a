// Vectors of numbers by the compiler's own vector types: one source for every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace relpos {
namespace RELPOS_ISA {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16;
constexpr int REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16;
constexpr int REGISTERS = 16;
#endif

template <class S>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};

// the element types stand outside the templates: gcc drops attributes on dependent types otherwise
template <class S>
struct Vectors;
template <>
struct Vectors<float> {
  typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
  typedef float Loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
};
template <>
struct Vectors<double> {
  typedef double Vec __attribute__((vector_size(VECTOR_BYTES)));
  typedef double Loose __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t Ints __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint64_t Bits __attribute__((vector_size(VECTOR_BYTES)));
};

template <class S>
using Vec = typename Vectors<S>::Vec;
template <class S>
using Ints = typename Vectors<S>::Ints;

template <class S>
constexpr int WIDTH = VECTOR_BYTES / int(sizeof(S));

template <class S>
inline Vec<S> load(const S* from) {
  return *reinterpret_cast<const typename Vectors<S>::Loose*>(from);
}

template <class S>
inline void store(S* to, Vec<S> x) {
  *reinterpret_cast<typename Vectors<S>::Loose*>(to) = x;
}

template <class S>
inline Vec<S> all(S x) {
  return Vec<S>{} + x;
}

// x where it is larger or not a number
template <class S>
inline Vec<S> larger(Vec<S> x, Vec<S> y) {
  return y > x ? y : x;
}

template <class S>
inline Ints<S> count_up() {
  Ints<S> lanes;
  for (int i = 0; i < WIDTH<S>; i++) lanes[i] = i;
  return lanes;
}

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// gcc has them from 12 on; without them turning a block of queries is slower, and so are few queries
#if defined(__has_builtin) && !defined(RELPOS_NO_SHUFFLES)
#if __has_builtin(__builtin_shufflevector)
#define RELPOS_HAS_SHUFFLES 1
#endif
#endif

#ifdef RELPOS_HAS_SHUFFLES
// Swaps the upper right and the lower left of each square of 2 SIDE by 2 SIDE numbers, of which x and y are rows
// SIDE apart.
template <int SIDE, class V, std::size_t... I>
inline void swap_corners(V& x, V& y, std::index_sequence<I...>) {
  constexpr int W = sizeof...(I);
  V upper = __builtin_shufflevector(x, y, (int(I) / SIDE % 2 == 0 ? int(I) : int(I) - SIDE + W)...);
  V lower = __builtin_shufflevector(x, y, (int(I) / SIDE % 2 == 0 ? int(I) + SIDE : int(I) + W)...);
  x = upper;
  y = lower;
}

template <int SIDE, class S>
inline void transpose_from(Vec<S>* rows) {
  constexpr int W = WIDTH<S>;
  if constexpr (SIDE < W) {
    for (int r = 0; r < W; r++)
      if (r / SIDE % 2 == 0) swap_corners<SIDE>(rows[r], rows[r + SIDE], std::make_index_sequence<W>());
    transpose_from<2 * SIDE, S>(rows);
  }
}

// turns a square of WIDTH rows
template <class S>
inline void transpose(Vec<S>* rows) {
  transpose_from<1, S>(rows);
}
#endif

// y times 2^n, where n is what was added to `shifted`'s last bits; a y that is not a number stays so
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
// the smallest normal number; not a number stays so. Cephes' method: x = n ln 2 + r, |r| <= ln 2 / 2, a
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

// 16-bit floating point as bits, since not every compiler has the types
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(bfloat16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
inline float widened(float16 x) {
  const uint32_t size = uint32_t(x.bits & 0x7fff) << 13, exponent = x.bits & 0x7c00;
  // the bias of the exponent differs by 112; a subnormal number has no leading 1, so one is taken off again, and no
  // step gives a subnormal float32, which a thread may flush to zero
  const uint32_t of_subnormal = bits_as<uint32_t>(bits_as<float>(size + 0x38800000) - 6.103515625e-5f);
  const uint32_t of_normal = size + 0x38000000, of_special = size | 0x7f800000;
  const uint32_t bits = exponent == 0 ? of_subnormal : exponent == 0x7c00 ? of_special : of_normal;
  return bits_as<float>(bits | uint32_t(x.bits & 0x8000) << 16);
}

template <class T>
inline T narrowed(float x);
template <class T>
inline T narrowed(double x);
template <>
inline float narrowed(float x) {
  return x;
}
template <>
inline double narrowed(double x) {
  return x;
}
template <>
inline bfloat16 narrowed(float x) {
  uint32_t bits = bits_as<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {uint16_t(x == x ? rounded : 0x7fc0)};
}
template <>
inline float16 narrowed(float x) {
  uint32_t bits = bits_as<uint32_t>(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  uint32_t half;
  if (size >= 0x47800000) {  // 65,536 and more
    half = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (size < 0x38800000) {  // less than 2^-14: adding 0.5 puts the rounded bits last
    half = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000;
  } else {
    half = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  }
  return {uint16_t(half | sign)};
}

}  // namespace RELPOS_ISA
}  // namespace relpos
