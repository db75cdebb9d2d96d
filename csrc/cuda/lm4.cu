// lm4.
#include "cuda/block_kernels.h"
#include "cuda/lm.h"

ZC_BLOCK_KERNELS(lm4, zcomm::Lm<4>)
