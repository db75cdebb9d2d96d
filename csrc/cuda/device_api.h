// What starts kernels: CUDA's runtime, its driver, or the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda/kernels.h"

namespace zcomm::cuda {

class Device {
 public:
  virtual ~Device() = default;

  // `args` is a plain struct, which is copied. Throws std::runtime_error if the device refuses.
  virtual void launch(Kernel kernel, unsigned ctas, unsigned threads, std::size_t shared_nbytes,
                      std::uintptr_t stream, const void* args) const = 0;
};

// The one device of a module that kernels are linked into.
const Device& linked_device();

// Why nothing can be launched there; "" if it can.
std::string device_missing();

// Major and minor compute capability of a device, by its number. Creates no context.
std::pair<int, int> compute_capability(int ordinal);

}  // namespace zcomm::cuda
