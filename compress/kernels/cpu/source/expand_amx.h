// 2:4 panels with their pruned columns filled in: signed bytes as matrix units want them, those of four columns of 16
// rows together.
#pragma once

#include "linear.h"

// Per four columns, by the positions of both values (2 bits each, the first lower): which of the values 0 and 1 each
// column takes, or none, where the top bit is set.
struct alignas(64) ColumnSources {
    uint32_t codes[16] = {};

    constexpr ColumnSources() {
        for (uint32_t code = 0; code < 16; ++code) {
            const uint32_t first = 8 * (code & 3), second = 8 * (code >> 2);
            codes[code] = (0x80808080u & ~(0xffu << first) & ~(0xffu << second)) | 1u << second;
        }
    }
};
constexpr ColumnSources COLUMN_SOURCES;

// How far ahead of what is filled in memory is asked for, in bytes: matrix units work on one piece meanwhile.
constexpr int64_t AHEAD = 2560;

struct Expansion {
    const __m512i sources = _mm512_load_si512(&COLUMN_SOURCES);
    // Where a row's bytes lie within 128 bits.
    const __m512i rows = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    // What 4 bits stand for.
    const __m512i nibbles =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));

    // Four columns, whose codes lie in the lowest bits of each row's 32; their values are bytes FIRST and FIRST + 1.
    template <int FIRST>
    inline void quad(__m512i values, __m512i codes, uint8_t* to) const {
        const __m512i places = _mm512_add_epi32(rows, _mm512_set1_epi32(0x01010101 * FIRST));
        const __m512i bytes = _mm512_or_si512(_mm512_permutexvar_epi32(codes, sources), places);
        _mm512_storeu_si512(to, _mm512_shuffle_epi8(values, bytes));
    }
    template <int UNIT>
    inline void unit(__m512i values, __m512i positions, uint8_t* to) const {
        const __m512i these = _mm512_and_si512(_mm512_srli_epi16(positions, 2 * UNIT), _mm512_set1_epi8(3));
        const __m512i codes = _mm512_maddubs_epi16(these, _mm512_set1_epi16(0x0401));
        quad<0>(values, codes, to + 128 * UNIT);
        quad<2>(values, _mm512_srli_epi32(codes, 16), to + 128 * UNIT + 64);
    }
    inline void nibble_block(const uint8_t* from, uint8_t* to) const {
        const __m512i positions = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
        const __m512i early = _mm512_loadu_si512(from + 64), late = _mm512_loadu_si512(from + 128);
        const auto low = [&](__m512i both) { return _mm512_shuffle_epi8(nibbles, _mm512_and_si512(both, mask)); };
        unit<0>(low(early), positions, to);
        unit<1>(low(_mm512_srli_epi16(early, 4)), positions, to);
        unit<2>(low(late), positions, to);
        unit<3>(low(_mm512_srli_epi16(late, 4)), positions, to);
    }
    inline void byte_block(const uint8_t* from, uint8_t* to) const {
        const __m512i positions = _mm512_loadu_si512(from);
        unit<0>(_mm512_loadu_si512(from + 64), positions, to);
        unit<1>(_mm512_loadu_si512(from + 128), positions, to);
        unit<2>(_mm512_loadu_si512(from + 192), positions, to);
        unit<3>(_mm512_loadu_si512(from + 256), positions, to);
    }
};

// `count` columns, from `first` on, of one panel of a 2:4 layer, 16 bytes for each of them.
static inline void expand_columns(const Linear& linear, int64_t panel, int64_t first, int64_t count, uint8_t* to) {
    constexpr int64_t COLUMNS = SparseByteDot::COLUMNS;
    const Expansion expansion;
    const bool nibbles = linear.type == SPARSE4;
    const int64_t bytes = nibbles ? SparseNibbleDot::BYTES : SparseByteDot::BYTES;
    const uint8_t* from =
        static_cast<const uint8_t*>(linear.weight) + (panel * linear.padded_columns + first) / COLUMNS * bytes;
    for (int64_t column = 0; column < count; column += COLUMNS, from += bytes, to += COLUMNS * LANES) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + AHEAD + line);
        nibbles ? expansion.nibble_block(from, to) : expansion.byte_block(from, to);
    }
}
