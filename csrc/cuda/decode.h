// Decoding a tile of a codec with blocks: the sum over wires, in their order.
#pragma once

#include "cuda/encode.h"

namespace zcomm::cuda {

// The input and output of a decoding tile.
struct DecodeTile {
  const DecodeArgs& args;
  std::uint32_t index;               // of the segment
  std::int64_t scales_at, codes_at;  // bytes of a wire
  std::uint64_t scales_weight, codes_weight;
  int scales_used, codes_used;
  std::uint8_t* out;
  int log2_block, left;

  ZC_FN DecodeTile(const DecodeArgs& a, const Strip& strip, int width)
      : args(a), index(strip.segment), left(strip.left) {
    const DeviceSegment& segment = args.tables.segments[index];
    log2_block = static_cast<int>(segment.log2_block);
    const std::int64_t scales = (strip.tile >> log2_block) * 2, codes = strip.tile * width / 8;
    const TileSection s = from_byte(section_of(args, segment, 0, 0), scales);
    const TileSection c = from_byte(section_of(args, segment, 1, 0), codes);
    scales_at = segment.section[0] + scales, scales_weight = s.weight, scales_used = s.used;
    codes_at = segment.section[1] + codes, codes_weight = c.weight, codes_used = c.used;
    out = reinterpret_cast<std::uint8_t*>(args.out + segment.offset + strip.tile);
  }

  ZC_FN TileSection scales_of(const std::uint8_t* wire) const {
    return {const_cast<std::uint8_t*>(wire) + scales_at, scales_weight, scales_used};
  }
  ZC_FN TileSection codes_of(const std::uint8_t* wire) const {
    return {const_cast<std::uint8_t*>(wire) + codes_at, codes_weight, codes_used};
  }
};

// What is wrong with a wire, in a lane's part of one block or of several.
struct Findings {
  bool beyond = false, unused = false;
  std::uint32_t scale = 0,
                scale_over_codes = 0;  // one that is not valid; one whose codes must be 0

  ZC_FN void report(const DecodeArgs& args, int w, std::uint32_t segment) const {
    if (beyond) refuse(args, kFaultPadding, w, segment, 0);
    if (unused) refuse(args, kFaultCode, w, segment, 0);
    if (scale) refuse(args, kFaultScale, w, segment, scale);
    if (scale_over_codes) refuse(args, kFaultCodesNotZero, w, segment, scale_over_codes & 0xffffu);
  }
};

// Adds one wire's values for the lane's part of a block to the sums.
template <class Codec, int Rows>
ZC_FN std::uint64_t add_wire(const TileSection& scales, const TileSection& section,
                             const Codec& codec, const Place<Rows>& place, int a, bool first_wire,
                             float sum[Rows][4], Findings& findings) {
  const int block = (a >> place.log2_block) + place.block;
  std::uint64_t checksum = 0;
  const auto scale = read_piece<std::uint16_t>(scales, 2 * block, place.leads(), checksum);
  const float s = bf16_value(scale);
  const int size = Codec::kRotated && place.m > 0 ? 1 << log2_ceil(place.m) : place.m;
  std::uint32_t any = 0;
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    const std::uint32_t codes =
        read_codes<Codec::kWidth>(section, a + 4 * lane_index() + r * kRow, checksum);
    float q[4];
    codec.values(codes, q);
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      const float d = q[j] * s;
      // A zero block's codes are 0, which lm* would read as -0: there sums start from +0.
      sum[r][j] = !first_wire ? sum[r][j] + d : Codec::kRotated ? 0.0f + d : d;
    }
    any |= codes;
    findings.unused |= Codec::any_unused(codes);
    findings.beyond |= codes_beyond<Codec::kWidth>(codes, place.valid(r, size)) != 0;
  }
  const bool normal = scale >= kScaleMin && scale <= kBf16Max;
  if (!normal && !scale_is_valid(scale)) findings.scale = scale;
  if (!normal && any != 0) findings.scale_over_codes = 0x10000u | scale;
  return checksum;
}

template <class Codec, int Rows, bool Full>
ZC_FN void store_sums(const DecodeTile& tile, const Codec& codec, const Place<Rows>& place, int a,
                      float sum[Rows][4]) {
  codec.template finish<Rows, Full>(place, sum);
  std::uint8_t* out = tile.out + (a + 4 * lane_index()) * 4;
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    ZC_UNROLL for (int j = 0; j < 4; ++j) sum[r][j] = canonical(sum[r][j]);
    write4(out + r * kRow * 4, Full ? 4 : place.valid(r, place.m), sum[r]);
  }
}

// Adds a warp's part of a wire's checksum to the CTA's.
ZC_FN void add_part(const DecodeArgs& args, unsigned long long* parts, int w, std::uint64_t part) {
  if (!args.verify) return;
  part = warp_sum(part);
  if (lane_index() == 0) atomicAdd(parts + w, static_cast<unsigned long long>(part));
}

template <int Rows>
inline constexpr int kGroups = Rows < 2 ? 2 : 1;

// Takes several groups of rows together, so that a wire's checksum is summed over the warp once.
template <class Codec, int Rows, bool Full>
ZC_FN void decode_groups(const DecodeTile& tile, const Codec& codec, int a,
                         unsigned long long* parts) {
  constexpr int groups = kGroups<Rows>, step = Rows * kRow;
  float sum[groups][Rows][4];
  ZC_NO_UNROLL for (int w = 0; w < tile.args.count; ++w) {
    const std::uint8_t* wire = wire_of(tile.args, w);
    const TileSection scales = tile.scales_of(wire), codes = tile.codes_of(wire);
    std::uint64_t part = 0;
    Findings findings;
    ZC_UNROLL for (int g = 0; g < groups; ++g) {
      const Place<Rows> place(tile.log2_block, tile.left - a - g * step);
      part += add_wire<Codec, Rows>(scales, codes, codec, place, a + g * step, w == 0, sum[g],
                                    findings);
    }
    findings.report(tile.args, w, tile.index);
    add_part(tile.args, parts, w, part);
  }
  ZC_UNROLL for (int g = 0; g < groups; ++g) {
    const Place<Rows> place(tile.log2_block, tile.left - a - g * step);
    store_sums<Codec, Rows, Full>(tile, codec, place, a + g * step, sum[g]);
  }
}

ZC_FN void check_paddings(const DecodeArgs& args, std::uint32_t index, unsigned long long* parts,
                          int codes_piece_nbytes = 1) {
  const DeviceSegment& segment = args.tables.segments[index];
  for (int w = 0; w < args.count; ++w) {
    std::uint64_t part = 0;
    for (int i = 0; i < 3; ++i) {
      const int piece_nbytes = i == 1 ? codes_piece_nbytes : 1;
      part += check_padding(args, section_of(args, segment, i, w), w, index, piece_nbytes);
    }
    add_part(args, parts, w, part);
  }
}

ZC_FN void clear_parts(const DecodeArgs& args, unsigned long long* parts) {
  for (int w = static_cast<int>(threadIdx.x); w < args.count; w += kThreads) parts[w] = 0;
  __syncthreads();
}

template <class Format, int Rows>
ZC_FN void decode_tile(const DecodeArgs& args) {
  using Codec = BlockCodec<Format>;
  ZC_DYNAMIC_SHARED(unsigned long long, parts);
  clear_parts(args, parts);
  const Strip strip(args.tables);
  if (strip.begin < strip.end) {
    const DecodeTile tile(args, strip, Codec::kWidth);
    const Codec codec(Place<Rows>(tile.log2_block, kStripElements));
    constexpr int step = kGroups<Rows> * Rows * kRow;
    int a = strip.begin;
    if (Codec::kRotated && Rows == 1) {
      ZC_NO_UNROLL for (; a + step <= strip.end; a += step) {
        decode_groups<Codec, Rows, true>(tile, codec, a, parts);
      }
    }
    ZC_NO_UNROLL for (; a < strip.end; a += step) {
      decode_groups<Codec, Rows, false>(tile, codec, a, parts);
    }
    if (strip.ends_segment) {
      check_paddings(args, strip.segment, parts, kPieceNbytes<Codec::kWidth>);
    }
  }
  finish_decode(args, strip.frame, parts);
}

}  // namespace zcomm::cuda
