// Activations to int8, one token per program: integers [M, K] and steps [M] with x ~ integers * step.
//
// In the arithmetic of reference.quantize_tokens (IEEE division, ties to even, clamped), so that the integers are the
// reference's own. A token with a NaN or an infinity gets a step that is not finite. K is even; x is read twice, the
// second time from the cache. After: per-token steps as in ZeroQuant (arXiv 2206.01861).

#include "instructions.h"

__device__ inline unsigned magnitude(Half bits) {
    return __float_as_uint(widened(bits)) & 0x7fffffff;
}

__device__ inline unsigned nearest(Half bits, float step) {
    float scaled = __fdiv_rn(widened(bits), step);
    return static_cast<unsigned>(__float2int_rn(fminf(fmaxf(scaled, -128.0f), 127.0f))) & 0xff;
}

// The largest over a program of WARPS warps.
__device__ inline unsigned largest_of_all(unsigned largest) {
    __shared__ unsigned found[WARPS];
    for (int distance = 16; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) largest = max(largest, found[warp]);
    return largest;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    quantize(const unsigned* __restrict__ x, unsigned short* __restrict__ integers, float* __restrict__ steps,
             int columns, float levels) {
    int token = blockIdx.x, pairs = columns / 2;
    x += static_cast<size_t>(token) * pairs;
    integers += static_cast<size_t>(token) * pairs;
    // Magnitudes compare as their bits do, and NaN above all: a maximum of floats would lose it.
    unsigned largest = 0;
    for (int pair = threadIdx.x; pair < pairs; pair += 32 * WARPS)
        largest = max(largest, max(magnitude(x[pair] & 0xffff), magnitude(x[pair] >> 16)));
    float step = __fdiv_rn(__uint_as_float(largest_of_all(largest)), levels);
    step = step == 0.0f ? 1.0f : step;
    if (threadIdx.x == 0) steps[token] = step;
    for (int pair = threadIdx.x; pair < pairs; pair += 32 * WARPS)
        integers[pair] = nearest(x[pair] & 0xffff, step) | nearest(x[pair] >> 16, step) << 8;
}
