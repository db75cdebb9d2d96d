#include "cpu/layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace zcomm {

Layout::Layout(CountedVector<Segment> s, CountedVector<Frame> f)
    : segments(std::move(s)), frames(std::move(f)) {
  std::vector<std::int64_t> next;
  std::int64_t start = 0;
  for (const Frame& frame : frames) {
    if (frame.start != start || frame.nbytes < 32 || frame.nbytes % 16) {
      throw std::invalid_argument("layout: frames must follow each other in units of 16 bytes");
    }
    next.push_back(start + static_cast<std::int64_t>(sizeof(Header)));
    start += frame.nbytes;
  }
  for (int i = 0; i < static_cast<int>(segments.size()); ++i) {
    Segment& segment = segments[i];
    if (segment.frame < 0 || segment.frame >= static_cast<int>(frames.size())) {
      throw std::invalid_argument("layout: a segment names a frame that is not there");
    }
    check_segment(segment, next[segment.frame]);
    next[segment.frame] += segment.sections.nbytes();
    add_tasks(i);
  }
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (next[i] != frames[i].start + frames[i].nbytes) {
      throw std::invalid_argument("layout: expected a frame of " +
                                  std::to_string(next[i] - frames[i].start) + " bytes, got " +
                                  std::to_string(frames[i].nbytes));
    }
  }
}

void Layout::check_segment(Segment& segment, std::int64_t body) const {
  const bool known = segment.codec >= kNone && segment.codec < kCodecs;
  const bool block =
      known && (has_blocks(segment.codec) ? segment.log2_block >= 5 && segment.log2_block <= 10
                                          : segment.log2_block == 0);
  constexpr std::int64_t limit = std::int64_t{1} << 40;
  if (!block || segment.n < 0 || segment.n > limit || segment.k < 0 || segment.k > segment.n ||
      segment.offset < 0) {
    throw std::invalid_argument("layout: a segment's codec, block or size is out of range");
  }
  segment.sections = sections(segment.codec, segment.log2_block, segment.n, segment.k);
  if (segment.body != body) {
    throw std::invalid_argument("layout: expected a segment's body at byte " +
                                std::to_string(body) + ", got " + std::to_string(segment.body));
  }
}

void Layout::add_tasks(int i) {
  const Segment& segment = segments[i];
  auto& list = segment.codec == kTopk ? topk_tasks : tasks;
  for (std::int64_t begin = 0; begin < segment.n; begin += kTaskSize) {
    list.push_back({i, begin, std::min(segment.n, begin + kTaskSize)});
  }
}

ByteRange section_range(const Segment& segment, int i, std::int64_t begin, std::int64_t end) {
  const auto at = [&](std::int64_t element) {
    if (i == 0 && has_blocks(segment.codec)) return (element >> segment.log2_block) * 2;
    return element * code_width(segment.codec) / 8;
  };
  return {at(begin), end == segment.n ? align16(segment.sections.used[i]) : at(end)};
}

}  // namespace zcomm
