#include "cpu/encode.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/blocks.h"
#include "cpu/pool.h"
#include "cpu/residual.h"
#include "cpu/topk.h"

namespace zcomm {
namespace {

// Wire bytes are summed while they are in the cache: every 4,096 elements end on a word in every
// section of every codec.
constexpr std::int64_t kChecksumStep = 4096;

// Small enough that v, e and the work buffers stay in L1; whole blocks. Long tiles hide more of the
// latency of what lm* does once per block.
int tile_elements(const Segment& segment) {
  return std::max(is_lm(segment.codec) ? kTileSize : 512, 1 << segment.log2_block);
}

void store_blocks(const ResidualTile& residual, const Segment& segment, std::int64_t a, int n,
                  const float* e, bool direct, const std::uint8_t* kept) {
  const int b = 1 << segment.log2_block, blocks = (n + b - 1) / b;
  if (std::none_of(kept, kept + blocks, [](std::uint8_t k) { return k; })) {
    if (!direct) residual.store(a, n, e);
    return;
  }
  for (int j = 0; j < blocks; ++j) {
    const int at = j * b, m = std::min(b, n - at);
    if (kept[j]) {
      residual.keep(a + at, m);
    } else if (!direct) {
      residual.store(a + at, m, e + at);
    }
  }
}

void encode_block_tile(const EncodeArgs& args, const Segment& segment, const ResidualTile& residual,
                       std::int64_t a, int n) {
  alignas(64) float loaded[kTileSize], buffer[kTileSize];
  std::uint8_t kept[kTileBlocks] = {};
  const float* const v = residual.values(a, n, loaded);
  float* const direct = residual.direct(a);
  float* const e = direct ? direct : residual.any() ? buffer : nullptr;
  encode_tile(*args.kernels, segment.codec, segment.log2_block, v, n,
              args.wire + segment.section(0) + (a >> segment.log2_block) * 2,
              args.wire + segment.section(1) + a * code_width(segment.codec) / 8, e, kept,
              residual.ahead(a + n));
  if (residual.any()) store_blocks(residual, segment, a, n, e, direct != nullptr, kept);
}

void encode_plain_tile(const EncodeArgs& args, const Segment& segment, const ResidualTile& residual,
                       std::int64_t a, int n) {
  alignas(64) float v[kTileSize], e[kTileSize], r[kTileSize];
  residual.load(a, n, v);
  std::uint8_t* codes = args.wire + segment.section(0) + a * code_width(segment.codec) / 8;
  const bool not_finite =
      args.kernels->encode_plain[segment.codec](v, n, codes, residual.any() ? e : nullptr);
  if (!residual.any()) return;
  if (!not_finite) return residual.store(a, n, e);
  if (args.residual_type == kResidualInt8) {
    residual.read(a, n, r);
    for (int i = 0; i < n; ++i) e[i] = finite(v[i]) ? e[i] : r[i];
    return residual.store(a, n, e);
  }
  for (int i = 0; i < n; ++i)
    finite(v[i]) ? residual.store(a + i, 1, e + i) : residual.keep(a + i, 1);
}

void clear_padding(const EncodeArgs& args, const Segment& segment) {
  for (int i = 0; i < 3; ++i) {
    const std::int64_t used = segment.sections.used[i];
    std::memset(args.wire + segment.section(i) + used, 0, align16(used) - used);
  }
}

std::uint64_t sum_sections(const EncodeArgs& args, const Segment& segment, std::int64_t begin,
                           std::int64_t end) {
  std::uint64_t sum = 0;
  for (int i = 0; i < (has_blocks(segment.codec) ? 2 : 1); ++i) {
    const ByteRange range = section_range(segment, i, begin, end);
    const std::int64_t at = segment.section(i) + range.begin;
    const std::int64_t word = (at - args.layout->frames[segment.frame].start) / 8;
    sum += args.kernels->checksum(args.wire + at, (range.end - range.begin) / 8, word);
  }
  return sum;
}

std::uint64_t encode_task(const EncodeArgs& args, const Task& task) {
  const Segment& segment = args.layout->segments[task.segment];
  const ResidualTile residual(args, task.segment);
  const int tile = tile_elements(segment);
  std::uint64_t sum = 0;
  if (task.end == segment.n) {
    clear_padding(args, segment);
    residual.clear_padding();
  }
  for (std::int64_t step = task.begin; step < task.end; step += kChecksumStep) {
    const std::int64_t end = std::min(task.end, step + kChecksumStep);
    for (std::int64_t a = step; a < end; a += tile) {
      const int n = static_cast<int>(std::min<std::int64_t>(tile, end - a));
      if (has_blocks(segment.codec)) {
        encode_block_tile(args, segment, residual, a, n);
      } else {
        encode_plain_tile(args, segment, residual, a, n);
      }
    }
    if (args.checksum) sum += sum_sections(args, segment, step, end);
  }
  return sum;
}

// Whether all elements are +0 or -0. The usual answer comes from the first few.
bool all_zero(const EncodeArgs& args, const Segment& segment) {
  const std::uint32_t bytes = args.grad_type == kGradF32 ? 4 : 2;
  const std::uint8_t* grad = args.grad + segment.offset * bytes;
  constexpr std::int64_t kStep = 1024;
  for (std::int64_t a = 0; a < segment.n; a += kStep) {
    const std::int64_t n = std::min(kStep, segment.n - a);
    std::uint32_t any = 0;
    for (std::int64_t i = a; i < a + n; ++i) {
      any |= bytes == 4 ? load<std::uint32_t>(grad + i * 4) << 1
                        : std::uint32_t{load<std::uint16_t>(grad + i * 2)} << 17;
    }
    if (any) return false;
  }
  return true;
}

// Which segments are idle. Their residuals are kept here, before anything is encoded.
std::vector<std::uint8_t> keep_idle_residuals(const EncodeArgs& args) {
  if (!args.keep_idle || args.residual_type == kResidualNone) return {};
  const CountedVector<Segment>& segments = args.layout->segments;
  std::vector<std::uint8_t> idle(segments.size());
  parallel_for(args.threads, segments.size(), [&](std::size_t i) {
    if (!args.residual_in[i] || !all_zero(args, segments[i])) return;
    const ResidualTile residual(args, static_cast<int>(i));
    for (std::int64_t a = 0; a < segments[i].n; a += kTaskSize) {
      residual.keep(a, static_cast<int>(std::min(kTaskSize, segments[i].n - a)));
    }
    residual.clear_padding();
    idle[i] = 1;
  });
  return idle;
}

void write_header(const EncodeArgs& args, const Frame& frame, std::uint64_t body_sum) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.codec = frame.codec;
  header.flags = args.checksum ? kHasChecksum : 0;
  header.elements = static_cast<std::uint64_t>(frame.elements);
  header.units = static_cast<std::uint32_t>(frame.nbytes / 16);
  header.layout = frame.hash;
  std::uint8_t* to = args.wire + frame.start;
  std::memcpy(to, &header, sizeof header);
  if (args.checksum) store(to + 24, body_sum + args.kernels->checksum(to, 3, 0));
}

}  // namespace

void encode(const EncodeArgs& given) {
  EncodeArgs args = given;
  const std::vector<std::uint8_t> idle = keep_idle_residuals(given);
  if (!idle.empty()) args.idle = idle.data();
  const Layout& layout = *args.layout;
  std::vector<std::atomic<std::uint64_t>> sums(layout.frames.size());
  parallel_for(args.threads, layout.tasks.size(), [&](std::size_t i) {
    const Task& task = layout.tasks[i];
    sums[layout.segments[task.segment].frame] += encode_task(args, task);
  });
  if (!layout.topk_tasks.empty()) encode_topk(args, sums.data());
  for (std::size_t i = 0; i < sums.size(); ++i) write_header(args, layout.frames[i], sums[i]);
}

}  // namespace zcomm
