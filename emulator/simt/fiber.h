// Fibers: stacks that one OS thread switches between, for a few nanoseconds each time.
#pragma once

#include <cstddef>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

// Where a fiber goes on.
struct Context {
  void* sp = nullptr;
  void* fp = nullptr;
  void* pc = nullptr;
};

// Everything but stack and frame pointer is declared as overwritten, so the compiler saves what it
// needs and no more. A jump, not a return: all fibers go on at the same few places, which a
// processor predicts. Nothing is pushed: the caller may keep values below its stack pointer.
[[gnu::always_inline]] inline void switch_context(Context* from, const Context* to) {
#if defined(__x86_64__)
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%0)\n\t"
      "movq %%rbp, 8(%0)\n\t"
      "movq %%rax, 16(%0)\n\t"
      "movq 0(%1), %%rsp\n\t"
      "movq 8(%1), %%rbp\n\t"
      "jmpq *16(%1)\n"
      "1:\n\t"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
#elif defined(__aarch64__)
  register Context* x0 asm("x0") = from;
  register const Context* x1 asm("x1") = to;
  asm volatile(
      "adr x10, 1f\n\t"
      "mov x9, sp\n\t"
      "stp x9, x29, [x0]\n\t"
      "str x10, [x0, #16]\n\t"
      "ldp x9, x29, [x1]\n\t"
      "ldr x10, [x1, #16]\n\t"
      "mov sp, x9\n\t"
      "mov x30, xzr\n\t"
      "br x10\n"
      "1:\n\t"
      : "+r"(x0), "+r"(x1)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
        "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28",
        "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12",
        "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25",
        "v26", "v27", "v28", "v29", "v30", "v31", "cc", "memory");
#else
#error "The emulator's fibers need x86-64 or aarch64: add switch_context for this architecture."
#endif
}

// A stack and where it goes on. The address sanitizer wants to know of every switch.
class Fiber {
 public:
  // The next switch to this fiber begins `entry` on an empty stack; what ran there before is
  // dropped. `entry` calls entered() first, and leaves by leave_for().
  void prepare(void (*entry)(), std::byte* stack, std::size_t nbytes, std::size_t offset);

  [[gnu::always_inline]] void switch_to(Fiber& next) {
    announce(&fake_stack_, next);
    switch_context(&context_, &next.context_);
    arrived();
  }
  // For good: whatever is on this stack is not looked at again.
  [[gnu::always_inline]] void leave_for(Fiber& next) {
    announce(nullptr, next);
    switch_context(&context_, &next.context_);
  }
  // `origin` is the OS thread's own stack: its place is known when the first fiber is entered from
  // it.
  static void entered(Fiber& origin);

 private:
  [[gnu::always_inline]] static void announce(void** fake_stack, const Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, next.stack_, next.nbytes_);
#else
    static_cast<void>(fake_stack), static_cast<void>(next);
#endif
  }
  [[gnu::always_inline]] void arrived() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  Context context_;
  const void* stack_ = nullptr;
  std::size_t nbytes_ = 0;
  void* fake_stack_ = nullptr;
};

// Stacks with a guard page below each; they grow in number, and are kept.
class Stacks {
 public:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kNbytes = 256 << 10;
#else
  static constexpr std::size_t kNbytes = 64 << 10;
#endif
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks();

  void reserve(std::size_t count);
  std::byte* operator[](std::size_t i) const { return stacks_[i]; }
  // After fibers were dropped in the middle of a function: the marks that the address sanitizer
  // keeps of their variables are gone.
  void forget_variables();

 private:
  std::vector<std::byte*> stacks_;
};

}  // namespace emu
