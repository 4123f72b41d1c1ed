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

struct NibbleDot : NoSurplus {
    static constexpr int COLUMNS = 8, BYTES = 64, PARTS = 1, ROWS = 8;
    static constexpr int OFFSET = 8;
    struct Weights {
        __m512i low, high;
    };
    using Sum = __m512i;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        const __m512i packed = _mm512_loadu_si512(panel), mask = _mm512_set1_epi8(15);
        return {_mm512_and_si512(packed, mask), _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask)};
    }
    static inline Sum zero() { return _mm512_setzero_si512(); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        sum = _mm512_dpbusd_epi32(sum, weights.low, splat_word(activations));
        return _mm512_dpbusd_epi32(sum, weights.high, splat_word(activations + 4));
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

struct ByteDot : NoSurplus {
    static constexpr int COLUMNS = 8, BYTES = 128, PARTS = 2, ROWS = 8;
    static constexpr int OFFSET = 128;
    using Weights = __m512i;
    using Sum = __m512i;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        return _mm512_loadu_si512(panel + 64 * PART);
    }
    static inline Sum zero() { return _mm512_setzero_si512(); }
    static inline Sum dot(Sum sum, Weights weights, const int8_t* activations, int64_t) {
        return _mm512_dpbusd_epi32(sum, weights, splat_word(activations));
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

// The kept values of one unit of a 2:4 panel, signed, and which of the unit's 8 activations each of them meets.
//
// Every row meets activations of its own, so these are shuffled and must be vpdpbusd's unsigned side: 128 is added to
// them. What that adds to a row's sum, its weights alone decide: the surplus, which serves all rows of activations.
struct SparseUnit {
    __m512i values, picks;

    template <int UNIT>
    static inline SparseUnit make(__m512i values, const uint8_t* block) {
        const __m512i positions = _mm512_srli_epi16(_mm512_loadu_si512(block), 2 * UNIT);
        // (positions & 3) | 4: values 2 and 3 belong to the unit's second four columns.
        const __m512i second = _mm512_set1_epi32(0x04040000);
        return {values, _mm512_ternarylogic_epi32(positions, _mm512_set1_epi8(3), second, 0xea)};
    }
    inline __m512i add_products(__m512i sum, const int8_t* activations) const {
        const __m512i eight = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(activations)));
        const __m512i raised = _mm512_xor_si512(eight, _mm512_set1_epi8(-128));
        return _mm512_dpbusd_epi32(sum, _mm512_shuffle_epi8(raised, picks), values);
    }
    inline __m512i add_surplus(__m512i sum) const {
        return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), values);
    }
};

// A nibble in a byte's upper half is a signed byte of 16 times its value, which the end takes off.
struct SparseNibbleDot {
    static constexpr int COLUMNS = 32, BYTES = 192, PARTS = 2, ROWS = 8;
    static constexpr int OFFSET = 0;
    struct Weights {
        SparseUnit low, high;
    };
    using Sum = __m512i;
    using Surplus = __m512i;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        const __m512i packed = _mm512_loadu_si512(panel + 64 + 64 * PART), mask = _mm512_set1_epi8(-16);
        return {SparseUnit::make<2 * PART>(_mm512_and_si512(_mm512_slli_epi16(packed, 4), mask), panel),
                SparseUnit::make<2 * PART + 1>(_mm512_and_si512(packed, mask), panel)};
    }
    static inline Sum zero() { return _mm512_setzero_si512(); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t hop) {
        return weights.high.add_products(weights.low.add_products(sum, activations), activations + hop);
    }
    static inline Surplus add(Surplus surplus, const Weights& weights) {
        return weights.high.add_surplus(weights.low.add_surplus(surplus));
    }
    static inline Ints finish(Sum sum, Surplus surplus) {
        return _mm512_srai_epi32(_mm512_sub_epi32(sum, surplus), 4);
    }
};

struct SparseByteDot {
    static constexpr int COLUMNS = 32, BYTES = 320, PARTS = 4, ROWS = 8;
    static constexpr int OFFSET = 0;
    using Weights = SparseUnit;
    using Sum = __m512i;
    using Surplus = __m512i;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        return SparseUnit::make<PART>(_mm512_loadu_si512(panel + 64 + 64 * PART), panel);
    }
    static inline Sum zero() { return _mm512_setzero_si512(); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        return weights.add_products(sum, activations);
    }
    static inline Surplus add(Surplus surplus, const Weights& weights) { return weights.add_surplus(surplus); }
    static inline Ints finish(Sum sum, Surplus surplus) { return _mm512_sub_epi32(sum, surplus); }
};

// Rows of activations that one pass over a weight panel serves, and panels at a time for few rows: enough independent
// sums to hide the multiplier's latency, few enough to stay in registers.
constexpr int TILE = 8;
constexpr int panels_for(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }
constexpr int float_panels_for(int rows) { return rows <= 4 ? 4 : 2; }

static inline void relax() { _mm_pause(); }
