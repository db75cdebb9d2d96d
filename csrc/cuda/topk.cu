// topk: the k-th largest magnitude of each segment by three histograms, then entries in the order
// of elements. Five launches over the same tiles. What a tile must know about the others of its
// segment, the last tile of a launch computes for the next one. No tile waits.
#include "cuda/topk_threshold.h"

namespace zcomm::cuda {

// Writes the entries of a row, and e. Entries begin at next.position, and next.ties of the elements
// at the threshold are among them.
ZC_FN std::uint64_t write_entries(const Section& offsets, const Section& values,
                                  std::uint32_t threshold, int first, const float v[4],
                                  TopkStrip& next, float e[4]) {
  const unsigned lower = (1u << lane_index()) - 1;
  bool above[4], equal[4];
  std::uint32_t above_before = 0, above_total = 0, equal_before = 0, equal_total = 0;
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    const std::uint32_t u = bits(v[j]) & kAbsMask;
    above[j] = u > threshold;
    equal[j] = u == threshold;
    const unsigned are_above = __ballot_sync(kAllLanes, above[j]);
    const unsigned are_equal = __ballot_sync(kAllLanes, equal[j]);
    above_before += __popc(are_above & lower), above_total += __popc(are_above);
    equal_before += __popc(are_equal & lower), equal_total += __popc(are_equal);
  }
  std::uint64_t sum = 0;
  ZC_UNROLL for (int j = 0; j < 4; ++j) {
    e[j] = v[j];
    if (above[j] || (equal[j] && equal_before < next.ties)) {
      const std::uint32_t ties = equal_before < next.ties ? equal_before : next.ties;
      const std::int64_t byte = 2 * static_cast<std::int64_t>(next.position + above_before + ties);
      const std::uint16_t value = topk_value(v[j]);
      e[j] = v[j] - bf16_value(value);
      sum += write_piece(offsets, byte, static_cast<std::uint16_t>(first + j));
      sum += write_piece(values, byte, value);
    }
    above_before += above[j];
    equal_before += equal[j];
  }
  const std::uint32_t ties = equal_total < next.ties ? equal_total : next.ties;
  next.position += above_total + ties;
  next.ties -= ties;
  return sum;
}

ZC_FN std::uint64_t write_strip(const EncodeArgs& args, const Strip& strip,
                                const DeviceSegment& segment, const Residual& residual) {
  const std::uint32_t threshold = args.topk[segment.topk_index].prefix;
  TopkStrip next = args.strips[segment.first_strip + (strip.tile + strip.begin) / kStripElements];
  const Section offsets = section_of(args, segment, 1), values = section_of(args, segment, 2);
  std::uint64_t sum = 0;
  const int from_range = static_cast<int>(strip.tile % kTopkRange);
  const auto write_row = [&](int a, const Place<1>& place, const float v[4]) {
    const int first = a + 4 * lane_index();
    float e[1][4];
    sum += write_entries(offsets, values, threshold, from_range + first, v, next, e[0]);
    if (residual.type == kResidualNone) return;
    write_residual<1>(residual, place, first, a / kRow, false, e);
  };
  for_each_row(args, strip, segment, residual, write_row);
  return sum;
}

// A segment that is not finite keeps its residual.
ZC_FN void keep_strip(const Strip& strip, const Residual& residual) {
  if (residual.type == kResidualNone) return;
  ZC_NO_UNROLL for (int a = strip.begin; a < strip.end; a += kRow) {
    const Place<1> place(kPlainResidualLog2Block, strip.left - a);
    keep_residual<1>(residual, place, a + 4 * lane_index(), a / kRow);
  }
}

// ... and its entries are 0: each tile clears some, paddings included.
ZC_FN void clear_entries(const EncodeArgs& args, const DeviceSegment& segment, std::uint32_t tile) {
  const std::int64_t pieces = align16(segment.used[1]) / sizeof(uint4);
  const std::int64_t step = static_cast<std::int64_t>(segment.tiles) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(tile) * kThreads + threadIdx.x; i < pieces;
       i += step) {
    for (int section = 1; section < 3; ++section) {
      write(args.wire + segment.section[section] + i * sizeof(uint4), uint4{0, 0, 0, 0});
    }
  }
}

// The tile that begins a range writes its count: what lies between its first entry and the next
// range's.
ZC_FN std::uint64_t write_count(const EncodeArgs& args, const DeviceSegment& segment,
                                std::uint32_t tile, bool not_finite) {
  constexpr std::uint32_t tiles = kTopkRange / kTileElements;
  if (tile % tiles != 0 || threadIdx.x != 0) return 0;
  const TopkStrip* strips = args.strips + segment.first_strip;
  const bool ends = tile + tiles >= segment.tiles;
  const std::uint32_t end = ends ? static_cast<std::uint32_t>(segment.k)
                                 : strips[(tile + std::int64_t{tiles}) * kWarps].position;
  const std::uint32_t count = end - strips[std::int64_t{tile} * kWarps].position;
  return write_piece(section_of(args, segment, 0), std::int64_t{tile / tiles} * 4,
                     not_finite ? kTopkNotFinite : count);
}

// Scratch memory is left as the next call needs it.
ZC_FN void clear_scratch(const EncodeArgs& args, const DeviceSegment& segment, TopkSegment& topk) {
  TopkStrip* strips = args.strips + segment.first_strip;
  const std::int64_t count = static_cast<std::int64_t>(segment.tiles) * kWarps;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) strips[i] = {};
  if (threadIdx.x == 0) topk.prefix = topk.above = topk.not_finite = 0;
}

ZC_FN void write_tile(const EncodeArgs& args) {
  const std::uint32_t tile = args.tables.tiles[blockIdx.x].index;
  const Strip strip(args.tables);
  const DeviceSegment& segment = args.tables.segments[strip.segment];
  TopkSegment& topk = args.topk[segment.topk_index];
  const Residual residual(args, segment, strip.segment, strip.tile);
  const bool not_finite = topk.not_finite;
  std::uint64_t sum = write_count(args, segment, tile, not_finite);
  if (not_finite) {
    keep_strip(strip, residual);
    clear_entries(args, segment, tile);
  } else if (strip.begin < strip.end) {
    sum += write_strip(args, strip, segment, residual);
  }
  if (strip.ends_segment) clear_paddings(args, strip.segment, residual);
  if (is_last_tile(topk, segment)) clear_scratch(args, segment, topk);
  finish_encode(args, strip.frame, sum);
}

}  // namespace zcomm::cuda

ZC_KERNEL(zc_topk_digit_0, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) {
  zcomm::cuda::find_digit<20, 11>(args);
}
ZC_KERNEL(zc_topk_digit_1, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) {
  zcomm::cuda::find_digit<10, 10>(args);
}
ZC_KERNEL(zc_topk_digit_2, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) {
  zcomm::cuda::find_digit<0, 10>(args);
}
ZC_KERNEL(zc_topk_count, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) {
  zcomm::cuda::count_strips(args);
}
ZC_KERNEL(zc_topk_write, zcomm::cuda::EncodeArgs, zcomm::cuda::kThreads, 6) {
  zcomm::cuda::write_tile(args);
}
