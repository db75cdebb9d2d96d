// The SIMT emulator: what its threads exchange, share and count, and the bugs that it must catch.
//
// `emulator_test` checks everything. With the name of a planted bug it runs that one and exits with
// 1 if the bug is caught. `emulator_test oob` reads beyond a buffer, which is for the address
// sanitizer. `emulator_test speed` measures.
#include <ctime>

#include "tests/emulator_meetings.h"
#include "tests/emulator_memory.h"
#include "tests/emulator_plants.h"
#include "tests/emulator_traffic.h"
#include "tests/harness.h"

namespace zcomm::test {
namespace {

using emu::Schedule;

constexpr Schedule kSchedules[] = {Schedule::kForward, Schedule::kReverse, Schedule::kRandom};

std::string name_of(Schedule schedule) {
  const char* const names[] = {"forward", "reverse", "random"};
  return names[static_cast<int>(schedule)];
}

// ---- What must be caught ----

struct Planted {
  const char* name;
  Bad how;
  const char* says;
};

constexpr Planted kPlanted[] = {
    {"divergent-barrier", kDivergentBarrier,
     "CTA 0, warp 0, lane 0 waits at the barrier, but CTA 0, warp 1, lane 5 has exited: expected "
     "all "
     "64 threads of the CTA there, got 63"},
    {"barrier-and-vote", kBarrierAndVote,
     "CTA 0, warp 1, lane 0 waits in a vote of the lanes 0xffffffff, but lane 3 waits at the "
     "barrier"},
    {"exited-lane", kExitedLane,
     "CTA 0, warp 0, lane 0 waits in a shuffle of the lanes 0xffffffff, but lane 7 has exited"},
    {"missing-lane", kMissingLane,
     "CTA 0, warp 1, lane 0 waits in a reduction of the lanes 0xffffffff, but lane 16 does not "
     "exist"},
    {"different-masks", kDifferentMasks,
     "CTA 0, warp 0, lane 0 waits in a shuffle of the lanes 0xffffffff, but lane 5 waits in a "
     "shuffle "
     "of the lanes 0x0000ffff"},
    {"different-operations", kDifferentOperations,
     "CTA 0, warp 0, lane 0 waits in a shuffle of the lanes 0xffffffff, but lane 5 waits in a "
     "vote"},
    {"not-in-mask", kNotInMask,
     "CTA 0, warp 0, lane 16 comes to a vote of the lanes 0x0000ffff: expected a mask with the "
     "lane "
     "itself in it"},
    {"source-outside-mask", kSourceOutsideMask,
     "CTA 0, warp 0, lane 15 asks in a shuffle for the value of lane 16: expected one of the lanes "
     "0x0000ffff"},
    {"throws", kThrows, "misaligned address 0x13"},
};

void check_planted() {
  for (const Schedule schedule : kSchedules) {
    for (const Planted& planted : kPlanted) {
      emu::settings().schedule = schedule;
      const std::string says = complaint(planted.how);
      CHECK(!says.empty(), std::string(planted.name) + ", " + name_of(schedule));
      if (schedule == Schedule::kForward) {
        CHECK(says.find(planted.says) == 0, std::string(planted.name) + ": " + says);
      }
      check_sums("after " + says);
    }
  }
  emu::settings().schedule = Schedule::kForward;
  CHECK(complaint(kBads).empty(), "nothing is wrong");
  CHECK(schedules_differ(false), "a missing barrier");
  CHECK(!schedules_differ(true), "a barrier");
}

// Threads that are dropped with variables on their stacks leave nothing there that the address
// sanitizer would mind.
void check_dropped_stacks() {
  unsigned sum = 0;
  const DroppedArgs dropping{true, &sum}, summing{false, &sum};
  CHECK(!complaint(zc_dropped, 1, 32, &dropping).empty(), "a divergent barrier");
  CHECK(complaint(zc_dropped, 1, 32, &summing).empty(), "the next launch");
  CHECK(sum == 32 * 499 * 250, std::to_string(sum));
}

// Of the CTAs that fail the first one counts, not the fastest.
void check_first_error() {
  const LateArgs args{20000};
  emu::settings().threads = 2;
  const std::string says = complaint(zc_late, 8, 32, &args);
  CHECK(says == "CTA 0", says);
}

void check_launch(unsigned ctas, unsigned threads, const std::string& expected) {
  const std::string says = complaint(zc_place, ctas, threads, nullptr);
  CHECK(says == expected, says);
}

// ---- Speed ----

struct SpeedArgs {
  float4* values;
  unsigned quads;
};

// 60 shuffles for 4 elements.
ZC_KERNEL(zc_speed, SpeedArgs, 128, 1) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < args.quads;
       i += gridDim.x * blockDim.x) {
    float4 v = args.values[i];
    for (int h = 1; h <= 15; ++h) {
      v.x += __shfl_xor_sync(~0u, v.x, h);
      v.y += __shfl_xor_sync(~0u, v.y, h);
      v.z += __shfl_xor_sync(~0u, v.z, h);
      v.w += __shfl_xor_sync(~0u, v.w, h);
    }
    args.values[i] = v;
  }
}

double seconds_of(const SpeedArgs& args, unsigned ctas, int times) {
  const std::clock_t start = std::clock();  // the processor's time: the machine may be busy
  for (int i = 0; i < times; ++i) emu::launch(zc_speed, {ctas}, {128}, 0, &args);
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / times;
}

void measure_speed() {
  std::vector<float4> values(1 << 18);
  const SpeedArgs args{values.data(), 1 << 18}, nothing{values.data(), 0};
  for (const Schedule schedule : kSchedules) {
    emu::settings().schedule = schedule;
    const double seconds = seconds_of(args, 64, 3);
    std::printf("60 shuffles for 4 elements, %s: %.2g elements/s, %.1f ns a shuffle\n",
                name_of(schedule).c_str(), 4e0 * values.size() / seconds,
                1e9 * seconds / (60. * values.size()));
  }
  std::printf("an empty CTA of 128 threads: %.1f us\n", 1e6 * seconds_of(nothing, 1, 1000));
}

int check_all() {
  for (const Schedule schedule : kSchedules) {
    emu::settings().schedule = schedule;
    for (const int threads : {1, 2}) {
      emu::settings().threads = threads;
      check_sums(name_of(schedule));
      check_atomics();
      check_float_mode();
    }
    check_shuffles();
    check_votes();
    check_places({3}, {1024});
    check_places({3, 2, 4}, {5, 3, 3});
  }
  check_orders();
  check_bits();
  check_traffic();
  for (const int threads : {1, 2}) {
    emu::settings().threads = threads;
    check_planted();
  }
  check_dropped_stacks();
  check_first_error();
  check_launch(1, 1025, "launch: expected 1 to 1024 threads in a CTA, got 1025");
  check_launch(1, 0, "launch: expected 1 to 1024 threads in a CTA, got 0");
  check_launch(0, 32, "launch: expected at least 1 CTA, got a grid of 0");
  return tally.finish();
}

int run_planted(const std::string& name) {
  std::string says;
  if (name == "missing-barrier" && schedules_differ(false)) says = "the schedules differ";
  for (const Planted& planted : kPlanted) {
    if (name == planted.name) says = complaint(planted.how);
  }
  std::printf("%s\n", says.c_str());
  return says.empty() ? 0 : 1;
}

int run(const std::string& mode) {
  if (mode.empty()) return check_all();
  if (mode == "oob") return read_beyond(), 0;
  if (mode == "speed") return measure_speed(), 0;
  return run_planted(mode);
}

}  // namespace
}  // namespace zcomm::test

int main(int argc, char** argv) { return zcomm::test::run(argc > 1 ? argv[1] : ""); }
