// Which bytes a CTA's threads load and store, and what that is in sectors of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "simt/simt.h"

namespace emu {

struct Access {
  std::uint64_t address;
  std::uint32_t nbytes;
  std::uint32_t instruction;  // 2 pc + is_store
};

// The accesses of each thread of a CTA, in its own order.
class AccessLog {
 public:
  void clear(unsigned threads);
  void add(unsigned thread, const Access& access) { threads_[thread].push_back(access); }
  // What the warps of the CTA move, lanes of a warp put together.
  Traffic count() const;

 private:
  std::vector<std::vector<Access>> threads_;
};

void add_traffic(const Traffic& more);

}  // namespace emu
