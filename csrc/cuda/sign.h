// sign on a block's lanes.
#pragma once

#include "codec/sign.h"
#include "cuda/uniform.h"

namespace zcomm::cuda {

template <>
struct BlockCodec<Sign> : UnrotatedCodec {
  static constexpr int kWidth = Sign::kWidth;
  using UnrotatedCodec::UnrotatedCodec;

  template <int Rows, bool Full>
  ZC_FN std::uint16_t encode(const Place<Rows>& place, const float v[Rows][4], std::uint32_t absmax,
                             std::uint32_t codes[Rows], float e[Rows][4]) const {
    const float factor = absmax >= Sign::kLarge ? Sign::kDown : 1.0f;
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        e[r][j] = from_bits(bits(v[r][j]) & kAbsMask) * factor;
      }
    }
    const float total = block_tree<Rows>(e, place.lanes);
    const std::uint16_t scale = Sign::scale(total, place.m > 0 ? place.m : 1, absmax);
    const std::uint32_t s = bits(bf16_value(scale));
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      codes[r] = 0;
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        const std::uint32_t sign = scale == kScaleZero ? 0 : bits(v[r][j]) & ~kAbsMask;
        codes[r] |= sign >> 31 << (4 * j);
        e[r][j] = v[r][j] - from_bits(s | sign);
      }
    }
    return scale;
  }

  ZC_FN void values(std::uint32_t codes, float q[4]) const {
    ZC_UNROLL for (int j = 0; j < 4; ++j) q[j] = codes >> (4 * j) & 1 ? -1.0f : 1.0f;
  }

  ZC_FN static bool any_unused(std::uint32_t) { return false; }
};

}  // namespace zcomm::cuda
