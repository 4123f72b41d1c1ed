// Linear layers: weights in panels of 16 rows, activations quantized to int8 where the weight is an integer.
//
// A panel holds 16 output rows side by side, so that one load fetches the same columns of all of them and no sum runs
// across lanes. Layout of one panel, K columns padded to a multiple of 8:
//   4 bit   per 8 columns 64 bytes: byte 4 r + j holds column j of row r in its low and column 4 + j in its high half
//   8 bit   per 4 columns 64 bytes: byte 4 r + j holds column j of row r
//   bfloat16 per 2 columns 32 numbers, the two of a row beside each other
//   float32 and float16 per column 16 numbers
// Integers are stored unsigned, 8 or 128 above their value. Scales and zero points: [panel][group][16].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pool.h"
#include "vector.h"

// From how many rows on matrix units, where there are any, beat vector units.
constexpr int64_t MATRIX_ROWS = 5;

enum NumberType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4 };

// One linear layer; Python's `LinearLayout` mirrors it field by field.
struct Linear {
    const void* weight;
    const void* scale;
    const int8_t* zero;  // null when symmetric
    const float* bias;   // null for none
    const int32_t* outlier_columns;
    const void* outlier_weight;  // [panel][outlier][16] in scale_type
    int64_t* counts;             // {activations over the threshold outside the outlier columns, activations seen}
    int64_t rows, columns, padded_columns;
    int64_t group;        // columns that share one activation step; padded_columns for a step per token
    int64_t scale_group;  // columns that share one scale
    int64_t outliers;
    int32_t type, scale_type;
    float levels;     // the activation step is its group's absmax over this
    float threshold;  // from which an activation counts as an outlier
};

static inline int64_t panels_of(const Linear& linear) { return (linear.rows + LANES - 1) / LANES; }
static inline bool is_integer(const Linear& linear) { return linear.type == INT8 || linear.type == INT4; }

// Columns of one row that lie together.
constexpr int64_t OCTET = 8;

// Rows of activations on int8 grids. Integers lie in tiles of up to TILE rows, [K / 8][rows of the tile][8], so that
// one pass over a weight panel reads those of all rows in order; for matrix units they lie row by row. Steps and sums
// of integers: [T, groups]. splits: three bfloat16 that sum up to each float, [3][T, padded], for matrix units.
struct Activations {
    const float* original = nullptr;  // [T, columns]
    std::vector<int8_t> integers;
    std::vector<float> steps, sums;
    std::vector<uint16_t> splits;
    int64_t rows = 0, rows_split = 0, padded = 0, groups = 0, missed = 0;
    bool matrix_units = false, row_by_row = false, is_split = false;
    const Linear* made_for = nullptr;  // the layer whose grid they are on; null: only `original` is there

    void replace(const float* x) {
        original = x;
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

// One group of `width` floats (the last may end early, at `count`) to int8, ties to even; octets go `hop` bytes apart.
// Returns the step.
static inline float quantize_group(const float* x, int64_t width, int64_t count, float levels, int8_t* to, int64_t hop,
                                   float* sum) {
    Floats largest = splat(0.0f), finite = splat(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats part = load_part(x + i, count - i);
        largest = maximum(largest, absolute(part));
        finite = fma(part, splat(0.0f), finite);
    }
    // A maximum may drop a NaN, and a row that holds one, or an infinity, must show it in every product.
    float step = max_lanes(largest) / levels + sum_lanes(finite);
    if (step == 0.0f) step = 1.0f;
    Ints total = splat_int(0);
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats part = i < count ? load_part(x + i, count - i) : splat(0.0f);
        const Ints integers = clamp_int8(round_to_ints(divide(part, splat(step))));
        total = subtract(total, integers);
        int8_t bytes[LANES];
        store_int8(bytes, integers);
        std::memcpy(to + i / OCTET * hop, bytes, OCTET);
        if (width - i > OCTET) std::memcpy(to + (i / OCTET + 1) * hop, bytes + OCTET, OCTET);
    }
    *sum = static_cast<float>(-sum_ints(total));
    return step;
}

static inline void quantize_row(const Linear& linear, const float* x, int64_t row, Activations& into,
                                int64_t* missed) {
    const int64_t hop = into.hop(row);
    static thread_local std::vector<float> inside;
    if (linear.outliers > 0 || linear.threshold > 0) {
        inside.assign(x, x + linear.columns);
        for (int64_t i = 0; i < linear.outliers; ++i) inside[linear.outlier_columns[i]] = 0.0f;
        int32_t over = 0;
        if (linear.threshold > 0)
            for (const float value : inside) over += std::fabs(value) >= linear.threshold;
        *missed = over;
        x = inside.data();
    }
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
            float rest = into.original[row * columns + column];
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
    const float* x = into.original;
    if (into.made_for == nullptr || !same_quantization(*into.made_for, linear)) {
        into.made_for = &linear;
        into.rows = rows;
        into.padded = linear.padded_columns;
        into.row_by_row = into.matrix_units && rows >= MATRIX_ROWS;
        into.groups = linear.padded_columns / linear.group;
        into.integers.resize(static_cast<size_t>(rows * linear.padded_columns));
        into.steps.resize(static_cast<size_t>(rows * into.groups));
        into.sums.resize(static_cast<size_t>(rows * into.groups));
        std::vector<int64_t> missed(static_cast<size_t>(rows), 0);
        const int64_t chunk_rows = 4;
        pool.run((rows + chunk_rows - 1) / chunk_rows, [&](int64_t chunk, int) {
            for (int64_t row = chunk * chunk_rows; row < std::min(rows, (chunk + 1) * chunk_rows); ++row)
                quantize_row(linear, x + row * linear.columns, row, into, &missed[static_cast<size_t>(row)]);
        });
        into.missed = 0;
        for (const int64_t count : missed) into.missed += count;
    }
    if (linear.counts != nullptr) {
        linear.counts[0] += into.missed;
        linear.counts[1] += rows * linear.columns;
    }
}

static inline Floats load_number(const void* from, int64_t index, int32_t type) {
    if (type == BFLOAT16) return load_bfloat16(static_cast<const uint16_t*>(from) + index);
    if (type == FLOAT16) return load_float16(static_cast<const uint16_t*>(from) + index);
    return load(static_cast<const float*>(from) + index);
}

// What turns a group's sums of integer products with 16 rows of the weight into floats.
struct GroupScale {
    Floats scale, offset;
    int32_t whole;
    bool symmetric;

    // Stored integers lie `above` the signed ones.
    GroupScale(const Linear& linear, int64_t panel, int64_t group, int32_t above)
        : whole(above), symmetric(linear.zero == nullptr) {
        const int64_t groups = linear.padded_columns / linear.scale_group;
        const int64_t at = (panel * groups + group * linear.group / linear.scale_group) * LANES;
        scale = load_number(linear.scale, at, linear.scale_type);
        offset = splat(static_cast<float>(above));
        if (!symmetric) offset = add(offset, load_int8(linear.zero + at));
    }

    // total + products * scale * step, for row and group `index` of the activations.
    Floats add_to(Floats total, Ints products, const Activations& input, int64_t index) const {
        const float sum = input.sums[static_cast<size_t>(index)];
        const Floats exact = symmetric
                                 ? to_floats(subtract(products, splat_int(static_cast<int32_t>(sum) * whole)))
                                 : fma(offset, splat(-sum), to_floats(products));
        return fma(mul(exact, scale), splat(input.steps[static_cast<size_t>(index)]), total);
    }
};

// sums[M][P] += the integer products of M rows, of the WIDTH that lie in one tile, with P panels.
template <class Dot, int M, int P, int WIDTH>
static inline void multiply_integers(const Linear& linear, const Activations& input, int64_t row, int64_t panel,
                                     Floats (*sums)[P]) {
    constexpr int64_t BYTES = 64 * Dot::PARTS, HOP = WIDTH * OCTET;
    const int64_t padded = linear.padded_columns, octets = linear.group / OCTET;
    const int64_t panel_bytes = padded / OCTET * BYTES;
    const uint8_t* weights[P];
    for (int p = 0; p < P; ++p) weights[p] = static_cast<const uint8_t*>(linear.weight) + (panel + p) * panel_bytes;
    const int8_t* integers = input.integers.data() + input.start(row);
    for (int64_t group = 0; group < input.groups; ++group) {
        typename Dot::Sum products[M][P];
        for (int m = 0; m < M; ++m)
            for (int p = 0; p < P; ++p) products[m][p] = Dot::zero();
        for (int64_t octet = 0; octet < octets; ++octet, integers += HOP) {
            for (int part = 0; part < Dot::PARTS; ++part) {
                for (int p = 0; p < P; ++p) {
                    const typename Dot::Weights loaded = Dot::load(weights[p] + part * 64);
                    for (int m = 0; m < M; ++m)
                        products[m][p] =
                            Dot::dot(products[m][p], loaded, integers + m * OCTET + part * (OCTET / Dot::PARTS));
                }
            }
            for (int p = 0; p < P; ++p) weights[p] += BYTES;
        }
        for (int p = 0; p < P; ++p) {
            const GroupScale scale(linear, panel + p, group, Dot::OFFSET);
            for (int m = 0; m < M; ++m)
                sums[m][p] = scale.add_to(sums[m][p], Dot::finish(products[m][p]), input,
                                          (row + m) * input.groups + group);
        }
    }
}

// The same for all M rows of a tile, as many at a time as the sums of `Dot` leave registers for.
template <class Dot, int M, int P, int FIRST = 0>
static inline void multiply_all_integers(const Linear& linear, const Activations& input, int64_t row, int64_t panel,
                                         Floats (&sums)[M][P]) {
    constexpr int COUNT = std::min(Dot::ROWS, M - FIRST);
    multiply_integers<Dot, COUNT, P, M>(linear, input, row + FIRST, panel, &sums[FIRST]);
    if constexpr (FIRST + COUNT < M) multiply_all_integers<Dot, M, P, FIRST + COUNT>(linear, input, row, panel, sums);
}

// sums[M][P] += the products of M rows of floats with P panels of `columns` columns; Number loads 16 of them.
template <class Number, int M, int P>
static inline void multiply_floats(const typename Number::type* panels, int64_t panel_size, const float* const (&x)[M],
                                   int64_t columns, Floats (&sums)[M][P]) {
    for (int64_t column = 0; column < columns; ++column) {
        Floats weights[P];
        for (int p = 0; p < P; ++p) weights[p] = Number::load(panels + p * panel_size + column * LANES);
        for (int m = 0; m < M; ++m) {
            const Floats value = splat(x[m][column]);
            for (int p = 0; p < P; ++p) sums[m][p] = fma(weights[p], value, sums[m][p]);
        }
    }
}

// The same for bfloat16 weights, two columns at a time; the last column of an odd number stands alone, beside a zero.
template <int M, int P>
static inline void multiply_pairs(const uint16_t* panels, int64_t panel_size, const float* const (&x)[M],
                                  int64_t columns, Floats (&sums)[M][P]) {
    for (int64_t column = 0; column < columns; column += 2) {
        Floats even[P], odd[P];
        for (int p = 0; p < P; ++p) load_pair(panels + p * panel_size + column * LANES, even[p], odd[p]);
        for (int m = 0; m < M; ++m) {
            const Floats first = splat(x[m][column]);
            for (int p = 0; p < P; ++p) sums[m][p] = fma(even[p], first, sums[m][p]);
            if (column + 1 == columns) continue;
            const Floats second = splat(x[m][column + 1]);
            for (int p = 0; p < P; ++p) sums[m][p] = fma(odd[p], second, sums[m][p]);
        }
    }
}

struct Float32 {
    using type = float;
    static inline Floats load(const float* from) { return ::load(from); }
};
struct Bfloat16 {
    using type = uint16_t;
    static inline Floats load(const uint16_t* from) { return load_bfloat16(from); }
};
struct Float16 {
    using type = uint16_t;
    static inline Floats load(const uint16_t* from) { return load_float16(from); }
};
struct Int8 {
    using type = int8_t;
    static inline Floats load(const int8_t* from) { return load_int8(from); }
};

// What the outlier columns add, in floating point: the few activations are gathered first.
template <int M, int P>
static inline void add_outliers(const Linear& linear, const Activations& input, int64_t row, int64_t panel,
                                Floats (&sums)[M][P]) {
    for (int64_t i = 0; i < linear.outliers; ++i) {
        const int64_t column = linear.outlier_columns[i];
        for (int p = 0; p < P; ++p) {
            const Floats weight =
                load_number(linear.outlier_weight, ((panel + p) * linear.outliers + i) * LANES, linear.scale_type);
            for (int m = 0; m < M; ++m)
                sums[m][p] = fma(weight, splat(input.original[(row + m) * linear.columns + column]), sums[m][p]);
        }
    }
}

// One row's 16 products with a panel into y [T, rows], or added to what stands there.
static inline void write_row(const Linear& linear, Floats value, int64_t row, int64_t panel, float* y,
                             bool accumulate) {
    const int64_t column = panel * LANES, left = linear.rows - column;
    float* to = y + row * linear.rows + column;
    if (linear.bias != nullptr) value = add(value, load_part(linear.bias + column, left));
    if (accumulate) value = add(value, load_part(to, left));
    store_part(to, value, left);
}

// M rows by P panels of the product, into y [T, rows], or added to what stands there.
template <bool INTEGERS, int M, int P>
static void multiply_tile(const Linear& linear, const Activations& input, int64_t row, int64_t panel, float* y,
                          bool accumulate) {
    Floats sums[M][P];
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < P; ++p) sums[m][p] = splat(0.0f);
    if constexpr (INTEGERS) {
        if (linear.type == INT4) multiply_all_integers<NibbleDot, M, P>(linear, input, row, panel, sums);
        if (linear.type == INT8) multiply_all_integers<ByteDot, M, P>(linear, input, row, panel, sums);
        if (linear.outliers > 0) add_outliers<M, P>(linear, input, row, panel, sums);
    } else {
        const float* x[M];
        for (int m = 0; m < M; ++m) x[m] = input.original + (row + m) * linear.columns;
        const int64_t size = linear.padded_columns * LANES;
        if (linear.type == FLOAT32)
            multiply_floats<Float32, M, P>(static_cast<const float*>(linear.weight) + panel * size, size, x,
                                           linear.columns, sums);
        const uint16_t* halves = static_cast<const uint16_t*>(linear.weight) + panel * size;
        if (linear.type == BFLOAT16) multiply_pairs<M, P>(halves, size, x, linear.columns, sums);
        if (linear.type == FLOAT16) multiply_floats<Float16, M, P>(halves, size, x, linear.columns, sums);
    }
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < P; ++p) write_row(linear, sums[m][p], row + m, panel + p, y, accumulate);
}

template <bool INTEGERS, int M>
static void multiply_panels(const Linear& linear, const Activations& input, int64_t row, int64_t first, int64_t last,
                            float* y, bool accumulate) {
    constexpr int P = INTEGERS ? panels_for(M) : float_panels_for(M);
    for (; first + P <= last; first += P) multiply_tile<INTEGERS, M, P>(linear, input, row, first, y, accumulate);
    for (; first < last; ++first) multiply_tile<INTEGERS, M, 1>(linear, input, row, first, y, accumulate);
}

template <int M>
static void multiply_rows(const Linear& linear, const Activations& input, int64_t row, int64_t first, int64_t last,
                          float* y, bool accumulate) {
    if (is_integer(linear)) multiply_panels<true, M>(linear, input, row, first, last, y, accumulate);
    else multiply_panels<false, M>(linear, input, row, first, last, y, accumulate);
}

template <int M>
static void multiply_rest(const Linear& linear, const Activations& input, int64_t row, int64_t last_row, int64_t first,
                          int64_t last, float* y, bool accumulate) {
    if constexpr (M > 0) {
        if (last_row - row == M) return multiply_rows<M>(linear, input, row, first, last, y, accumulate);
        multiply_rest<M - 1>(linear, input, row, last_row, first, last, y, accumulate);
    }
}

// Rows row..last_row of the product with panels first..last, few enough to stay in the first-level cache.
static inline void multiply_range(const Linear& linear, const Activations& input, int64_t row, int64_t last_row,
                                  int64_t first, int64_t last, float* y, bool accumulate) {
    for (; row + TILE <= last_row; row += TILE)
        multiply_rows<TILE>(linear, input, row, first, last, y, accumulate);
    multiply_rest<TILE - 1>(linear, input, row, last_row, first, last, y, accumulate);
}
