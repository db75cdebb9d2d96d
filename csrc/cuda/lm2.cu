// lm2.
#include "cuda/block_kernels.h"
#include "cuda/lm.h"

ZC_BLOCK_KERNELS(lm2, zcomm::Lm<2>)
