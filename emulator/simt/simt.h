// A SIMT emulator: runs a kernel's threads as fibers, so that GPU code is executed where there is
// no GPU. A CTA's threads share one OS thread; a warp's lanes meet in shuffles and votes, a CTA's
// threads in barriers. Whoever waits for something that cannot come is an error, never a hang.
//
// What it cannot show: races that need threads to run at the same moment, weak memory, and CTAs
// that wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace emu {

// A kernel takes the address of its one argument, a plain struct.
using Kernel = void (*)(const void* args);

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// A barrier or a shuffle that not all of its threads reach; an address that no memory has.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// In which order the threads of a CTA run between the points where they meet. A result that depends
// on it is a race.
enum class Schedule { kForward, kReverse, kRandom };

struct Settings {
  Schedule schedule = Schedule::kForward;
  std::uint64_t seed = 1;
  int threads = 1;             // OS threads that CTAs are spread over
  bool count_sectors = false;  // see Traffic
};
Settings& settings();

// Runs all CTAs of a grid, and returns when they are done. Rethrows the first Error.
void launch(Kernel kernel, Dim grid, Dim block, std::size_t dynamic_shared_nbytes,
            const void* args);

// Bytes between the chip and its memory since the last reset, in whole sectors of 32 bytes.
// Accesses of a warp's lanes by one instruction to the same sector count once; so does a sector
// that the warp touched within its last kRecentSectors ones, which is its share of the L1 cache.
// Loads and stores are counted separately. Atomics are not counted.
inline constexpr int kRecentSectors = 64;
struct Traffic {
  std::uint64_t loaded = 0, stored = 0;  // bytes
  std::uint64_t shuffles = 0;            // instructions of a warp; votes are none
};
Traffic traffic();
void reset_traffic();

// Inside a kernel.

struct Thread {
  Dim index, cta, block, grid;  // threadIdx, blockIdx, blockDim, gridDim
  unsigned lane, warp;
  std::byte* shared;  // the CTA's dynamic shared memory
};
// The same for the whole life of a thread, hence const: a compiler need not ask twice.
[[gnu::const]] const Thread& self();

// __syncthreads: an Error if a thread of the CTA has exited or waits elsewhere.
void barrier();

// All lanes of `mask` meet (an Error if one has exited, waits elsewhere, or came with another
// mask); then each receives the value that lane `source` gave. A source outside of the mask is an
// Error.
std::uint32_t exchange(std::uint32_t mask, std::uint32_t value, unsigned source);
// All lanes of `mask` meet; bit l of the result is lane l's predicate.
std::uint32_t ballot(std::uint32_t mask, bool predicate);
// All lanes of `mask` meet; the values of all 32 lanes, 0 for those outside of the mask.
struct Lanes {
  std::uint32_t value[32];
};
Lanes gather(std::uint32_t mask, std::uint32_t value);

namespace detail {
extern bool counting;
void record(const void* address, unsigned nbytes, bool is_store, unsigned pc);
}  // namespace detail

// A load or store of global memory by instruction number `pc` of the kernel: what Traffic is
// counted from. Does nothing unless settings().count_sectors.
inline void touch(const void* address, unsigned nbytes, bool is_store, unsigned pc) {
  if (__builtin_expect(detail::counting, false)) detail::record(address, nbytes, is_store, pc);
}

}  // namespace emu
