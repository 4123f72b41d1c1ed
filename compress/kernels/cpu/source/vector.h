// Sixteen lanes at a time, whatever the instruction set: every kernel here is written once, on these types.
//
// Floats: 16 float32. Ints: 16 int32. NibbleDot and ByteDot multiply unsigned weights of 4 or 8 bits by int8
// activations, SparseNibbleDot and SparseByteDot signed ones with 2:4 sparsity. Of a weight panel, BYTES bytes hold 16
// rows by COLUMNS columns; `load` fetches one of the PARTS that they are read in, `dot` adds the part's products with
// as many activations, whose octets lie `hop` bytes apart, to an accumulator, `add` what they come out too high by, and
// `finish` gives one exact int32 sum per row. OFFSET: what weights lie above their value. ROWS: rows of activations
// whose sums fit the registers.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int LANES = 16;

// Of a dot product whose sums come out as they should.
struct NoSurplus {
    struct Surplus {};
    template <class Weights>
    static inline Surplus add(Surplus, const Weights&) {
        return {};
    }
};

#if defined(__AVX512VNNI__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "vector_neon.h"
#else
#error "no instruction set chosen: compile with the flags of one of the variants in build.py"
#endif

// e^x to within 2 units in the last place; 0 below -87, where float32 ends. Cody and Waite's reduction to
// [-ln 2 / 2, ln 2 / 2], then a polynomial of degree 6.
static inline Floats exponential(Floats x) {
    const Floats lowest = splat(-87.0f);
    // In this order, because x86 returns the second operand where one is NaN: it must not become a number.
    const Floats inside = minimum(splat(88.0f), maximum(lowest, x));
    const Ints power = round_to_ints(mul(inside, splat(1.44269504088896341f)));
    const Floats turns = to_floats(power);
    Floats rest = fma(turns, splat(-0.693359375f), inside);
    rest = fma(turns, splat(2.12194440e-4f), rest);
    Floats series = splat(1.9875691500e-4f);
    for (const float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        series = fma(series, rest, splat(term));
    series = fma(series, mul(rest, rest), add(rest, splat(1.0f)));
    return where_less(x, lowest, splat(0.0f), scale_by_power_of_two(series, power));
}

static inline Floats sigmoid(Floats x) {
    return divide(splat(1.0f), add(splat(1.0f), exponential(sub(splat(0.0f), x))));
}

static inline Floats hyperbolic_tangent(Floats x) {
    return fma(splat(2.0f), sigmoid(add(x, x)), splat(-1.0f));
}

// Up to 16 floats from or to memory that ends after `count` of them.
static inline Floats load_part(const float* from, int64_t count) {
    if (count >= LANES) return load(from);
    float lanes[LANES] = {};
    std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(float));
    return load(lanes);
}

static inline void store_part(float* to, Floats value, int64_t count) {
    if (count >= LANES) return store(to, value);
    float lanes[LANES];
    store(lanes, value);
    std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(float));
}
