// The PTX instructions that the kernels need, one function each, and the bits of 16-bit floats.
//
// Everything else in this folder is plain C++. tests/kernels/cuda_on_cpu puts functions of the same names in the place
// of this file, written from the PTX ISA's tables, and runs the kernels on the CPU with them.
#pragma once

// The bits of a 16-bit float: bfloat16 where BF16 is set, else IEEE's. A `pair` is two of them, the first one lowest.
using Half = unsigned short;

#if BF16
#define HALF "bf16"
#else
#define HALF "f16"
#endif

__device__ inline Half rounded(float value) {
    Half bits;
    asm("cvt.rn." HALF ".f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline float widened(Half bits) {
#if BF16
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

// left * right + more, each half rounded once. sm_80 has no plain product or sum of bfloat16.
__device__ inline unsigned fused(unsigned left, unsigned right, unsigned more) {
    unsigned result;
    asm("fma.rn." HALF "x2 %0, %1, %2, %3;" : "=r"(result) : "r"(left), "r"(right), "r"(more));
    return result;
}

// Begin to copy 16 bytes, of which the first `bytes` (0 or 16) are read and the others zero.
__device__ inline void copy_ahead(void* shared, const void* global, int bytes) {
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// End a batch of copies.
__device__ inline void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait for all batches but the latest PENDING.
template <int PENDING>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lane l tells where row l % 8 of matrix l / 8 is. Of each, a lane gets the 4 bytes
// at 4 * (lane % 4) of row lane / 4.
__device__ inline void load_matrices(unsigned (&fragment)[4], const void* row) {
    unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(from)
                 : "memory");
}

// sum [16, 8] += sparse a times b: over 32 columns of 16-bit floats, over 64 of int8. SELECTOR: whose metadata counts.
// Stored indices ascend, which newer tensor cores want to be told (::ordered_metadata); sm_80 does not mind.
template <int SELECTOR>
__device__ inline void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[4], unsigned metadata) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." HALF "." HALF ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(SELECTOR));
}

template <int SELECTOR>
__device__ inline void multiply(int (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[4], unsigned metadata) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(SELECTOR));
}
