#include "cuda/driver.h"

#include <stdexcept>

namespace zcomm::cuda {
namespace {

// As cuda.h declares them, on all systems with the C calling convention.
using LaunchKernel = int (*)(void* function, unsigned ctas_x, unsigned ctas_y, unsigned ctas_z,
                             unsigned threads_x, unsigned threads_y, unsigned threads_z,
                             unsigned shared_nbytes, void* stream, void** args, void** extra);
using GetErrorName = int (*)(int error, const char** name);
using CtxSetCurrent = int (*)(void* context);
constexpr int kSuccess = 0, kInvalidContext = 201;

}  // namespace

// A thread that has not used the device yet has no context. The runtime library would make one
// current; the driver refuses the launch, which has then done nothing.
void Driver::launch(Kernel kernel, unsigned ctas, unsigned threads, std::size_t shared_nbytes,
                    std::uintptr_t stream, const void* args) const {
  void* parameters[] = {const_cast<void*>(args)};
  const int index = static_cast<int>(kernel);
  if (!has(index)) {
    throw std::runtime_error(std::string("zcomm._core: expected a loaded kernel, got none for ") +
                             kKernelNames[index].symbol);
  }
  const auto start = [&] {
    return reinterpret_cast<LaunchKernel>(at_.launch)(
        reinterpret_cast<void*>(functions_[index]), ctas, 1, 1, threads, 1, 1,
        static_cast<unsigned>(shared_nbytes), reinterpret_cast<void*>(stream), parameters, nullptr);
  };
  int error = start();
  if (error == kInvalidContext) {
    error = reinterpret_cast<CtxSetCurrent>(at_.set_context)(reinterpret_cast<void*>(at_.context));
    if (error == kSuccess) error = start();
  }
  if (error != kSuccess) {
    throw std::runtime_error("zcomm._core: expected the driver to take a launch, got " +
                             name_of(error));
  }
}

std::string Driver::name_of(int error) const {
  const char* name = nullptr;
  reinterpret_cast<GetErrorName>(at_.error_name)(error, &name);
  return name ? name : "error " + std::to_string(error);
}

}  // namespace zcomm::cuda
