// What the formats need from the standard library. NVRTC, which compiles kernels at run time, has
// none: the functions are built in, and the types are the usual ones.
#pragma once

#if defined(__CUDACC_RTC__)
namespace std {
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
using ::floor;
using ::fma;
using ::memcpy;
using ::nearbyintf;
using ::sqrt;
}  // namespace std
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#endif
