#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace emu {
namespace {

std::size_t guard_nbytes() {
  static const auto nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return nbytes;
}

std::byte* new_stack() {
  const std::size_t guard = guard_nbytes();
  void* memory = mmap(nullptr, guard + Stacks::kNbytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, guard, PROT_NONE);
  return static_cast<std::byte*>(memory) + guard;
}

}  // namespace

void Fiber::prepare(void (*entry)(), std::byte* stack, std::size_t nbytes, std::size_t offset) {
  stack_ = stack;
  nbytes_ = nbytes;
  fake_stack_ = nullptr;
  auto* top = reinterpret_cast<void**>(stack + nbytes - offset);
#if defined(__x86_64__)
  // As after a call; no caller has address 0, which ends a stack trace.
  *--top = nullptr;
  *--top = nullptr;
  *--top = nullptr;
#endif
  context_ = {top, nullptr, reinterpret_cast<void*>(entry)};
}

void Fiber::entered(Fiber& origin) {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack = nullptr;
  std::size_t nbytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &nbytes);
  if (!origin.stack_) {
    origin.stack_ = stack;
    origin.nbytes_ = nbytes;
  }
#else
  static_cast<void>(origin);
#endif
}

Stacks::~Stacks() {
  for (std::byte* stack : stacks_) munmap(stack - guard_nbytes(), guard_nbytes() + kNbytes);
}

void Stacks::reserve(std::size_t count) {
  while (stacks_.size() < count) stacks_.push_back(new_stack());
}

void Stacks::forget_variables() {
#if defined(__SANITIZE_ADDRESS__)
  for (std::byte* stack : stacks_) __asan_unpoison_memory_region(stack, kNbytes);
#endif
}

}  // namespace emu
