// Kernels of the emulated module: started on the emulator, in whatever memory their addresses name.
#include "cuda/device_api.h"

#include "emulator/simt.h"

namespace zcomm::cuda {

void launch(void (*kernel)(const void*), unsigned ctas, unsigned threads, std::size_t shared_nbytes,
            std::uintptr_t, const void* args) {
  if (!kernel) throw emu::Error("expected a kernel, got one that this module was built without");
  emu::launch(kernel, {ctas}, {threads}, shared_nbytes, args);
}

std::string device_missing() { return ""; }

}  // namespace zcomm::cuda
