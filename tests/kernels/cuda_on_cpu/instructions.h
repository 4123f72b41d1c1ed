// In the place of compress/kernels/sparse/source/instructions.h: what runs those kernels on a CPU, one program at a time.
//
// Every thread of a program is a coroutine, and one runs until it must wait for others: for its warp (ldmatrix, mma.sp,
// shuffles) or for all (__syncthreads). The last to come does the work of all. Instructions are written out from the
// tables of the PTX ISA, thread by thread and element by element.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

using Half = unsigned short;
using std::max;
using std::min;

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    int x, y, z;
};
static Index threadIdx, blockIdx;

constexpr int THREADS = 32 * WARPS;

// --- Coroutines ---

struct Copy {
    void* to;
    const void* from;
    int bytes;
};
struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    std::vector<std::vector<Copy>> batches;  // copies that have not come yet, the last batch still open
};
struct Meeting {
    int expected, arrived = 0, times = 0;
    void* brought[THREADS];
};
static Thread threads[THREADS];
static ucontext_t scheduler;
static Meeting warps[WARPS], everyone;
static bool copies_come_late;

// Wait for the others of `meeting`. The last calls `work` with what each brought, by its number.
inline void meet(Meeting& meeting, int number, void* brought, const std::function<void(void**)>& work) {
    meeting.brought[number] = brought;
    int time = meeting.times;
    if (++meeting.arrived == meeting.expected) {
        work(meeting.brought);
        meeting.arrived = 0;
        ++meeting.times;
    }
    while (meeting.times == time) swapcontext(&threads[threadIdx.x].context, &scheduler);
}

inline void meet_warp(void* brought, const std::function<void(void**)>& work) {
    meet(warps[threadIdx.x / 32], threadIdx.x % 32, brought, work);
}

inline void __syncthreads() {
    meet(everyone, threadIdx.x, nullptr, [](void**) {});
}

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
    unsigned told[2] = {value, 0};
    meet_warp(told, [distance](void** lanes) {
        for (int lane = 0; lane < 32; ++lane)
            static_cast<unsigned*>(lanes[lane])[1] = static_cast<unsigned*>(lanes[lane ^ distance])[0];
    });
    return told[1];
}

// --- Numbers ---

template <class To, class From>
To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}

inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline float __fdiv_rn(float left, float right) { return left / right; }
inline float __fmul_rn(float left, float right) { return left * right; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }

inline float widened(Half bits) {
#if BF16
    return bits_as<float>(static_cast<unsigned>(bits) << 16);
#else
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
    if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
    return static_cast<float>(bits >> 15 ? -size : size);
#endif
}

// The nearest 16-bit float, ties to even.
inline Half nearest_half(double value) {
#if BF16
    constexpr int DIGITS = 8, LEAST = -126;
#else
    constexpr int DIGITS = 11, LEAST = -14;
#endif
    if (std::isfinite(value) && value != 0) {
        int exponent = max(std::ilogb(value), LEAST) - DIGITS + 1;
        value = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
    }
#if BF16
    return static_cast<Half>(bits_as<unsigned>(static_cast<float>(value)) >> 16);
#else
    int exponent = value == 0 || !std::isfinite(value) ? LEAST : max(std::ilogb(value), LEAST);
    double size = std::fabs(value);
    // Subnormal numbers have the exponent's bits 0, where others have their leading digit added to them.
    unsigned bits = std::isnan(value) ? 0x7e00 : 0x7c00;
    if (std::isfinite(value) && exponent <= 15)
        bits = ((exponent + 14) << 10) + static_cast<unsigned>(std::ldexp(size, 10 - exponent));
    return static_cast<Half>(bits | (std::signbit(value) ? 0x8000 : 0));
#endif
}

inline Half rounded(float value) { return nearest_half(value); }

inline unsigned fused(unsigned left, unsigned right, unsigned more) {
    unsigned result = 0;
    for (int shift : {0, 16}) {
        auto half = [shift](unsigned pair) { return static_cast<double>(widened(static_cast<Half>(pair >> shift))); };
        result |= static_cast<unsigned>(nearest_half(half(left) * half(right) + half(more))) << shift;
    }
    return result;
}

// --- Copies: at once, or no sooner than they are waited for ---

inline void copy_now(const Copy& copy) {
    memset(copy.to, 0, 16);
    memcpy(copy.to, copy.from, copy.bytes);
}

inline void copy_ahead(void* shared, const void* global, int bytes) {
    Copy copy = {shared, global, bytes};
    if (copies_come_late)
        threads[threadIdx.x].batches.back().push_back(copy);
    else
        copy_now(copy);
}

inline void commit_copies() { threads[threadIdx.x].batches.emplace_back(); }

template <int PENDING>
void wait_for_copies() {
    auto& batches = threads[threadIdx.x].batches;
    while (batches.size() > PENDING + 1) {
        for (const Copy& copy : batches.front()) copy_now(copy);
        batches.erase(batches.begin());
    }
}

// --- Matrices ---

// PTX ISA, "Warp-level matrix instructions: ldmatrix", .x4: lanes 8i to 8i + 7 have the rows of matrix i.
inline void load_matrices(unsigned (&fragment)[4], const void* row) {
    std::pair<unsigned*, const unsigned char*> told = {fragment, static_cast<const unsigned char*>(row)};
    meet_warp(&told, [](void** lanes) {
        using Told = decltype(told);
        for (int lane = 0; lane < 32; ++lane)
            for (int matrix = 0; matrix < 4; ++matrix) {
                const unsigned char* from = static_cast<Told*>(lanes[8 * matrix + lane / 4])->second;
                memcpy(static_cast<Told*>(lanes[lane])->first + matrix, from + 4 * (lane % 4), 4);
            }
    });
}

template <class Sum>
struct Operands {
    Sum* sum;
    const unsigned *a, *b;
    unsigned metadata;
};

// PTX ISA, "Matrix fragments for sparse mma.m16n8k32 with .f16 and .bf16 types".
template <int SELECTOR>
void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[4], unsigned metadata) {
    Operands<float> told = {sum, a, b, metadata};
    meet_warp(&told, [](void** lanes) {
        float left[16][32] = {}, right[32][8];
        auto of = [lanes](int lane) -> Operands<float>& { return *static_cast<Operands<float>*>(lanes[lane]); };
        auto half = [](const unsigned* registers, int i) { return widened(registers[i / 2] >> (i % 2 * 16)); };
        for (int lane = 0; lane < 32; ++lane) {
            int group = lane >> 2, within = lane % 4;
            for (int i = 0; i < 8; ++i) {
                int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
                int first = within * 4 + (i < 4 ? 0 : 16);
                // Columns 0 to 15 by the first lane of the pair, 16 to 31 by the second; row group + 8 in the upper half.
                unsigned word = of(group * 4 + 2 * SELECTOR + first / 16).metadata;
                int place = (row >= 8 ? 16 : 0) + (first % 16 / 4) * 4 + i % 2 * 2;
                left[row][first + (word >> place & 3)] = half(of(lane).a, i);
                right[within * 2 + i % 2 + i / 2 * 8][group] = half(of(lane).b, i);
            }
        }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                int row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
                for (int k = 0; k < 32; ++k) of(lane).sum[i] += left[row][k] * right[k][column];
            }
    });
}

// PTX ISA, "Matrix fragments for sparse mma.m16n8k64 with .u8 / .s8 integer type".
template <int SELECTOR>
void multiply(int (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[4], unsigned metadata) {
    static_assert(SELECTOR == 0);
    Operands<int> told = {sum, a, b, metadata};
    meet_warp(&told, [](void** lanes) {
        int left[16][64] = {}, right[64][8];
        auto of = [lanes](int lane) -> Operands<int>& { return *static_cast<Operands<int>*>(lanes[lane]); };
        auto byte = [](const unsigned* registers, int i) { return static_cast<int8_t>(registers[i / 4] >> (i % 4 * 8)); };
        for (int lane = 0; lane < 32; ++lane) {
            int group = lane >> 2, within = lane % 4;
            for (int i = 0; i < 16; ++i) {
                int row = i < 4 || (i >= 8 && i < 12) ? group : group + 8;
                int first = within * 8 + (i < 8 ? 0 : 32) + i % 4 / 2 * 4;
                // Columns 0 to 31 by lanes 0 (row group) and 1 (row group + 8) of four, 32 to 63 by lanes 2 and 3.
                unsigned word = of(group * 4 + first / 32 * 2 + row / 8).metadata;
                left[row][first + (word >> (first % 32 + i % 2 * 2) & 3)] = byte(of(lane).a, i);
                right[within * 4 + i % 4 + i / 4 * 16][group] = byte(of(lane).b, i);
            }
        }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                int row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
                for (int k = 0; k < 64; ++k) of(lane).sum[i] += left[row][k] * right[k][column];
            }
    });
}
