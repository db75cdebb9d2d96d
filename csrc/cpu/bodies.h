// Everything that runs over lanes, in the order of use. Included inside an instruction set's
// namespace, after its lanes.

#include "cpu/lanes_common.h"
#include "cpu/bytes.h"
#include "cpu/uniform.h"
#include "cpu/fp8.h"
#include "cpu/sign.h"
#include "cpu/lm.h"
#include "cpu/lanes_table.h"
