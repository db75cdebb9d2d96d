// What every binding that runs kernels needs: the kernels, and a refused wire for Python.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <tuple>

#include "cpu/encode.h"

namespace zcomm {

inline const Kernels* chosen_kernels(int isa) {
  const Kernels* found = kernels_for(isa);
  if (!found) {
    throw pybind11::value_error("this build or processor does not have the instruction set");
  }
  return found;
}

// The refused wire, the message, and the frame or segment at fault.
using Refused =
    std::tuple<int, std::string, std::optional<std::size_t>, std::optional<std::size_t>>;

inline Refused refused(const Fault& fault) {
  return {fault.wire, fault.message, fault.frame, fault.segment};
}

}  // namespace zcomm
