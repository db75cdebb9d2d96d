// none, bf16 and fp16: values unchanged or cast, in rows of 128 like blocks.
#pragma once

#include "cuda/decode.h"

namespace zcomm::cuda {

struct None {
  using Code = float;
  ZC_FN static Code code(float v) { return canonical(v); }
  ZC_FN static float value(Code c) { return c; }
};
struct Bf16 {
  using Code = std::uint16_t;
  ZC_FN static Code code(float v) { return bf16_saturate(v); }
  ZC_FN static float value(Code c) { return bf16_value(c); }
};
struct Fp16 {
  using Code = std::uint16_t;
  ZC_FN static Code code(float v) { return fp16_saturate(v); }
  ZC_FN static float value(Code c) { return fp16_value(c); }
};

// Four codes are 8 or 16 bytes of the wire: one or two words.
template <class Code>
ZC_FN std::uint64_t codes_checksum(const Code codes[4], std::uint64_t weight, int byte) {
  constexpr int words = 4 * sizeof(Code) / 8;
  std::uint64_t w[words], sum = 0;
  memcpy(w, codes, sizeof w);
  ZC_UNROLL for (int i = 0; i < words; ++i) sum += checksum_part(w[i], weight, byte + 8 * i);
  return sum;
}

// An element that is not finite keeps its residual.
ZC_FN void write_plain_residual(const Residual& residual, const Place<1>& place, int first,
                                int block, const float v[4], float e[1][4]) {
  const int valid = place.valid(0, place.m);
  bool all_finite = true;
  ZC_UNROLL for (int j = 0; j < 4; ++j) all_finite &= finite(v[j]);
  if (residual.type == kResidualInt8 && !all_finite) {
    float r[4];
    read_residual(residual, first, valid, block, r);
    ZC_UNROLL for (int j = 0; j < 4; ++j) e[0][j] = finite(v[j]) ? e[0][j] : r[j];
  }
  if (residual.type == kResidualInt8 || all_finite) {
    write_residual<1>(residual, place, first, block, false, e);
    return;
  }
  const int nbytes = residual.element_nbytes();
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    const int at = (first + j) * nbytes;
    if (j >= valid) continue;
    if (!finite(v[j])) {
      for (int i = 0; i < nbytes; ++i) residual.out[at + i] = residual.in[at + i];
    } else if (residual.type == kResidualF32) {
      write(residual.out + at, e[0][j]);
    } else {
      write(residual.out + at, bf16_saturate(e[0][j]));
    }
  }
}

template <class Codec>
ZC_FN std::uint64_t encode_plain_row(const Gradient& gradient, const Residual& residual,
                                     const TileSection& section, int left, int a) {
  using Code = typename Codec::Code;
  const Place<1> place(kPlainResidualLog2Block, left - a);
  const int block = a / kRow, first = a + 4 * lane_index(), valid = place.valid(0, place.m);
  float v[4], e[1][4];
  load_values(gradient, residual, first, valid, block, v);
  Code codes[4];
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    codes[j] = j < valid ? Codec::code(v[j]) : Code(0);
    e[0][j] = v[j] - Codec::value(codes[j]);
  }
  if (residual.type != kResidualNone) {
    write_plain_residual(residual, place, first, block, v, e);
  }
  constexpr int bytes = sizeof(Code);
  write4(section.bytes + first * bytes, valid, codes);
  return codes_checksum(codes, section.weight, first * bytes);
}

template <class Codec>
ZC_FN void encode_plain_tile(const EncodeArgs& args) {
  const Strip strip(args.tables);
  std::uint64_t sum = 0;
  if (strip.begin < strip.end) {
    const DeviceSegment& segment = args.tables.segments[strip.segment];
    const Gradient gradient(args, segment, strip.tile);
    const Residual residual(args, segment, strip.segment, strip.tile);
    const TileSection section = from_byte(
        section_of(args, segment, 0), strip.tile * static_cast<int>(sizeof(typename Codec::Code)));
    ZC_NO_UNROLL for (int a = strip.begin; a < strip.end; a += kRow) {
      sum += encode_plain_row<Codec>(gradient, residual, section, strip.left, a);
    }
    if (strip.ends_segment) clear_paddings(args, strip.segment, residual);
  }
  finish_encode(args, strip.frame, sum);
}

template <class Codec>
ZC_FN void decode_plain_rows(const DecodeArgs& args, const DeviceSegment& segment,
                             const Strip& strip, int a, unsigned long long* parts) {
  using Code = typename Codec::Code;
  constexpr int rows = 4, bytes = sizeof(Code);
  float sum[rows][4];
  const int first = a + 4 * lane_index();
  const auto valid = [&](int r) {
    const int left = strip.left - first - r * kRow;
    return left < 0 ? 0 : left > 4 ? 4 : left;
  };
  ZC_NO_UNROLL for (int w = 0; w < args.count; ++w) {
    const TileSection section = from_byte(section_of(args, segment, 0, w), strip.tile * bytes);
    std::uint64_t part = 0;
    ZC_UNROLL for (int r = 0; r < rows; ++r) {
      const int byte = (first + r * kRow) * bytes;
      Code codes[4];
      read4(section.bytes + byte, valid(r), codes);
      part += codes_checksum(codes, section.weight, byte);
      ZC_UNROLL for (int j = 0; j < 4; ++j) {
        const float d = Codec::value(codes[j]);
        sum[r][j] = w > 0 ? sum[r][j] + d : d;
      }
    }
    add_part(args, parts, w, part);
  }
  auto* out = reinterpret_cast<std::uint8_t*>(args.out + segment.offset + strip.tile + first);
  ZC_UNROLL for (int r = 0; r < rows; ++r) {
    ZC_UNROLL for (int j = 0; j < 4; ++j) sum[r][j] = canonical(sum[r][j]);
    write4(out + r * kRow * 4, valid(r), sum[r]);
  }
}

template <class Codec>
ZC_FN void decode_plain_tile(const DecodeArgs& args) {
  ZC_DYNAMIC_SHARED(unsigned long long, parts);
  clear_parts(args, parts);
  const Strip strip(args.tables);
  if (strip.begin < strip.end) {
    const DeviceSegment& segment = args.tables.segments[strip.segment];
    ZC_NO_UNROLL for (int a = strip.begin; a < strip.end; a += 4 * kRow) {
      decode_plain_rows<Codec>(args, segment, strip, a, parts);
    }
    if (strip.ends_segment) check_paddings(args, strip.segment, parts);
  }
  finish_decode(args, strip.frame, parts);
}

}  // namespace zcomm::cuda

#define ZC_PLAIN_KERNELS(codec, Codec)                                              \
  ZC_KERNEL(zc_encode_##codec, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) { \
    zcomm::cuda::encode_plain_tile<zcomm::cuda::Codec>(args);                       \
  }                                                                                 \
  ZC_KERNEL(zc_decode_##codec, zcomm::cuda::DecodeArgs, zcomm::cuda::kThreads, 6) { \
    zcomm::cuda::decode_plain_tile<zcomm::cuda::Codec>(args);                       \
  }
