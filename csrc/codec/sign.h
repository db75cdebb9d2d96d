// sign: scales (bf16), then one sign bit per element.
//
//   s = bf16(tree(|v|) / m), taken in a range where the sum cannot overflow    d = +-s
#pragma once

#include "codec/block.h"

namespace zcomm {

struct Sign {
  static constexpr int kWidth = 1;

  // total = tree(|v| * exponent.down) over m elements.
  ZC_FN static std::uint16_t scale(float total, int m, const Exponent& exponent) {
    if (exponent.biased == 0) return kScaleZero;
    const std::uint16_t s = bf16_round(total / static_cast<float>(m) * exponent.up);
    return scale_or_zero(s < kBf16Max ? s : kBf16Max);
  }
};

}  // namespace zcomm
