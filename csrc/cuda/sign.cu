// sign.
#include "cuda/block_kernels.h"
#include "cuda/sign.h"

ZC_BLOCK_KERNELS(sign, zcomm::Sign)
