// int8.
#include "cuda/block_kernels.h"
#include "cuda/uniform.h"

ZC_BLOCK_KERNELS(int8, zcomm::Int8)
