// A simulation of the little that edge_server/gpu/libcuda.py needs of the CUDA driver: one Orin whose
// memory is the host's.
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { return getenv("SIMULATED_NO_DEVICE") ? 100 : 0; }
int cuDriverGetVersion(int *version) { return *version = 12060, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int device) { return strncpy(name, "Orin", length), 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 76 ? 7 : attribute == 16 ? 16 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &cuInit, 0; }
int cuCtxPushCurrent_v2(void *context) { return context == &cuInit ? 0 : 201; }
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    return *address = (unsigned long long)malloc(bytes), 0;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) {
    return memcpy((void *)to, from, bytes), 0;
}
int cuGetErrorString(int code, const char **text) {
    return *text = code == 100 ? "no CUDA-capable device is detected" : "simulated", 0;
}
