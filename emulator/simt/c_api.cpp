// The emulator as plain functions, for kernels that are compiled and loaded one by one.
#include <cstdio>

#include "simt/simt.h"

#define EMULATOR_API extern "C" [[gnu::visibility("default")]]

// Nonzero: `error` says what went wrong.
EMULATOR_API int emulator_launch(emu::Kernel kernel, const unsigned grid[3], unsigned threads,
                                 unsigned shared_nbytes, const void* args, char* error,
                                 unsigned error_nbytes) {
  try {
    emu::launch(kernel, {grid[0], grid[1], grid[2]}, {threads}, shared_nbytes, args);
  } catch (const std::exception& e) {
    std::snprintf(error, error_nbytes, "%s", e.what());
    return 1;
  }
  return 0;
}

EMULATOR_API void emulator_set_schedule(int schedule, std::uint64_t seed) {
  emu::settings().schedule = static_cast<emu::Schedule>(schedule);
  emu::settings().seed = seed;
}

// What launches move from here on; see emu::Traffic.
EMULATOR_API void emulator_count_sectors(int on) {
  emu::settings().count_sectors = on != 0;
  emu::reset_traffic();
}

EMULATOR_API void emulator_traffic(std::uint64_t moved[3]) {
  const emu::Traffic traffic = emu::traffic();
  moved[0] = traffic.loaded;
  moved[1] = traffic.stored;
  moved[2] = traffic.shuffles;
}
