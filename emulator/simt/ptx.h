// What PTX instructions do, for the C++ that emulator/ptx_to_cpp.py makes of PTX. Registers are raw
// bits, so every function takes and returns the unsigned integer of its type's size. Compile with
// -ffp-contract=off -fno-strict-aliasing.
#pragma once

#include "simt/ptx_float.h"
#include "simt/ptx_convert.h"
#include "simt/ptx_integer.h"
#include "simt/ptx_matrix.h"
#include "simt/ptx_memory.h"
#include "simt/ptx_warp.h"
