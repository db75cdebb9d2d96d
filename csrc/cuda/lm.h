// lm4, lm3 and lm2 on a block's lanes: the Hadamard transform in registers and shuffles.
#pragma once

#include "codec/lm.h"
#include "cuda/uniform.h"

namespace zcomm::cuda {

template <int Width>
struct BlockCodec<Lm<Width>> {
  using Format = Lm<Width>;
  static constexpr int kWidth = Width;
  static constexpr bool kRotated = true;

  // The sign bits of the lane's elements, four for each row; they are the same for every block.
  std::uint32_t flips = 0;

  template <int Rows>
  ZC_FN explicit BlockCodec(const Place<Rows>& place) {
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      const int i = place.index(r);
      flips |= static_cast<std::uint32_t>(kSignWords[i / 64] >> (i % 64) & 15u) << (4 * r);
    }
  }

  template <int Rows, bool Full>
  ZC_FN std::uint16_t encode(const Place<Rows>& place, const float v[Rows][4], std::uint32_t absmax,
                             std::uint32_t codes[Rows], float e[Rows][4]) const {
    const int log2 = Full ? place.log2_block : log2_ceil(place.m), size = 1 << log2;
    const Exponent exponent = block_exponent(absmax);
    float y[Rows][4], t[Rows][4];
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) y[r][j] = flip(v[r][j] * exponent.down, r, j);
    }
    block_hadamard<Rows, Full>(y, place.lanes, size);
    products<Rows>(y, y, t);
    const float gain = lm_gain(block_tree<Rows>(t, place.lanes), log2);
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      codes[r] = quantised(y[r], gain);
      if (!Full) codes[r] = first_fields(codes[r], place.valid(r, size));
      values(codes[r], e[r]);
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        if (!Full && j >= place.valid(r, size)) e[r][j] = 0.0f;
      }
    }
    products<Rows>(y, e, t);
    const float yq = block_tree<Rows>(t, place.lanes);
    products<Rows>(e, e, t);
    const float qq = block_tree<Rows>(t, place.lanes);
    const std::uint16_t scale = lm_scale(yq, qq, log2, exponent);
    const float s = bf16_value(scale);
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      if (scale == kScaleZero) codes[r] = 0;
      ZC_UNROLL for (int j = 0; j < 4; ++j) e[r][j] = e[r][j] * s;
    }
    block_hadamard<Rows, Full>(e, place.lanes, size);
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        // A rotated zero may be -0, and the residual of a zero block is v, bit for bit.
        const float d = scale == kScaleZero ? 0.0f : flip(e[r][j], r, j);
        e[r][j] = lm_residual(v[r][j], d);
      }
    }
    return scale;
  }

  // Levels are bf16, so one selection of bytes finds the upper bytes of four of them, one the
  // lower.
  ZC_FN void values(std::uint32_t codes, float q[4]) const {
    constexpr std::uint32_t half = Format::kLevels / 2, ones = 0x1111u;
    const std::uint32_t upper = codes & (half * ones), low = codes & ((half - 1) * ones);
    const std::uint32_t keep = (upper / half) * (half - 1);  // fields of ones where q is positive
    const std::uint32_t index = low ^ (((half - 1) * ones) & ~keep);
    const std::uint32_t high_bytes = __byte_perm(level_bytes<0, 8>(), level_bytes<4, 8>(), index);
    const std::uint32_t low_bytes = __byte_perm(level_bytes<0, 0>(), level_bytes<4, 0>(), index);
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      const std::uint32_t magnitude = __byte_perm(low_bytes, high_bytes, (4 + j) << 12 | j << 8);
      const std::uint32_t sign = upper >> (4 * j) & half ? 0 : 0x80000000u;
      q[j] = from_bits((magnitude & 0xffff0000u) | sign);
    }
  }

  ZC_FN static bool any_unused(std::uint32_t) { return false; }

  // The sum over wires, back in the gradient's domain.
  template <int Rows, bool Full>
  ZC_FN void finish(const Place<Rows>& place, float sum[Rows][4]) const {
    const int size = Full ? 1 << place.log2_block : 1 << log2_ceil(place.m);
    block_hadamard<Rows, Full>(sum, place.lanes, size);
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) sum[r][j] = flip(sum[r][j], r, j);
    }
  }

 private:
  ZC_FN float flip(float x, int row, int j) const {
    return from_bits(bits(x) ^ (flips >> (4 * row + j) & 1u) << 31);
  }

  ZC_FN static std::uint32_t quantised(const float y[4], float gain) {
    std::uint32_t codes = 0;
    ZC_UNROLL for (int j = 0; j < 4; ++j) codes |= Format::code(y[j] * gain) << (4 * j);
    return codes;
  }

  ZC_FN static std::uint32_t first_fields(std::uint32_t codes, int valid) {
    return codes & ((1u << (4 * valid)) - 1);
  }

  template <int Rows>
  ZC_FN static void products(const float a[Rows][4], const float b[Rows][4], float t[Rows][4]) {
    ZC_UNROLL for (int r = 0; r < Rows; ++r) {
      ZC_UNROLL for (int j = 0; j < 4; ++j) t[r][j] = a[r][j] * b[r][j];
    }
  }

  // Byte `Shift` / 8 of the bf16 magnitudes First ... First + 3, one in each byte.
  template <int First, int Shift>
  ZC_FN static std::uint32_t level_bytes() {
    std::uint32_t packed = 0;
    ZC_UNROLL for (int i = 0; i < 4; ++i) {
      if (First + i < Format::kLevels / 2) {
        const std::uint32_t level = bits(Format::level(Format::kLevels / 2 + First + i)) >> 16;
        packed |= (level >> Shift & 0xffu) << (8 * i);
      }
    }
    return packed;
  }
};

}  // namespace zcomm::cuda
