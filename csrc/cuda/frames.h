// What the tiles of a frame share: the checksum, paddings, and the header, which the last tile
// writes or checks.
#pragma once

#include "cuda/codes.h"
#include "cuda/warp.h"

namespace zcomm::cuda {

ZC_FN std::uint64_t header_sum(const std::uint8_t* header) {
  std::uint64_t sum = 0;
  ZC_UNROLL for (int i = 0; i < 3; ++i) sum += read<std::uint64_t>(header + 8 * i) * (2 * i + 1);
  return sum;
}

// True in the last thread of all tiles of a frame to arrive here. Its atomic reads see everything
// that the others wrote with atomics before.
ZC_FN bool is_last(std::uint32_t* done, std::uint32_t tiles) {
  __threadfence();
  if (atomicAdd(done, 1u) + 1 != tiles) return false;
  atomicExch(done, 0u);
  __threadfence();
  return true;
}

// Adds the CTA's part of the checksum to the frame; its last tile writes the header. All threads
// call it.
ZC_FN void finish_encode(const EncodeArgs& args, std::uint32_t frame_index, std::uint64_t part) {
  __shared__ std::uint64_t parts[kWarps];
  part = warp_sum(part);
  if (lane_index() == 0) parts[warp_index()] = part;
  __syncthreads();
  if (threadIdx.x != 0) return;
  const DeviceFrame& frame = args.tables.frames[frame_index];
  std::uint64_t sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += parts[w];
  if (args.checksum) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.sums + frame_index), sum);
  }
  if (!is_last(args.done + frame_index, frame.tiles)) return;
  Header header = frame.header;
  if (args.checksum) {
    auto* total = reinterpret_cast<unsigned long long*>(args.sums + frame_index);
    header.flags = kHasChecksum;
    header.checksum = 0;
    header.checksum =
        atomicExch(total, 0ull) + header_sum(reinterpret_cast<std::uint8_t*>(&header));
  }
  std::uint8_t words[sizeof header];
  memcpy(words, &header, sizeof header);
  for (unsigned i = 0; i < sizeof header; i += 8) {
    write(args.wire + frame.start + i, load<std::uint64_t>(words + i));
  }
}

ZC_FN std::uint64_t section_weight(const Tables& tables, const DeviceSegment& segment, int i) {
  const std::int64_t at = segment.section[i] - tables.frames[segment.frame].start;
  return static_cast<std::uint64_t>(2 * (at >> 3) + 1);
}

ZC_FN Section section_of(const EncodeArgs& args, const DeviceSegment& segment, int i) {
  return {args.wire + segment.section[i], section_weight(args.tables, segment, i), segment.used[i]};
}

// The part of a section from `byte` on, a multiple of 16.
ZC_FN TileSection from_byte(const Section& section, std::int64_t byte) {
  constexpr std::int64_t most = 1 << 30;  // more than a tile has
  const std::int64_t left = section.used - byte;
  return {section.bytes + byte, section.weight + static_cast<std::uint64_t>(byte >> 3 << 1),
          static_cast<int>(left < most ? left : most)};
}

// Zeroes what follows `used` bytes up to a multiple of 16; for one warp.
ZC_FN void clear_padding(std::uint8_t* bytes, std::int64_t used) {
  const std::int64_t at = used + lane_index();
  if (at < align16(used)) bytes[at] = 0;
}

ZC_FN const std::uint8_t* wire_of(const DecodeArgs& args, int w) {
  return args.more_wires ? args.more_wires[w] : args.wires[w];
}

ZC_FN void refuse(const DecodeArgs& args, std::uint32_t kind, int wire, std::uint32_t index,
                  std::uint32_t detail) {
  atomicMin(reinterpret_cast<unsigned long long*>(args.fault),
            static_cast<unsigned long long>(fault_key(kind, wire, index, detail)));
}

// The first field of a header that is not as expected, or -1.
ZC_FN int wrong_field(const Header& h, const Header& expected, bool verify) {
  for (int i = 0; i < 4; ++i) {
    if (h.magic[i] != expected.magic[i]) return kFieldMagic;
  }
  if (h.version != expected.version) return kFieldVersion;
  if (h.codec != expected.codec) return kFieldCodec;
  if (h.flags & ~kHasChecksum) return kFieldFlags;
  if (verify && !(h.flags & kHasChecksum)) return kFieldNoChecksum;
  if (h.elements != expected.elements) return kFieldElements;
  if (h.units != expected.units) return kFieldUnits;
  if (h.layout != expected.layout) return kFieldLayout;
  if (!(h.flags & kHasChecksum) && h.checksum != 0) return kFieldChecksum;
  return -1;
}

// Checks the header of wire w, and the sum of its body.
ZC_FN void check_frame(const DecodeArgs& args, std::uint32_t frame_index, int w) {
  const DeviceFrame& frame = args.tables.frames[frame_index];
  const std::uint8_t* at = wire_of(args, w) + frame.start;
  Header header;
  std::uint8_t words[sizeof header];
  for (unsigned i = 0; i < sizeof header; i += 8) store(words + i, read<std::uint64_t>(at + i));
  memcpy(&header, words, sizeof header);
  const int field = wrong_field(header, frame.header, args.verify);
  if (field >= 0) refuse(args, kFaultHeader, w, frame_index, static_cast<std::uint32_t>(field));
  if (!args.verify) return;
  auto* sum = reinterpret_cast<unsigned long long*>(
      args.sums + static_cast<std::int64_t>(w) * args.frames + frame_index);
  const std::uint64_t expected = atomicExch(sum, 0ull) + header_sum(words);
  if (expected != header.checksum) refuse(args, kFaultChecksum, w, frame_index, 0);
}

// Adds the CTA's parts of the wires' checksums (`parts`, in shared memory) to the frame; its last
// tile checks headers and checksums. All threads call it.
ZC_FN void finish_decode(const DecodeArgs& args, std::uint32_t frame_index,
                         const unsigned long long* parts) {
  __shared__ bool last;
  __syncthreads();
  for (int w = static_cast<int>(threadIdx.x); w < args.count && args.verify; w += kThreads) {
    auto* sum = reinterpret_cast<unsigned long long*>(
        args.sums + static_cast<std::int64_t>(w) * args.frames + frame_index);
    atomicAdd(sum, parts[w]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    last = is_last(args.done + frame_index, args.tables.frames[frame_index].tiles);
  __syncthreads();
  if (!last) return;
  for (int w = static_cast<int>(threadIdx.x); w < args.count; w += kThreads) {
    check_frame(args, frame_index, w);
  }
}

ZC_FN Section section_of(const DecodeArgs& args, const DeviceSegment& segment, int i, int w) {
  return {const_cast<std::uint8_t*>(wire_of(args, w)) + segment.section[i],
          section_weight(args.tables, segment, i), segment.used[i]};
}

// Padding bytes of a section must be 0; for one warp. They count toward the checksum, unless the
// section's last piece of `piece_nbytes` already included them.
ZC_FN std::uint64_t check_padding(const DecodeArgs& args, const Section& section, int w,
                                  std::uint32_t segment, int piece_nbytes) {
  const std::int64_t at = section.used + lane_index();
  if (at >= align16(section.used) || section.bytes[at] == 0) return 0;
  refuse(args, kFaultPadding, w, segment, 0);
  const std::int64_t counted = (section.used + piece_nbytes - 1) & -std::int64_t{piece_nbytes};
  return at < counted ? 0 : checksum_part(section.bytes[at], section.weight, at);
}

}  // namespace zcomm::cuda
