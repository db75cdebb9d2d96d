// Kernels of the emulated module: started on the emulator, in whatever memory their addresses name.
#include "cuda/device_api.h"

#include "cuda/symbols.h"
#include "simt/simt.h"

namespace zcomm::cuda {
namespace {

class Emulated final : public Device {
 public:
  void launch(Kernel kernel, unsigned ctas, unsigned threads, std::size_t shared_nbytes,
              std::uintptr_t, const void* args) const override {
    const Function function = function_of(kernel);
    if (!function)
      throw emu::Error("expected a kernel, got one that this module was built without");
    emu::launch(function, {ctas}, {threads}, shared_nbytes, args);
  }
};

}  // namespace

const Device& linked_device() {
  static const Emulated device;
  return device;
}

std::string device_missing() { return ""; }

}  // namespace zcomm::cuda
