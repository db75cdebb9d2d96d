// A tile of a codec with blocks: whole blocks by the instruction set, a short last one by scalar.
#pragma once

#include "cpu/kernels.h"

namespace zcomm {

// n is a multiple of the block size, or reaches the end of the segment.
void encode_tile(const Kernels& kernels, std::uint8_t codec, int log2_block, const float* v, int n,
                 std::uint8_t* scales, std::uint8_t* codes, float* e, std::uint8_t* kept,
                 const Ahead& ahead);

void decode_tile(const Kernels& kernels, std::uint8_t codec, int log2_block, const BlockWire* wires,
                 int count, int n, const Output& output);

}  // namespace zcomm
