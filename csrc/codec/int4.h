// int4: scales (bf16), then two elements per byte, the lower nibble first.
#pragma once

#include "codec/uniform.h"

namespace zcomm {

using Int4 = Uniform<4, 7, 0x7e12>;

}  // namespace zcomm
