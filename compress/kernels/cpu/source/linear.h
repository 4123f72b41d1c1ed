// Linear layers: activations times panels of the weight, on vector units.
#pragma once

#include <type_traits>

#include "activations.h"

// Where a product goes: rows `stride` floats apart, which it is added to or written over.
struct Output {
    float* to;
    int64_t stride;
    bool accumulate;
};

static inline Floats load_number(const void* from, int64_t index, int32_t type) {
    if (type == BFLOAT16) return load_bfloat16(static_cast<const uint16_t*>(from) + index);
    if (type == FLOAT16) return load_float16(static_cast<const uint16_t*>(from) + index);
    return load(static_cast<const float*>(from) + index);
}

// Where the scales of a panel's 16 rows start for the columns of activation group `group`.
static inline int64_t scale_index(const Linear& linear, int64_t panel, int64_t group) {
    const int64_t groups = linear.padded_columns / linear.scale_group;
    return (panel * groups + group * linear.group / linear.scale_group) * LANES;
}

// What turns a group's sums of integer products with 16 rows of the weight into floats.
struct GroupScale {
    Floats scale, offset;
    int32_t whole;
    bool symmetric;

    // Stored integers lie `above` the signed ones.
    GroupScale(const Linear& linear, int64_t panel, int64_t group, int32_t above)
        : whole(above), symmetric(linear.zero == nullptr) {
        const int64_t at = scale_index(linear, panel, group);
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

// How far ahead of what is multiplied memory is asked for: each panel's bytes, and its scales in groups. Hardware stops
// at a page's end and has to find every panel anew. Twice as far is slower again.
constexpr int64_t BYTES_AHEAD = 1280, GROUPS_AHEAD = 4;

// Ask for the BYTES bytes of a panel that come BYTES_AHEAD later, into the second-level cache: the first one is too
// small for all that is under way. Only for a tile of WIDTH rows that is not full: rows that fill tiles are many, find
// most panels in the cache and wait for arithmetic alone.
template <int BYTES, int WIDTH>
static inline void ask_for_weights(const void* panel) {
    if constexpr (WIDTH < TILE)
        for (int64_t byte = 0; byte < BYTES; byte += static_cast<int64_t>(CACHE_LINE))
            __builtin_prefetch(static_cast<const uint8_t*>(panel) + BYTES_AHEAD + byte, 0, 2);
}

// The same for the scales that products of a group are multiplied by.
template <int WIDTH>
static inline void ask_for_scales(const Linear& linear, int64_t panel, int64_t group) {
    const int64_t bytes = linear.scale_type == FLOAT32 ? 4 : 2;
    if constexpr (WIDTH < TILE)
        __builtin_prefetch(static_cast<const uint8_t*>(linear.scale) +
                           (scale_index(linear, panel, group) + GROUPS_AHEAD * LANES) * bytes);
}

// Call task(part) for each of PARTS parts, known when compiled.
template <int PARTS, int PART = 0, class Task>
static inline void each_part(const Task& task) {
    if constexpr (PART < PARTS) {
        task(std::integral_constant<int, PART>{});
        each_part<PARTS, PART + 1>(task);
    }
}

// sums[M][P] += the integer products of M rows, of the WIDTH that lie in one tile, with P panels.
template <class Dot, int M, int P, int WIDTH>
static inline void multiply_integers(const Linear& linear, const Activations& input, int64_t row, int64_t panel,
                                     Floats (*sums)[P]) {
    constexpr int64_t HOP = WIDTH * OCTET;
    const int64_t blocks = linear.group / Dot::COLUMNS;
    const int64_t panel_bytes = linear.padded_columns / Dot::COLUMNS * Dot::BYTES;
    const uint8_t* weights[P];
    for (int p = 0; p < P; ++p) weights[p] = static_cast<const uint8_t*>(linear.weight) + (panel + p) * panel_bytes;
    const int8_t* integers = input.integers.data() + input.start(row);
    for (int64_t group = 0; group < input.groups; ++group) {
        typename Dot::Sum products[M][P];
        for (int m = 0; m < M; ++m)
            for (int p = 0; p < P; ++p) products[m][p] = Dot::zero();
        typename Dot::Surplus surplus[P] = {};
        for (int p = 0; p < P; ++p) ask_for_scales<WIDTH>(linear, panel + p, group);
        for (int64_t block = 0; block < blocks; ++block, integers += Dot::COLUMNS / OCTET * HOP) {
            each_part<Dot::PARTS>([&](auto part) {
                constexpr int PART = decltype(part)::value, COLUMN = Dot::COLUMNS / Dot::PARTS * PART;
                for (int p = 0; p < P; ++p) {
                    const typename Dot::Weights loaded = Dot::template load<PART>(weights[p]);
                    surplus[p] = Dot::add(surplus[p], loaded);
                    for (int m = 0; m < M; ++m) {
                        const int8_t* columns = integers + m * OCTET + COLUMN / OCTET * HOP + COLUMN % OCTET;
                        products[m][p] = Dot::dot(products[m][p], loaded, columns, HOP);
                    }
                }
            });
            for (int p = 0; p < P; ++p) {
                ask_for_weights<Dot::BYTES, WIDTH>(weights[p]);
                weights[p] += Dot::BYTES;
            }
        }
        for (int p = 0; p < P; ++p) {
            const GroupScale scale(linear, panel + p, group, Dot::OFFSET);
            for (int m = 0; m < M; ++m)
                sums[m][p] = scale.add_to(sums[m][p], Dot::finish(products[m][p], surplus[p]), input,
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
        for (int p = 0; p < P; ++p) {
            const uint16_t* from = panels + p * panel_size + column * LANES;
            load_pair(from, even[p], odd[p]);
            ask_for_weights<2 * LANES * sizeof *from, M>(from);
        }
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

// What the outlier columns add, in floating point.
template <int M, int P>
static inline void add_outliers(const Linear& linear, const Activations& input, int64_t row, int64_t panel,
                                Floats (&sums)[M][P]) {
    const float* x = input.outliers.data() + row * linear.outliers;
    for (int64_t i = 0; i < linear.outliers; ++i) {
        for (int p = 0; p < P; ++p) {
            const Floats weight =
                load_number(linear.outlier_weight, ((panel + p) * linear.outliers + i) * LANES, linear.scale_type);
            for (int m = 0; m < M; ++m)
                sums[m][p] = fma(weight, splat(x[m * linear.outliers + i]), sums[m][p]);
        }
    }
}

// One row's 16 products with a panel, the bias added.
static inline void write_row(const Linear& linear, Floats value, int64_t row, int64_t panel, const Output& output) {
    const int64_t column = panel * LANES, left = linear.rows - column;
    float* to = output.to + row * output.stride + column;
    if (linear.bias != nullptr) value = add(value, load_part(linear.bias + column, left));
    if (output.accumulate) value = add(value, load_part(to, left));
    store_part(to, value, left);
}

// M rows by P panels of the product.
template <bool INTEGERS, int M, int P>
static void multiply_tile(const Linear& linear, const Activations& input, int64_t row, int64_t panel,
                          const Output& output) {
    Floats sums[M][P];
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < P; ++p) sums[m][p] = splat(0.0f);
    if constexpr (INTEGERS) {
        if (linear.type == INT4) multiply_all_integers<NibbleDot, M, P>(linear, input, row, panel, sums);
        if (linear.type == INT8) multiply_all_integers<ByteDot, M, P>(linear, input, row, panel, sums);
        if (linear.type == SPARSE4) multiply_all_integers<SparseNibbleDot, M, P>(linear, input, row, panel, sums);
        if (linear.type == SPARSE8) multiply_all_integers<SparseByteDot, M, P>(linear, input, row, panel, sums);
        if (linear.outliers > 0) add_outliers<M, P>(linear, input, row, panel, sums);
    } else {
        const float* x[M];
        for (int m = 0; m < M; ++m) x[m] = input.original + (row + m) * input.stride;
        const int64_t size = linear.padded_columns * LANES;
        if (linear.type == FLOAT32)
            multiply_floats<Float32, M, P>(static_cast<const float*>(linear.weight) + panel * size, size, x,
                                           linear.columns, sums);
        const uint16_t* halves = static_cast<const uint16_t*>(linear.weight) + panel * size;
        if (linear.type == BFLOAT16) multiply_pairs<M, P>(halves, size, x, linear.columns, sums);
        if (linear.type == FLOAT16) multiply_floats<Float16, M, P>(halves, size, x, linear.columns, sums);
    }
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < P; ++p) write_row(linear, sums[m][p], row + m, panel + p, output);
}

template <bool INTEGERS, int M>
static void multiply_panels(const Linear& linear, const Activations& input, int64_t row, int64_t first, int64_t last,
                            const Output& output) {
    constexpr int P = INTEGERS ? panels_for(M) : float_panels_for(M);
    for (; first + P <= last; first += P) multiply_tile<INTEGERS, M, P>(linear, input, row, first, output);
    for (; first < last; ++first) multiply_tile<INTEGERS, M, 1>(linear, input, row, first, output);
}

template <int M>
static void multiply_rows(const Linear& linear, const Activations& input, int64_t row, int64_t first, int64_t last,
                          const Output& output) {
    if (is_integer(linear)) multiply_panels<true, M>(linear, input, row, first, last, output);
    else multiply_panels<false, M>(linear, input, row, first, last, output);
}

template <int M>
static void multiply_rest(const Linear& linear, const Activations& input, int64_t row, int64_t last_row, int64_t first,
                          int64_t last, const Output& output) {
    if constexpr (M > 0) {
        if (last_row - row == M) return multiply_rows<M>(linear, input, row, first, last, output);
        multiply_rest<M - 1>(linear, input, row, last_row, first, last, output);
    }
}

// Rows row..last_row of the product with panels first..last, few enough to stay in the first-level cache.
static inline void multiply_range(const Linear& linear, const Activations& input, int64_t row, int64_t last_row,
                                  int64_t first, int64_t last, const Output& output) {
    for (; row + TILE <= last_row; row += TILE)
        multiply_rows<TILE>(linear, input, row, first, last, output);
    multiply_rest<TILE - 1>(linear, input, row, last_row, first, last, output);
}
