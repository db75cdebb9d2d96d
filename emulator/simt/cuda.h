// CUDA's names in terms of the emulator: kernels compile with a host compiler and run on simt.h.
// Only what our kernels use; anything else fails to compile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/simt.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
// All threads of a CTA run on one OS thread, and an OS thread runs one CTA at a time.
#define __shared__ static thread_local

// nvcc's counterpart: extern __shared__ type name[].
#define ZC_DYNAMIC_SHARED(type, name) \
  type* const name = reinterpret_cast<type*>(::emu::self().shared)

// Begins the definition of a kernel whose one argument is called `args`. nvcc's counterpart:
//   extern "C" __global__ void __launch_bounds__(threads, ctas)
//       name(const __grid_constant__ Args args)
#define ZC_KERNEL(name, Args, threads, ctas)                                               \
  static void name##_body(const Args& args);                                               \
  extern "C" void name(const void* args);                                                  \
  extern "C" void name(const void* args) { name##_body(*static_cast<const Args*>(args)); } \
  static void name##_body([[maybe_unused]] const Args& args)

#define threadIdx (::emu::self().index)
#define blockIdx (::emu::self().cta)
#define blockDim (::emu::self().block)
#define gridDim (::emu::self().grid)

inline constexpr int warpSize = 32;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};

// Byte i of the result is the byte of y:x that nibble i of the selector names.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t both = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z,
                            unsigned short w) {
  return {x, y, z, w};
}

// ---- Bits ----

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

// ---- Meetings ----

inline void __syncthreads() { emu::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffff) { emu::ballot(mask, true); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emu::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const emu::Lanes lanes = emu::gather(mask, value);
  unsigned most = 0;  // what lanes outside of the mask give
  for (const unsigned other : lanes.value) most = most < other ? other : most;
  return most;
}

namespace emu::detail {

template <class T>
T exchange_value(unsigned mask, T value, unsigned source) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "a shuffle moves 4 or 8 bytes");
  std::uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  for (auto& word : words) word = exchange(mask, word, source);
  std::memcpy(&value, words, sizeof(T));
  return value;
}

// The first lane of the caller's part of the warp: shuffles stay within parts of `width` lanes.
inline unsigned first_lane(int width) { return self().lane & ~(static_cast<unsigned>(width) - 1); }

template <class T, class Change>
T change(T* address, Change next) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, next(old), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

}  // namespace emu::detail

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned within = static_cast<unsigned>(source) & (static_cast<unsigned>(width) - 1);
  return emu::detail::exchange_value(mask, value, emu::detail::first_lane(width) + within);
}
// A source beyond the part: the lane's own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emu::self().lane, within = lane - emu::detail::first_lane(width);
  return emu::detail::exchange_value(mask, value, delta <= within ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emu::self().lane, within = lane - emu::detail::first_lane(width);
  const bool is_inside = delta < static_cast<unsigned>(width) - within;
  return emu::detail::exchange_value(mask, value, is_inside ? lane + delta : lane);
}
// Unlike the others it may reach into an earlier part, but not into a later one.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flips, int width = 32) {
  const unsigned lane = emu::self().lane, other = lane ^ static_cast<unsigned>(flips);
  const unsigned end = emu::detail::first_lane(width) + static_cast<unsigned>(width);
  return emu::detail::exchange_value(mask, value, other < end ? other : lane);
}

// ---- Atomics: CTAs run on several OS threads ----

template <class T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  static_assert(std::is_unsigned_v<T>, "sums of floats would depend on the order");
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return emu::detail::change(address, [value](T old) { return value < old ? value : old; });
}
template <class T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return emu::detail::change(address, [value](T old) { return old < value ? value : old; });
}
