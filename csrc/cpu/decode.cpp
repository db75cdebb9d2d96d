#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "cpu/blocks.h"
#include "cpu/encode.h"
#include "cpu/pool.h"
#include "cpu/topk.h"

namespace zcomm {
namespace {

constexpr std::int64_t kStreamElements = 4 << 20;  // more output than this goes past the cache
constexpr const char* kNames[kCodecs] = {"",     "none", "bf16", "fp16", "int8", "fp8",
                                         "int4", "lm4",  "lm3",  "lm2",  "sign", "topk"};

std::string codec_name(std::uint8_t id) {
  if (id == kMixed) return "mixed";
  if (id == 0) return "no segments";
  return id < kCodecs ? kNames[id] : "unknown codec " + std::to_string(id);
}

std::string hex(std::uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

std::string expected_got(const std::string& what, const std::string& expected,
                         const std::string& got) {
  return "expected " + what + (expected.empty() ? "" : " ") + expected + ", got " + got;
}

std::optional<std::string> check_header(const Frame& frame, const std::uint8_t* at, bool verify) {
  const Header h = load<Header>(at);
  const auto units = static_cast<std::uint32_t>(frame.nbytes / 16);
  if (std::memcmp(h.magic, kMagic, sizeof kMagic)) {
    return expected_got("magic", hex(load<std::uint32_t>(kMagic)),
                        hex(load<std::uint32_t>(h.magic)));
  }
  if (h.version != kVersion) {
    return expected_got("version", std::to_string(kVersion), std::to_string(h.version));
  }
  if (h.codec != frame.codec) {
    return expected_got("codec", codec_name(frame.codec), codec_name(h.codec));
  }
  if (h.flags & ~kHasChecksum) return expected_got("flags", "0 or 1", std::to_string(h.flags));
  if (verify && !(h.flags & kHasChecksum)) {
    return expected_got("a checksum", "", "a frame without one");
  }
  if (h.elements != static_cast<std::uint64_t>(frame.elements)) {
    return expected_got("elements", std::to_string(frame.elements), std::to_string(h.elements));
  }
  if (h.units != units) {
    return expected_got("frame bytes", std::to_string(frame.nbytes),
                        std::to_string(16ull * h.units));
  }
  if (h.layout != frame.hash) return expected_got("layout", hex(frame.hash), hex(h.layout));
  if (!(h.flags & kHasChecksum) && h.checksum != 0) {
    return expected_got("checksum field", "0 in a frame without checksum", hex(h.checksum));
  }
  return {};
}

// Keeps the fault of the lowest wire and task, so that the message does not depend on threads.
class Faults {
 public:
  void add(std::size_t task, Fault fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_ && std::pair(fault_->wire, task_) <= std::pair(fault.wire, task)) return;
    fault_ = std::move(fault);
    task_ = task;
  }
  std::optional<Fault> take() { return std::move(fault_); }

 private:
  std::mutex mutex_;
  std::size_t task_ = 0;
  std::optional<Fault> fault_;
};

class Decoder {
 public:
  explicit Decoder(const DecodeArgs& args)
      : args_(args), layout_(*args.layout), sums_(layout_.frames.size() * args.count) {
    std::int64_t elements = 0;
    for (const Frame& frame : layout_.frames) elements += frame.elements;
    stream_ = elements > kStreamElements;
  }

  std::optional<Fault> run() {
    if (auto fault = check_headers()) return fault;
    const std::size_t plain = layout_.tasks.size(), all = plain + layout_.topk_tasks.size();
    parallel_for(args_.threads, all, [&](std::size_t i) {
      if (i < plain) {
        decode_task(i, layout_.tasks[i]);
      } else {
        topk_task(i, layout_.topk_tasks[i - plain]);
      }
    });
    if (auto fault = check_sums()) return fault;
    return faults_.take();
  }

 private:
  std::optional<Fault> check_headers() const {
    for (int w = 0; w < args_.count; ++w) {
      for (std::size_t f = 0; f < layout_.frames.size(); ++f) {
        const Frame& frame = layout_.frames[f];
        if (auto text = check_header(frame, args_.wire(w, f) + frame.start, args_.verify)) {
          return Fault{w, *text, f, {}};
        }
      }
    }
    return {};
  }

  void refuse(int w, std::size_t task, const Segment& segment, const std::string& text) {
    const std::size_t index = &segment - layout_.segments.data();
    faults_.add(task, Fault{w, text, {}, index});
  }

  std::optional<Fault> check_sums() const {
    if (!args_.verify) return {};
    for (int w = 0; w < args_.count; ++w) {
      for (std::size_t f = 0; f < layout_.frames.size(); ++f) {
        const std::uint8_t* at = args_.wire(w, f) + layout_.frames[f].start;
        const auto got = load<std::uint64_t>(at + 24);
        const std::uint64_t sum = sums_[w * layout_.frames.size() + f];
        const std::uint64_t expected = sum + args_.kernels->checksum(at, 3, 0);
        if (got != expected) {
          return Fault{w, expected_got("checksum", hex(expected), hex(got)), f, {}};
        }
      }
    }
    return {};
  }

  // Adds bytes [at, at + nbytes) of a wire to its frame's sum; true if a code among them does not
  // occur.
  bool scan(std::uint8_t codec, int w, const Segment& segment, std::int64_t at,
            std::int64_t nbytes) {
    const std::int64_t word = (at - layout_.frames[segment.frame].start) / 8;
    bool unused;
    const std::uint64_t sum =
        args_.kernels->scan[codec](args_.wire(w, segment.frame) + at, nbytes / 8, word, &unused);
    sums_[w * layout_.frames.size() + segment.frame].fetch_add(sum, std::memory_order_relaxed);
    return unused;
  }

  void decode_task(std::size_t index, const Task& task) {
    const Segment& segment = layout_.segments[task.segment];
    // Four blocks' scales make a word of the checksum.
    const std::int64_t step =
        std::max(elements_per_step(code_width(segment.codec)), 4 << segment.log2_block);
    for (std::int64_t a = task.begin; a < task.end; a += step) {
      const std::int64_t end = std::min(task.end, a + step);
      const bool tame = has_blocks(segment.codec) ? check_blocks(index, segment, a, end)
                                                  : check_plain(segment, a, end);
      decode_step(segment, a, static_cast<int>(end - a), tame);
    }
    if (task.end == segment.n) check_padding(index, segment);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // streamed stores before the caller reads
  }

  bool check_plain(const Segment& segment, std::int64_t a, std::int64_t end) {
    const ByteRange range = section_range(segment, 0, a, end);
    for (int w = 0; w < args_.count && args_.verify; ++w) {
      scan(0, w, segment, segment.section(0) + range.begin, range.end - range.begin);
    }
    return true;
  }

  bool stream_to(const float* out) const {
    return stream_ && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
  }

  void decode_step(const Segment& segment, std::int64_t a, int n, bool tame) const {
    constexpr int kStack = 64;  // wires; more are rare and take the heap
    float* out = args_.out + segment.offset + a;
    const std::int64_t codes = a * code_width(segment.codec) / 8;
    if (has_blocks(segment.codec)) {
      const std::int64_t scales = (a >> segment.log2_block) * 2;
      BlockWire stack[kStack];
      std::vector<BlockWire> heap(args_.count > kStack ? args_.count : 0);
      BlockWire* wires = heap.empty() ? stack : heap.data();
      for (int w = 0; w < args_.count; ++w) {
        wires[w] = {args_.wire(w, segment.frame) + segment.section(0) + scales,
                    args_.wire(w, segment.frame) + segment.section(1) + codes};
      }
      decode_tile(*args_.kernels, segment.codec, segment.log2_block, wires, args_.count, n,
                  {out, stream_to(out), !tame});
    } else {
      const std::uint8_t* stack[kStack];
      std::vector<const std::uint8_t*> heap(args_.count > kStack ? args_.count : 0);
      const std::uint8_t** wires = heap.empty() ? stack : heap.data();
      for (int w = 0; w < args_.count; ++w) {
        wires[w] = args_.wire(w, segment.frame) + segment.section(0) + codes;
      }
      args_.kernels->decode_plain[segment.codec](wires, args_.count, n, out, stream_to(out));
    }
  }

  // Looks at the scales and codes of elements [a, end) of all wires; true if all scales are tame.
  bool check_blocks(std::size_t task, const Segment& segment, std::int64_t a, std::int64_t end) {
    const std::int64_t b = std::int64_t{1} << segment.log2_block, blocks = (end - a + b - 1) / b;
    const ByteRange scales = section_range(segment, 0, a, end);
    const ByteRange codes = section_range(segment, 1, a, end);
    const std::int64_t scales_at = segment.section(0) + scales.begin;
    const std::int64_t codes_at = segment.section(1) + codes.begin;
    bool all_tame = true;
    for (int w = 0; w < args_.count; ++w) {
      if (args_.verify) scan(0, w, segment, scales_at, scales.end - scales.begin);
      if (scan(segment.codec, w, segment, codes_at, codes.end - codes.begin)) {
        refuse(w, task, segment, expected_got("codes that occur", "", "one that does not"));
      }
      if (args_.kernels->scales_are_tame(args_.wire(w, segment.frame) + scales_at, blocks))
        continue;
      all_tame = false;
      for (std::int64_t at = a; at < end; at += b) {
        check_block(task, segment, w, at, static_cast<int>(std::min(b, end - at)));
      }
    }
    return all_tame;
  }

  // One block of m elements, its scale first.
  void check_block(std::size_t task, const Segment& segment, int w, std::int64_t at, int m) {
    const std::uint8_t* wire = args_.wire(w, segment.frame);
    const auto scale =
        load<std::uint16_t>(wire + segment.section(0) + (at >> segment.log2_block) * 2);
    if (scale >= kScaleMin && scale <= kBf16Max) return;
    if (!scale_is_valid(scale)) {
      refuse(w, task, segment, expected_got("a scale", "that is zero, normal or NaN", hex(scale)));
      return;
    }
    const int width = code_width(segment.codec);
    const std::uint8_t* codes = wire + segment.section(1) + at * width / 8;
    const int nbytes = (codes_in_block(segment.codec, m) * width + 7) / 8;
    unsigned any = 0;  // no early end, so that it takes many codes at a time
    for (int i = 0; i < nbytes; ++i) any |= codes[i];
    if (any) {
      refuse(w, task, segment, expected_got("codes", "0 under scale " + hex(scale), "others"));
    }
  }

  void check_padding(std::size_t task, const Segment& segment) {
    for (int w = 0; w < args_.count; ++w) {
      bool clean = true;
      for (int i = 0; i < 3; ++i) {
        const std::uint8_t* section = args_.wire(w, segment.frame) + segment.section(i);
        const std::int64_t used = segment.sections.used[i];
        clean &= std::all_of(section + used, section + align16(used),
                             [](std::uint8_t byte) { return byte == 0; });
      }
      if (!clean || unused_bits(args_.wire(w, segment.frame), segment)) {
        refuse(w, task, segment, expected_got("padding", "0", "other bytes"));
      }
    }
  }

  // The bits of the last code byte that no code uses.
  static unsigned unused_bits(const std::uint8_t* wire, const Segment& segment) {
    if (!has_blocks(segment.codec)) return 0;
    const int rest = static_cast<int>(segment.n & ((1 << segment.log2_block) - 1));
    const int used = codes_in_block(segment.codec, rest) * code_width(segment.codec) % 8;
    return used ? wire[segment.section(1) + segment.sections.used[1] - 1] >> used : 0;
  }

  void topk_task(std::size_t index, const Task& task) {
    const Segment& segment = layout_.segments[task.segment];
    const std::int64_t i = task.begin / kTopkRange;
    const std::int64_t count = (segment.n + kTopkRange - 1) / kTopkRange;
    for (int w = 0; w < args_.count; ++w) {
      const ByteRange slice = topk_slice(segment, i, count);
      scan(0, w, segment, segment.body + slice.begin, slice.end - slice.begin);
    }
    if (const auto fault = decode_topk(args_, task)) {
      refuse(fault->wire, index, segment,
             expected_got(fault->expected, "", std::to_string(fault->got)));
    }
    if (task.end == segment.n) check_padding(index, segment);
  }

  const DecodeArgs& args_;
  const Layout& layout_;
  std::vector<std::atomic<std::uint64_t>> sums_;
  Faults faults_;
  bool stream_;
};

}  // namespace

std::optional<Fault> decode_sum(const DecodeArgs& args) { return Decoder(args).run(); }

}  // namespace zcomm
