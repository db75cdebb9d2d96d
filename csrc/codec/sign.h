// sign: scales (bf16), then one sign bit per element.
//
//   s = bf16(tree(|v|) / m)    d = +-s
#pragma once

#include "codec/block.h"

namespace zcomm {

struct Sign {
  static constexpr int kWidth = 1;

  // From here on the sum of a block could overflow, and is taken 2^64 times smaller.
  static constexpr std::uint32_t kLarge = 227u << 23;  // 2^100
  static constexpr float kDown = 5.421010862427522e-20f, kUp = 18446744073709551616.0f;

  // total = tree(|v|) over m elements, or tree(|v| * kDown).
  ZC_FN static std::uint16_t scale(float total, int m, std::uint32_t absmax_bits) {
    float mean = total / static_cast<float>(m);
    if (absmax_bits >= kLarge) mean = mean * kUp;
    const std::uint16_t s = bf16_round(mean);
    return scale_or_zero(s < kBf16Max ? s : kBf16Max);
  }
};

}  // namespace zcomm
