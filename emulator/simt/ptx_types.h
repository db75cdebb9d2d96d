// PTX's types. A register holds Bits<T>; as<T>() and bits() go between the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

// -O1 inlines nothing that it is not told to, and the calls would dominate.
#define PTX_INLINE [[gnu::always_inline]] inline

namespace ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using f32 = float;
using f64 = double;
using pred = bool;
// Two floats in a register of 64 bits, the first in the low half.
struct f32x2 {
  f32 low, high;
};

template <std::size_t kNbytes>
using Uint = std::conditional_t<
    kNbytes == 1, u8,
    std::conditional_t<kNbytes == 2, u16, std::conditional_t<kNbytes == 4, u32, u64>>>;
template <class T>
using Bits = Uint<sizeof(T)>;
template <class T>
inline constexpr unsigned kWidth = 8 * sizeof(T);

template <class T>
PTX_INLINE T as(Bits<T> bits) {
  return __builtin_bit_cast(T, bits);
}
template <class T>
PTX_INLINE Bits<T> bits(T value) {
  return __builtin_bit_cast(Bits<T>, value);
}

// The value in a register that may be wider: extended by its sign if it has one.
template <class T, class Register>
PTX_INLINE Register extend(Bits<T> value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<Register>(as<T>(value));
  } else {
    return value;
  }
}

// `_` in the place of a destination.
struct Sink {
  template <class T>
  PTX_INLINE void operator=(T) {}
};

}  // namespace ptx
