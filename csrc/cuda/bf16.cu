// bf16.
#include "cuda/plain.h"

ZC_PLAIN_KERNELS(bf16, Bf16)
