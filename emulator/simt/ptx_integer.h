// Integer arithmetic, bits, and comparisons of anything. Overflow wraps around.
#pragma once

#include "simt/ptx_types.h"

namespace ptx {

// Twice the size, with the same sign.
template <class T>
using Wide = std::conditional_t<
    std::is_signed_v<T>,
    std::conditional_t<sizeof(T) == 2, s32, std::conditional_t<sizeof(T) == 4, s64, __int128>>,
    std::conditional_t<sizeof(T) == 2, u32,
                       std::conditional_t<sizeof(T) == 4, u64, unsigned __int128>>>;

template <class T>
PTX_INLINE Wide<T> product(Bits<T> a, Bits<T> b) {
  return static_cast<Wide<T>>(as<T>(a)) * as<T>(b);
}
template <class T>
PTX_INLINE Bits<T> mul_lo(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(u64{a} * b);
}
template <class T>
PTX_INLINE Bits<T> mul_hi(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(product<T>(a, b) >> kWidth<T>);
}
template <class T>
PTX_INLINE Uint<2 * sizeof(T)> mul_wide(Bits<T> a, Bits<T> b) {
  return static_cast<Uint<2 * sizeof(T)>>(product<T>(a, b));
}

template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> add(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(a + b);
}
template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> sub(Bits<T> a, Bits<T> b) {
  return static_cast<Bits<T>>(a - b);
}
template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> min(Bits<T> a, Bits<T> b) {
  return as<T>(a) < as<T>(b) ? a : b;
}
template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> max(Bits<T> a, Bits<T> b) {
  return as<T>(a) < as<T>(b) ? b : a;
}
template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> neg(Bits<T> a) {
  return static_cast<Bits<T>>(0 - a);
}
template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> abs(Bits<T> a) {
  return as<T>(a) < 0 ? neg<T>(a) : a;
}

// Two numbers of 16 bits in one register.
template <class Combine>
PTX_INLINE u32 each_half(u32 a, u32 b, Combine combine) {
  const auto low = combine(static_cast<u16>(a), static_cast<u16>(b));
  const auto high = combine(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16));
  return u32{static_cast<u16>(high)} << 16 | static_cast<u16>(low);
}
#define PTX_HALVES(op, T)                                                    \
  PTX_INLINE u32 op##_##T##x2(u32 a, u32 b) {                                \
    return each_half(a, b, [](u16 x, u16 y) -> u16 { return op<T>(x, y); }); \
  }
PTX_HALVES(add, u16)
PTX_HALVES(add, s16)
PTX_HALVES(min, u16)
PTX_HALVES(min, s16)
PTX_HALVES(max, u16)
PTX_HALVES(max, s16)
#undef PTX_HALVES

// The carry is CC.CF: of a subtraction, whether it borrowed.
template <class T>
PTX_INLINE Bits<T> add_cc(Bits<T> a, Bits<T> b, bool in, bool& out) {
  const Bits<T> sum = a + b, all = sum + in;
  out = sum < a || all < sum;
  return all;
}
template <class T>
PTX_INLINE Bits<T> sub_cc(Bits<T> a, Bits<T> b, bool in, bool& out) {
  const Bits<T> difference = a - b;
  out = a < b || difference < Bits<T>{in};
  return difference - in;
}
PTX_INLINE u32 clamp_s32(s64 value) {
  return static_cast<u32>(value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : value);
}
PTX_INLINE u32 add_sat(u32 a, u32 b) { return clamp_s32(s64{as<s32>(a)} + as<s32>(b)); }
PTX_INLINE u32 sub_sat(u32 a, u32 b) { return clamp_s32(s64{as<s32>(a)} - as<s32>(b)); }

// A division by 0 gives what the machine likes: here, all ones.
template <class T>
PTX_INLINE std::enable_if_t<std::is_integral_v<T>, Bits<T>> div(Bits<T> a, Bits<T> b) {
  if (b == 0) return static_cast<Bits<T>>(-1);
  if (std::is_signed_v<T> && b == static_cast<Bits<T>>(-1)) return static_cast<Bits<T>>(0 - a);
  return static_cast<Bits<T>>(as<T>(a) / as<T>(b));
}
template <class T>
PTX_INLINE Bits<T> rem(Bits<T> a, Bits<T> b) {
  if (b == 0) return static_cast<Bits<T>>(-1);
  if (std::is_signed_v<T> && b == static_cast<Bits<T>>(-1)) return 0;
  return static_cast<Bits<T>>(as<T>(a) % as<T>(b));
}
template <class T>
PTX_INLINE Bits<T> sad(Bits<T> a, Bits<T> b, Bits<T> c) {
  return static_cast<Bits<T>>(c + max<T>(a, b) - min<T>(a, b));
}
template <class A, class B>
PTX_INLINE u32 dp4a(u32 a, u32 b, u32 c) {
  using Byte = std::conditional_t<std::is_signed_v<A>, s8, u8>;
  using OtherByte = std::conditional_t<std::is_signed_v<B>, s8, u8>;
  for (int i = 0; i < 32; i += 8) {
    c += static_cast<u32>(int{static_cast<Byte>(a >> i)} * int{static_cast<OtherByte>(b >> i)});
  }
  return c;
}

template <class T>
PTX_INLINE T and_(T a, T b) {
  return a & b;
}
template <class T>
PTX_INLINE T or_(T a, T b) {
  return a | b;
}
template <class T>
PTX_INLINE T xor_(T a, T b) {
  return a ^ b;
}

// Amounts beyond the width act like the width.
template <class T>
PTX_INLINE Bits<T> shl(Bits<T> a, u32 amount) {
  return amount < kWidth<T> ? static_cast<Bits<T>>(u64{a} << amount) : Bits<T>{0};
}
template <class T>
PTX_INLINE Bits<T> shr(Bits<T> a, u32 amount) {
  if (amount < kWidth<T>) return static_cast<Bits<T>>(as<T>(a) >> amount);
  return std::is_signed_v<T> ? static_cast<Bits<T>>(as<T>(a) >> (kWidth<T> - 1)) : Bits<T>{0};
}
PTX_INLINE u64 joined(u32 low, u32 high) { return u64{high} << 32 | low; }
PTX_INLINE u32 shf_l_clamp(u32 low, u32 high, u32 amount) {
  return static_cast<u32>(joined(low, high) << (amount < 32 ? amount : 32) >> 32);
}
PTX_INLINE u32 shf_r_clamp(u32 low, u32 high, u32 amount) {
  return static_cast<u32>(joined(low, high) >> (amount < 32 ? amount : 32));
}
PTX_INLINE u32 shf_l_wrap(u32 low, u32 high, u32 amount) {
  return shf_l_clamp(low, high, amount & 31);
}
PTX_INLINE u32 shf_r_wrap(u32 low, u32 high, u32 amount) {
  return shf_r_clamp(low, high, amount & 31);
}

// Bit i of the table: the result where the bits of a, b, c are those of i, a's being the highest.
template <unsigned kTable>
PTX_INLINE u32 lop3(u32 a, u32 b, u32 c) {
  static_assert(kTable < 256);
  u32 result = 0;
  for (unsigned i = 0; i < 8; ++i) {
    if (kTable >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

PTX_INLINE u32 byte_of(u32 a, u32 b, unsigned i) { return joined(a, b) >> (8 * (i & 7)) & 0xff; }
// Four bits per byte: which one, and whether its sign takes its place.
PTX_INLINE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const u32 byte = byte_of(a, b, selector >> (4 * i));
    const bool is_sign = selector >> (4 * i) & 8;
    result |= (is_sign ? (byte >> 7) * 0xff : byte) << (8 * i);
  }
  return result;
}
template <class Pick>
PTX_INLINE u32 permute(u32 a, u32 b, u32 selector, Pick pick) {
  u32 result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= byte_of(a, b, pick(selector & 3, i)) << (8 * i);
  return result;
}
PTX_INLINE u32 prmt_f4e(u32 a, u32 b, u32 selector) {
  return permute(a, b, selector, [](unsigned s, unsigned i) { return s + i; });
}
PTX_INLINE u32 prmt_b4e(u32 a, u32 b, u32 selector) {
  return permute(a, b, selector, [](unsigned s, unsigned i) { return s - i; });
}
PTX_INLINE u32 prmt_rc8(u32 a, u32 b, u32 selector) {
  return permute(a, b, selector, [](unsigned s, unsigned) { return s; });
}
PTX_INLINE u32 prmt_ecl(u32 a, u32 b, u32 selector) {
  return permute(a, b, selector, [](unsigned s, unsigned i) { return s > i ? s : i; });
}
PTX_INLINE u32 prmt_ecr(u32 a, u32 b, u32 selector) {
  return permute(a, b, selector, [](unsigned s, unsigned i) { return s < i ? s : i; });
}
PTX_INLINE u32 prmt_rc16(u32 a, u32 b, u32 selector) {
  return permute(a, b, selector, [](unsigned s, unsigned i) { return (s & 1) * 2 + (i & 1); });
}

template <class T>
PTX_INLINE u32 popc(T a) {
  return static_cast<u32>(__builtin_popcountll(a));
}
template <class T>
PTX_INLINE u32 clz(T a) {
  return a == 0 ? kWidth<T> : static_cast<u32>(__builtin_clzll(a)) - (64 - kWidth<T>);
}
template <class T>
PTX_INLINE T brev(T a) {
  T result = 0;
  for (unsigned i = 0; i < kWidth<T>; ++i) result |= (a >> i & 1) << (kWidth<T> - 1 - i);
  return result;
}
// The highest bit that differs from the sign; all ones if there is none.
template <class T>
PTX_INLINE u32 bfind(Bits<T> a) {
  const Bits<T> positive = as<T>(a) < 0 ? ~a : a;
  return kWidth<T> - 1 - clz<Bits<T>>(positive);
}
template <class T>
PTX_INLINE u32 bfind_shiftamt(Bits<T> a) {
  const u32 position = bfind<T>(a);
  return position == ~u32{0} ? position : kWidth<T> - 1 - position;
}
// `length` bits from `begin` on; beyond the highest bit, and of the result, the field's sign.
template <class T>
PTX_INLINE Bits<T> bfe(Bits<T> a, u32 begin, u32 length) {
  begin &= 255, length &= 255;
  if (length == 0) return 0;
  const Bits<T> field = shr<T>(a, begin);
  if (length >= kWidth<T>) return field;
  return shr<T>(shl<T>(field, kWidth<T> - length), kWidth<T> - length);
}
template <class T>
PTX_INLINE T bfi(T a, T b, u32 begin, u32 length) {
  const T ones = static_cast<T>(~shl<T>(~T{0}, length & 255));
  const T mask = shl<T>(ones, begin & 255);
  return (b & ~mask) | (shl<T>(a, begin & 255) & mask);
}

// Comparisons; of floats, those without `u` are false if either is a NaN, those with it true.
#define PTX_COMPARE(name, expression)                 \
  template <class T>                                  \
  PTX_INLINE bool name(Bits<T> left, Bits<T> right) { \
    const T a = as<T>(left), b = as<T>(right);        \
    return expression;                                \
  }
PTX_COMPARE(eq, a == b)
PTX_COMPARE(ne, (a < b) || (a > b))
PTX_COMPARE(lt, a < b)
PTX_COMPARE(le, a <= b)
PTX_COMPARE(gt, a > b)
PTX_COMPARE(ge, a >= b)
PTX_COMPARE(lo, a < b)
PTX_COMPARE(ls, a <= b)
PTX_COMPARE(hi, a > b)
PTX_COMPARE(hs, a >= b)
PTX_COMPARE(equ, !((a < b) || (a > b)))
PTX_COMPARE(neu, !(a == b))
PTX_COMPARE(ltu, !(a >= b))
PTX_COMPARE(leu, !(a > b))
PTX_COMPARE(gtu, !(a <= b))
PTX_COMPARE(geu, !(a < b))
PTX_COMPARE(num, a == a && b == b)
PTX_COMPARE(nan, !(a == a && b == b))
#undef PTX_COMPARE

template <class T>
PTX_INLINE bool not_negative(Bits<T> a) {
  return as<T>(a) >= 0;
}

}  // namespace ptx
