// The weight of a linear layer, in panels of 16 rows.
//
// A panel holds 16 output rows side by side, so that one load fetches the same columns of all of them and no sum runs
// across lanes. Layout of one panel, K columns padded to a multiple of 8:
//   4 bit   per 8 columns 64 bytes: byte 4 r + j holds column j of row r in its low and column 4 + j in its high half
//   8 bit   per 4 columns 64 bytes: byte 4 r + j holds column j of row r
//   bfloat16 per 2 columns 32 numbers, the two of a row beside each other
//   float32 and float16 per column 16 numbers
// Integers are stored unsigned, 8 or 128 above their value. Scales and zero points: [panel][group][16].
//
// With 2:4 sparsity two of every four columns are kept, of which no byte is spent on the others. K is padded to a
// multiple of 32: a block of four units of 8 columns, in each of which a row keeps the values 0 and 1 of the first four
// columns and 2 and 3 of the second four. Integers are signed. Layout of a block:
//   64 bytes of positions: byte 4 r + j holds in its bits 2 u and 2 u + 1 where among its four columns value j of row r
//   stood in unit u
//   8 bit   per unit 64 bytes: byte 4 r + j holds value j of row r
//   4 bit   per two units 64 bytes: the same, the earlier unit in the low and the later in the high half
#pragma once

#include <cstdint>

#include "vector.h"

enum NumberType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4, SPARSE8 = 5, SPARSE4 = 6 };

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
static inline bool is_sparse(const Linear& linear) { return linear.type == SPARSE8 || linear.type == SPARSE4; }
static inline bool is_integer(const Linear& linear) {
    return linear.type == INT8 || linear.type == INT4 || is_sparse(linear);
}

// Columns of one row that lie together.
constexpr int64_t OCTET = 8;
