// Kernels with a bug each, which the emulator must catch: `emulator_test NAME` runs one.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "simt/cuda.h"

namespace zcomm::test {

struct ReversalArgs {
  unsigned* out;
  bool has_barrier;
};

// out[i] = in[n - 1 - i] through shared memory; without the barrier it depends on who runs first.
ZC_KERNEL(zc_reversal, ReversalArgs, 128, 1) {
  __shared__ unsigned values[128];
  const unsigned i = threadIdx.x;
  values[i] = 0;
  __syncthreads();
  values[i] = i + 1;
  if (args.has_barrier) __syncthreads();
  args.out[i] = values[blockDim.x - 1 - i];
}

struct BadArgs {
  int how;
  unsigned* out;
};

enum Bad {
  kDivergentBarrier,
  kBarrierAndVote,
  kExitedLane,
  kMissingLane,
  kDifferentMasks,
  kDifferentOperations,
  kNotInMask,
  kSourceOutsideMask,
  kThrows,
  kBads,
};

ZC_KERNEL(zc_bad, BadArgs, 64, 1) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned low = 0x0000ffff;
  switch (args.how) {
    case kDivergentBarrier:
      if (threadIdx.x != 37) __syncthreads();
      break;
    case kBarrierAndVote:
      if (warp == 1 && lane == 3) __syncthreads();
      __any_sync(~0u, 1);
      __syncthreads();
      break;
    case kExitedLane:
      if (lane == 7) return;
      args.out[threadIdx.x] = __shfl_xor_sync(~0u, lane, 1);
      break;
    case kMissingLane:  // the second warp has lanes 0 ... 15
      args.out[threadIdx.x] = __reduce_max_sync(~0u, lane);
      break;
    case kDifferentMasks:
      args.out[threadIdx.x] = __shfl_sync(lane == 5 ? low : ~0u, lane, 0);
      break;
    case kDifferentOperations:
      if (lane == 5) __ballot_sync(~0u, 1);
      if (lane != 5) args.out[threadIdx.x] = __shfl_sync(~0u, lane, 0);
      break;
    case kNotInMask:
      args.out[threadIdx.x] = __ballot_sync(low, 1);
      break;
    case kSourceOutsideMask:
      if (lane < 16) args.out[threadIdx.x] = __shfl_down_sync(low, lane, 1);
      break;
    case kThrows:
      if (blockIdx.x == 2 && threadIdx.x == 9) throw emu::Error("misaligned address 0x13");
      __syncthreads();
      break;
    default:
      break;
  }
}

struct LateArgs {
  unsigned rounds;
};

// All CTAs fail, CTA 0 after the others.
ZC_KERNEL(zc_late, LateArgs, 32, 1) {
  for (unsigned i = 0; blockIdx.x == 0 && i < args.rounds; ++i) __syncwarp();
  throw emu::Error("CTA " + std::to_string(blockIdx.x));
}

struct DroppedArgs {
  bool is_dropped;
  unsigned* sum;
};

// Its variable has marks of the address sanitizer around it while it waits.
[[gnu::noinline]] inline unsigned wait_with_variables(int depth) {
  volatile unsigned value[4] = {};
  value[threadIdx.x % 4] = 1;
  if (depth == 0) __syncthreads();
  return depth == 0 ? value[0] : value[0] + wait_with_variables(depth - 1);
}

[[gnu::noinline]] inline unsigned sum_of(const unsigned* values) {
  unsigned sum = 0;
  for (int i = 0; i < 500; ++i) sum += values[i];
  return sum;
}

// Does not set marks of its own, so it would meet those that others have left.
[[gnu::noinline, gnu::no_sanitize_address]] inline unsigned sum_without_marks() {
  unsigned values[500];
  for (unsigned i = 0; i < 500; ++i) values[i] = i;
  return sum_of(values);
}

ZC_KERNEL(zc_dropped, DroppedArgs, 32, 1) {
  if (!args.is_dropped) {
    atomicAdd(args.sum, sum_without_marks());
  } else if (threadIdx.x) {
    atomicAdd(args.sum, wait_with_variables(10));
  }
}

struct BeyondArgs {
  const unsigned* in;
  unsigned n;
  unsigned* out;
};

// One element too many: the last thread reads in[n].
ZC_KERNEL(zc_beyond, BeyondArgs, 32, 1) {
  args.out[threadIdx.x] = args.in[threadIdx.x + args.n - 31];
}

inline std::vector<unsigned> reversed(emu::Schedule schedule, bool has_barrier) {
  std::vector<unsigned> out(128);
  const ReversalArgs args{out.data(), has_barrier};
  emu::settings().schedule = schedule;
  emu::launch(zc_reversal, {1}, {128}, 0, &args);
  return out;
}

// True if two schedules give different results.
inline bool schedules_differ(bool has_barrier) {
  const auto forward = reversed(emu::Schedule::kForward, has_barrier);
  const auto reverse = reversed(emu::Schedule::kReverse, has_barrier);
  const auto random = reversed(emu::Schedule::kRandom, has_barrier);
  emu::settings().schedule = emu::Schedule::kForward;
  return forward != reverse && forward != random && reverse != random;
}

// What the emulator says; empty if nothing.
inline std::string complaint(emu::Kernel kernel, unsigned ctas, unsigned threads,
                             const void* args) {
  try {
    emu::launch(kernel, {ctas}, {threads}, 0, args);
  } catch (const emu::Error& error) {
    return error.what();
  }
  return "";
}

inline std::string complaint(int how) {
  std::vector<unsigned> out(64);
  const BadArgs args{how, out.data()};
  return complaint(zc_bad, 4, how == kMissingLane ? 48 : 64, &args);
}

inline void read_beyond() {
  const unsigned n = 32;
  const auto in = std::make_unique<unsigned[]>(n), out = std::make_unique<unsigned[]>(n);
  const BeyondArgs args{in.get(), n, out.get()};
  emu::launch(zc_beyond, {1}, {n}, 0, &args);
  std::printf("read %u\n", out[n - 1]);
}

}  // namespace zcomm::test
