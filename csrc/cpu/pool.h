// Threads for one call: parallel_for over independent tasks.
#pragma once

#include <cstddef>
#include <type_traits>

namespace zcomm {

using TaskFunction = void (*)(void* context, std::size_t task);

// Runs task 0 ... tasks - 1 on up to `threads` threads, the caller among them. The threads stay for
// the next call; a call that finds them busy runs alone. Floating point rounds to nearest and
// keeps subnormals, whatever the caller has set; the caller's mode is restored afterwards.
void run_tasks(int threads, std::size_t tasks, TaskFunction function, void* context);

template <class Body>
void parallel_for(int threads, std::size_t tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_tasks(
      threads, tasks, [](void* context, std::size_t i) { (*static_cast<Plain*>(context))(i); },
      &body);
}

}  // namespace zcomm
