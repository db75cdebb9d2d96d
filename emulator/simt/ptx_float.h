// Arithmetic of floats, rounded to nearest even. A result that is a NaN is 0x7fffffff in fp32,
// whatever the operands were; in fp64 it is what IEEE hardware gives.
#pragma once

#include <cmath>

#include "simt/ptx_types.h"

namespace ptx {

inline constexpr u32 kNan32 = 0x7fffffff;

template <class T>
using IfFloat = std::enable_if_t<std::is_floating_point_v<T>, Bits<T>>;
template <class T>
using IfPair = std::enable_if_t<std::is_same_v<T, f32x2>, u64>;

PTX_INLINE u32 result(f32 x) { return x == x ? bits(x) : kNan32; }
PTX_INLINE u64 result(f64 x) { return bits(x); }
PTX_INLINE u64 result(f32 low, f32 high) { return u64{result(high)} << 32 | result(low); }

template <class T>
PTX_INLINE IfFloat<T> add(Bits<T> a, Bits<T> b) {
  return result(as<T>(a) + as<T>(b));
}
template <class T>
PTX_INLINE IfFloat<T> sub(Bits<T> a, Bits<T> b) {
  return result(as<T>(a) - as<T>(b));
}
template <class T>
PTX_INLINE IfFloat<T> mul(Bits<T> a, Bits<T> b) {
  return result(as<T>(a) * as<T>(b));
}
template <class T>
PTX_INLINE IfFloat<T> div(Bits<T> a, Bits<T> b) {
  return result(as<T>(a) / as<T>(b));
}
template <class T>
PTX_INLINE IfFloat<T> fma(Bits<T> a, Bits<T> b, Bits<T> c) {
  return result(std::fma(as<T>(a), as<T>(b), as<T>(c)));
}
template <class T>
PTX_INLINE IfFloat<T> sqrt(Bits<T> a) {
  return result(std::sqrt(as<T>(a)));
}
template <class T>
PTX_INLINE IfFloat<T> rcp(Bits<T> a) {
  return result(T{1} / as<T>(a));
}

template <class T>
PTX_INLINE IfPair<T> add(u64 a, u64 b) {
  const auto x = as<T>(a), y = as<T>(b);
  return result(x.low + y.low, x.high + y.high);
}
template <class T>
PTX_INLINE IfPair<T> sub(u64 a, u64 b) {
  const auto x = as<T>(a), y = as<T>(b);
  return result(x.low - y.low, x.high - y.high);
}
template <class T>
PTX_INLINE IfPair<T> mul(u64 a, u64 b) {
  const auto x = as<T>(a), y = as<T>(b);
  return result(x.low * y.low, x.high * y.high);
}
template <class T>
PTX_INLINE IfPair<T> fma(u64 a, u64 b, u64 c) {
  const auto x = as<T>(a), y = as<T>(b), z = as<T>(c);
  return result(std::fma(x.low, y.low, z.low), std::fma(x.high, y.high, z.high));
}

template <class T>
inline constexpr Bits<T> kSign = Bits<T>{1} << (kWidth<T> - 1);
template <class T>
PTX_INLINE IfFloat<T> abs(Bits<T> a) {
  return a & ~kSign<T>;
}
template <class T>
PTX_INLINE IfFloat<T> neg(Bits<T> a) {
  return a ^ kSign<T>;
}
// The sign of a, on b.
template <class T>
PTX_INLINE Bits<T> copysign(Bits<T> a, Bits<T> b) {
  return (a & kSign<T>) | abs<T>(b);
}

// A NaN loses against a number; -0 is less than +0.
template <class T>
PTX_INLINE IfFloat<T> min(Bits<T> a, Bits<T> b) {
  const T x = as<T>(a), y = as<T>(b);
  if (x != x) return y != y ? result(y) : b;
  if (x == y) return a | b;
  return y < x ? b : a;
}
template <class T>
PTX_INLINE IfFloat<T> max(Bits<T> a, Bits<T> b) {
  const T x = as<T>(a), y = as<T>(b);
  if (x != x) return y != y ? result(y) : b;
  if (x == y) return a & b;
  return y > x ? b : a;
}
// A NaN wins.
PTX_INLINE bool is_nan(u32 a) { return (a & 0x7fffffff) > 0x7f800000; }
PTX_INLINE u32 min_nan(u32 a, u32 b) { return is_nan(a) || is_nan(b) ? kNan32 : min<f32>(a, b); }
PTX_INLINE u32 max_nan(u32 a, u32 b) { return is_nan(a) || is_nan(b) ? kNan32 : max<f32>(a, b); }

template <class T>
PTX_INLINE bool testp_finite(Bits<T> a) {
  return std::isfinite(as<T>(a));
}
template <class T>
PTX_INLINE bool testp_infinite(Bits<T> a) {
  return std::isinf(as<T>(a));
}
template <class T>
PTX_INLINE bool testp_number(Bits<T> a) {
  return !std::isnan(as<T>(a));
}
template <class T>
PTX_INLINE bool testp_notanumber(Bits<T> a) {
  return std::isnan(as<T>(a));
}
template <class T>
PTX_INLINE bool testp_subnormal(Bits<T> a) {
  return std::fpclassify(as<T>(a)) == FP_SUBNORMAL;
}
// Zeros count as normal.
template <class T>
PTX_INLINE bool testp_normal(Bits<T> a) {
  return std::isfinite(as<T>(a)) && !testp_subnormal<T>(a);
}

}  // namespace ptx
