// Kernels that were loaded at run time, started through CUDA's driver. The loader passes the
// addresses of the driver's functions, so building and linking this needs nothing from CUDA.
#pragma once

#include <vector>

#include "cuda/device_api.h"

namespace zcomm::cuda {

// Addresses: of cuLaunchKernel, cuGetErrorName and cuCtxSetCurrent, and a device's context.
struct DriverAddresses {
  std::uintptr_t launch, error_name, set_context, context;
};

class Driver final : public Device {
 public:
  explicit Driver(const DriverAddresses& addresses) : at_(addresses), functions_(kKernels) {}

  // `function` is a CUfunction. Throws std::out_of_range.
  void set_function(int kernel, std::uintptr_t function) { functions_.at(kernel) = function; }
  bool has(int kernel) const { return functions_.at(kernel) != 0; }

  void launch(Kernel kernel, unsigned ctas, unsigned threads, std::size_t shared_nbytes,
              std::uintptr_t stream, const void* args) const override;

 private:
  std::string name_of(int error) const;

  DriverAddresses at_;
  std::vector<std::uintptr_t> functions_;
};

}  // namespace zcomm::cuda
