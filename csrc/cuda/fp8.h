// fp8 on a block's lanes.
#pragma once

#include "codec/fp8.h"
#include "cuda/uniform.h"

namespace zcomm::cuda {

template <>
struct BlockCodec<Fp8> : UnrotatedCodec {
  static constexpr int kWidth = Fp8::kWidth;
  using UnrotatedCodec::UnrotatedCodec;

  template <int Rows, bool Full>
  ZC_FN std::uint16_t encode(const Place<Rows>&, const float v[Rows][4], std::uint32_t absmax,
                             std::uint32_t codes[Rows], float e[Rows][4]) const {
    const std::uint16_t scale = Fp8::scale(from_bits(absmax));
    const float s = bf16_value(scale), inverse = scale == kScaleZero ? 0.0f : 1.0f / s;
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      codes[r] = 0;
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        // A zero block's codes are 0: none for the sign of a zero.
        const unsigned code = scale == kScaleZero ? 0 : Fp8::encode(v[r][j] * inverse);
        codes[r] |= code << (8 * j);
        e[r][j] = v[r][j] - Fp8::value(code) * s;
      }
    }
    return scale;
  }

  ZC_FN void values(std::uint32_t codes, float q[4]) const {
    ZC_UNROLL for (int j = 0; j < 4; ++j) q[j] = Fp8::value(codes >> (8 * j) & 0xffu);
  }

  ZC_FN static bool any_unused(std::uint32_t codes) {
    bool found = false;
    ZC_UNROLL for (int j = 0; j < 4; ++j) found |= (codes >> (8 * j) & 0x7fu) == 0x7fu;
    return found;
  }
};

}  // namespace zcomm::cuda
