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

struct NibbleDot : NoSurplus {
    static constexpr int COLUMNS = 8, BYTES = 64, PARTS = 1, ROWS = 4;
    static constexpr int OFFSET = 8;
    struct Weights {
        __m256i low[2], high[2];
    };
    using Sum = Ints;
    template <int PART>
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
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        int32_t words[2];
        std::memcpy(words, activations, sizeof words);
        const __m256i first = _mm256_set1_epi32(words[0]), second = _mm256_set1_epi32(words[1]);
        return {_mm256_add_epi32(sum.left, four(weights.low[0], weights.high[0], first, second)),
                _mm256_add_epi32(sum.right, four(weights.low[1], weights.high[1], first, second))};
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

// Products of two bytes would overflow the 16 bits that vpmaddubsw adds in, so both sides are widened first.
struct ByteDot : NoSurplus {
    static constexpr int COLUMNS = 8, BYTES = 128, PARTS = 2, ROWS = 2;
    static constexpr int OFFSET = 128;
    struct Weights {
        __m256i rows[4];  // 4 rows by 4 columns each, 16 bit
    };
    struct Sum {
        __m256i rows[4];  // 4 rows by 2 partial sums each
    };
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int part = 0; part < 4; ++part)
            weights.rows[part] =
                _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + 64 * PART + 16 * part)));
        return weights;
    }
    static inline Sum zero() {
        const __m256i none = _mm256_setzero_si256();
        return {{none, none, none, none}};
    }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        int32_t word;
        std::memcpy(&word, activations, sizeof word);
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_set1_epi32(word));
        for (int part = 0; part < 4; ++part)
            sum.rows[part] = _mm256_add_epi32(sum.rows[part], _mm256_madd_epi16(weights.rows[part], wide));
        return sum;
    }
    static inline Ints finish(const Sum& sum, Surplus) {
        // The horizontal sum puts rows in the order 0 1 4 5 2 3 6 7.
        return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.rows[0], sum.rows[1]), 0xd8),
                _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.rows[2], sum.rows[3]), 0xd8)};
    }
};

// Which of a unit's 8 activations each kept value of 8 rows of a 2:4 panel meets.
template <int UNIT>
static inline __m256i picks_of(__m256i positions) {
    const __m256i picks = _mm256_and_si256(_mm256_srli_epi16(positions, 2 * UNIT), _mm256_set1_epi8(3));
    // Values 2 and 3 belong to the unit's second four columns.
    return _mm256_or_si256(picks, _mm256_set1_epi32(0x04040000));
}

static inline __m256i pick(const int8_t* activations, __m256i picks) {
    int64_t eight;
    std::memcpy(&eight, activations, sizeof eight);
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), picks);
}

struct SparseNibbleDot : NoSurplus {
    static constexpr int COLUMNS = 32, BYTES = 192, PARTS = 2, ROWS = 4;
    static constexpr int OFFSET = 0;
    struct Weights {
        __m256i low[2], high[2], low_picks[2], high_picks[2];
    };
    using Sum = Ints;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        const __m256i mask = _mm256_set1_epi8(15);
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
        Weights weights;
        for (int half = 0; half < 2; ++half) {
            const __m256i positions = load_half(panel + 32 * half);
            const __m256i packed = load_half(panel + 64 + 64 * PART + 32 * half);
            weights.low[half] = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, mask));
            weights.high[half] =
                _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask));
            weights.low_picks[half] = picks_of<2 * PART>(positions);
            weights.high_picks[half] = picks_of<2 * PART + 1>(positions);
        }
        return weights;
    }
    static inline Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    // vpmaddubsw's left side is unsigned: the sign of an activation goes over to its weight.
    static inline __m256i pairs(__m256i weights, __m256i activations) {
        return _mm256_maddubs_epi16(_mm256_abs_epi8(activations), _mm256_sign_epi8(weights, activations));
    }
    static inline __m256i add_half(__m256i sum, const Weights& weights, int half, const int8_t* activations,
                                   int64_t hop) {
        const __m256i low = pairs(weights.low[half], pick(activations, weights.low_picks[half]));
        const __m256i high = pairs(weights.high[half], pick(activations + hop, weights.high_picks[half]));
        // Four products of at most 8 * 128 stay within 16 bits.
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1)));
    }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t hop) {
        return {add_half(sum.left, weights, 0, activations, hop), add_half(sum.right, weights, 1, activations, hop)};
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

// Both sides are widened here, too: even and odd bytes on their own, so that a row's products stay in its lane.
struct SparseByteDot : NoSurplus {
    static constexpr int COLUMNS = 32, BYTES = 320, PARTS = 4, ROWS = 4;
    static constexpr int OFFSET = 0;
    struct Weights {
        __m256i even[2], odd[2], picks[2];
    };
    using Sum = Ints;
    static inline __m256i even_bytes(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
    static inline __m256i odd_bytes(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int half = 0; half < 2; ++half) {
            const __m256i values = load_half(panel + 64 + 64 * PART + 32 * half);
            weights.even[half] = even_bytes(values);
            weights.odd[half] = odd_bytes(values);
            weights.picks[half] = picks_of<PART>(load_half(panel + 32 * half));
        }
        return weights;
    }
    static inline Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static inline __m256i add_half(__m256i sum, const Weights& weights, int half, const int8_t* activations) {
        const __m256i picked = pick(activations, weights.picks[half]);
        const __m256i even = _mm256_madd_epi16(weights.even[half], even_bytes(picked));
        const __m256i odd = _mm256_madd_epi16(weights.odd[half], odd_bytes(picked));
        return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
    }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        return {add_half(sum.left, weights, 0, activations), add_half(sum.right, weights, 1, activations)};
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

constexpr int TILE = 4;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
constexpr int float_panels_for(int rows) { return rows <= 2 ? 2 : 1; }

static inline void relax() { _mm_pause(); }
