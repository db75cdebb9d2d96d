// Where the segments of a bucket lie in the gradient and on the wire.
#pragma once

#include <cstdint>

#include "codec/frame.h"
#include "cpu/counted.h"

namespace zcomm {

struct Segment {
  std::uint8_t codec;
  int log2_block;  // 0 for a codec without blocks
  std::int64_t n, k, offset;
  int frame;
  std::int64_t body;  // from the start of the wire
  Sections sections;

  std::int64_t section(int i) const { return body + sections.start(i); }
};

struct Frame {
  std::int64_t start, nbytes;
  std::uint8_t codec;
  std::int64_t elements;
  std::uint32_t hash;
};

// Elements [begin, end) of a segment; begin is a multiple of kTaskSize.
struct Task {
  int segment;
  std::int64_t begin, end;
};

inline constexpr std::int64_t kTaskSize = kTopkRange;

// One call's work, cut into tasks. Throws std::invalid_argument if the parts do not fit.
class Layout {
 public:
  Layout(CountedVector<Segment> segments, CountedVector<Frame> frames);

  CountedVector<Segment> segments;
  CountedVector<Frame> frames;
  CountedVector<Task> tasks;       // of all codecs but topk
  CountedVector<Task> topk_tasks;  // whole segments, in order

 private:
  void check_segment(Segment& segment, std::int64_t body) const;
  void add_tasks(int segment);
};

// The sum over the whole words of section `i` that elements [begin, end) own: the padding belongs
// to the last of them.
struct ByteRange {
  std::int64_t begin, end;  // from the start of the section
};
ByteRange section_range(const Segment& segment, int i, std::int64_t begin, std::int64_t end);

}  // namespace zcomm
