// What topk's encode kernels share: a tile among those of its segment, and its rows.
#pragma once

#include "cuda/encode.h"
#include "cuda/topk.h"

namespace zcomm::cuda {

struct Scan {
  std::uint64_t before, total;  // over the threads of lower index; over all
};

// All threads of the CTA call it.
ZC_FN Scan scan(std::uint64_t x) {
  __shared__ std::uint64_t sums[kWarps];
  std::uint64_t sum = x;
  ZC_UNROLL for (int h = 1; h < kWarp; h *= 2) {
    const std::uint64_t lower = __shfl_up_sync(kAllLanes, sum, h);
    if (lane_index() >= h) sum += lower;
  }
  if (lane_index() == kWarp - 1) sums[warp_index()] = sum;
  __syncthreads();
  Scan result{sum - x, 0};
  ZC_UNROLL for (int w = 0; w < kWarps; ++w) {
    if (w < warp_index()) result.before += sums[w];
    result.total += sums[w];
  }
  __syncthreads();  // the next call writes to `sums`
  return result;
}

// True in all threads of the segment's last CTA to arrive here. It sees everything that the others
// wrote before.
ZC_FN bool is_last_tile(TopkSegment& topk, const DeviceSegment& segment) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = is_last(&topk.done, segment.tiles);
  __syncthreads();
  return last;
}

// Calls row(a, place, v) for each row of the warp's strip. v is 0 past the segment's end: no
// magnitude is smaller and no index higher, so these elements are never among the k.
template <class Row>
ZC_FN void for_each_row(const EncodeArgs& args, const Strip& strip, const DeviceSegment& segment,
                        const Residual& residual, const Row& row) {
  const Gradient gradient(args, segment, strip.tile);
  ZC_NO_UNROLL for (int a = strip.begin; a < strip.end; a += kRow) {
    const Place<1> place(kPlainResidualLog2Block, strip.left - a);
    float v[4];
    load_values(gradient, residual, a + 4 * lane_index(), place.valid(0, place.m), a / kRow, v);
    row(a, place, v);
  }
}

}  // namespace zcomm::cuda
