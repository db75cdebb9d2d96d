// Python bindings of the CUDA kernels. On the emulator, ZC_MODULE is another name.
#include "python/bind_device.h"

#if defined(ZC_EMULATED)
#include "simt/bind.h"
#else
#define ZC_MODULE _cuda
#endif

namespace py = pybind11;

PYBIND11_MODULE(ZC_MODULE, m) {
  zcomm::cuda::bind_plan(m);
  zcomm::cuda::bind_device(m);
  const auto device = py::cast(&zcomm::cuda::linked_device(), py::return_value_policy::reference);
  m.attr("encode") = device.attr("encode");
  m.attr("decode_sum") = device.attr("decode_sum");
  m.def("missing", &zcomm::cuda::device_missing);
#if defined(ZC_EMULATED)
  emu::bind_settings(m);
#else
  m.def("capability", &zcomm::cuda::compute_capability);
  m.attr("ARCHS") = std::vector<int>{ZC_CUDA_ARCHS};
#endif
}
