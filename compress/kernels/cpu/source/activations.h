// Activations as the products want them: int8 with a step per group or token, or bfloat16 parts for matrix units.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"
#include "pool.h"
#include "weights.h"

// From how many rows on matrix units, where there are any, beat vector units.
constexpr int64_t MATRIX_ROWS = 5;

// Rows of activations on int8 grids. Integers lie in tiles of up to TILE rows, [K / 8][rows of the tile][8], so that
// one pass over a weight panel reads those of all rows in order; for matrix units they lie row by row. Steps and sums
// of integers: [T, groups]. outliers: the activations of the outlier columns, [T, outliers]. splits: three bfloat16
// that sum up to each float, [3][T, padded], for matrix units.
struct Activations {
    const float* original = nullptr;  // [T, columns], `stride` floats from row to row
    int64_t stride = 0;
    Buffer<int8_t> integers;
    Buffer<float> steps, sums, outliers;
    Buffer<uint16_t> splits;
    int64_t rows = 0, rows_split = 0, padded = 0, groups = 0, missed = 0;
    bool matrix_units = false, row_by_row = false, is_split = false;
    const Linear* made_for = nullptr;  // the layer whose grid they are on; null: only `original` is there

    void replace(const float* x, int64_t floats_per_row) {
        original = x;
        stride = floats_per_row;
        made_for = nullptr;
        is_split = false;
    }
    // Bytes from one octet of a row to its next, and where its first one lies.
    int64_t hop(int64_t row) const {
        return row_by_row ? OCTET : OCTET * std::min<int64_t>(TILE, rows - row / TILE * TILE);
    }
    int64_t start(int64_t row) const {
        return row_by_row ? row * padded : row / TILE * TILE * padded + row % TILE * OCTET;
    }
};

static inline bool same_quantization(const Linear& a, const Linear& b) {
    return a.group == b.group && a.levels == b.levels && a.padded_columns == b.padded_columns &&
           a.outliers == b.outliers && a.threshold == b.threshold &&
           std::equal(a.outlier_columns, a.outlier_columns + a.outliers, b.outlier_columns);
}

// Divides by one step, many times: by its reciprocal, whose error two corrections take out, so that what comes out is
// what a division rounds to (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990). Steps
// so small or large that the reciprocal or a remainder could leave float32's range are divided by.
struct Divisor {
    Floats step, inverse, minus;
    bool near;

    explicit Divisor(float value)
        : step(splat(value)), inverse(splat(1.0f / value)), minus(splat(-value)),
          near(value > 1e-18f && value < 1e18f) {}
    Floats divide_into(Floats x) const {
        if (!near) return divide(x, step);
        Floats quotient = mul(x, inverse);
        for (int correction = 0; correction < 2; ++correction)
            quotient = fma(fma(quotient, minus, x), inverse, quotient);
        return quotient;
    }
};

// Four results side by side, each of every fourth vector: one alone would wait for itself.
struct Chains {
    Floats of[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};

    // Call step(i, chain) for every vector below `count`.
    template <class Step>
    static void each(int64_t count, const Step& step) {
        int64_t i = 0;
        for (; i + 4 * LANES <= count; i += 4 * LANES)
            for (int chain = 0; chain < 4; ++chain) step(i + chain * LANES, chain);
        for (; i < count; i += LANES) step(i, 0);
    }
    template <class Join>
    Floats joined(const Join& join) const {
        return join(join(of[0], of[1]), join(of[2], of[3]));
    }
};

// One group of `width` floats (the last may end early, at `count`) to int8, ties to even; octets go `hop` bytes apart.
// Returns the step.
static inline float quantize_group(const float* x, int64_t width, int64_t count, float levels, int8_t* to, int64_t hop,
                                   float* sum) {
    Chains largest, finite;
    Chains::each(count, [&](int64_t i, int chain) {
        const Floats part = load_part(x + i, count - i);
        largest.of[chain] = maximum(largest.of[chain], absolute(part));
        finite.of[chain] = fma(part, splat(0.0f), finite.of[chain]);
    });
    // A maximum may drop a NaN, and a row that holds one, or an infinity, must show it in every product.
    float step = max_lanes(largest.joined(maximum)) / levels + sum_lanes(finite.joined(add));
    if (step == 0.0f) step = 1.0f;
    const Divisor divisor(step);
    Ints total = splat_int(0);
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats part = i < count ? load_part(x + i, count - i) : splat(0.0f);
        const Ints integers = clamp_int8(round_to_ints(divisor.divide_into(part)));
        total = subtract(total, integers);
        if (hop == OCTET && width - i >= LANES) {
            store_int8(to + i, integers);
            continue;
        }
        int8_t bytes[LANES];
        store_int8(bytes, integers);
        std::memcpy(to + i / OCTET * hop, bytes, OCTET);
        if (width - i > OCTET) std::memcpy(to + (i / OCTET + 1) * hop, bytes + OCTET, OCTET);
    }
    *sum = static_cast<float>(-sum_ints(total));
    return step;
}

// The row with zeros for its outliers, which are put aside. Counts what is over the threshold all the same.
static inline const float* without_outliers(const Linear& linear, const float* x, int64_t row, Activations& into,
                                            int64_t* missed) {
    static thread_local Buffer<float> buffer;
    float* inside = room(buffer, linear.columns + LANES);
    Chains over;
    const Floats threshold = splat(linear.threshold), none = splat(0.0f), one = splat(1.0f);
    Chains::each(linear.columns, [&](int64_t i, int chain) {
        const Floats part = load_part(x + i, linear.columns - i);
        store(inside + i, part);
        over.of[chain] = add(over.of[chain], where_less(absolute(part), threshold, none, one));
    });
    // Past the last column there are zeros, which are below any threshold that is one.
    int64_t count = static_cast<int64_t>(sum_lanes(over.joined(add)));
    for (int64_t i = 0; i < linear.outliers; ++i) {
        float& outlier = inside[linear.outlier_columns[i]];
        count -= !(std::fabs(outlier) < linear.threshold);
        into.outliers[static_cast<size_t>(row * linear.outliers + i)] = outlier;
        outlier = 0.0f;
    }
    if (linear.threshold > 0) *missed = count;
    return inside;
}

static inline void quantize_row(const Linear& linear, const float* x, int64_t row, Activations& into,
                                int64_t* missed) {
    const int64_t hop = into.hop(row);
    if (linear.outliers > 0 || linear.threshold > 0) x = without_outliers(linear, x, row, into, missed);
    for (int64_t group = 0; group < into.groups; ++group) {
        const int64_t start = group * linear.group, count = std::min(linear.group, linear.columns - start);
        const int64_t at = row * into.groups + group;
        int8_t* to = into.integers.data() + into.start(row) + start / OCTET * hop;
        into.steps[at] = quantize_group(x + start, linear.group, count, linear.levels, to, hop, &into.sums[at]);
    }
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_bfloat16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Write each float as a sum of three bfloat16, which hold its 24 bits between them.
static inline void split(Pool& pool, const Linear& linear, int64_t rows, Activations& into) {
    into.is_split = true;
    into.rows_split = rows;
    const int64_t columns = linear.columns, padded = linear.padded_columns;
    into.splits.assign(static_cast<size_t>(3 * rows * padded), 0);
    pool.run(rows, [&](int64_t row, int) {
        uint16_t* to = into.splits.data() + row * padded;
        for (int64_t column = 0; column < columns; ++column) {
            float rest = into.original[row * into.stride + column];
            for (int64_t part = 0; part < 3; ++part) {
                const uint16_t half = to_bfloat16(rest);
                to[part * rows * padded + column] = half;
                rest -= from_bfloat16(half);
            }
        }
    });
}

// Activations of `rows` rows as `linear` wants them; nothing is done where they already are.
static inline void quantize(Pool& pool, const Linear& linear, int64_t rows, Activations& into) {
    if (!is_integer(linear)) {
        const bool wanted = into.matrix_units && rows >= MATRIX_ROWS && linear.type == BFLOAT16;
        if (wanted && !into.is_split) split(pool, linear, rows, into);
        return;
    }
    if (into.made_for == nullptr || !same_quantization(*into.made_for, linear)) {
        into.made_for = &linear;
        into.rows = rows;
        into.padded = linear.padded_columns;
        into.row_by_row = into.matrix_units && rows >= MATRIX_ROWS;
        into.groups = linear.padded_columns / linear.group;
        into.integers.resize(static_cast<size_t>(rows * linear.padded_columns));
        into.steps.resize(static_cast<size_t>(rows * into.groups));
        into.sums.resize(static_cast<size_t>(rows * into.groups));
        into.outliers.resize(static_cast<size_t>(rows * linear.outliers));
        std::vector<int64_t> missed(static_cast<size_t>(rows), 0);
        const int64_t chunk_rows = 4;
        pool.run((rows + chunk_rows - 1) / chunk_rows, [&](int64_t chunk, int) {
            for (int64_t row = chunk * chunk_rows; row < std::min(rows, (chunk + 1) * chunk_rows); ++row)
                quantize_row(linear, into.original + row * into.stride, row, into, &missed[static_cast<size_t>(row)]);
        });
        into.missed = 0;
        for (const int64_t count : missed) into.missed += count;
    }
    if (linear.counts != nullptr) {
        __atomic_fetch_add(&linear.counts[0], into.missed, __ATOMIC_RELAXED);
        __atomic_fetch_add(&linear.counts[1], rows * linear.columns, __ATOMIC_RELAXED);
    }
}
