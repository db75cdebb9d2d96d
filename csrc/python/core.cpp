// Python bindings of the native core: addresses and sizes in, no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/encode.h"
#include "python/bind_device.h"
#include "cuda/driver.h"
#include "python/kernel_calls.h"
#include "python/layout_rows.h"
#include "python/ring.h"

namespace py = pybind11;

namespace {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void encode(const zcomm::Layout& layout, int isa, int threads, std::uintptr_t grad, int grad_dtype,
            double prescale, std::uintptr_t residual_in, std::uintptr_t residual_out,
            int residual_dtype, std::uintptr_t wire, bool verify, bool keep_idle) {
  const zcomm::EncodeArgs args{&layout,
                               zcomm::chosen_kernels(isa),
                               threads,
                               pointer<const std::uint8_t>(grad),
                               static_cast<zcomm::GradType>(grad_dtype),
                               prescale,
                               pointer<const std::uint64_t>(residual_in),
                               pointer<const std::uint64_t>(residual_out),
                               static_cast<zcomm::ResidualType>(residual_dtype),
                               pointer<std::uint8_t>(wire),
                               verify,
                               keep_idle};
  const py::gil_scoped_release release;
  zcomm::encode(args);
}

std::optional<zcomm::Refused> decode_sum(const zcomm::Layout& layout, int isa, int threads,
                                         const std::vector<std::uintptr_t>& wires,
                                         std::uintptr_t out, bool verify, bool apart) {
  static_assert(sizeof(std::uintptr_t) == sizeof(const std::uint8_t*));
  const zcomm::DecodeArgs args{&layout,
                               zcomm::chosen_kernels(isa),
                               threads,
                               reinterpret_cast<const std::uint8_t* const*>(wires.data()),
                               apart ? 1 : static_cast<int>(wires.size()),
                               pointer<float>(out),
                               verify,
                               apart};
  const py::gil_scoped_release release;
  const auto fault = zcomm::decode_sum(args);
  if (!fault) return std::nullopt;
  return zcomm::refused(*fault);
}

template <class Has>
std::vector<std::string> isa_names(Has has) {
  std::vector<std::string> names;
  for (int i = 0; i < zcomm::kIsas; ++i) {
    if (has(i)) names.emplace_back(zcomm::kIsaNames[i]);
  }
  return names;
}

// CUDA kernels that were compiled at run time; see zcomm/kernels/cupy.py.
void bind_driver(py::module_& m) {
  using zcomm::cuda::Driver;
  zcomm::cuda::bind_plan(m);
  zcomm::cuda::bind_device(m);
  py::class_<Driver, zcomm::cuda::Device>(m, "Driver")
      .def(py::init([](std::uintptr_t launch, std::uintptr_t error_name, std::uintptr_t set_context,
                       std::uintptr_t context) {
        return Driver({launch, error_name, set_context, context});
      }))
      .def("set_function", &Driver::set_function)
      .def("has", &Driver::has);
  py::list names;
  for (const auto& name : zcomm::cuda::kKernelNames) {
    names.append(py::make_tuple(name.symbol, name.file, name.rows));
  }
  m.attr("KERNELS") = py::tuple(names);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  py::class_<zcomm::Layout>(m, "Layout")
      .def(py::init(&zcomm::layout_from_rows), py::arg("segments"), py::arg("frames"));
  m.def("encode", &encode);
  m.def("decode_sum", &decode_sum);
  m.def("allocated_nbytes",
        [] { return std::pair(zcomm::heap_counter.now(), zcomm::heap_counter.most()); });
  m.def("isas", [] { return isa_names([](int i) { return zcomm::kernels_for(i) != nullptr; }); });
  m.def("built_isas", [] { return isa_names(zcomm::isa_is_built); });
  bind_driver(m);
  zcomm::shm::bind_ring(m);
}
