// What products are summed in, and what becomes of a sum.
#pragma once

#include "instructions.h"

#if BITS == 8
using Sum = int;
#else
using Sum = float;
#endif

// One number of out [M, N]. int8 sums meet the token's step and the row's scale, in the order of the reference kernel;
// the weights of the others had theirs before.
__device__ inline Half finished(Sum sum, int token, int row, const Half* scales, const float* steps) {
#if BITS == 8
    return rounded(__fmul_rn(__fmul_rn(static_cast<float>(sum), steps[token]), widened(scales[row])));
#else
    return rounded(sum);
#endif
}
