// Binds the ring of a host's ranks.
#pragma once

#include <pybind11/pybind11.h>

namespace zcomm::shm {

void bind_ring(pybind11::module_& m);

}  // namespace zcomm::shm
