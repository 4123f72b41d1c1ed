// NEON with the dot product of ARMv8.2: sixteen lanes are four registers.
#pragma once

#include <arm_neon.h>

struct Floats {
    float32x4_t part[4];
};
struct Ints {
    int32x4_t part[4];
};

// Sixteen lanes from what `make` returns for each of the four registers.
template <class Lanes, class Make>
static inline Lanes four(const Make& make) {
    return {{make(0), make(1), make(2), make(3)}};
}
template <class Make>
static inline Floats floats(const Make& make) {
    return four<Floats>(make);
}
template <class Make>
static inline Ints ints(const Make& make) {
    return four<Ints>(make);
}

static inline Floats load(const float* from) {
    return floats([&](int i) { return vld1q_f32(from + 4 * i); });
}
static inline void store(float* to, Floats value) {
    for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, value.part[i]);
}
static inline Floats splat(float value) {
    return floats([&](int) { return vdupq_n_f32(value); });
}
static inline Floats add(Floats a, Floats b) {
    return floats([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
static inline Floats sub(Floats a, Floats b) {
    return floats([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}
static inline Floats mul(Floats a, Floats b) {
    return floats([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
static inline Floats divide(Floats a, Floats b) {
    return floats([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}
static inline Floats fma(Floats a, Floats b, Floats c) {
    return floats([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
static inline Floats maximum(Floats a, Floats b) {
    return floats([&](int i) { return vmaxq_f32(a.part[i], b.part[i]); });
}
static inline Floats minimum(Floats a, Floats b) {
    return floats([&](int i) { return vminq_f32(a.part[i], b.part[i]); });
}
static inline Floats absolute(Floats a) {
    return floats([&](int i) { return vabsq_f32(a.part[i]); });
}
static inline float sum_lanes(Floats a) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(a.part[0], a.part[1]), vaddq_f32(a.part[2], a.part[3])));
}
static inline float max_lanes(Floats a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.part[0], a.part[1]), vmaxq_f32(a.part[2], a.part[3])));
}

static inline Floats load_bfloat16(const uint16_t* from) {
    return floats([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)); });
}
static inline Floats load_float16(const uint16_t* from) {
    return floats([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))); });
}
static inline Floats load_int8(const int8_t* from) {
    const int16x8_t left = vmovl_s8(vld1_s8(from)), right = vmovl_s8(vld1_s8(from + 8));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(left))), vcvtq_f32_s32(vmovl_high_s16(left)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(right))), vcvtq_f32_s32(vmovl_high_s16(right))}};
}

static inline Ints splat_int(int32_t value) {
    return ints([&](int) { return vdupq_n_s32(value); });
}
static inline Ints subtract(Ints a, Ints b) {
    return ints([&](int i) { return vsubq_s32(a.part[i], b.part[i]); });
}
static inline Floats to_floats(Ints a) {
    return floats([&](int i) { return vcvtq_f32_s32(a.part[i]); });
}
// To the nearest integer, ties to even.
static inline Ints round_to_ints(Floats a) {
    return ints([&](int i) { return vcvtnq_s32_f32(a.part[i]); });
}
static inline int32_t sum_ints(Ints a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.part[0], a.part[1]), vaddq_s32(a.part[2], a.part[3])));
}
// 16 integers clamped to -128..127.
static inline void store_int8(int8_t* to, Ints value) {
    const int16x8_t left = vqmovn_high_s32(vqmovn_s32(value.part[0]), value.part[1]);
    const int16x8_t right = vqmovn_high_s32(vqmovn_s32(value.part[2]), value.part[3]);
    vst1q_s8(to, vqmovn_high_s16(vqmovn_s16(left), right));
}
static inline Ints clamp_int8(Ints a) {
    return ints([&](int i) { return vminq_s32(vmaxq_s32(a.part[i], vdupq_n_s32(-128)), vdupq_n_s32(127)); });
}
// For powers within -126..127, which go straight into the exponent.
static inline Floats scale_by_power_of_two(Floats a, Ints power) {
    return floats([&](int i) {
        const int32x4_t exponent = vshlq_n_s32(vaddq_s32(power.part[i], vdupq_n_s32(127)), 23);
        return vmulq_f32(a.part[i], vreinterpretq_f32_s32(exponent));
    });
}
// below where x < bound, else above: there where x is NaN, too.
static inline Floats where_less(Floats x, Floats bound, Floats below, Floats above) {
    return floats([&](int i) { return vbslq_f32(vcltq_f32(x.part[i], bound.part[i]), below.part[i], above.part[i]); });
}

// 32 bfloat16 as two columns of 16 rows each: even ones and odd ones.
static inline void load_pair(const uint16_t* from, Floats& even, Floats& odd) {
    for (int i = 0; i < 4; ++i) {
        const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(from + 8 * i));
        even.part[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
        odd.part[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
    }
}

// sdot multiplies signed bytes by signed bytes: nibbles are positive as they come.
struct NibbleDot : NoSurplus {
    static constexpr int COLUMNS = 8, BYTES = 64, PARTS = 1, ROWS = 4;
    static constexpr int OFFSET = 8;
    struct Weights {
        int8x16_t low[4], high[4];  // 4 rows by 4 columns each
    };
    using Sum = Ints;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int i = 0; i < 4; ++i) {
            const uint8x16_t packed = vld1q_u8(panel + 16 * i);
            weights.low[i] = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15)));
            weights.high[i] = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
        }
        return weights;
    }
    static inline Sum zero() { return splat_int(0); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        const int8x8_t columns = vld1_s8(activations);
        return ints([&](int i) {
            return vdotq_lane_s32(vdotq_lane_s32(sum.part[i], weights.low[i], columns, 0), weights.high[i], columns, 1);
        });
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

// Bytes lie 128 above their value; turning the top bit makes them signed again, so that nothing is left to take off.
struct ByteDot : NoSurplus {
    static constexpr int COLUMNS = 8, BYTES = 128, PARTS = 2, ROWS = 4;
    static constexpr int OFFSET = 0;
    struct Weights {
        int8x16_t rows[4];  // 4 rows by 4 columns each
    };
    using Sum = Ints;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int i = 0; i < 4; ++i)
            weights.rows[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(panel + 64 * PART + 16 * i), vdupq_n_u8(128)));
        return weights;
    }
    static inline Sum zero() { return splat_int(0); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        int32_t word;
        std::memcpy(&word, activations, sizeof word);
        const int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(word));
        return ints([&](int i) { return vdotq_s32(sum.part[i], weights.rows[i], columns); });
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

// The kept values of one unit of a 2:4 panel, and which of the unit's 8 activations each of them meets.
struct SparseUnit {
    int8x16_t values[4];  // 4 rows by 4 values each
    uint8x16_t picks[4];

    template <int UNIT>
    inline void place(const uint8_t* block) {
        // Values 2 and 3 belong to the unit's second four columns.
        const uint8x16_t second = vreinterpretq_u8_u32(vdupq_n_u32(0x04040000));
        for (int i = 0; i < 4; ++i) {
            uint8x16_t positions = vld1q_u8(block + 16 * i);
            if constexpr (UNIT > 0) positions = vshrq_n_u8(positions, 2 * UNIT);
            picks[i] = vorrq_u8(vandq_u8(positions, vdupq_n_u8(3)), second);
        }
    }
    inline Ints add_products(Ints sum, const int8_t* activations) const {
        const int8x8_t eight = vld1_s8(activations);
        const int8x16_t table = vcombine_s8(eight, eight);
        return ints([&](int i) { return vdotq_s32(sum.part[i], values[i], vqtbl1q_s8(table, picks[i])); });
    }
};

struct SparseNibbleDot : NoSurplus {
    static constexpr int COLUMNS = 32, BYTES = 192, PARTS = 2, ROWS = 4;
    static constexpr int OFFSET = 0;
    struct Weights {
        SparseUnit low, high;
    };
    using Sum = Ints;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int i = 0; i < 4; ++i) {
            const int8x16_t packed = vreinterpretq_s8_u8(vld1q_u8(panel + 64 + 64 * PART + 16 * i));
            weights.low.values[i] = vshrq_n_s8(vshlq_n_s8(packed, 4), 4);
            weights.high.values[i] = vshrq_n_s8(packed, 4);
        }
        weights.low.place<2 * PART>(panel);
        weights.high.place<2 * PART + 1>(panel);
        return weights;
    }
    static inline Sum zero() { return splat_int(0); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t hop) {
        return weights.high.add_products(weights.low.add_products(sum, activations), activations + hop);
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

struct SparseByteDot : NoSurplus {
    static constexpr int COLUMNS = 32, BYTES = 320, PARTS = 4, ROWS = 4;
    static constexpr int OFFSET = 0;
    using Weights = SparseUnit;
    using Sum = Ints;
    template <int PART>
    static inline Weights load(const uint8_t* panel) {
        Weights weights;
        for (int i = 0; i < 4; ++i) weights.values[i] = vreinterpretq_s8_u8(vld1q_u8(panel + 64 + 64 * PART + 16 * i));
        weights.place<PART>(panel);
        return weights;
    }
    static inline Sum zero() { return splat_int(0); }
    static inline Sum dot(Sum sum, const Weights& weights, const int8_t* activations, int64_t) {
        return weights.add_products(sum, activations);
    }
    static inline Ints finish(Sum sum, Surplus) { return sum; }
};

// Of 32 registers, four rows take 16 for their sums and a panel of nibbles 8.
constexpr int TILE = 4;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
constexpr int float_panels_for(int rows) { return rows <= 2 ? 2 : 1; }

static inline void relax() { __asm__ __volatile__("yield"); }
