// The time that deadlines and totals go by.
#pragma once

#include <time.h>

namespace zcomm::shm {

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace zcomm::shm
