// A CTA: its threads as fibers of one OS thread, and who of them runs next.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "simt/fiber.h"
#include "simt/simt.h"
#include "simt/traffic.h"
#include "simt/warp.h"

namespace emu {

struct Launch {
  Kernel kernel;
  Dim grid, block;
  std::size_t dynamic_shared_nbytes;
  const void* args;
  Settings settings;

  unsigned threads() const { return block.x * block.y * block.z; }
  std::uint64_t ctas() const { return std::uint64_t{grid.x} * grid.y * grid.z; }
};

class Cta {
 public:
  // Makes room for the CTAs of a launch, which run() then runs one after another.
  void prepare(const Launch& launch);
  // Throws what the kernel threw, or an Error if its threads wait for what cannot come. The Cta can
  // be used again after that.
  void run(std::uint64_t number);

  // For the thread that runs.
  const Thread& thread() const { return threads_[current_]; }
  unsigned lane() const { return current_ % kLanes; }
  Warp& warp() { return *warp_; }
  void meet(Meeting how, std::uint32_t mask);
  void meet_at_barrier();
  AccessLog& log() { return log_; }
  [[noreturn]] void refuse_source(std::uint32_t mask, unsigned source) const;

 private:
  static void entry();
  void run_thread();
  void place_threads();
  Traffic moved() const;
  void suspend();
  [[noreturn]] void leave();

  Fiber& next_fiber();
  bool find_ready_warp();
  unsigned pick(std::uint32_t set);
  std::uint64_t random();

  [[noreturn]] void refuse_mask(Meeting how, std::uint32_t mask) const;
  // Why nobody can go on.
  std::string explain_stall() const;
  std::string explain_meeting(const Warp& warp, unsigned lane) const;
  std::string explain_barrier() const;
  std::string state_of(const Warp& warp, unsigned lane) const;
  std::string name_of(const Warp& warp, unsigned lane) const;

  const Launch* launch_ = nullptr;
  std::uint64_t number_ = 0;
  unsigned current_ = 0;     // the thread that runs
  Warp* warp_ = nullptr;     // its warp, which is the first one to be looked at for the next thread
  unsigned at_barrier_ = 0;  // threads
  unsigned unfinished_ = 0;  // threads
  std::uint64_t random_state_ = 0;
  Schedule schedule_ = Schedule::kForward;
  std::exception_ptr failure_;

  Fiber origin_;  // the OS thread's own stack
  std::vector<Fiber> fibers_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Stacks stacks_;
  std::unique_ptr<std::byte, void (*)(std::byte*)> shared_{nullptr, nullptr};
  AccessLog log_;
};

}  // namespace emu
