#include "cuda/device_api.h"

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/symbols.h"

namespace zcomm::cuda {
namespace {

class Runtime final : public Device {
 public:
  void launch(Kernel kernel, unsigned ctas, unsigned threads, std::size_t shared_nbytes,
              std::uintptr_t stream, const void* args) const override {
    void* parameters[] = {const_cast<void*>(args)};
    const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(function_of(kernel)),
                                               dim3(ctas), dim3(threads), parameters, shared_nbytes,
                                               reinterpret_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
      throw std::runtime_error(
          std::string("zcomm._cuda: expected the device to take a launch, got ") +
          cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
    }
  }
};

}  // namespace

const Device& linked_device() {
  static const Runtime device;
  return device;
}

std::string device_missing() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaGetLastError();  // clears it, or torch would report it after a call of its own
  if (error == cudaErrorInsufficientDriver || error == cudaErrorStubLibrary) {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver";
    return "the CUDA driver is older than CUDA " + std::to_string(CUDART_VERSION / 1000) +
           ", which this module was built with; update the driver";
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) return "no CUDA device";
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

std::pair<int, int> compute_capability(int ordinal) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error("zcomm._cuda: expected a CUDA device " + std::to_string(ordinal) +
                             ", got " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
  }
  return {major, minor};
}

}  // namespace zcomm::cuda
