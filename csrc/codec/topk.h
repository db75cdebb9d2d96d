// topk: counts (u32 per range of 65,536 elements), offsets (u16), values (bf16).
#pragma once

#include "codec/float.h"

namespace zcomm {

inline constexpr std::int64_t kTopkRange = 65536;
inline constexpr std::uint32_t kTopkNotFinite =
    0xffffffffu;  // every count of a segment that holds NaN or Inf

// bf16, finite, and never -0: an element that is not sent decodes to +0, and a sum over wires must
// not depend on which of them sent a zero.
ZC_FN std::uint16_t topk_value(float v) {
  const std::uint16_t value = bf16_saturate(v);
  return value == 0x8000 ? 0 : value;
}

}  // namespace zcomm
