// topk's threshold: the k-th largest magnitude of a segment, and which strips send the elements
// that equal it.
#pragma once

#include "cuda/topk_tile.h"

namespace zcomm::cuda {

// ---- zc_topk_digit_*: the threshold, digit by digit ----

// Adds the CTA's bins to the segment's. True in the segment's last CTA: its bins are then the whole
// segment's, whose own are zero again. A segment of one tile needs only that tile's bins.
template <int Bins>
ZC_FN bool merge_bins(TopkSegment& topk, const DeviceSegment& segment, uint4* bins) {
  __syncthreads();
  if (segment.tiles == 1) return true;
  const auto* own = reinterpret_cast<const std::uint32_t*>(bins);
  ZC_NO_UNROLL for (int first = 0; first < Bins; first += kThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    if (own[b] != 0) atomicAdd(&topk.histogram[b], own[b]);
  }
  if (!is_last_tile(topk, segment)) return false;
  auto* all = reinterpret_cast<uint4*>(topk.histogram);
  ZC_UNROLL for (int first = 0; first < Bins / 4; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    bins[i] = all[i];
    all[i] = uint4{0, 0, 0, 0};
  }
  __syncthreads();
  return true;
}

// The digit at which the count from above reaches k. Each thread takes some bins, the first one the
// highest.
template <int Width>
ZC_FN void take_digit(TopkSegment& topk, std::int64_t k, const std::uint32_t* bins) {
  constexpr int bins_each = (1 << Width) / kThreads;
  int bin = (1 << Width) - 1 - bins_each * static_cast<int>(threadIdx.x);
  const std::uint64_t left = static_cast<std::uint64_t>(k) - topk.above;
  std::uint32_t own = 0;
  ZC_UNROLL for (int i = 0; i < bins_each; ++i) own += bins[bin - i];
  std::uint64_t above = scan(own).before;
  if (above >= left || above + own < left) return;
  for (; above + bins[bin] < left; --bin) above += bins[bin];
  topk.prefix = topk.prefix << Width | static_cast<std::uint32_t>(bin);
  topk.above += static_cast<std::uint32_t>(above);
}

// Bits Shift to Shift + Width - 1 of the magnitudes whose upper bits are those of the threshold.
template <int Shift, int Width>
ZC_FN void find_digit(const EncodeArgs& args) {
  constexpr int bins = 1 << Width;
  constexpr bool is_first = Shift + Width == 31;
  __shared__ uint4 shared[bins / 4];
  auto* histogram = reinterpret_cast<std::uint32_t*>(shared);
  const Strip strip(args.tables);
  const DeviceSegment& segment = args.tables.segments[strip.segment];
  TopkSegment& topk = args.topk[segment.topk_index];
  if (!is_first && topk.not_finite) return;
  ZC_UNROLL for (int i = 0; i < bins / 4; i += kThreads) shared[i + threadIdx.x] = {};
  __syncthreads();
  const std::uint32_t prefix = is_first ? 0 : topk.prefix;
  const Residual residual(args, segment, strip.segment, strip.tile);
  bool not_finite = false;
  const auto count_row = [&](int, const Place<1>&, const float v[4]) {
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      const std::uint32_t u = bits(v[j]) & kAbsMask;
      not_finite |= u >= kInfBits;
      if (u >> (Shift + Width) == prefix) {
        atomicAdd(&histogram[u >> Shift & (bins - 1)], 1u);
      }
    }
  };
  for_each_row(args, strip, segment, residual, count_row);
  if (is_first && __any_sync(kAllLanes, not_finite) && lane_index() == 0) {
    atomicOr(&topk.not_finite, 1u);
  }
  if (merge_bins<bins>(topk, segment, shared)) take_digit<Width>(topk, segment.k, histogram);
}

// ---- zc_topk_count: where each strip's entries begin, and which ties it sends ----

ZC_FN std::uint64_t packed(const TopkStrip& strip) {
  return static_cast<std::uint64_t>(strip.ties) << 32 | strip.position;
}

// Lower strips send ties first, `ties` of them in all.
ZC_FN void share_ties(TopkStrip* strips, std::int64_t count, std::uint32_t ties) {
  constexpr int strips_each = 4;
  static_assert(kWarps % strips_each == 0);
  std::uint64_t before = 0;
  for (std::int64_t a = 0; a < count; a += strips_each * kThreads) {
    const std::int64_t first = a + strips_each * threadIdx.x;
    TopkStrip own[strips_each] = {};
    std::uint64_t sum = 0;
    ZC_UNROLL for (int i = 0; i < strips_each; ++i) {
      if (first < count) own[i] = strips[first + i];
      sum += packed(own[i]);
    }
    const Scan scanned = scan(sum);
    std::uint64_t at = before + scanned.before;
    ZC_UNROLL for (int i = 0; i < strips_each; ++i) {
      const auto above = static_cast<std::uint32_t>(at),
                 equal = static_cast<std::uint32_t>(at >> 32);
      const std::uint32_t sent = equal < ties ? equal : ties, left = ties - sent;
      const std::uint32_t more = own[i].ties < left ? own[i].ties : left;
      if (first < count) strips[first + i] = {above + sent, more};
      at += packed(own[i]);
    }
    before += scanned.total;
  }
}

ZC_FN void count_strips(const EncodeArgs& args) {
  const Strip strip(args.tables);
  const DeviceSegment& segment = args.tables.segments[strip.segment];
  TopkSegment& topk = args.topk[segment.topk_index];
  if (topk.not_finite) return;
  const std::uint32_t threshold = topk.prefix;
  const Residual residual(args, segment, strip.segment, strip.tile);
  TopkStrip own = {};
  const auto count_row = [&](int, const Place<1>&, const float v[4]) {
    ZC_UNROLL for (int j = 0; j < 4; ++j) {
      const std::uint32_t u = bits(v[j]) & kAbsMask;
      own.position += u > threshold;
      own.ties += u == threshold;
    }
  };
  for_each_row(args, strip, segment, residual, count_row);
  const std::uint64_t sum = warp_sum(packed(own));
  TopkStrip* strips = args.strips + segment.first_strip;
  if (lane_index() == 0) {
    strips[(strip.tile + strip.begin) / kStripElements] = {static_cast<std::uint32_t>(sum),
                                                           static_cast<std::uint32_t>(sum >> 32)};
  }
  if (!is_last_tile(topk, segment)) return;
  share_ties(strips, static_cast<std::int64_t>(segment.tiles) * kWarps,
             static_cast<std::uint32_t>(segment.k) - topk.above);
}

}  // namespace zcomm::cuda
