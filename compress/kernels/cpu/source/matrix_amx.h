// AMX, the matrix units of newer Xeons: 16 rows by 16 rows of the weight by 64 bytes of columns per instruction.
//
// A byte panel is already the right operand of `tdpbsud` (columns by fours, 16 rows side by side), and a bfloat16 panel
// that of `tdpbf16ps`; 4-bit panels, and 2:4 panels for `tdpbssd`, are widened into a small buffer first. Four sums at
// a time, of two row tiles and two panels or of one row tile and four panels, hide the units' latency. Floats are
// multiplied as three bfloat16 each, which loses nothing of their 24 bits.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "expand_amx.h"

constexpr int TILE_ROWS = 16, TILE_BYTES = 64, SUMS = 4;
// Blocks of columns that are widened at a time where that is done in each pass: so few that they stay in the
// first-level cache, and that the next ones are widened while matrix units work on these.
constexpr int64_t PIECE_BLOCKS = 2;

// Ask the kernel for the tile registers, whose state is large; false where it says no.
static inline bool allow_matrix_units() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Shapes of the tile registers: 0 to 3 sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes(int64_t count, int64_t column_bytes) {
        const int64_t rest = count > TILE_ROWS ? count - TILE_ROWS : count;
        const int64_t heights[2] = {std::min<int64_t>(TILE_ROWS, count), rest};
        for (int tile = 0; tile < 8; ++tile) {
            const bool sum = tile < SUMS, left = tile == 4 || tile == 5;
            const int64_t height = heights[sum ? tile / 2 : tile - 4 > 0];
            rows[tile] = static_cast<uint8_t>(sum || left ? height : column_bytes / 4);
            bytes[tile] = static_cast<uint16_t>(left ? column_bytes : TILE_BYTES);
        }
    }
};

// Everything written so far stands in memory. The tile instructions' own declarations do not tell the compiler that
// they read it: GCC 12 drops stores to the shapes, of which it believes 8 bytes to be read.
static inline void finish_stores() { asm volatile("" ::: "memory"); }

static inline void configure(const TileShapes& shapes) {
    finish_stores();
    _tile_loadconfig(&shapes);
}

// Two row tiles by two panels, or one by four: what one pass over the columns needs to know. Sum number s belongs to
// row tile s / 2 and panel s % 2, or to panel s of the only row tile.
struct TileJob {
    const void* left[2];  // activations, `stride` bytes from row to row
    int64_t stride;
    const uint8_t* right[SUMS];  // weights, 16 bytes for each byte of a row's columns
    int64_t panels;
    bool two_rows;
    uint8_t* widened;  // where those that are widened go, `room` bytes from panel to panel
    int64_t room;
    bool in_pieces;  // widened a piece at a time, just before it is used

    int sums() const { return two_rows ? SUMS : static_cast<int>(panels); }
    int panel(int sum) const { return two_rows ? sum % 2 : sum; }
    bool used(int sum) const { return panel(sum) < panels; }
};

static inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// What a right tile holds.
enum TileNumbers { UNSIGNED, SIGNED, FLOATS };

// Sum number SUM += left register LEFT times right register RIGHT.
#define LMPRESS_MULTIPLY(SUM, LEFT, RIGHT)                                    \
    do {                                                                      \
        if constexpr (NUMBERS == UNSIGNED) _tile_dpbsud(SUM, LEFT, RIGHT);    \
        else if constexpr (NUMBERS == SIGNED) _tile_dpbssd(SUM, LEFT, RIGHT); \
        else _tile_dpbf16ps(SUM, LEFT, RIGHT);                                \
    } while (false)

// Add the products over `count` blocks of `bytes` bytes of columns to the four sums: from the byte `offset` of the left
// side's rows and `start` of the right side's.
template <TileNumbers NUMBERS>
static inline void add_blocks(const TileJob& job, int64_t offset, int64_t start, int64_t bytes, int64_t count) {
    for (int64_t block = 0; block < count; ++block, offset += bytes, start += bytes) {
        _tile_loadd(4, static_cast<const uint8_t*>(job.left[0]) + offset, job.stride);
        _tile_loadd(6, job.right[0] + start * LANES, TILE_BYTES);
        LMPRESS_MULTIPLY(0, 4, 6);
        if (job.panels > 1) {
            _tile_loadd(7, job.right[1] + start * LANES, TILE_BYTES);
            LMPRESS_MULTIPLY(1, 4, 7);
        }
        if (job.two_rows) {
            _tile_loadd(5, static_cast<const uint8_t*>(job.left[1]) + offset, job.stride);
            LMPRESS_MULTIPLY(2, 5, 6);
            if (job.panels > 1) LMPRESS_MULTIPLY(3, 5, 7);
            continue;
        }
        if (job.panels > 2) {
            _tile_loadd(6, job.right[2] + start * LANES, TILE_BYTES);
            LMPRESS_MULTIPLY(2, 4, 6);
        }
        if (job.panels > 3) {
            _tile_loadd(7, job.right[3] + start * LANES, TILE_BYTES);
            LMPRESS_MULTIPLY(3, 4, 7);
        }
    }
}

#undef LMPRESS_MULTIPLY

// The four sums: [sum][row of its tile][16].
struct alignas(64) TileSums {
    float values[SUMS][TILE_ROWS][LANES];
};

template <class Number>
static inline void store_sums(Number (&to)[SUMS][TILE_ROWS][LANES]) {
    _tile_stored(0, to[0], TILE_BYTES);
    _tile_stored(1, to[1], TILE_BYTES);
    _tile_stored(2, to[2], TILE_BYTES);
    _tile_stored(3, to[3], TILE_BYTES);
}

// Bytes of columns in a tile's row: the most that divide a group, or a row of bfloat16.
static inline int64_t tile_columns(const Linear& linear) {
    const int64_t bytes = is_integer(linear) ? linear.group : 2 * linear.padded_columns;
    int64_t columns = TILE_BYTES;
    while (bytes % columns) columns -= is_sparse(linear) ? SparseByteDot::COLUMNS : OCTET;
    return columns;
}

static inline bool is_widened(const Linear& linear) { return linear.type == INT4 || is_sparse(linear); }

// `count` columns of the job's panels, the first of which is `panel`, as bytes: from `first` on.
static inline void widen(const Linear& linear, const TileJob& job, int64_t panel, int64_t first, int64_t count) {
    for (int64_t p = 0; p < job.panels; ++p) {
        uint8_t* to = job.widened + p * job.room;
        if (is_sparse(linear)) {
            expand_columns(linear, panel + p, first, count, to);
            continue;
        }
        const uint8_t* packed = static_cast<const uint8_t*>(linear.weight) +
                                ((panel + p) * linear.padded_columns + first) / OCTET * NibbleDot::BYTES;
        for (int64_t octet = 0; octet < count / OCTET; ++octet) {
            const NibbleDot::Weights weights = NibbleDot::load<0>(packed + octet * NibbleDot::BYTES);
            _mm512_storeu_si512(to + octet * 128, weights.low);
            _mm512_storeu_si512(to + octet * 128 + 64, weights.high);
        }
    }
    finish_stores();
}

// Rows and panels of one pass: `count` rows, up to 32, from `row`, and the job's panels from `panel`.
struct TilePlace {
    int64_t row, count, panel;

    int64_t first_row(const TileJob& job, int sum) const { return row + (job.two_rows ? sum / 2 * TILE_ROWS : 0); }
    int64_t rows(const TileJob& job, int sum) const {
        return std::min<int64_t>(TILE_ROWS, row + count - first_row(job, sum));
    }
};

static inline void multiply_integer_tiles(const Linear& linear, const Activations& input, const TileJob& job,
                                          const TilePlace& place, TileSums& sums) {
    alignas(64) int32_t products[SUMS][TILE_ROWS][LANES];
    const int64_t columns = tile_columns(linear), blocks = linear.group / columns;
    const int32_t above = linear.type == INT4 ? NibbleDot::OFFSET : linear.type == INT8 ? ByteDot::OFFSET : 0;
    for (int64_t group = 0; group < input.groups; ++group) {
        zero_sums();
        for (int64_t block = 0; block < blocks; block += PIECE_BLOCKS) {
            const int64_t first = group * linear.group + block * columns;
            const int64_t count = std::min(PIECE_BLOCKS, blocks - block);
            if (job.in_pieces) widen(linear, job, place.panel, first, count * columns);
            const int64_t start = job.in_pieces ? 0 : first;
            if (is_sparse(linear)) add_blocks<SIGNED>(job, first, start, columns, count);
            else add_blocks<UNSIGNED>(job, first, start, columns, count);
        }
        store_sums(products);
        for (int sum = 0; sum < job.sums(); ++sum) {
            if (!job.used(sum)) continue;
            const GroupScale scale(linear, place.panel + job.panel(sum), group, above);
            const int64_t first = place.first_row(job, sum), rows = place.rows(job, sum);
            for (int64_t m = 0; m < rows; ++m) {
                const Ints exact = _mm512_load_si512(products[sum][m]);
                float* total = sums.values[sum][m];
                const Floats before = group == 0 ? splat(0.0f) : load(total);
                store(total, scale.add_to(before, exact, input, (first + m) * input.groups + group));
            }
        }
    }
}

static inline void multiply_float_tiles(const Linear& linear, const Activations& input, TileJob job,
                                        const TilePlace& place, TileSums& sums) {
    const int64_t padded = linear.padded_columns, bytes = tile_columns(linear);
    zero_sums();
    for (int64_t part = 0; part < 3; ++part) {
        const uint16_t* x = input.splits.data() + (part * input.rows_split + place.row) * padded;
        job.left[0] = x;
        job.left[1] = x + TILE_ROWS * padded;
        add_blocks<FLOATS>(job, 0, 0, bytes, 2 * padded / bytes);
    }
    store_sums(sums.values);
}

// M rows of sums with a panel: their outlier columns added, and written to y.
template <int M>
static inline void finish_rows(const Linear& linear, const Activations& input, const float (*sums)[LANES], int64_t row,
                               int64_t panel, const Output& output) {
    Floats values[M][1];
    for (int m = 0; m < M; ++m) values[m][0] = load(sums[m]);
    if (linear.outliers > 0) add_outliers<M, 1>(linear, input, row, panel, values);
    for (int m = 0; m < M; ++m) write_row(linear, values[m][0], row + m, panel, output);
}

// One pass: the product of the place's rows and panels.
static inline void multiply_place(const Linear& linear, const Activations& input, TileJob& job, const TilePlace& place,
                                  const Output& output) {
    TileSums sums;
    const int64_t padded = linear.padded_columns;
    // Where the sums will go is on its way into the cache while they are made.
    for (int64_t row = place.row; row < place.row + place.count; ++row)
        for (int64_t panel = place.panel; panel < place.panel + job.panels; ++panel)
            __builtin_prefetch(output.to + row * output.stride + panel * LANES, 1);
    if (is_integer(linear)) {
        const int8_t* x = input.integers.data() + place.row * padded;
        job.left[0] = x;
        job.left[1] = x + TILE_ROWS * padded;
        job.stride = padded;
        multiply_integer_tiles(linear, input, job, place, sums);
    } else {
        job.stride = 2 * padded;
        multiply_float_tiles(linear, input, job, place, sums);
    }
    for (int sum = 0; sum < job.sums(); ++sum) {
        if (!job.used(sum)) continue;
        const int64_t first = place.first_row(job, sum), rows = place.rows(job, sum);
        const int64_t panel = place.panel + job.panel(sum);
        int64_t m = 0;
        for (; m + TILE_ROWS <= rows; m += TILE_ROWS)
            finish_rows<TILE_ROWS>(linear, input, sums.values[sum] + m, first + m, panel, output);
        for (; m + 4 <= rows; m += 4)
            finish_rows<4>(linear, input, sums.values[sum] + m, first + m, panel, output);
        for (; m < rows; ++m) finish_rows<1>(linear, input, sums.values[sum] + m, first + m, panel, output);
    }
}

// Rows row..last_row of the product with panels first..last.
static inline void multiply_matrix_units(const Linear& linear, const Activations& input, int64_t row, int64_t last_row,
                                         int64_t first, int64_t last, const Output& output) {
    static thread_local Buffer<uint8_t> widened;
    const int64_t padded = linear.padded_columns, panel_bytes = padded * LANES;  // of bytes
    TileJob job{};
    job.in_pieces = is_widened(linear) && last_row - row <= 4 * TILE_ROWS;
    job.room = job.in_pieces ? PIECE_BLOCKS * TILE_BYTES * LANES : panel_bytes;
    if (is_widened(linear)) job.widened = room(widened, SUMS * job.room);
    const int64_t step = last_row - row <= TILE_ROWS ? SUMS : 2, columns = tile_columns(linear);
    int64_t configured = 0;  // rows that the registers are shaped for
    for (int64_t panel = first; panel < last; panel += step) {
        job.panels = std::min(step, last - panel);
        for (int64_t p = 0; p < job.panels; ++p) {
            const int64_t bytes = panel_bytes * (linear.type == BFLOAT16 ? 2 : 1);
            const uint8_t* weight = static_cast<const uint8_t*>(linear.weight) + (panel + p) * bytes;
            job.right[p] = is_widened(linear) ? job.widened + p * job.room : weight;
        }
        if (is_widened(linear) && !job.in_pieces) widen(linear, job, panel, 0, padded);
        for (int64_t start = row; start < last_row; start += 2 * TILE_ROWS) {
            const TilePlace place{start, std::min<int64_t>(2 * TILE_ROWS, last_row - start), panel};
            job.two_rows = place.count > TILE_ROWS;
            if (place.count != configured) configure(TileShapes(place.count, columns));
            configured = place.count;
            multiply_place(linear, input, job, place, output);
        }
    }
    _tile_release();
}
