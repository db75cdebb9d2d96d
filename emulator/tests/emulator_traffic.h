// Patterns of access whose traffic is known, in sectors of 32 bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "simt/cuda.h"
#include "tests/harness.h"

namespace zcomm::test {

enum Pattern {
  kContiguous,    // 8 times 16 bytes by each lane, loaded and stored
  kStride,        // 4 bytes of every sector
  kTwice,         // the same 128 bytes by two instructions
  kRows,          // 70 times 128 bytes, far apart
  kAcross,        // 16 bytes from the middle of a sector on
  kBackAndForth,  // a store and a load of the same sector
  kWithinWindow,  // 64 sectors, twice, by one lane
  kBeyondWindow,  // 65 sectors, twice, by one lane
  kUsedAgain,     // 64 sectors; the first one; one more; the first one
  kDivergent,     // a sector by all; 64 others by lane 0; the first one again by all
};

struct TrafficArgs {
  const char* memory;
  int pattern;
};

ZC_KERNEL(zc_traffic, TrafficArgs, 64, 1) {
  const unsigned thread = threadIdx.x, lane = thread % 32;
  const char* p = args.memory;
  switch (args.pattern) {
    case kContiguous:
      for (unsigned i = 0; i < 8; ++i) {
        emu::touch(p + 16 * (i * blockDim.x + thread), 16, false, 0);
        emu::touch(p + 16 * (i * blockDim.x + thread), 16, true, 1);
      }
      break;
    case kStride:
      emu::touch(p + 32 * lane, 4, false, 0);
      break;
    case kTwice:
      emu::touch(p + 4 * lane, 4, false, 0);
      emu::touch(p + 4 * lane, 4, false, 1);
      break;
    case kRows:
      for (unsigned i = 0; i < 70; ++i) emu::touch(p + 256 * i + 4 * lane, 4, false, 0);
      break;
    case kAcross:
      if (lane == 0) emu::touch(p + 24, 16, false, 0);
      break;
    case kBackAndForth:
      if (lane == 0) emu::touch(p, 4, true, 0);
      if (lane == 0) emu::touch(p, 4, false, 1);
      break;
    case kWithinWindow:
    case kBeyondWindow:
      for (int i = 0; lane == 0 && i < 2; ++i) {
        const int sectors = args.pattern == kWithinWindow ? 64 : 65;
        for (int s = 0; s < sectors; ++s) emu::touch(p + 32 * s, 4, false, 0);
      }
      break;
    case kUsedAgain:
      for (int s = 0; lane == 0 && s < 64; ++s) emu::touch(p + 32 * s, 4, false, 0);
      for (const int s : {0, 64, 0}) {
        if (lane == 0) emu::touch(p + 32 * s, 4, false, 1);
      }
      break;
    case kDivergent:
      emu::touch(p, 4, false, 0);
      for (int s = 1; lane == 0 && s <= 64; ++s) emu::touch(p + 32 * s, 4, false, 1);
      emu::touch(p, 4, false, 2);
      break;
  }
}

struct Sectors {
  std::uint64_t loaded, stored;
};

inline Sectors count_sectors(Pattern pattern, unsigned ctas, unsigned threads, bool is_counting) {
  // Of the start of a sector.
  static std::vector<char> memory(1 << 16);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const TrafficArgs args{memory.data() + (32 - address % 32) % 32, pattern};
  emu::settings().count_sectors = is_counting;
  emu::reset_traffic();
  emu::launch(zc_traffic, {ctas}, {threads}, 0, &args);
  emu::settings().count_sectors = false;
  return {emu::traffic().loaded / 32, emu::traffic().stored / 32};
}

inline void check_traffic() {
  const auto check = [](Pattern pattern, std::uint64_t loaded, std::uint64_t stored,
                        unsigned threads = 32) {
    for (const auto schedule :
         {emu::Schedule::kForward, emu::Schedule::kReverse, emu::Schedule::kRandom}) {
      emu::settings().schedule = schedule;
      const auto got = count_sectors(pattern, 1, threads, true);
      CHECK(got.loaded == loaded && got.stored == stored,
            "pattern " + std::to_string(pattern) + ": " + std::to_string(got.loaded) + " and " +
                std::to_string(got.stored) + " sectors");
    }
    emu::settings().schedule = emu::Schedule::kForward;
  };
  check(kContiguous, 128, 128);
  check(kContiguous, 256, 256, 64);
  check(kStride, 32, 0);
  check(kTwice, 4, 0);
  check(kTwice, 8, 0, 64);  // each warp has its own window
  check(kRows, 280, 0);
  check(kAcross, 2, 0);
  check(kBackAndForth, 1, 1);
  check(kWithinWindow, 64, 0);
  check(kBeyondWindow, 130, 0);
  check(kUsedAgain, 65, 0);
  // Lane 1 executes its second load right after its first: so does the warp, in the window's view.
  check(kDivergent, 65, 0);
  CHECK(count_sectors(kStride, 1, 32, false).loaded == 0, "not counting");
  emu::settings().threads = 2;
  CHECK(count_sectors(kStride, 100, 32, true).loaded == 3200, "100 CTAs on 2 threads");
  emu::settings().threads = 1;
  emu::reset_traffic();
  CHECK(emu::traffic().loaded == 0 && emu::traffic().stored == 0, "after a reset");
}

}  // namespace zcomm::test
