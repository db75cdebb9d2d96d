// cvt: between integers, floats, and their sizes.
#pragma once

#include <limits>

#include "simt/ptx_float.h"

namespace ptx {

// Rounding to a float, and to an integer: nearest even, toward zero, down, up.
enum Rounding { rn, rz, rm, rp };
inline constexpr Rounding rni = rn, rzi = rz, rmi = rm, rpi = rp;

// Sources may lie in wider registers, hence the cast to their own bits on the way in.
template <class D, class A, class Register>
PTX_INLINE Register cvt(Bits<A> a) {
  return extend<D, Register>(static_cast<Bits<D>>(as<A>(a)));
}
template <class D, class A, class Register>
PTX_INLINE Register cvt_sat(Bits<A> a) {
  using Limits = std::numeric_limits<D>;
  const __int128 value = as<A>(a);
  const __int128 clamped = value < Limits::min()   ? __int128{Limits::min()}
                           : value > Limits::max() ? __int128{Limits::max()}
                                                   : value;
  return extend<D, Register>(static_cast<Bits<D>>(clamped));
}

// Corrects a value that was rounded to nearest. `exact` is what it was rounded from.
template <class D, Rounding kRounding, class Exact>
PTX_INLINE D directed(D nearest, Exact exact) {
  const D infinity = std::numeric_limits<D>::infinity();
  const bool is_above = nearest > exact, is_below = nearest < exact;
  if (kRounding == rm && is_above) return std::nextafter(nearest, -infinity);
  if (kRounding == rp && is_below) return std::nextafter(nearest, infinity);
  if (kRounding == rz && (exact < 0 ? is_below : is_above)) return std::nextafter(nearest, D{0});
  return nearest;
}

template <class D, class A, Rounding kRounding>
PTX_INLINE Bits<D> cvt_from_int(Bits<A> a) {
  const D nearest = static_cast<D>(as<A>(a));
  if constexpr (kRounding == rn) return bits(nearest);
  // x87's 64 bits hold every integer.
  static_assert(std::numeric_limits<long double>::digits >= 64);
  return bits(directed<D, kRounding>(nearest, static_cast<long double>(as<A>(a))));
}

template <Rounding kRounding, class T>
PTX_INLINE T integral(T x) {
  if constexpr (kRounding == rn) return std::nearbyint(x);
  if constexpr (kRounding == rz) return std::trunc(x);
  if constexpr (kRounding == rm) return std::floor(x);
  return std::ceil(x);
}
template <class T, Rounding kRounding>
PTX_INLINE Bits<T> cvt_integral(Bits<T> a) {
  return result(integral<kRounding>(as<T>(a)));
}

// Clamped to D's range. A NaN is 0, or with 64 bits on either side only the highest bit.
template <class D, class A, Rounding kRounding, class Register>
PTX_INLINE Register cvt_to_int(Bits<A> a) {
  using Limits = std::numeric_limits<D>;
  const A x = integral<kRounding>(as<A>(a));
  const A end = 2 * static_cast<A>(D{1} << (Limits::digits - 1));  // one more than the greatest
  if (x != x) {
    const bool is_zero = sizeof(A) == 4 && sizeof(D) < 8;
    return extend<D, Register>(is_zero ? 0 : static_cast<Bits<D>>(u64{1} << (kWidth<D> - 1)));
  }
  const D value = x >= end                             ? Limits::max()
                  : x <= static_cast<A>(Limits::min()) ? Limits::min()
                                                       : static_cast<D>(x);
  return extend<D, Register>(static_cast<Bits<D>>(value));
}

template <Rounding kRounding>
PTX_INLINE u32 cvt_f32_f64(u64 a) {
  const f64 x = as<f64>(a);
  return result(directed<f32, kRounding>(static_cast<f32>(x), x));
}
PTX_INLINE u64 cvt_f64_f32(u32 a) { return bits(static_cast<f64>(as<f32>(a))); }

// Drops the low `shift` bits.
template <Rounding kRounding>
PTX_INLINE u32 drop_bits(u32 value, unsigned shift) {
  const u32 kept = value >> shift, rest = value & ((u32{1} << shift) - 1);
  const u32 half = u32{1} << (shift - 1);
  return kept + (kRounding == rn && (rest > half || (rest == half && (kept & 1))));
}
// A bf16 is the high half of an fp32; a carry out of the mantissa moves the exponent on.
template <Rounding kRounding>
PTX_INLINE u16 cvt_bf16_f32(u32 a) {
  if (is_nan(a)) return 0x7fff;
  return static_cast<u16>(drop_bits<kRounding>(a, 16));
}
template <Rounding kRounding>
PTX_INLINE u16 cvt_f16_f32(u32 a) {
  const u32 sign = a >> 16 & 0x8000, size = a & 0x7fffffff, exponent = size >> 23;
  if (is_nan(a)) return 0x7fff;
  u32 half;
  if (exponent >= 113) {  // 2^-14, the least normal fp16
    half = drop_bits<kRounding>(size - (u32{112} << 23), 13);
    const u32 most = kRounding == rz && size != 0x7f800000 ? 0x7bff : 0x7c00;
    half = half < most ? half : most;
  } else {  // subnormal: units of 2^-24
    const u32 mantissa = (size & 0x7fffff) | 0x800000;
    half = exponent < 101 ? 0 : drop_bits<kRounding>(mantissa, 126 - exponent);
  }
  return static_cast<u16>(sign | half);
}
// The first operand goes to the high half.
template <Rounding kRounding>
PTX_INLINE u32 cvt_bf16x2_f32(u32 high, u32 low) {
  return u32{cvt_bf16_f32<kRounding>(high)} << 16 | cvt_bf16_f32<kRounding>(low);
}
template <Rounding kRounding>
PTX_INLINE u32 cvt_f16x2_f32(u32 high, u32 low) {
  return u32{cvt_f16_f32<kRounding>(high)} << 16 | cvt_f16_f32<kRounding>(low);
}

PTX_INLINE u32 cvt_f32_bf16(u16 a) { return result(as<f32>(u32{a} << 16)); }
PTX_INLINE u32 cvt_f32_f16(u16 a) {
  const u32 sign = u32{a} >> 15 << 31, size = a & 0x7fff;
  if (size > 0x7c00) return kNan32;
  if (size == 0x7c00) return sign | 0x7f800000;
  if (size < 0x400) return sign | bits(static_cast<f32>(size) * 0x1p-24f);
  return sign | ((size << 13) + (u32{112} << 23));
}

}  // namespace ptx
