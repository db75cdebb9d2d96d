// none.
#include "cuda/plain.h"

ZC_PLAIN_KERNELS(none, None)
