// int4.
#include "cuda/block_kernels.h"
#include "cuda/uniform.h"

ZC_BLOCK_KERNELS(int4, zcomm::Int4)
