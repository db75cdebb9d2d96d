// Python bindings of plans and of the devices that run them: addresses and sizes in, no torch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/launch.h"
#include "python/layout_rows.h"

namespace zcomm::cuda {

inline void bind_plan(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<Plan>(m, "Plan", py::module_local())
      .def(py::init([](const SegmentRows& segments, const FrameRows& frames) {
             return Plan(layout_from_rows(segments, frames));
           }),
           py::arg("segments"), py::arg("frames"))
      .def_property_readonly("tables", [](const Plan& plan) { return py::bytes(plan.tables); })
      .def("encode_scratch_nbytes", [](const Plan& plan) { return plan.encode_scratch().nbytes; })
      .def("decode_scratch_nbytes",
           [](const Plan& plan, int wires) { return plan.decode_scratch(wires).nbytes; })
      .def("kernels", [](const Plan& plan) {
        std::vector<int> found;
        for (const Kernel kernel : plan.kernels()) found.push_back(static_cast<int>(kernel));
        return found;
      });
  m.attr("INLINE_WIRES") = kInlineWires;
}

inline pybind11::class_<Device> bind_device(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<Device> face(m, "Device", py::module_local());
  face.def("encode", [](const Device& device, const Plan& plan, std::uintptr_t tables,
                        std::uintptr_t scratch, std::uintptr_t grad, int grad_type, double prescale,
                        std::uintptr_t residual_in, std::uintptr_t residual_out, int residual_type,
                        std::uintptr_t wire, bool checksum, bool keep_idle, std::uintptr_t stream) {
    const EncodeCall call{&plan,        tables,   scratch,  grad,      residual_in,
                          residual_out, wire,     stream,   grad_type, residual_type,
                          prescale,     checksum, keep_idle};
    const py::gil_scoped_release release;
    encode(device, call);
  });
  face.def("decode_sum",
           [](const Device& device, const Plan& plan, std::uintptr_t tables, std::uintptr_t scratch,
              std::vector<std::uintptr_t> wires, std::uintptr_t more_wires, std::uintptr_t out,
              bool verify, std::uintptr_t fault, std::uintptr_t stream) {
             const DecodeCall call{&plan, tables, scratch,          out,   more_wires,
                                   fault, stream, std::move(wires), verify};
             const py::gil_scoped_release release;
             decode_sum(device, call);
           });
  return face;
}

}  // namespace zcomm::cuda
