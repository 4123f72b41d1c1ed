// AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned by 64 signed bytes and sums by fours, exactly.
#pragma once

#include <immintrin.h>

using Floats = __m512;
using Ints = __m512i;

static inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
static inline Floats splat(float value) { return _mm512_set1_ps(value); }
static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
static inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
static inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats absolute(Floats a) { return _mm512_abs_ps(a); }
static inline float sum_lanes(Floats a) { return _mm512_reduce_add_ps(a); }
static inline float max_lanes(Floats a) { return _mm512_reduce_max_ps(a); }

static inline Floats load_bfloat16(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline Floats load_float16(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
static inline Floats load_int8(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

static inline Ints splat_int(int32_t value) { return _mm512_set1_epi32(value); }
static inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
static inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
// To the nearest integer, ties to even.
static inline Ints round_to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
static inline int32_t sum_ints(Ints a) { return _mm512_reduce_add_epi32(a); }
// 16 integers clamped to -128..127.
static inline void store_int8(int8_t* to, Ints value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(value));
}
static inline Ints clamp_int8(Ints a) {
    return _mm512_min_epi32(_mm512_max_epi32(a, _mm512_set1_epi32(-128)), _mm512_set1_epi32(127));
}
static inline Floats scale_by_power_of_two(Floats a, Ints power) {
    return _mm512_scalef_ps(a, _mm512_cvtepi32_ps(power));
}
// below where x < bound, else above: there where x is NaN, too.
static inline Floats where_less(Floats x, Floats bound, Floats below, Floats above) {
    return _mm512_mask_mov_ps(above, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), below);
}

// Four bytes to every lane, straight from memory.
static inline __m512i splat_word(const int8_t* bytes) {
    return _mm512_broadcastd_epi32(_mm_castps_si128(_mm_load_ss(reinterpret_cast<const float*>(bytes))));
}
// 32 bfloat16 as two columns of 16 rows each: even ones and odd ones.
static inline void load_pair(const uint16_t* from, Floats& even, Floats& odd) {
    const __m512i both = _mm512_loadu_si512(from);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

struct NibbleDot {
    static constexpr int PARTS = 1, ROWS = 8;
    static constexpr int OFFSET = 8;
    struct Weights {
        __m512i low, high;
    };
    using Sum = __m512i;
    static inline Weights load(const uint8_t* panel) {
        const __m512i packed = _mm512_loadu_si512(panel), mask = _mm512_set1_epi8(15);
        return {_mm512_and_si512(packed, mask), _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask)};
    }
    static inline Sum zero() { return _mm512_setzero_si512(); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations) {
        sum = _mm512_dpbusd_epi32(sum, weights.low, splat_word(activations));
        return _mm512_dpbusd_epi32(sum, weights.high, splat_word(activations + 4));
    }
    static inline Ints finish(Sum sum) { return sum; }
};

struct ByteDot {
    static constexpr int PARTS = 2, ROWS = 8;
    static constexpr int OFFSET = 128;
    using Weights = __m512i;
    using Sum = __m512i;
    static inline Weights load(const uint8_t* panel) { return _mm512_loadu_si512(panel); }
    static inline Sum zero() { return _mm512_setzero_si512(); }
    static inline Sum dot(Sum sum, Weights weights, const int8_t* activations) {
        return _mm512_dpbusd_epi32(sum, weights, splat_word(activations));
    }
    static inline Ints finish(Sum sum) { return sum; }
};

// Rows of activations that one pass over a weight panel serves, and panels at a time for few rows: enough independent
// sums to hide the multiplier's latency, few enough to stay in registers.
constexpr int TILE = 8;
constexpr int panels_for(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }
constexpr int float_panels_for(int rows) { return rows <= 4 ? 4 : 2; }

static inline void relax() { _mm_pause(); }
