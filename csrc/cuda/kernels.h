// The kernels of this module, by name. What the host knows of a kernel is its symbol.
#pragma once

#include <cstdint>

#define ZC_EACH_PLAIN_CODEC(X) X(none, kNone) X(bf16, kBf16) X(fp16, kFp16)
#define ZC_EACH_BLOCK_CODEC(X) \
  X(int8, kInt8) X(fp8, kFp8) X(int4, kInt4) X(lm4, kLm4) X(lm3, kLm3) X(lm2, kLm2) X(sign, kSign)

// A module of the emulator may have some of the kernels only.
#if defined(ZC_EMULATED)
#pragma GCC visibility push(default)
#define ZC_SYMBOL __attribute__((weak)) void
#else
#define ZC_SYMBOL void
#endif

extern "C" {
ZC_SYMBOL zc_find_idle(const void*);
ZC_SYMBOL zc_topk_digit_0(const void*);
ZC_SYMBOL zc_topk_digit_1(const void*);
ZC_SYMBOL zc_topk_digit_2(const void*);
ZC_SYMBOL zc_topk_count(const void*);
ZC_SYMBOL zc_topk_write(const void*);
ZC_SYMBOL zc_decode_topk(const void*);
#define ZC_DECLARE(codec, id)               \
  ZC_SYMBOL zc_encode_##codec(const void*); \
  ZC_SYMBOL zc_decode_##codec(const void*);
ZC_EACH_PLAIN_CODEC(ZC_DECLARE)
#undef ZC_DECLARE
#define ZC_DECLARE(codec, id)                   \
  ZC_SYMBOL zc_encode_##codec##_1(const void*); \
  ZC_SYMBOL zc_encode_##codec##_2(const void*); \
  ZC_SYMBOL zc_encode_##codec##_4(const void*); \
  ZC_SYMBOL zc_encode_##codec##_8(const void*); \
  ZC_SYMBOL zc_decode_##codec##_1(const void*); \
  ZC_SYMBOL zc_decode_##codec##_2(const void*); \
  ZC_SYMBOL zc_decode_##codec##_4(const void*); \
  ZC_SYMBOL zc_decode_##codec##_8(const void*);
ZC_EACH_BLOCK_CODEC(ZC_DECLARE)
#undef ZC_DECLARE
}

#if defined(ZC_EMULATED)
#pragma GCC visibility pop
#endif
