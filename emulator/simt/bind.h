// What the emulated module has beyond the real one: the emulator's settings and its count of bytes.
#pragma once

#include <pybind11/pybind11.h>

#include "simt/simt.h"

namespace emu {

inline void bind_settings(pybind11::module_& m) {
  m.def("set_schedule", [](int schedule, std::uint64_t seed) {
    settings().schedule = static_cast<Schedule>(schedule);
    settings().seed = seed;
  });
  m.def("set_threads", [](int threads) { settings().threads = threads; });
  m.def("count_sectors", [](bool on) {
    settings().count_sectors = on;
    reset_traffic();
  });
  m.def("traffic", [] { return std::pair(traffic().loaded, traffic().stored); });
  m.def("shuffles", [] { return traffic().shuffles; });
}

}  // namespace emu
