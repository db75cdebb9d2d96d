// int8 and int4 on a block's lanes.
#pragma once

#include "codec/int4.h"
#include "codec/int8.h"
#include "cuda/codes.h"
#include "cuda/warp.h"

namespace zcomm::cuda {

template <class Codec>
struct BlockCodec;

// A codec whose values decode straight to gradient values: a lane does not need to know its place,
// and sums over wires need no last step.
struct UnrotatedCodec {
  static constexpr bool kRotated = false;

  template <int Rows>
  ZC_FN explicit UnrotatedCodec(const Place<Rows>&) {}

  template <int Rows, bool Full>
  ZC_FN void finish(const Place<Rows>&, float[Rows][4]) const {}
};

template <int Width, int Q, std::uint16_t Cap>
struct BlockCodec<Uniform<Width, Q, Cap>> : UnrotatedCodec {
  using Format = Uniform<Width, Q, Cap>;
  static constexpr int kWidth = Width;
  using UnrotatedCodec::UnrotatedCodec;

  // Gives a finite block's scale, its codes, and e = v - d.
  template <int Rows, bool Full>
  ZC_FN std::uint16_t encode(const Place<Rows>&, const float v[Rows][4], std::uint32_t absmax,
                             std::uint32_t codes[Rows], float e[Rows][4]) const {
    const std::uint16_t scale = Format::scale(from_bits(absmax));
    const float s = bf16_value(scale), inverse = scale == kScaleZero ? 0.0f : 1.0f / s;
    constexpr std::uint32_t mask = (1u << Width) - 1;
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      codes[r] = 0;
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        const float code = Format::code(v[r][j], inverse);
        codes[r] |= (Format::to_wire(code) & mask) << (kCodeStride<Width> * j);
        e[r][j] = v[r][j] - code * s;
      }
    }
    return scale;
  }

  ZC_FN void values(std::uint32_t codes, float q[4]) const {
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      q[j] = Format::value(codes >> (kCodeStride<Width> * j) & ((1u << Width) - 1));
    }
  }

  // Whether one of the four codes is invalid.
  ZC_FN static bool any_unused(std::uint32_t codes) {
    bool found = false;
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      constexpr std::uint32_t mask = (1u << Width) - 1;
      const std::uint32_t unused = static_cast<std::uint32_t>(Format::kUnused) & mask;
      found |= (codes >> (kCodeStride<Width> * j) & mask) == unused;
    }
    return found;
  }
};

}  // namespace zcomm::cuda
