// What a GPU has and C++ has not. The tests' shim offers the same names on a CPU.
#pragma once

// The IEEE half nearest to `value`, ties to even, as bits; without cuda_fp16.h, so that NVRTC needs
// no headers of a toolkit.
static __device__ __forceinline__ unsigned short half_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// 16 bytes from global to shared memory, both aligned to 16; there after `wait_for_copies` and
// a barrier. No register waits for it, so a warp has all its reads under way at once.
static __device__ __forceinline__ void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    unsigned shared = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
#else
    *(uint4*)to = __ldg((const uint4*)from);
#endif
}

static __device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#define KERNEL_ASSERT(condition)
