// Encoding a tile of a codec with blocks, or of one without.
#pragma once

#include "cuda/frames.h"
#include "cuda/residual.h"

namespace zcomm::cuda {

// The gradient of a segment from its element `start` on.
struct Gradient {
  const std::uint8_t* at;
  int type;
  float prescale;

  ZC_FN Gradient(const EncodeArgs& args, const DeviceSegment& segment, std::int64_t start = 0)
      : type(args.grad_type), prescale(static_cast<float>(args.prescale)) {
    at = args.grad + (segment.offset + start) * (type == kGradF32 ? 4 : 2);
  }
};

// Elements `first` ... before quantization; 0 past the block's end.
template <class Index>
ZC_FN void load_values(const Gradient& gradient, const Residual& residual, Index first, int valid,
                       Index block, float v[4]) {
  float g[4], r[4] = {};
  read_floats(gradient.at, gradient.type, first, valid, g);
  if (residual.type != kResidualNone) read_residual(residual, first, valid, block, r);
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    const float scaled = g[j] * gradient.prescale;
    const float sum = residual.type != kResidualNone ? scaled + r[j] : scaled;
    v[j] = j < valid ? sum : 0.0f;
  }
}

// This warp's strip of the CTA's tile: elements [begin, end) from the tile's first one on.
struct Strip {
  std::uint32_t segment, frame;
  std::int64_t tile;  // its first element
  int begin, end;
  int left;  // elements from the tile's first one to the segment's end, or more than a tile has
  bool ends_segment;

  ZC_FN explicit Strip(const Tables& tables) {
    const Tile t = tables.tiles[blockIdx.x];
    segment = t.segment;
    tile = 0;
    begin = end = left = 0;
    ends_segment = false;
    if (segment == kNoSegment) {
      frame = t.index;
      return;
    }
    const DeviceSegment& s = tables.segments[segment];
    frame = s.frame;
    tile = static_cast<std::int64_t>(t.index) * kTileElements;
    left = static_cast<int>(s.n - tile < 2 * kTileElements ? s.n - tile : 2 * kTileElements);
    begin = warp_index() * kStripElements;
    end = begin + kStripElements < left ? begin + kStripElements : left;
    ends_segment = begin < end && end == left;
  }
};

// The input and output of an encoding tile.
struct EncodeTile {
  Gradient gradient;
  Residual residual;
  TileSection scales, codes;
  int log2_block, left;

  ZC_FN EncodeTile(const EncodeArgs& args, const DeviceSegment& segment, const Strip& strip,
                   int width)
      : gradient(args, segment, strip.tile),
        residual(args, segment, strip.segment, strip.tile),
        scales(from_byte(section_of(args, segment, 0), (strip.tile >> segment.log2_block) * 2)),
        codes(from_byte(section_of(args, segment, 1), strip.tile * width / 8)),
        log2_block(static_cast<int>(segment.log2_block)),
        left(strip.left) {}
};

template <class Codec, int Rows, bool Full>
ZC_FN std::uint64_t encode_group(const EncodeTile& tile, const Codec& codec, int a) {
  const Place<Rows> place(tile.log2_block, tile.left - a);
  const int block = (a >> tile.log2_block) + place.block, first = a + 4 * lane_index();
  float v[Rows][4], e[Rows][4];
  std::uint32_t codes[Rows];
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    const int valid = Full ? 4 : place.valid(r, place.m);
    load_values(tile.gradient, tile.residual, first + r * kRow, valid, block, v[r]);
  }
  const std::uint32_t absmax = block_absmax<Rows>(v, place.lanes);
  const bool kept = absmax >= kInfBits;
  std::uint16_t scale = codec.template encode<Rows, Full>(place, v, absmax, codes, e);
  if (kept) scale = kBf16Nan;
  std::uint64_t sum = 0;
  ZC_UNROLL for (int r = 0; r < Rows; ++r) {
    sum += write_codes<Codec::kWidth>(tile.codes, first + r * kRow, kept ? 0 : codes[r]);
  }
  if (place.leads() && place.m > 0) sum += write_piece(tile.scales, 2 * block, scale);
  if (tile.residual.type != kResidualNone) {
    write_residual<Rows>(tile.residual, place, first, block, kept, e);
  }
  return sum;
}

ZC_FN void clear_paddings(const EncodeArgs& args, std::uint32_t index, const Residual& residual) {
  const DeviceSegment& segment = args.tables.segments[index];
  ZC_UNROLL for (int i = 0; i < 3; ++i) {
    clear_padding(args.wire + segment.section[i], segment.used[i]);
  }
  if (residual.type != kResidualInt8) return;
  auto* out = reinterpret_cast<std::uint8_t*>(args.residual_out[index]);
  clear_padding(out, segment.residual_used[0]);
  clear_padding(out + segment.residual_codes, segment.residual_used[1]);
}

template <class Format, int Rows>
ZC_FN void encode_tile(const EncodeArgs& args) {
  using Codec = BlockCodec<Format>;
  const Strip strip(args.tables);
  std::uint64_t sum = 0;
  if (strip.begin < strip.end) {
    const EncodeTile tile(args, args.tables.segments[strip.segment], strip, Codec::kWidth);
    const Codec codec(Place<Rows>(tile.log2_block, kStripElements));
    constexpr int step = Rows * kRow;
    int a = strip.begin;
    if (Codec::kRotated && Rows == 1) {  // other blocks are rare: one body less to compile
      ZC_NO_UNROLL for (; a + step <= strip.end; a += step) {
        sum += encode_group<Codec, Rows, true>(tile, codec, a);
      }
    }
    ZC_NO_UNROLL for (; a < strip.end; a += step) {
      sum += encode_group<Codec, Rows, false>(tile, codec, a);
    }
    if (strip.ends_segment) clear_paddings(args, strip.segment, tile.residual);
  }
  finish_encode(args, strip.frame, sum);
}

}  // namespace zcomm::cuda
