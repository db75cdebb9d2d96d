#include "cpu/blocks.h"

#include "cpu/scalar.h"

namespace zcomm {
namespace {

// Calls body with the codec's type.
template <class Body>
auto with_codec(std::uint8_t codec, Body body) {
  switch (codec) {
    case kInt8:
      return body(Int8{});
    case kFp8:
      return body(Fp8{});
    case kInt4:
      return body(Int4{});
    case kLm4:
      return body(Lm<4>{});
    case kLm3:
      return body(Lm<3>{});
    case kLm2:
      return body(Lm<2>{});
    default:
      return body(Sign{});
  }
}

}  // namespace

void encode_tile(const Kernels& kernels, std::uint8_t codec, int log2_block, const float* v, int n,
                 std::uint8_t* scales, std::uint8_t* codes, float* e, std::uint8_t* kept,
                 const Ahead& ahead) {
  const int full = n >> log2_block, at = full << log2_block;
  if (full) kernels.encode_blocks[codec](v, full, log2_block, scales, codes, e, kept, ahead);
  if (at == n) return;
  kept[full] = with_codec(codec, [&](auto type) {
    return scalar::encode_block<decltype(type)>(codec, v + at, n - at, scales + 2 * full,
                                                codes + at * code_width(codec) / 8,
                                                e ? e + at : nullptr);
  });
}

void decode_tile(const Kernels& kernels, std::uint8_t codec, int log2_block, const BlockWire* wires,
                 int count, int n, const Output& output) {
  const int full = n >> log2_block, at = full << log2_block;
  if (full) kernels.decode_blocks[codec](wires, count, full, log2_block, output);
  if (at == n) return;
  with_codec(codec, [&](auto type) {
    const auto wire = [&](int w) {
      return BlockWire{wires[w].scales + 2 * full, wires[w].codes + at * code_width(codec) / 8};
    };
    scalar::sum_block<decltype(type)>(codec, count, wire, n - at, output.out + at);
  });
}

}  // namespace zcomm
