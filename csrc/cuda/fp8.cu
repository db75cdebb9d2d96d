// fp8.
#include "cuda/block_kernels.h"
#include "cuda/fp8.h"

ZC_BLOCK_KERNELS(fp8, zcomm::Fp8)
