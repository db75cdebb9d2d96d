// fp16.
#include "cuda/plain.h"

ZC_PLAIN_KERNELS(fp16, Fp16)
