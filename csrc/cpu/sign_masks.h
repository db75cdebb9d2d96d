// The lm* signs as masks to xor with, one per element of a block.
#pragma once

#include "codec/lm.h"

namespace zcomm {

struct SignMasks {
  alignas(64) std::uint32_t mask[kMaxBlock];
  constexpr SignMasks() : mask() {
    for (int i = 0; i < kMaxBlock; ++i) {
      mask[i] = static_cast<std::uint32_t>(kSignWords[i / 64] >> (i % 64) & 1u) << 31;
    }
  }
};

inline constexpr SignMasks kSignMasks;

}  // namespace zcomm
