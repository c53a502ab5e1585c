// A simulation of the CUDA language for one block of threads at a time, on a CPU: enough of it for
// `edge_server/gpu/kernels/*.cu` to be compiled by g++ without a changed character.
//
// Every thread of a block is a fiber that runs until `__syncthreads`; so a barrier that is missing
// from a kernel shows as wrong numbers. Shared memory is filled with junk before every block.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Index {
    unsigned x, y, z;
};
extern Index gridDim, blockDim, blockIdx, threadIdx;
void __syncthreads();

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("shared_memory")))

struct uint2 {
    unsigned x, y;
};
struct float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
// To nearest, ties to even: the rounding mode that every process starts with.
inline int __float2int_rn(float value) { return (int)lrintf(value); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }

#define KERNEL_ASSERT(condition)                                                           \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: KERNEL_ASSERT(%s)\n", __FILE__, __LINE__, #condition); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

// IEEE binary32 to binary16, ties to even.
inline unsigned short half_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7fff;  // as the GPU's conversion gives it
    if (magnitude >= 0x47800000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {
        // A half's subnormals are whole multiples of 2^-24.
        return sign | (unsigned)lrintf(fabsf(value) * 16777216.f);
    }
    const uint32_t kept = magnitude - 0x38000000;  // the exponent's bias: 127 to 15
    return sign | ((kept + 0xfff + (kept >> 13 & 1)) >> 13);
}

// What the blocks took from the frames in whole words, all launches together.
extern unsigned long long copied_bytes;

inline void copy_16(void* to, const void* from) {
    copied_bytes += 16;
    KERNEL_ASSERT((uintptr_t)to % 16 == 0 && (uintptr_t)from % 16 == 0);
    memcpy(to, from, 16);
}
inline void wait_for_copies() {}
