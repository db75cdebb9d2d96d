// CUDA's driver on the emulator: what zcomm/kernels/cuda_driver.py calls, and zcomm._core. A module
// is a library of translated PTX beside this one, named for the PTX that the driver is given.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "simt/simt.h"

namespace {

constexpr int kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201, kNotFound = 500;
constexpr int kLaunchFailed = 719;
constexpr int kDevices = 2;
constexpr unsigned kSharedNbytes = 48 << 10;  // what a kernel gets that does not ask for more
char contexts[kDevices];
thread_local void* current = nullptr;  // a thread begins without a context
thread_local void* pushed = nullptr;
thread_local std::string failure;

std::string library_of(const char* image) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char* at = image; *at; ++at) {
    hash = (hash ^ static_cast<unsigned char>(*at)) * 0x100000001b3u;
  }
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&library_of), &self);
  const std::string path = self.dli_fname;
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.so", static_cast<unsigned long long>(hash));
  return path.substr(0, path.rfind('/') + 1) + name;
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return flags ? kInvalidValue : 0; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < kDevices ? 0 : 101;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kMajor = 75, kMinor = 76;
  if (attribute != kMajor && attribute != kMinor) return kInvalidValue;
  *value = attribute == kMajor ? 8 : 0;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}

int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  pushed = current;
  current = context;
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = pushed;
  return 0;
}

int cuModuleLoadData(void** module, const char* image) {
  if (!current) return kInvalidContext;
  *module = dlopen(library_of(image).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!*module) failure = dlerror();
  return *module ? 0 : kInvalidImage;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (!current) return kInvalidContext;
  *function = dlsym(module, name);
  return *function ? 0 : kNotFound;
}

int cuLaunchKernel(void* function, unsigned ctas_x, unsigned ctas_y, unsigned ctas_z,
                   unsigned threads_x, unsigned threads_y, unsigned threads_z,
                   unsigned shared_nbytes, void*, void** args, void**) {
  if (!current) return kInvalidContext;
  if (shared_nbytes > kSharedNbytes) return kInvalidValue;
  try {
    emu::launch(reinterpret_cast<emu::Kernel>(function), {ctas_x, ctas_y, ctas_z},
                {threads_x, threads_y, threads_z}, shared_nbytes, args[0]);
    return 0;
  } catch (const emu::Error& error) {
    failure = error.what();
    return kLaunchFailed;
  }
}

int cuGetErrorName(int error, const char** name) {
  if (error == kLaunchFailed || error == kInvalidImage) {
    *name = failure.c_str();
  } else if (error == kInvalidValue) {
    *name = "CUDA_ERROR_INVALID_VALUE";
  } else if (error == kNotFound) {
    *name = "CUDA_ERROR_NOT_FOUND";
  } else if (error == kInvalidContext) {
    *name = "CUDA_ERROR_INVALID_CONTEXT";
  } else {
    return kInvalidValue;
  }
  return 0;
}

}  // extern "C"
