// bfloat16 and float16: widened to float32, and rounded to nearest even.
#pragma once

#include "vectors.h"

namespace relpos {
namespace RELPOS_ISA {

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
