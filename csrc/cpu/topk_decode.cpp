#include <algorithm>

#include "cpu/topk.h"

namespace zcomm {
namespace {

// For what bounds an access. In memory that ranks share, the next read may find another value, so
// the compiler must not read it again either: what passed through here it no longer knows.
template <class T>
T load_once(const std::uint8_t* p) {
  T x = load<T>(p);
  asm volatile("" : "+r"(x));
  return x;
}

struct Entries {
  const std::uint8_t *offsets, *values;
  std::uint32_t count;  // in this range
};

// Checks every count of the segment; entries of this range in `entries`.
std::optional<TopkFault> open_range(const Segment& segment, const std::uint8_t* wire, int w,
                                    std::int64_t range, Entries& entries) {
  const std::uint8_t* counts = wire + segment.section(0);
  const std::int64_t ranges = (segment.n + kTopkRange - 1) / kTopkRange;
  std::int64_t total = 0, before = 0, flagged = 0;
  std::uint32_t mine = 0;
  for (std::int64_t r = 0; r < ranges; ++r) {
    const auto count = load_once<std::uint32_t>(counts + 4 * r);
    if (r == range) {
      before = total;
      mine = count;
    }
    if (count == kTopkNotFinite) {
      ++flagged;
    } else if (count > std::min(kTopkRange, segment.n - r * kTopkRange)) {
      return TopkFault{w, "a topk count within its range", count};
    } else {
      total += count;
    }
  }
  if (flagged != 0 && (flagged != ranges || total != 0)) {
    return TopkFault{w, "all topk counts or none to be flagged",
                     static_cast<std::uint64_t>(flagged)};
  }
  if (flagged == 0 && total != segment.k) {
    return TopkFault{w, "topk counts that add up to k", static_cast<std::uint64_t>(total)};
  }
  entries = {wire + segment.section(1) + 2 * before, wire + segment.section(2) + 2 * before, mine};
  return {};
}

std::optional<TopkFault> add_entries(const Entries& entries, int w, std::int64_t n, float* out) {
  std::int64_t last = -1;
  for (std::uint32_t i = 0; i < entries.count; ++i) {
    const std::int64_t at = load_once<std::uint16_t>(entries.offsets + 2 * i);
    const auto value = load<std::uint16_t>(entries.values + 2 * i);
    if (at <= last || at >= n) {
      return TopkFault{w, "topk offsets that increase within their range",
                       static_cast<std::uint64_t>(at)};
    }
    if ((value & 0x7fff) > kBf16Max || value == 0x8000) {
      return TopkFault{w, "a finite topk value that is not -0", value};
    }
    out[at] = w == 0 ? bf16_value(value) : out[at] + bf16_value(value);
    last = at;
  }
  return {};
}

bool all_zero(const std::uint8_t* p, std::int64_t nbytes) {
  return std::all_of(p, p + nbytes, [](std::uint8_t b) { return b == 0; });
}

}  // namespace

std::optional<TopkFault> decode_topk(const DecodeArgs& args, const Task& task) {
  const Segment& segment = args.layout->segments[task.segment];
  const std::int64_t n = task.end - task.begin, range = task.begin / kTopkRange;
  float* out = args.out + segment.offset + task.begin;
  std::fill_n(out, n, 0.0f);
  bool not_finite = false;
  for (int w = 0; w < args.count; ++w) {
    Entries entries;
    if (auto fault = open_range(segment, args.wire(w, segment.frame), w, range, entries))
      return fault;
    if (entries.count == kTopkNotFinite) {
      const std::int64_t at = segment.section(1), end = segment.body + segment.sections.nbytes();
      if (range == 0 && !all_zero(args.wire(w, segment.frame) + at, end - at)) {
        return TopkFault{w, "no topk entries in a segment that is not finite", 1};
      }
      not_finite = true;
    } else if (auto fault = add_entries(entries, w, n, out)) {
      return fault;
    }
  }
  if (not_finite) std::fill_n(out, n, from_bits(kNanBits));
  return {};
}

}  // namespace zcomm
