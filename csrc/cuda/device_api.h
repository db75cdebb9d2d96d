// How a kernel is started: on the device, or on the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace zcomm::cuda {

// `args` is a plain struct, which is copied. Throws std::runtime_error if the device refuses.
void launch(void (*kernel)(const void*), unsigned ctas, unsigned threads, std::size_t shared_nbytes,
            std::uintptr_t stream, const void* args);

// Why nothing can be launched here; "" if it can.
std::string device_missing();

}  // namespace zcomm::cuda
