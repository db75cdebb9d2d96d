#include "cuda/plan.h"

#include <cstring>
#include <iterator>
#include <map>
#include <stdexcept>

#include "cuda/topk.h"

namespace zcomm::cuda {
namespace {

template <class T>
void append(std::string& bytes, const std::vector<T>& items) {
  bytes.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
  bytes.resize((bytes.size() + 15) & ~std::size_t{15});
}

std::int64_t place(std::int64_t& end, std::int64_t nbytes) {
  const std::int64_t at = end;
  end = align16(end + nbytes);
  return at;
}

constexpr Group kTopkGroup{Kernel::zc_topk_write, Kernel::zc_decode_topk, 0, 0};

// Which of a codec's kernels: 0 for blocks of up to 128 elements, then 256, 512, 1024.
int variant(const Segment& segment) { return segment.log2_block > 7 ? segment.log2_block - 7 : 0; }

Group kernels_of(std::uint8_t codec, int variant) {
  switch (codec) {
#define ZC_CASE(X, name, id) \
  case id:                   \
    return {Kernel::zc_encode_##name, Kernel::zc_decode_##name, 0, 0};
    ZC_EACH_PLAIN_CODEC(ZC_CASE, )
#undef ZC_CASE
#define ZC_CASE(X, name, id)                                                                  \
  case id: {                                                                                  \
    constexpr Kernel encode[] = {Kernel::zc_encode_##name##_1, Kernel::zc_encode_##name##_2,  \
                                 Kernel::zc_encode_##name##_4, Kernel::zc_encode_##name##_8}; \
    constexpr Kernel decode[] = {Kernel::zc_decode_##name##_1, Kernel::zc_decode_##name##_2,  \
                                 Kernel::zc_decode_##name##_4, Kernel::zc_decode_##name##_8}; \
    return {encode[variant], decode[variant], 0, 0};                                          \
  }
    ZC_EACH_BLOCK_CODEC(ZC_CASE, )
#undef ZC_CASE
    default:
      return kTopkGroup;
  }
}

std::uint32_t tile_count(const Segment& segment) {
  return static_cast<std::uint32_t>((segment.n + kTileElements - 1) / kTileElements);
}

DeviceFrame device_frame(const Frame& frame, std::uint32_t tiles) {
  DeviceFrame d{};
  d.start = frame.start;
  std::memcpy(d.header.magic, kMagic, sizeof kMagic);
  d.header.version = kVersion;
  d.header.codec = frame.codec;
  d.header.elements = static_cast<std::uint64_t>(frame.elements);
  d.header.units = static_cast<std::uint32_t>(frame.nbytes / 16);
  d.header.layout = frame.hash;
  d.tiles = tiles;
  return d;
}

DeviceSegment device_segment(const Segment& s) {
  DeviceSegment d{};
  d.n = s.n;
  d.k = s.k;
  d.offset = s.offset;
  for (int i = 0; i < 3; ++i) {
    d.section[i] = s.section(i);
    d.used[i] = s.sections.used[i];
  }
  d.log2_block = static_cast<std::uint32_t>(s.log2_block);
  const int residual_block = s.log2_block ? s.log2_block : kPlainResidualLog2Block;
  const Sections residual = sections(kInt8, residual_block, s.n, 0);
  d.residual_codes = residual.start(1);
  d.residual_used[0] = residual.used[0];
  d.residual_used[1] = residual.used[1];
  d.frame = static_cast<std::uint32_t>(s.frame);
  d.tiles = tile_count(s);
  return d;
}

}  // namespace

Plan::Plan(const Layout& layout)
    : topk(kTopkGroup),
      segments(static_cast<std::uint32_t>(layout.segments.size())),
      frames(static_cast<std::uint32_t>(layout.frames.size())),
      frame_tiles_(layout.frames.size()) {
  if (layout.segments.size() >= (1u << 24) || layout.frames.size() >= (1u << 24)) {
    throw std::invalid_argument("layout: expected less than 2^24 segments and frames");
  }
  add_tiles(layout);
  std::vector<DeviceSegment> device_segments;
  for (const Segment& s : layout.segments) {
    DeviceSegment d = device_segment(s);
    if (s.codec == kTopk) {
      if (s.n > kTopkMaxElements) {
        throw std::invalid_argument("layout: expected less than 2^32 elements in a topk segment");
      }
      d.topk_index = topk_segments_++;
      d.first_strip = topk_strips_;
      topk_strips_ += static_cast<std::int64_t>(d.tiles) * kWarps;
    }
    device_segments.push_back(d);
  }
  std::vector<DeviceFrame> device_frames;
  for (std::uint32_t f = 0; f < frames; ++f) {
    device_frames.push_back(device_frame(layout.frames[f], frame_tiles_[f]));
  }
  append(tables, device_segments);
  frames_at_ = static_cast<std::int64_t>(tables.size());
  append(tables, device_frames);
  tiles_at_ = static_cast<std::int64_t>(tables.size());
  append(tables, tiles_);
}

// The tiles of one launch are contiguous. A frame without elements gets an empty tile of `none`,
// which writes or checks its header.
void Plan::add_tiles(const Layout& layout) {
  std::map<std::pair<int, int>, std::vector<Tile>> by_kernel;
  for (std::uint32_t i = 0; i < segments; ++i) {
    const Segment& s = layout.segments[i];
    for (std::uint32_t t = 0; t < tile_count(s); ++t) {
      by_kernel[{s.codec, variant(s)}].push_back({i, t});
      ++frame_tiles_[s.frame];
    }
  }
  for (std::uint32_t f = 0; f < frames; ++f) {
    if (frame_tiles_[f] > 0) continue;
    by_kernel[{kNone, 0}].push_back({kNoSegment, f});
    frame_tiles_[f] = 1;
  }
  for (const auto& [key, list] : by_kernel) {
    if (list.size() > 0x7fffffffu) {
      throw std::invalid_argument("layout: expected less than 2^31 tiles of one codec");
    }
    Group group = kernels_of(static_cast<std::uint8_t>(key.first), key.second);
    group.first_tile = static_cast<std::int64_t>(tiles_.size());
    group.tiles = static_cast<std::uint32_t>(list.size());
    tiles_.insert(tiles_.end(), list.begin(), list.end());
    if (key.first == kTopk) {
      topk = group;
    } else {
      groups.push_back(group);
    }
  }
}

std::vector<Kernel> Plan::kernels() const {
  std::vector<Kernel> found{Kernel::zc_find_idle};
  for (const Group& group : groups) found.insert(found.end(), {group.encode, group.decode});
  if (topk.tiles > 0) {
    found.insert(found.end(), std::begin(kTopkEncode), std::end(kTopkEncode));
    found.push_back(topk.decode);
  }
  return found;
}

EncodeScratch Plan::encode_scratch() const {
  EncodeScratch s{};
  s.sums = place(s.nbytes, frames * 8);
  s.done = place(s.nbytes, frames * 4);
  s.idle = place(s.nbytes, segments);
  s.topk = place(s.nbytes, topk_segments_ * static_cast<std::int64_t>(sizeof(TopkSegment)));
  s.strips = place(s.nbytes, topk_strips_ * static_cast<std::int64_t>(sizeof(TopkStrip)));
  return s;
}

DecodeScratch Plan::decode_scratch(int wires) const {
  DecodeScratch s{};
  s.done = place(s.nbytes, frames * 4);
  s.sums = place(s.nbytes, std::int64_t{8} * frames * wires);
  return s;
}

Tables Plan::tables_at(std::uintptr_t address, const Group& group) const {
  return {reinterpret_cast<const DeviceSegment*>(address),
          reinterpret_cast<const DeviceFrame*>(address + frames_at_),
          reinterpret_cast<const Tile*>(address + tiles_at_) + group.first_tile};
}

}  // namespace zcomm::cuda
