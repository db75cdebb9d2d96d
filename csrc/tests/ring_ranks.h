// Ranks of a host as threads, on segments of one process.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "shm/ring.h"

namespace zcomm::test {

// The segments of all ranks. Each ends where its allocation ends, so that sanitizers see what goes
// past it.
class Host {
 public:
  Host(int world, std::int64_t slot_nbytes, int slots = 4, std::uint32_t start = 0)
      : slots_(slots), slot_nbytes_(slot_nbytes) {
    const auto nbytes = static_cast<std::size_t>(shm::kControlBytes + slots * slot_nbytes);
    for (int r = 0; r < world; ++r) {
      void* segment = nullptr;
      if (posix_memalign(&segment, 4096, nbytes)) throw std::bad_alloc();
      std::memset(segment, 0, nbytes);
      memory_.emplace_back(segment, std::free);
      ranks_.push_back({static_cast<std::uint8_t*>(segment), -1});
      for (shm::Line& line : control(r).counters) line.value = start;
    }
  }

  int world() const { return static_cast<int>(ranks_.size()); }
  std::int64_t slots_nbytes() const { return slots_ * slot_nbytes_; }
  shm::Control& control(int rank) const {
    return *reinterpret_cast<shm::Control*>(ranks_[rank].segment);
  }
  std::uint8_t* slots(int rank) const { return ranks_[rank].segment + shm::kControlBytes; }

  // The rank is dead once `life_fd` is readable. Rings made later know it.
  void watch(int rank, int life_fd) { ranks_[rank].life_fd = life_fd; }
  shm::Ring ring(int rank) const { return shm::Ring(rank, ranks_, slots_, slot_nbytes_); }

 private:
  int slots_;
  std::int64_t slot_nbytes_;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory_;
  std::vector<shm::Peer> ranks_;
};

// body(0) ... body(count - 1), each in a thread.
template <class Body>
void in_threads(int count, Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zcomm::test
