// The AVX2 kernel set: bodies over eight lanes, compiled for AVX2 whatever the build's target.
#include "cpu/kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "codec/fp8.h"
#include "codec/frame.h"
#include "codec/int4.h"
#include "codec/int8.h"
#include "codec/lm.h"
#include "codec/sign.h"
#include "cpu/inline.h"
#include "cpu/sign_masks.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")

namespace zcomm {
namespace {

constexpr int kVectorBytes = 32;

#include "cpu/lanes_avx2.h"
#include "cpu/bodies.h"

}  // namespace

constexpr Kernels kAvx2Kernels = lanes_table();

}  // namespace zcomm

#pragma GCC pop_options
#endif
