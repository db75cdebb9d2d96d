// Bodies over lanes must be inlined into the functions of their instruction set, lambdas too.
#pragma once

#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS
