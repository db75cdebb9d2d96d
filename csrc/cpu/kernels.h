// The primitives that each instruction set provides, and the table that holds them.
//
// They work on a tile: a few blocks, small enough to stay in the L1 cache between the steps
// load (gradient + residual -> v), encode (v -> codes, e) and store (e -> residual).
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/types.h"

namespace zcomm {

// One wire's scales and codes, from the first block of a tile on.
struct BlockWire {
  const std::uint8_t* scales;
  const std::uint8_t* codes;
};

// What the next tile will read. The kernels fetch it a block's share at a time between their
// arithmetic, so that memory and arithmetic overlap: a tile is longer than any reorder buffer.
struct Ahead {
  const std::uint8_t *grad, *residual;
  int grad_bytes, residual_bytes;  // per element

  // The share of block `block` of b elements.
  void fetch_grad(std::size_t block, int b) const { fetch(grad, grad_bytes, block, b); }
  void fetch_residual(std::size_t block, int b) const { fetch(residual, residual_bytes, block, b); }

 private:
  static void fetch(const std::uint8_t* from, int bytes, std::size_t block, int b) {
    const std::uint8_t* p = from + block * b * bytes;
    for (int i = 0; i < b * bytes; i += 64) __builtin_prefetch(p + i);
  }
};

// v[i] = grad[i] * prescale (+ residual[i]). v may be the residual itself.
using LoadTile = void (*)(const void* grad, float prescale, const void* residual, std::size_t n,
                          float* v);

// Encodes whole blocks. Writes e = v - d unless e is null; a block that is not finite sets its
// kept flag and leaves e alone.
using EncodeBlocks = void (*)(const float* v, std::size_t blocks, int log2_block,
                              std::uint8_t* scales, std::uint8_t* codes, float* e,
                              std::uint8_t* kept, const Ahead& ahead);

// How decoded values are written (past the cache or not), and whether any block has a scale of zero
// or NaN, or one so large that a sum may overflow.
struct Output {
  float* out;
  bool stream, wild;
};

// The sum over wires of whole blocks, in order.
using DecodeBlocks = void (*)(const BlockWire* wires, int count, std::size_t blocks, int log2_block,
                              const Output& output);

// none, bf16, fp16: writes codes and e = v - d; true if any v is not finite.
using EncodePlain = bool (*)(const float* v, std::size_t n, std::uint8_t* codes, float* e);

// out[i] = the sum over `count` wires of value i.
using DecodePlain = void (*)(const std::uint8_t* const* codes, int count, std::size_t n, float* out,
                             bool stream);

struct Kernels {
  LoadTile load[3][3];  // [GradType][ResidualType]; int8 residuals are decoded first
  void (*store_bf16)(const float* e, std::size_t n, void* residual);

  EncodePlain encode_plain[4];  // by codec id: none, bf16, fp16
  DecodePlain decode_plain[4];
  EncodeBlocks encode_blocks[11];  // by codec id: int8 ... sign
  DecodeBlocks decode_blocks[11];

  // The sum of word_i * (2 i + 1) over `count` 64-bit words of codes, the first having index
  // `first`; *unused: whether a code that does not occur is among them. By codec id; entry 0 is for
  // all other bytes.
  std::uint64_t (*scan[12])(const std::uint8_t* words, std::size_t count, std::uint64_t first,
                            bool* unused);
  std::uint64_t checksum(const std::uint8_t* words, std::size_t count, std::uint64_t first) const {
    bool unused;
    return scan[0](words, count, first, &unused);
  }
  // Whether all scales are normal and small enough that no sum of them can overflow.
  bool (*scales_are_tame)(const std::uint8_t* scales, std::size_t count);

  // topk: the indices of every |v| whose bits are >= least (at least 1), increasing; returns how
  // many. `index` has room for n + 16.
  std::size_t (*find)(const float* v, std::size_t n, std::uint32_t least, std::uint32_t* index,
                      const Ahead& ahead);
};

// Elements that are checked and then decoded in one step, for blocks of up to 512 and codes of this
// width: a few KiB of each wire. The decoder fetches this far ahead.
constexpr int elements_per_step(int width) { return width < 8 ? 8192 : 2048; }

// The largest tile, and how many blocks it can hold.
inline constexpr int kTileSize = 1024;
inline constexpr int kTileBlocks = 32;

extern const Kernels kScalarKernels, kAvx2Kernels, kAvx512Kernels;

enum Isa : int { kIsaScalar, kIsaAvx2, kIsaAvx512, kIsas };
inline constexpr const char* kIsaNames[kIsas] = {"scalar", "avx2", "avx512"};

// Null if this build or this processor lacks it.
const Kernels* kernels_for(int isa);
bool isa_is_built(int isa);

}  // namespace zcomm
