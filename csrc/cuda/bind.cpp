// The Python face of the CUDA kernels: addresses and sizes in, no torch. ZC_MODULE is another name
// where the kernels run on the emulator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/launch.h"
#include "layout_rows.h"

#if defined(ZC_EMULATED)
#include "emulator/bind.h"
#else
#define ZC_MODULE _cuda
#endif

namespace py = pybind11;
using zcomm::cuda::Plan;

PYBIND11_MODULE(ZC_MODULE, m) {
  py::class_<Plan>(m, "Plan", py::module_local())
      .def(py::init([](const zcomm::SegmentRows& segments, const zcomm::FrameRows& frames) {
             return Plan(zcomm::layout_from_rows(segments, frames));
           }),
           py::arg("segments"), py::arg("frames"))
      .def_property_readonly("tables", [](const Plan& plan) { return py::bytes(plan.tables); })
      .def("encode_scratch_nbytes", [](const Plan& plan) { return plan.encode_scratch().nbytes; })
      .def("decode_scratch_nbytes",
           [](const Plan& plan, int wires) { return plan.decode_scratch(wires).nbytes; });
  m.def("encode", [](const Plan& plan, std::uintptr_t tables, std::uintptr_t scratch,
                     std::uintptr_t grad, int grad_type, double prescale,
                     std::uintptr_t residual_in, std::uintptr_t residual_out, int residual_type,
                     std::uintptr_t wire, bool checksum, bool keep_idle, std::uintptr_t stream) {
    const zcomm::cuda::EncodeCall call{&plan,        tables,   scratch,  grad,      residual_in,
                                       residual_out, wire,     stream,   grad_type, residual_type,
                                       prescale,     checksum, keep_idle};
    const py::gil_scoped_release release;
    zcomm::cuda::encode(call);
  });
  m.def("decode_sum",
        [](const Plan& plan, std::uintptr_t tables, std::uintptr_t scratch,
           std::vector<std::uintptr_t> wires, std::uintptr_t more_wires, std::uintptr_t out,
           bool verify, std::uintptr_t fault, std::uintptr_t stream) {
          const zcomm::cuda::DecodeCall call{&plan, tables, scratch,          out,   more_wires,
                                             fault, stream, std::move(wires), verify};
          const py::gil_scoped_release release;
          zcomm::cuda::decode_sum(call);
        });
  m.def("missing", &zcomm::cuda::missing);
  m.attr("INLINE_WIRES") = zcomm::cuda::kInlineWires;
  m.attr("MAX_WIRES") = zcomm::cuda::kMaxWires;
#if defined(ZC_EMULATED)
  emu::bind_settings(m);
#endif
}
