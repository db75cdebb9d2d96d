// Bits of floats: conversions that round the same on every machine.
#pragma once

#include "codec/standard.h"

// The formats are written once, for hosts and devices: files that nvcc compiles hold only device
// code.
#if defined(__CUDACC__)
#define ZC_FN __device__ __forceinline__
#define ZC_TABLE __device__ constexpr
#else
#define ZC_FN inline
#define ZC_TABLE inline constexpr
#endif

namespace zcomm {

inline constexpr std::uint32_t kAbsMask = 0x7fffffffu;
inline constexpr std::uint32_t kInfBits = 0x7f800000u;  // |x| at or above: not finite
inline constexpr std::uint32_t kNanBits = 0x7fc00000u;  // the only NaN a decoder gives
inline constexpr std::uint16_t kBf16Max = 0x7f7f;
inline constexpr std::uint16_t kBf16Nan = 0x7fc0;
inline constexpr std::uint16_t kFp16Max = 0x7bff;
inline constexpr std::uint16_t kFp16Nan = 0x7e00;

// Reads and writes at any alignment.
template <class T>
ZC_FN T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
ZC_FN void store(void* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

ZC_FN std::uint32_t bits(float x) { return load<std::uint32_t>(&x); }
ZC_FN float from_bits(std::uint32_t u) { return load<float>(&u); }
ZC_FN bool finite(float x) { return (bits(x) & kAbsMask) < kInfBits; }
ZC_FN float canonical(float x) { return x != x ? from_bits(kNanBits) : x; }

// 2^(e - 127) for a biased exponent e of 1 to 254.
ZC_FN float pow2_biased(std::uint32_t e) { return from_bits(e << 23); }

ZC_FN float bf16_value(std::uint16_t b) { return from_bits(std::uint32_t{b} << 16); }

// Nearest even; overflows to infinity. Not for NaN.
ZC_FN std::uint16_t bf16_round(float x) {
  const std::uint32_t u = bits(x);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// As bf16_round, but a finite x stays finite, and NaN is kBf16Nan.
ZC_FN std::uint16_t bf16_saturate(float x) {
  const std::uint32_t a = bits(x) & kAbsMask;
  if (a > kInfBits) return kBf16Nan;
  const std::uint16_t sign = static_cast<std::uint16_t>((bits(x) >> 16) & 0x8000u);
  const std::uint16_t magnitude = bf16_round(from_bits(a));
  if (a < kInfBits && magnitude > kBf16Max) return sign | kBf16Max;
  return sign | magnitude;
}

ZC_FN float fp16_value(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | kInfBits | ((magnitude & 0x3ffu) << 13));
  // Shifted into place the number is 2^112 too small; the product is exact, subnormals included.
  const float scaled = from_bits(magnitude << 13) * pow2_biased(127 + 112);
  return from_bits(sign | bits(scaled));
}

// Nearest even, finite stays finite, NaN is kFp16Nan.
ZC_FN std::uint16_t fp16_saturate(float x) {
  const std::uint32_t a = bits(x) & kAbsMask;
  const std::uint16_t sign = static_cast<std::uint16_t>((bits(x) >> 16) & 0x8000u);
  if (a > kInfBits) return kFp16Nan;
  if (a == kInfBits) return sign | 0x7c00u;
  if (a >= 0x477fe000u) return sign | kFp16Max;  // 65504 and above
  if (a < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24
    return sign | static_cast<std::uint16_t>(bits(from_bits(a) + 0.5f) - bits(0.5f));
  }
  const std::uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u) - (112u << 23);
  const std::uint32_t h = rounded >> 13;
  return sign | static_cast<std::uint16_t>(h > kFp16Max ? kFp16Max : h);
}

}  // namespace zcomm
