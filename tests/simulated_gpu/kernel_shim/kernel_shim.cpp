// A simulation of launching: `launch_<kernel>(kernelParams, grid, block)` runs a grid on this CPU,
// block after block, thread after thread. One launch runs at a time.
#include "cuda_on_cpu.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <mutex>

#include KERNEL_SOURCE

Index gridDim, blockDim, blockIdx, threadIdx;
unsigned long long copied_bytes;

extern char __start_shared_memory[], __stop_shared_memory[];

namespace {

const int MAX_THREADS = 1024;
const size_t STACK_BYTES = 64 * 1024;

std::mutex one_launch;
ucontext_t scheduler, fibers[MAX_THREADS];
bool done[MAX_THREADS];
unsigned running;
void (*kernel_body)(void**);
void** kernel_params;

char* stacks() {
    static char* memory = (char*)mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory;
}

void thread_body() {
    kernel_body(kernel_params);
    done[running] = true;
}

void run_block() {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    memset(__start_shared_memory, 0xa5, __stop_shared_memory - __start_shared_memory);
    for (unsigned i = 0; i < threads; ++i) {
        done[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks() + i * STACK_BYTES;
        fibers[i].uc_stack.ss_size = STACK_BYTES;
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], thread_body, 0);
    }
    // Each round takes every living thread to its next barrier or its end.
    for (unsigned living = threads; living > 0;) {
        living = 0;
        for (running = 0; running < threads; ++running) {
            if (done[running]) continue;
            threadIdx = {running % blockDim.x, running / blockDim.x % blockDim.y,
                         running / (blockDim.x * blockDim.y)};
            swapcontext(&scheduler, &fibers[running]);
            living += !done[running];
        }
    }
}

void launch(void (*body)(void**), void** params, Index grid, Index block) {
    KERNEL_ASSERT(block.x * block.y * block.z <= MAX_THREADS);
    std::lock_guard<std::mutex> guard(one_launch);
    kernel_body = body;
    kernel_params = params;
    gridDim = grid;
    blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block();
}

}  // namespace

void __syncthreads() { swapcontext(&fibers[running], &scheduler); }

extern "C" unsigned long long take_copied_bytes() {
    const unsigned long long bytes = copied_bytes;
    copied_bytes = 0;
    return bytes;
}

#define LAUNCHER(kernel)                                                                           \
    extern "C" void launch_##kernel(void** params, unsigned gx, unsigned gy, unsigned gz,          \
                                    unsigned bx, unsigned by, unsigned bz) {                       \
        launch([](void** params) { kernel(*(const PreprocessArgs*)params[0]); }, params,           \
               {gx, gy, gz}, {bx, by, bz});                                                        \
    }

#define LAUNCHERS(format) LAUNCHER(format##_to_nchw) LAUNCHER(format##_to_nchw_undistorted)

LAUNCHERS(bgr)
LAUNCHERS(grey)
LAUNCHERS(yuy2)
LAUNCHERS(nv12)
LAUNCHERS(i420)
