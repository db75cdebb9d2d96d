// What PTX instructions do, for the C++ that tools/ptx_to_cpp.py makes of PTX. Registers are raw
// bits, so every function takes and returns the unsigned integer of its type's size. Compile with
// -ffp-contract=off -fno-strict-aliasing.
#pragma once

#include "emulator/ptx_float.h"
#include "emulator/ptx_convert.h"
#include "emulator/ptx_integer.h"
#include "emulator/ptx_matrix.h"
#include "emulator/ptx_memory.h"
#include "emulator/ptx_warp.h"
