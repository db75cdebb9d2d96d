// What a kernel file sees of the device: CUDA's own names, or the emulator's.
#pragma once

#include "codec/float.h"

#if defined(__CUDACC__)
// `ctas` of `threads` threads at a time on a multiprocessor. This bounds a kernel's registers.
#define ZC_KERNEL(name, Args, threads, ctas)                  \
  extern "C" __global__ void __launch_bounds__(threads, ctas) \
      name(const __grid_constant__ Args args)
#define ZC_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define ZC_UNROLL _Pragma("unroll")
#define ZC_NO_UNROLL _Pragma("unroll 1")
// An address that was read from memory. Without this, the compiler does not know that it points to
// global memory.
#define ZC_IS_GLOBAL(p) __builtin_assume(__isGlobal(p))
#else
#include "simt/cuda.h"
#define ZC_UNROLL
#define ZC_NO_UNROLL
#define ZC_IS_GLOBAL(p)
#endif

namespace zcomm::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

ZC_FN int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
ZC_FN int warp_index() { return static_cast<int>(threadIdx.x / kWarp); }

}  // namespace zcomm::cuda
