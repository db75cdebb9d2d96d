// topk: counts (u32 per range of 65,536 elements), offsets (u16), values (bf16).
#pragma once

#include <cstdint>

namespace zcomm {

inline constexpr std::int64_t kTopkRange = 65536;
inline constexpr std::uint32_t kTopkNotFinite =
    0xffffffffu;  // every count of a segment that holds NaN or Inf

}  // namespace zcomm
