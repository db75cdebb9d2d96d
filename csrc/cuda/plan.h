// A layout as the device sees it: tables that are uploaded once, and the launches of a call.
#pragma once

#include <string>
#include <vector>

#include "cpu/layout.h"
#include "cuda/args.h"
#include "cuda/kernels.h"

namespace zcomm::cuda {

// topk encodes in these launches, all over the same tiles.
inline constexpr Kernel kTopkEncode[] = {Kernel::zc_topk_digit_0, Kernel::zc_topk_digit_1,
                                         Kernel::zc_topk_digit_2, Kernel::zc_topk_count,
                                         Kernel::zc_topk_write};

// One launch for each codec and number of rows in a block, except topk.
struct Group {
  Kernel encode, decode;
  std::int64_t first_tile;
  std::uint32_t tiles;
};

// Where parts of a piece of device memory begin.
struct EncodeScratch {
  std::int64_t sums, done, idle, topk, strips, nbytes;
};
struct DecodeScratch {
  std::int64_t sums, done, nbytes;
};

class Plan {
 public:
  // Throws std::invalid_argument where the parts do not fit.
  explicit Plan(const Layout& layout);

  EncodeScratch encode_scratch() const;
  DecodeScratch decode_scratch(int wires) const;

  std::vector<Kernel> kernels() const;  // all that its calls may launch

  Tables tables_at(std::uintptr_t device_address, const Group& group) const;

  std::string tables;         // what is uploaded
  std::vector<Group> groups;  // all codecs but topk
  Group topk;                 // no tiles if there is no topk segment
  std::uint32_t segments, frames;

 private:
  void add_tiles(const Layout& layout);

  std::vector<Tile> tiles_;
  std::vector<std::uint32_t> frame_tiles_;
  std::int64_t frames_at_, tiles_at_;
  std::uint32_t topk_segments_ = 0;
  std::int64_t topk_strips_ = 0;
};

}  // namespace zcomm::cuda
