// int8: scales (bf16), then one byte per element.
#pragma once

#include "codec/uniform.h"

namespace zcomm {

using Int8 = Uniform<8, 127, 0x7c01>;

}  // namespace zcomm
