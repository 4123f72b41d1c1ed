// out [M, N] from the sums of parts, partial [split, M, N], added in order: the same bits every time.

#include "sums.h"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    combine(const Sum* __restrict__ partial, const Half* __restrict__ scales, const float* __restrict__ steps,
            Half* __restrict__ out, int tokens, int rows, int split) {
    int place = blockIdx.x * 32 * WARPS + threadIdx.x, count = tokens * rows;
    if (place >= count) return;
    Sum total = 0;
    for (int part = 0; part < split; ++part) total += partial[static_cast<size_t>(part) * count + place];
    out[place] = finished(total, place / rows, place % rows, scales, steps);
}
