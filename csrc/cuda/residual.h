// A segment's residual: read with the gradient, written with what the codes leave out.
#pragma once

#include "cuda/uniform.h"

namespace zcomm::cuda {

// One segment of one encode call, from its element `start` on (a multiple of the block).
struct Residual {
  int type;
  const std::uint8_t* in;  // elements, or int8 codes
  std::uint8_t* out;
  std::int64_t to_scales;  // of int8 storage, from the codes

  ZC_FN Residual(const EncodeArgs& args, const DeviceSegment& segment, std::uint32_t index,
                 std::int64_t start = 0)
      : type(args.residual_type), in(nullptr), out(nullptr), to_scales(0) {
    if (type == kResidualNone) return;
    // Without a residual, or with one to leave alone, only the gradient is encoded.
    if (!args.residual_in[index] || (args.idle && args.idle[index])) {
      type = kResidualNone;
      return;
    }
    std::int64_t at = start * element_nbytes();
    if (type == kResidualInt8) {
      const int log2 =
          segment.log2_block ? static_cast<int>(segment.log2_block) : kPlainResidualLog2Block;
      at += segment.residual_codes;
      to_scales = (start >> log2) * 2 - at;
    }
    in = reinterpret_cast<const std::uint8_t*>(args.residual_in[index]) + at;
    out = reinterpret_cast<std::uint8_t*>(args.residual_out[index]) + at;
  }

  ZC_FN int element_nbytes() const {
    return type == kResidualF32 ? 4 : type == kResidualBf16 ? 2 : 1;
  }
};

ZC_FN float int8_value(std::uint8_t code) { return Int8::value(code); }

// The stored residual: elements `first` to `first + valid` of block `block`; the rest is 0.
template <class Index>
ZC_FN void read_residual(const Residual& residual, Index first, int valid, Index block,
                         float r[4]) {
  if (residual.type != kResidualInt8) {
    const int type = residual.type == kResidualF32 ? kGradF32 : kGradBf16;
    return read_floats(residual.in, type, first, valid, r);
  }
  std::uint8_t codes[4];
  read4(residual.in + first, valid, codes);
  const float s =
      valid > 0 ? bf16_value(read<std::uint16_t>(residual.in + residual.to_scales + 2 * block))
                : 0.0f;
  ZC_UNROLL for (int j = 0; j < 4; ++j) r[j] = int8_value(codes[j]) * s;
}

// Keeps elements unchanged: copies their bytes where input and output differ.
template <int Rows, class Index>
ZC_FN void keep_residual(const Residual& residual, const Place<Rows>& place, Index first,
                         Index block) {
  if (residual.in == residual.out) return;
  const int nbytes = residual.element_nbytes();
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    const Index at = (first + r * kRow) * nbytes;
    const int end = place.valid(r, place.m) * nbytes;
    for (int i = 0; i < end; ++i) residual.out[at + i] = residual.in[at + i];
  }
  if (residual.type == kResidualInt8 && place.leads() && place.m > 0) {
    write(residual.out + residual.to_scales + 2 * block,
          read<std::uint16_t>(residual.in + residual.to_scales + 2 * block));
  }
}

// Writes e as an int8 body; its blocks are those of the place.
template <int Rows, class Index>
ZC_FN void write_int8_residual(const Residual& residual, const Place<Rows>& place, Index first,
                               Index block, bool kept, float e[Rows][4]) {
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      // Past the block's end a decoded value may be anything.
      if (j >= place.valid(r, place.m)) e[r][j] = 0.0f;
    }
  }
  const std::uint32_t absmax = block_absmax<Rows>(e, place.lanes);
  std::uint32_t codes[Rows];
  std::uint16_t scale =
      BlockCodec<Int8>(place).template encode<Rows, false>(place, e, absmax, codes, e);
  if (absmax >= kInfBits) scale = kBf16Nan;
  if (kept) return;
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    std::uint8_t bytes[4];
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      bytes[j] = absmax >= kInfBits ? 0 : static_cast<std::uint8_t>(codes[r] >> (8 * j));
    }
    write4(residual.out + first + r * kRow, place.valid(r, place.m), bytes);
  }
  if (place.leads() && place.m > 0) write(residual.out + residual.to_scales + 2 * block, scale);
}

// Writes e (and may overwrite it), or keeps the block's residual; all lanes of the warp call it.
template <int Rows, class Index>
ZC_FN void write_residual(const Residual& residual, const Place<Rows>& place, Index first,
                          Index block, bool kept, float e[Rows][4]) {
  if (residual.type == kResidualInt8) {
    write_int8_residual<Rows>(residual, place, first, block, kept, e);
  }
  if (kept) return keep_residual<Rows>(residual, place, first, block);
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    const Index at = first + r * kRow;
    const int valid = place.valid(r, place.m);
    if (residual.type == kResidualF32) write4(residual.out + at * 4, valid, e[r]);
    if (residual.type == kResidualBf16) {
      std::uint16_t rounded[4];
      ZC_UNROLL for (int j = 0; j < 4; ++j) rounded[j] = bf16_saturate(e[r][j]);
      write4(residual.out + at * 2, valid, rounded);
    }
  }
}

}  // namespace zcomm::cuda
