// What hosts pass to kernels: plain structs, the tables of a layout, and the faults of a wire.
#pragma once

#include "codec/frame.h"
#include "codec/types.h"

namespace zcomm::cuda {

// A warp takes strips, a CTA tiles; all of a tile's strips are of one segment.
inline constexpr int kStripElements = 2048;
inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kTileElements = kStripElements * kWarps;
static_assert(kTopkRange % kTileElements == 0);

struct DeviceSegment {
  std::int64_t n, k, offset;
  std::int64_t section[3];                        // bytes from the start of the wire
  std::int64_t used[3];                           // bytes before padding
  std::int64_t residual_codes, residual_used[2];  // int8 storage
  std::int64_t first_strip;                       // topk: among the strips of the layout
  std::uint32_t frame, log2_block, topk_index, tiles;
};

struct DeviceFrame {
  std::int64_t start;
  Header header;        // without a checksum
  std::uint32_t tiles;  // of all its segments; a frame without segments has one empty tile
};

struct Tile {
  std::uint32_t segment;  // kNoSegment: the frame has no elements
  std::uint32_t index;    // its first element is index * kTileElements; or the frame's index
};
inline constexpr std::uint32_t kNoSegment = 0xffffffffu;

struct Tables {
  const DeviceSegment* segments;
  const DeviceFrame* frames;
  const Tile* tiles;  // of this launch
};

// Scratch memory is zero before and after every call, except `idle`: a call sets it before it reads
// it.
struct EncodeArgs {
  Tables tables;
  const std::uint8_t* grad;
  double prescale;
  const std::uint64_t* residual_in;  // an address per segment; 0: no residual
  const std::uint64_t* residual_out;
  std::uint8_t* wire;
  std::uint8_t* idle;   // per segment: the gradient is all zero, the residual is kept; or null
  std::uint64_t* sums;  // per frame: the checksum so far
  std::uint32_t* done;  // per frame: tiles
  struct TopkSegment* topk;
  struct TopkStrip* strips;
  std::int32_t grad_type, residual_type;
  bool checksum;
};

inline constexpr int kInlineWires = 64;

struct DecodeArgs {
  Tables tables;
  const std::uint8_t* wires[kInlineWires];
  const std::uint8_t* const* more_wires;  // the whole table, in device memory, if there are more
  std::int32_t count, frames;
  float* out;
  std::uint64_t* sums;   // per wire and frame
  std::uint32_t* done;   // per frame
  std::uint64_t* fault;  // the least fault; all ones if there is none
  bool verify;
};

// Why a wire is refused. The least fault is reported: headers first, then checksums, then bodies;
// within each kind, the first wire's.
enum FaultKind : std::uint32_t {
  kFaultHeader,  // detail: the field, below
  kFaultChecksum,
  kFaultScale,  // detail: the scale
  kFaultCode,
  kFaultCodesNotZero,  // detail: the scale
  kFaultPadding,
  kFaultTopkCount,
  kFaultTopkFlags,
  kFaultTopkTotal,
  kFaultTopkOffset,  // detail: the offset
  kFaultTopkValue,   // detail: the value
  kFaultTopkEntries,
};
enum HeaderField : std::uint32_t {
  kFieldMagic,
  kFieldVersion,
  kFieldCodec,
  kFieldFlags,
  kFieldNoChecksum,
  kFieldElements,
  kFieldUnits,
  kFieldLayout,
  kFieldChecksum,
};

// stage (2 bits), wire (14), segment or frame (24), kind (8), detail (16)
ZC_FN std::uint64_t fault_key(std::uint32_t kind, int wire, std::uint32_t index,
                              std::uint32_t detail) {
  const std::uint64_t stage = kind < 2 ? kind : 2;
  return stage << 62 | static_cast<std::uint64_t>(wire) << 48 |
         static_cast<std::uint64_t>(index & 0xffffffu) << 24 |
         static_cast<std::uint64_t>(kind) << 16 | (detail & 0xffffu);
}

}  // namespace zcomm::cuda
