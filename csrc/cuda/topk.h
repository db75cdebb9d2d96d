// What topk's kernels keep from launch to launch of one encode call, in the layout's scratch
// memory.
#pragma once

#include "cuda/args.h"

namespace zcomm::cuda {

// The 31 bits of an element's magnitude are split into digits of 11, 10 and 10 bits.
inline constexpr int kTopkBins = 2048;

// Elements are counted in 32 bits.
inline constexpr std::int64_t kTopkMaxElements = 0xffffffff;

struct alignas(16) TopkSegment {
  std::uint32_t histogram[kTopkBins];  // of the current digit
  std::uint32_t prefix;                // the threshold's digits so far; finally all of them
  std::uint32_t above;                 // elements whose upper digits exceed them
  std::uint32_t not_finite;            // whether there are such elements
  std::uint32_t done;                  // tiles, in each launch
};

// zc_topk_count counts the strip's elements above and at the threshold; its last tile turns the
// counts of all strips into what zc_topk_write needs.
struct TopkStrip {
  std::uint32_t position;  // above; then where its entries begin among the segment's k
  std::uint32_t ties;      // at the threshold; then how many of them are sent
};

}  // namespace zcomm::cuda
