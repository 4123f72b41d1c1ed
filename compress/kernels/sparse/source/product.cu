// out [M, N] = x [M, K] times the transpose of a 2:4 sparse weight [N, K], in sparse tensor cores.
//
// The weight is operand A of mma.sp (16 rows, a "strip"), the tokens are operand B (8 of them, a "tile"). Columns go in
// blocks of 128: four products deep for 16-bit activations, two for int8. BITS tells what the kept values are: 16-bit
// floats; int8, which meet activations that quantize.cu made int8; int4, brought to 16-bit floats in registers, exactly
// q * scale rounded once, which is what the reference multiplies with.
//
// Memory layout (layout.py makes it): `values` [strips, blocks, QUADS, 32 lanes] of 16 bytes and `metadata` [strips,
// blocks, 32 lanes] of 8 are registers as the lanes hold them, so that weights pass through no shared memory and each is
// loaded once per tile of tokens, 16 bytes at a time, one block ahead of its use. `scales`: [N] for int8; for int4
// [groups, 16 * strips], so that the 8 rows of a load lie side by side. x [M, K] passes through shared memory,
// STAGES - 1 blocks ahead; rows there are 16 bytes longer than their content, so that the 8 rows that ldmatrix reads at
// once begin in different banks. K is a multiple of 16; what x lacks of a block is zero.
//
// A program: WARPS * STRIPS strips, TOKEN_TILES tiles, a part of the blocks; where split > 1, combine.cu adds the parts.
// Bounds: the bandwidth of the weights with few tokens, the sparse tensor cores with many.
//
// After: PTX ISA, "Matrix fragments for multiply-accumulate operation with sparse matrix A".

#include "sums.h"

constexpr int BLOCK_COLUMNS = 128;
constexpr int BLOCK_BYTES = BLOCK_COLUMNS * (BITS == 8 ? 1 : 2);  // of a token
constexpr int DEPTH_BYTES = 64;                                   // of a token, in one product
constexpr int DEPTHS = BLOCK_BYTES / DEPTH_BYTES;
constexpr int STRIDE = BLOCK_BYTES + 16;
constexpr int QUADS = BITS / 4;
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int SPANS = BITS == 4 ? BLOCK_COLUMNS / SPAN : 1;  // of a block, each with one scale

// Pairs that make 16-bit floats of int4: a nibble n in the low bits of BIAS is BIAS + n, and n is the value plus 8.
#if BF16
constexpr unsigned BIAS = 0x43004300, UNBIAS = 0xc308c308, ONE = 0x3f803f80;  // 128, -136, 1
#else
constexpr unsigned BIAS = 0x64006400, UNBIAS = 0xe408e408, ONE = 0x3c003c00;  // 1024, -1032, 1
#endif
constexpr unsigned MINUS_ZERO = 0x80008000;  // leaves every product as it is

struct Weight {
    const uint4* values;
    const uint2* metadata;
    const Half* scales;
    int blocks, strips, groups, shift;
};

// A block of one strip as a lane holds it. scales: pairs, of the lane's two rows.
struct Registers {
    uint4 quads[QUADS];
    uint2 metadata;
    unsigned scales[SPANS][2];
};

using Stage = unsigned char[TOKENS][STRIDE];

__device__ inline void load(Registers& held, const Weight& weight, int strip, int block) {
    int lane = threadIdx.x % 32, place = strip * weight.blocks + block;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) held.quads[quad] = weight.values[(place * QUADS + quad) * 32 + lane];
    held.metadata = weight.metadata[place * 32 + lane];
#if BITS == 4
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
        int group = min((block * BLOCK_COLUMNS + span * SPAN) >> weight.shift, weight.groups - 1);
        const Half* scales = weight.scales + (group * weight.strips + strip) * 16 + lane / 4;
        held.scales[span][0] = scales[0] * 0x10001u;
        held.scales[span][1] = scales[8] * 0x10001u;
    }
#endif
}

// Operand A of product `depth` of a block. Registers 0 and 2 are of the lane's first row, 1 and 3 of its second.
__device__ inline void operand(unsigned (&a)[4], const Registers& held, int depth) {
#if BITS == 4
    const uint4& quad = held.quads[0];
    unsigned word = depth == 0 ? quad.x : depth == 1 ? quad.y : depth == 2 ? quad.z : quad.w;
    const unsigned(&scales)[2] = held.scales[depth * 32 / SPAN];
#pragma unroll
    for (int index = 0; index < 4; ++index) {
        unsigned biased = ((word >> 4 * index) & 0x000f000f) | BIAS;
        a[index] = fused(fused(biased, ONE, UNBIAS), scales[index % 2], MINUS_ZERO);
    }
#else
    const uint4& quad = held.quads[depth];
    a[0] = quad.x, a[1] = quad.y, a[2] = quad.z, a[3] = quad.w;
#endif
}

// Of 16-bit products two share a word of metadata: the first takes it from lanes 0 and 1 of every four, the second from
// lanes 2 and 3. An int8 product takes a word from each lane.
__device__ inline void multiply_block(Sum (&sums)[STRIPS][TOKEN_TILES][4], const Registers (&held)[STRIPS],
                                      const Stage& stage) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int depth = 0; depth < DEPTHS; ++depth) {
        unsigned a[STRIPS][4];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) operand(a[strip], held[strip], depth);
#pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            unsigned b[4];
            load_matrices(b, &stage[8 * tile + lane % 8][depth * DEPTH_BYTES + lane / 8 * 16]);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                const uint2& metadata = held[strip].metadata;
#if BITS == 8
                multiply<0>(sums[strip][tile], a[strip], b, depth == 0 ? metadata.x : metadata.y);
#else
                unsigned word = depth < 2 ? metadata.x : metadata.y;
                if (depth % 2 == 0)
                    multiply<0>(sums[strip][tile], a[strip], b, word);
                else
                    multiply<1>(sums[strip][tile], a[strip], b, word);
#endif
            }
        }
    }
}

// Begin to copy a block of the program's tokens; zeros stand for tokens and columns that there are none of.
__device__ inline void copy_tokens(Stage& stage, const unsigned char* x, int tokens, int token_bytes, int block) {
    constexpr int PIECES = BLOCK_BYTES / 16;
    for (int piece = threadIdx.x; piece < TOKENS * PIECES; piece += 32 * WARPS) {
        int row = piece / PIECES, within = piece % PIECES * 16;
        int token = blockIdx.x * TOKENS + row, byte = block * BLOCK_BYTES + within;
        bool inside = token < tokens && byte < token_bytes;
        const unsigned char* from = inside ? x + static_cast<size_t>(token) * token_bytes + byte : x;
        copy_ahead(&stage[row][within], from, inside ? 16 : 0);
    }
}

// Two programs on a multiprocessor at a time: told nothing, ptxas spills registers to make it four.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    product(const unsigned char* __restrict__ x, const uint4* __restrict__ values, const uint2* __restrict__ metadata,
            const Half* __restrict__ scales, const float* __restrict__ steps, Half* __restrict__ out,
            Sum* __restrict__ partial, int tokens, int rows, int columns, int groups, int shift, int split) {
    __shared__ __align__(16) Stage stages[STAGES];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, strips = (rows + 15) / 16;
    int depth = (blocks + split - 1) / split, first = blockIdx.z * depth, end = min(first + depth, blocks);
    int first_strip = (blockIdx.y * WARPS + warp) * STRIPS;
    int token_bytes = columns * (BITS == 8 ? 1 : 2);
    Weight weight = {values, metadata, scales, blocks, strips, groups, shift};

    Sum sums[STRIPS][TOKEN_TILES][4] = {};
    Registers held[STRIPS], ahead[STRIPS];
    // Warps beyond the last strip do its work again, for all threads copy tokens and meet; they store nothing.
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) load(ahead[strip], weight, min(first_strip + strip, strips - 1), first);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (first + stage < end) copy_tokens(stages[stage], x, tokens, token_bytes, first + stage);
        commit_copies();
    }
#pragma unroll 1
    for (int block = first; block < end; ++block) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // the block has come for all, and all are done with the stage that is filled next
        int later = block + STAGES - 1;
        if (later < end) copy_tokens(stages[(later - first) % STAGES], x, tokens, token_bytes, later);
        commit_copies();
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            held[strip] = ahead[strip];
            if (block + 1 < end) load(ahead[strip], weight, min(first_strip + strip, strips - 1), block + 1);
        }
        multiply_block(sums, held, stages[(block - first) % STAGES]);
    }

#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int index = 0; index < 4 * TOKEN_TILES; ++index) {
            int row = (first_strip + strip) * 16 + lane / 4 + index % 4 / 2 * 8;
            int token = blockIdx.x * TOKENS + index / 4 * 8 + lane % 4 * 2 + index % 2;
            if (row >= rows || token >= tokens) continue;
            Sum sum = sums[strip][index / 4][index % 4];
            if (split == 1)
                out[token * rows + row] = finished(sum, token, row, scales, steps);
            else
                partial[(static_cast<size_t>(blockIdx.z) * tokens + token) * rows + row] = sum;
        }
    }
}
