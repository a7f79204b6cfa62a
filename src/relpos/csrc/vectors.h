// Vectors of numbers in the compiler's own vector types: one source for every instruction set.
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

// x where it is larger or NaN
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

// clang has them, and gcc from 12 on. Without them transposing a block of queries is slower, and so are few queries.
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

// transposes a square of WIDTH rows
template <class S>
inline void transpose(Vec<S>* rows) {
  transpose_from<1, S>(rows);
}
#endif

}  // namespace RELPOS_ISA
}  // namespace relpos
