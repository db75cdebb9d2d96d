// lm3.
#include "cuda/block_kernels.h"
#include "cuda/lm.h"

ZC_BLOCK_KERNELS(lm3, zcomm::Lm<3>)
