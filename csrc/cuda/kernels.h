// The kernels, by name. Hosts know a kernel by its place in this list.
#pragma once

// F(X, codec, its id); F decides what X is for.
#define ZC_EACH_PLAIN_CODEC(F, X) F(X, none, kNone) F(X, bf16, kBf16) F(X, fp16, kFp16)
#define ZC_EACH_BLOCK_CODEC(F, X) \
  F(X, int8, kInt8)               \
  F(X, fp8, kFp8)                 \
  F(X, int4, kInt4) F(X, lm4, kLm4) F(X, lm3, kLm3) F(X, lm2, kLm2) F(X, sign, kSign)

#define ZC_PLAIN_NAMES(X, codec, id) X(zc_encode_##codec, codec, 0) X(zc_decode_##codec, codec, 0)
#define ZC_BLOCK_NAMES(X, codec, id) \
  X(zc_encode_##codec##_1, codec, 1) \
  X(zc_encode_##codec##_2, codec, 2) \
  X(zc_encode_##codec##_4, codec, 4) \
  X(zc_encode_##codec##_8, codec, 8) \
  X(zc_decode_##codec##_1, codec, 1) \
  X(zc_decode_##codec##_2, codec, 2) \
  X(zc_decode_##codec##_4, codec, 4) X(zc_decode_##codec##_8, codec, 8)

// X(symbol, the stem of its file, ZC_ROWS under which it is compiled alone; 0: under any).
#define ZC_EACH_KERNEL(X)                \
  X(zc_find_idle, idle, 0)               \
  X(zc_topk_digit_0, topk, 0)            \
  X(zc_topk_digit_1, topk, 0)            \
  X(zc_topk_digit_2, topk, 0)            \
  X(zc_topk_count, topk, 0)              \
  X(zc_topk_write, topk, 0)              \
  X(zc_decode_topk, topk_decode, 0)      \
  ZC_EACH_PLAIN_CODEC(ZC_PLAIN_NAMES, X) \
  ZC_EACH_BLOCK_CODEC(ZC_BLOCK_NAMES, X)

namespace zcomm::cuda {

enum class Kernel : int {
#define ZC_NAME(symbol, file, rows) symbol,
  ZC_EACH_KERNEL(ZC_NAME)
#undef ZC_NAME
};

struct KernelName {
  const char *symbol, *file;
  int rows;
};
inline constexpr KernelName kKernelNames[] = {
#define ZC_NAME(symbol, file, rows) {#symbol, #file, rows},
    ZC_EACH_KERNEL(ZC_NAME)
#undef ZC_NAME
};
inline constexpr int kKernels = static_cast<int>(sizeof kKernelNames / sizeof *kKernelNames);

}  // namespace zcomm::cuda
