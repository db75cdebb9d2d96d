// The kernels that are linked into a module: compiled ones, or those that the emulator runs.
#pragma once

#include "cuda/kernels.h"

// A module of the emulator may have only some of the kernels.
#if defined(ZC_EMULATED)
#pragma GCC visibility push(default)
#define ZC_SYMBOL __attribute__((weak)) void
#else
#define ZC_SYMBOL void
#endif

extern "C" {
#define ZC_DECLARE(symbol, file, rows) ZC_SYMBOL symbol(const void*);
ZC_EACH_KERNEL(ZC_DECLARE)
#undef ZC_DECLARE
}

#if defined(ZC_EMULATED)
#pragma GCC visibility pop
#endif

namespace zcomm::cuda {

using Function = void (*)(const void*);

inline Function function_of(Kernel kernel) {
  static constexpr Function functions[] = {
#define ZC_FUNCTION(symbol, file, rows) symbol,
      ZC_EACH_KERNEL(ZC_FUNCTION)
#undef ZC_FUNCTION
  };
  return functions[static_cast<int>(kernel)];
}

}  // namespace zcomm::cuda
