// The kernels of a codec with blocks, for blocks of up to 128, 256, 512 and 1024 elements.
#pragma once

#include "cuda/decode.h"

namespace zcomm::cuda {

// Rows live in registers: at most 96, 168 or 255 of them. (With more CTAs, some kernels would
// spill.)
template <int Rows>
inline constexpr int kCtas = Rows == 8   ? 2
                             : Rows == 4 ? 3
                                         : 5;

}  // namespace zcomm::cuda

#define ZC_BLOCK_KERNELS_OF(codec, Format, rows)                                        \
  ZC_KERNEL(zc_encode_##codec##_##rows, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, \
            zcomm::cuda::kCtas<rows>) {                                                 \
    zcomm::cuda::encode_tile<Format, rows>(args);                                       \
  }                                                                                     \
  ZC_KERNEL(zc_decode_##codec##_##rows, zcomm::cuda::DecodeArgs, zcomm::cuda::kThreads, \
            zcomm::cuda::kCtas<rows>) {                                                 \
    zcomm::cuda::decode_tile<Format, rows>(args);                                       \
  }

// ZC_ROWS: compile the kernels of one number of rows only. At run time, the others would only cost
// time.
#if defined(ZC_ROWS)
#define ZC_BLOCK_KERNELS_FOR(codec, Format, rows) ZC_BLOCK_KERNELS_OF(codec, Format, rows)
#define ZC_BLOCK_KERNELS(codec, Format) ZC_BLOCK_KERNELS_FOR(codec, Format, ZC_ROWS)
#else
#define ZC_BLOCK_KERNELS(codec, Format) \
  ZC_BLOCK_KERNELS_OF(codec, Format, 1) \
  ZC_BLOCK_KERNELS_OF(codec, Format, 2) \
  ZC_BLOCK_KERNELS_OF(codec, Format, 4) \
  ZC_BLOCK_KERNELS_OF(codec, Format, 8)
#endif
