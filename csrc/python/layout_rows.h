// Layouts as Python describes them: a row of numbers for each segment and each frame.
#pragma once

#include <tuple>
#include <vector>

#include "cpu/layout.h"

namespace zcomm {

// codec, log2 of the block, n, k, offset, frame, body
using SegmentRows =
    std::vector<std::tuple<int, int, std::int64_t, std::int64_t, std::int64_t, int, std::int64_t>>;
// start, nbytes, codec, elements, hash
using FrameRows =
    std::vector<std::tuple<std::int64_t, std::int64_t, int, std::int64_t, std::uint32_t>>;

inline Layout layout_from_rows(const SegmentRows& segments, const FrameRows& frames) {
  CountedVector<Segment> s;
  s.reserve(segments.size());
  for (const auto& [codec, log2_block, n, k, offset, frame, body] : segments) {
    s.push_back({static_cast<std::uint8_t>(codec), log2_block, n, k, offset, frame, body, {}});
  }
  CountedVector<Frame> f;
  f.reserve(frames.size());
  for (const auto& [start, nbytes, codec, elements, hash] : frames) {
    f.push_back({start, nbytes, static_cast<std::uint8_t>(codec), elements, hash});
  }
  return {std::move(s), std::move(f)};
}

}  // namespace zcomm
