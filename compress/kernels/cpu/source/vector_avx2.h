// AVX2 with FMA and F16C: sixteen lanes are two registers.
#pragma once

#include <immintrin.h>

struct Floats {
    __m256 left, right;
};
struct Ints {
    __m256i left, right;
};

static inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void store(float* to, Floats value) {
    _mm256_storeu_ps(to, value.left);
    _mm256_storeu_ps(to + 8, value.right);
}
static inline Floats splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.left, b.left), _mm256_add_ps(a.right, b.right)};
}
static inline Floats sub(Floats a, Floats b) {
    return {_mm256_sub_ps(a.left, b.left), _mm256_sub_ps(a.right, b.right)};
}
static inline Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.left, b.left), _mm256_mul_ps(a.right, b.right)};
}
static inline Floats divide(Floats a, Floats b) {
    return {_mm256_div_ps(a.left, b.left), _mm256_div_ps(a.right, b.right)};
}
static inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.left, b.left, c.left), _mm256_fmadd_ps(a.right, b.right, c.right)};
}
static inline Floats maximum(Floats a, Floats b) {
    return {_mm256_max_ps(a.left, b.left), _mm256_max_ps(a.right, b.right)};
}
static inline Floats minimum(Floats a, Floats b) {
    return {_mm256_min_ps(a.left, b.left), _mm256_min_ps(a.right, b.right)};
}
static inline Floats absolute(Floats a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.left, mask), _mm256_and_ps(a.right, mask)};
}
static inline float sum_lanes(Floats a) {
    const __m256 eight = _mm256_add_ps(a.left, a.right);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline float max_lanes(Floats a) {
    const __m256 eight = _mm256_max_ps(a.left, a.right);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline __m128i eight_halves(const uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
static inline Floats load_bfloat16(const uint16_t* from) {
    const __m256i left = _mm256_cvtepu16_epi32(eight_halves(from));
    const __m256i right = _mm256_cvtepu16_epi32(eight_halves(from + 8));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(left, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(right, 16))};
}
static inline Floats load_float16(const uint16_t* from) {
    return {_mm256_cvtph_ps(eight_halves(from)), _mm256_cvtph_ps(eight_halves(from + 8))};
}
static inline Floats load_int8(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

static inline Ints splat_int(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
static inline Ints subtract(Ints a, Ints b) {
    return {_mm256_sub_epi32(a.left, b.left), _mm256_sub_epi32(a.right, b.right)};
}
static inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.left), _mm256_cvtepi32_ps(a.right)}; }
// To the nearest integer, ties to even.
static inline Ints round_to_ints(Floats a) { return {_mm256_cvtps_epi32(a.left), _mm256_cvtps_epi32(a.right)}; }
static inline int32_t sum_ints(Ints a) {
    const __m256i eight = _mm256_add_epi32(a.left, a.right);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// 16 integers clamped to -128..127.
static inline void store_int8(int8_t* to, Ints value) {
    // Packing works on halves of 128 bits: words come out in the order left 0, right 0, left 1, right 1.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(value.left, value.right), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
static inline Ints clamp_int8(Ints a) {
    const __m256i low = _mm256_set1_epi32(-128), high = _mm256_set1_epi32(127);
    return {_mm256_min_epi32(_mm256_max_epi32(a.left, low), high),
            _mm256_min_epi32(_mm256_max_epi32(a.right, low), high)};
}
// For powers within -126..127, which go straight into the exponent.
static inline __m256 power_of_two(__m256i power) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23));
}
static inline Floats scale_by_power_of_two(Floats a, Ints power) {
    return {_mm256_mul_ps(a.left, power_of_two(power.left)), _mm256_mul_ps(a.right, power_of_two(power.right))};
}
// below where x < bound, else above: there where x is NaN, too.
static inline Floats where_less(Floats x, Floats bound, Floats below, Floats above) {
    return {_mm256_blendv_ps(above.left, below.left, _mm256_cmp_ps(x.left, bound.left, _CMP_LT_OQ)),
            _mm256_blendv_ps(above.right, below.right, _mm256_cmp_ps(x.right, bound.right, _CMP_LT_OQ))};
}

// 32 bfloat16 as two columns of 16 rows each: even ones and odd ones.
static inline void load_pair(const uint16_t* from, Floats& even, Floats& odd) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(left, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(right, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(left, mask)), _mm256_castsi256_ps(_mm256_and_si256(right, mask))};
}

static inline __m256i load_half(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

struct NibbleDot {
    static constexpr int PARTS = 1, ROWS = 4;
    static constexpr int OFFSET = 8;
    struct Weights {
        __m256i low[2], high[2];
    };
    using Sum = Ints;
    static inline Weights load(const uint8_t* panel) {
        const __m256i mask = _mm256_set1_epi8(15);
        const __m256i packed[2] = {load_half(panel), load_half(panel + 32)};
        Weights weights;
        for (int half = 0; half < 2; ++half) {
            weights.low[half] = _mm256_and_si256(packed[half], mask);
            weights.high[half] = _mm256_and_si256(_mm256_srli_epi16(packed[half], 4), mask);
        }
        return weights;
    }
    static inline Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    // Four products of at most 15 * 128 stay within 16 bits.
    static inline __m256i four(__m256i low, __m256i high, __m256i first, __m256i second) {
        const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second));
        return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations) {
        int32_t words[2];
        std::memcpy(words, activations, sizeof words);
        const __m256i first = _mm256_set1_epi32(words[0]), second = _mm256_set1_epi32(words[1]);
        return {_mm256_add_epi32(sum.left, four(weights.low[0], weights.high[0], first, second)),
                _mm256_add_epi32(sum.right, four(weights.low[1], weights.high[1], first, second))};
    }
    static inline Ints finish(Sum sum) { return sum; }
};

// Products of two bytes would overflow the 16 bits that vpmaddubsw adds in, so both sides are widened first.
struct ByteDot {
    static constexpr int PARTS = 2, ROWS = 2;
    static constexpr int OFFSET = 128;
    struct Weights {
        __m256i rows[4];  // 4 rows by 4 columns each, 16 bit
    };
    struct Sum {
        __m256i rows[4];  // 4 rows by 2 partial sums each
    };
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int part = 0; part < 4; ++part)
            weights.rows[part] =
                _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + 16 * part)));
        return weights;
    }
    static inline Sum zero() {
        const __m256i none = _mm256_setzero_si256();
        return {{none, none, none, none}};
    }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations) {
        int32_t word;
        std::memcpy(&word, activations, sizeof word);
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_set1_epi32(word));
        for (int part = 0; part < 4; ++part)
            sum.rows[part] = _mm256_add_epi32(sum.rows[part], _mm256_madd_epi16(weights.rows[part], wide));
        return sum;
    }
    static inline Ints finish(const Sum& sum) {
        // The horizontal sum puts rows in the order 0 1 4 5 2 3 6 7.
        return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.rows[0], sum.rows[1]), 0xd8),
                _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.rows[2], sum.rows[3]), 0xd8)};
    }
};

constexpr int TILE = 4;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
constexpr int float_panels_for(int rows) { return rows <= 2 ? 2 : 1; }

static inline void relax() { _mm_pause(); }
