// SIMULATION of the CUDA driver library, libcuda.so.1: there is no GPU behind it.
//
// Device memory is host memory. A stream is a queue that stands still until somebody waits for it
// (or asks it: each question lets one piece of work happen), so what is read too early is stale,
// and what is freed or reused too early is spoilt. Pageable host memory is read and written before
// a copy returns, pinned memory when the copy happens, as the real driver has it. Copies and fills
// outside of living memory break the device, for ever, as on a real one.
//
// Kernels run on the CPU where EDGE_SIMULATED_KERNELS names a library with, for each of them,
// launch_<kernel>(void **arguments, gx, gy, gz, bx, by, bz); elsewhere they do nothing. A kernel of
// several arguments has a string beside it, signature_<kernel>, with their letters as Python's
// struct has them; without it there is one argument.
//
// EDGE_SIMULATED_CUDA says what machine it is, and what shall go wrong: words parted by commas,
//   devices=2  driver=12060  compute=87  integrated=1  memory=1000000 (bytes)
//   init=100            cuInit answers that
//   fail=NAME:CODE:N:T  T calls of NAME (1) after N good ones (0) answer CODE; of `kernel` and `copy`,
//                       the piece of work in a stream does, and who waits for it is told
// A test says the same with simulated_settings(words), and counts with the functions below it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long Pointer;
typedef int Result;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, ILLEGAL_STATE = 401 };

static const struct { int code; const char *text; } TEXTS[] = {
    {0, "no error"}, {1, "invalid argument"}, {2, "out of memory"}, {3, "initialization error"},
    {4, "driver shutting down"}, {34, "CUDA driver is a stub library"},
    {46, "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "no CUDA-capable device is detected"}, {101, "invalid device ordinal"},
    {200, "device kernel image is invalid"}, {201, "invalid device context"},
    {209, "no kernel image is available for execution on the device"},
    {214, "uncorrectable ECC error encountered"},
    {218, "a PTX JIT compilation failed"},
    {220, "uncorrectable NVLink error detected during the execution"},
    {221, "PTX JIT compiler library not found"},
    {222, "the provided PTX was compiled with an unsupported toolchain."},
    {223, "PTX JIT compilation was disabled"},
    {226, "Invalid access of peer GPU memory over nvlink or a hardware error"},
    {400, "invalid resource handle"},
    {401, "the operation cannot be performed in the present state"},
    {500, "named symbol not found"}, {600, "device not ready"},
    {700, "an illegal memory access was encountered"},
    {701, "too many resources requested for launch"},
    {702, "the launch timed out and was terminated"}, {709, "context is destroyed"},
    {710, "device-side assert triggered"}, {714, "hardware stack error"},
    {715, "an illegal instruction was encountered"}, {716, "misaligned address"},
    {717, "operation not supported on global/shared address space"},
    {718, "invalid program counter"}, {719, "unspecified launch failure"},
    {801, "operation not supported"},
    {803, "system has unsupported display driver / cuda driver combination"},
    {810, "the MPS client has been terminated"},
    {900, "operation not permitted when stream is capturing"},
    {901, "operation failed due to a previous error during capture"}, {999, "unknown error"}};

typedef struct Stream Stream;
typedef struct Event { unsigned long long set, reached; Stream *stream; int timed; } Event;
typedef struct Function { char name[96]; char signature[64];
                          void (*launch)(void **, unsigned, unsigned, unsigned, unsigned, unsigned,
                                         unsigned); } Function;
enum Kind { COPY, FILL, RECORD, WAIT, CALL, LAUNCH };
typedef struct Work {
    enum Kind kind;
    char *to; const char *from; size_t nbytes; int byte, to_host, from_host;
    Event *event; unsigned long long set; Stream *stream;
    void (*call)(void *); void *argument;
    Function *function; unsigned grid[3], block[3];
    char *staged; size_t staged_bytes;
    struct Work *next;
} Work;
struct Stream { Work *head, *tail; struct Graph *capture; int priority; };
// A graph that can be launched is another object than the one that it was made of.
typedef struct Graph { Work *head, *tail; int spoilt, executable; struct Graph *next; } Graph;
typedef struct Memory { char *begin; size_t nbytes; int pinned, device; struct Memory *next; } Memory;
typedef struct { int device; int retained; } Context;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int initialised, lost, devices = 1, driver = 13000, compute = 87, integrated = 1;
static int init_result, fail_code, fail_after, fail_times;
static char fail_name[64];
static size_t memory_limit = (size_t)8 << 30, device_bytes, allocations, calls,
    copies_to_host;
static Memory *memories;
static Context contexts[8];
static Stream legacy;
// The graph being recorded in a mode that forbids to allocate and free meanwhile.
static Graph *strict;
// Those that are not destroyed yet.
static Graph *graphs;
static __thread Context *stack[64];
static __thread int depth;
static Stream *streams[4096];
static int stream_count;

static void parse(const char *words) {
    char copy[512], *rest = copy, *word;
    snprintf(copy, sizeof copy, "%s", words);
    while ((word = strsep(&rest, ","))) {
        char *value = strchr(word, '=');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(word, "devices")) devices = atoi(value);
        if (!strcmp(word, "driver")) driver = atoi(value);
        if (!strcmp(word, "compute")) compute = atoi(value);
        if (!strcmp(word, "integrated")) integrated = atoi(value);
        if (!strcmp(word, "memory")) memory_limit = strtoull(value, 0, 10);
        if (!strcmp(word, "init")) init_result = atoi(value);
        if (!strcmp(word, "fail")) {
            fail_after = 0, fail_times = 1;
            sscanf(value, "%63[^:]:%d:%d:%d", fail_name, &fail_code, &fail_after, &fail_times);
        }
    }
}

static int sticky(int code) {
    return code == 214 || code == 220 || code == 226 || code == 700 || code == 702 ||
           (code >= 709 && code <= 719 && code != 711 && code != 712 && code != 713) ||
           code == 721 || code == 810 || code == 999;
}

static Result failing(const char *name) {
    if (!fail_name[0] || strcmp(name, fail_name) || fail_after-- > 0) return 0;
    if (--fail_times < 1) fail_name[0] = 0;
    if (sticky(fail_code)) lost = fail_code;
    return fail_code;
}

// Every call that needs a context begins so; ENTER of __func__ is what `fail=` names.
static Result enter(const char *name, int needs_context) {
    calls++;
    Result failed = failing(name);
    if (failed) return failed;
    if (!initialised) return NOT_INITIALIZED;
    if (needs_context && lost) return lost;
    if (needs_context && (!depth || !stack[depth - 1])) return INVALID_CONTEXT;
    return 0;
}
static void unlock(int *unused) { (void)unused; pthread_mutex_unlock(&lock); }
#define LOCK pthread_mutex_lock(&lock); int locked __attribute__((cleanup(unlock))) = 1; (void)locked
#define ENTER(context) LOCK; Result entered = enter(__func__, context); if (entered) return entered

static Memory *memory_at(const char *address, size_t nbytes) {
    for (Memory *m = memories; m; m = m->next)
        if (address >= m->begin && address + nbytes <= m->begin + m->nbytes) return m;
    return 0;
}

static Stream *stream_of(Stream *handle) { return (uintptr_t)handle <= 2 ? &legacy : handle; }

static Result step(Stream *stream);

static void run(Work *work) {
    if (lost) return;
    if (work->kind == COPY || work->kind == FILL) {
        if (failing("copy")) return;
        int good = (work->to_host || memory_at(work->to, work->nbytes)) &&
                   (work->kind == FILL || work->from_host || work->staged ||
                    memory_at(work->from, work->nbytes));
        if (!good) { lost = ILLEGAL_ADDRESS; return; }
        if (work->kind == FILL) memset(work->to, work->byte, work->nbytes);
        else memmove(work->to, work->staged ? work->staged : work->from, work->nbytes);
    } else if (work->kind == RECORD) {
        if (work->event->reached < work->set) work->event->reached = work->set;
    } else if (work->kind == WAIT) {
        while (work->event->reached < work->set && !lost)
            if (step(work->stream)) break;
    } else if (work->kind == CALL) {
        work->call(work->argument);
    } else if (work->kind == LAUNCH) {
        if (failing("kernel")) return;
        // The arguments lie one behind the other as C has them; without a signature there is one.
        void *arguments[64]; size_t at = 0; int count = 0;
        const char *letter = work->function->signature;
        if (!*letter) arguments[count++] = work->staged;
        while (*letter) {
            char *after; size_t size = strtoul(letter, &after, 10), align = 1;
            letter = after;
            if (*letter != 's') {
                size = strchr("PqQdlLnN", *letter) ? 8 : strchr("iIf", *letter) ? 4
                     : strchr("hHe", *letter) ? 2 : 1;
                align = size;
            }
            at = (at + align - 1) / align * align;
            arguments[count++] = work->staged + at;
            at += size;
            letter++;
        }
        if (work->function->launch)
            work->function->launch(arguments, work->grid[0], work->grid[1], work->grid[2],
                                   work->block[0], work->block[1], work->block[2]);
    }
}

// One piece of work; 1 where there is none.
static Result step(Stream *stream) {
    Work *work = stream->head;
    if (!work) return 1;
    run(work);
    stream->head = work->next;
    if (!stream->head) stream->tail = 0;
    free(work->staged);
    free(work);
    return 0;
}
static void drain(Stream *stream) { while (!step(stream)) ; }
static void drain_all(void) {
    drain(&legacy);
    for (int i = 0; i < stream_count; i++) if (streams[i]) drain(streams[i]);
}

static void append(Work **head, Work **tail, Work *work) {
    work->next = 0;
    if (*tail) (*tail)->next = work; else *head = work;
    *tail = work;
}

static Result give(Stream *stream, Work values) {
    Work *work = malloc(sizeof *work);
    *work = values;
    if (stream->capture) append(&stream->capture->head, &stream->capture->tail, work);
    else append(&stream->head, &stream->tail, work);
    return 0;
}

static void *staged(const void *bytes, size_t nbytes) {
    void *copy = malloc(nbytes ? nbytes : 1);
    memcpy(copy, bytes, nbytes);
    return copy;
}

// With a context all that was in it goes. Pinned memory stays, as arrays may still look at it.
static void empty(int device) {
    for (Memory **m = &memories; *m;) {
        Memory *memory = *m;
        if (memory->pinned || memory->device != device) { m = &memory->next; continue; }
        *m = memory->next;
        device_bytes -= memory->nbytes;
        free(memory->begin);
        free(memory);
    }
}

// ---- what tests ask of the simulation ----
void simulated_settings(const char *words) { LOCK; parse(words); }
static void free_graph(Graph *graph);
void simulated_reset(void) {
    LOCK;
    drain_all();
    for (int i = 0; i < stream_count; i++) streams[i]->capture = 0;
    while (graphs) free_graph(graphs);
    strict = 0;
    for (int i = 0; i < 8; i++) { contexts[i].retained = 0; empty(i); }
    lost = 0; fail_name[0] = 0; devices = 1; driver = 13000; compute = 87; integrated = 1;
    init_result = 0; memory_limit = (size_t)8 << 30;
    const char *words = getenv("EDGE_SIMULATED_CUDA");
    if (words) parse(words);
}
size_t simulated_device_bytes(void) { LOCK; return device_bytes; }
size_t simulated_allocations(void) { LOCK; return allocations; }
size_t simulated_calls(void) { LOCK; return calls; }
size_t simulated_copies_to_host(void) { LOCK; return copies_to_host; }
int simulated_graphs(void) {
    LOCK;
    int count = 0;
    for (Graph *graph = graphs; graph; graph = graph->next) count++;
    return count;
}
// The GPU is busy with something until a test says so, or so many milliseconds have passed since
// somebody began to wait for that. A test asks by itself whether somebody does: it needs the
// interpreter for that.
static volatile int busy_ms, is_waited_for, go_on;
void simulated_keep_busy(int most_ms) { go_on = 0; busy_ms = most_ms; }
int simulated_is_waited_for(void) { return is_waited_for; }
void simulated_go_on(void) { go_on = 1; }
static void wait_until_idle(void) {
    is_waited_for = busy_ms > 0;
    while (busy_ms > 0 && !go_on) { usleep(1000); busy_ms--; }
    is_waited_for = busy_ms = 0;
}
// Who holds the interpreter's lock in a call takes this one before: the other way round, a thread
// that has it may wait for the interpreter's, to run work that is written in Python.
void simulated_lock(void) { pthread_mutex_lock(&lock); }
void simulated_unlock(void) { pthread_mutex_unlock(&lock); }

// ---- the driver's own functions ----
Result cuInit(unsigned flags) {
    (void)flags;
    LOCK;
    if (!initialised) { const char *words = getenv("EDGE_SIMULATED_CUDA"); if (words) parse(words); }
    if (init_result) return init_result;
    if (!devices) return 100;
    initialised = 1;
    return failing("cuInit");
}
Result cuDriverGetVersion(int *version) { *version = driver; return 0; }
Result cuGetErrorString(int code, const char **text) {
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++)
        if (TEXTS[i].code == code) { *text = TEXTS[i].text; return 0; }
    // The real one leaves NULL here; pycuda would not live through that.
    *text = "unrecognized error code";
    return INVALID_VALUE;
}
Result cuGetErrorName(int code, const char **text) { return cuGetErrorString(code, text); }
Result cuDeviceGetCount(int *count) { ENTER(0); *count = devices; return 0; }
Result cuDeviceGet(int *device, int index) {
    ENTER(0);
    if (index < 0 || index >= devices) return INVALID_DEVICE;
    *device = index;
    return 0;
}
Result cuDeviceGetName(char *name, int room, int device) {
    ENTER(0); snprintf(name, room, "Simulated GPU %d", device); return 0;
}
Result cuDeviceComputeCapability(int *major, int *minor, int device) {
    (void)device; ENTER(0); *major = compute / 10; *minor = compute % 10; return 0;
}
Result cuDeviceTotalMem_v2(size_t *nbytes, int device) {
    (void)device; ENTER(0); *nbytes = memory_limit; return 0;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    ENTER(0);
    switch (attribute) {
        case 18: *value = integrated; break;       // INTEGRATED
        case 19: case 41: *value = 1; break;       // CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING
        case 75: *value = compute / 10; break;     // COMPUTE_CAPABILITY_MAJOR
        case 76: *value = compute % 10; break;
        default: *value = 0;
    }
    return 0;
}
Result cuDevicePrimaryCtxRetain(Context **context, int device) {
    ENTER(0);
    contexts[device].device = device;
    contexts[device].retained++;
    *context = &contexts[device];
    return 0;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    LOCK;
    if (!contexts[device].retained) return INVALID_CONTEXT;
    if (--contexts[device].retained) return 0;
    if (!lost) drain_all();
    empty(device);
    return 0;
}
Result cuCtxPushCurrent_v2(Context *context) {
    ENTER(0);
    if (!context || !context->retained || depth == 64) return INVALID_CONTEXT;
    stack[depth++] = context;
    return 0;
}
Result cuCtxPopCurrent_v2(Context **context) {
    LOCK;
    calls++;
    Result failed = failing(__func__);
    if (failed) return failed;
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return 0;
}
Result cuCtxGetCurrent(Context **context) { *context = depth ? stack[depth - 1] : 0; return 0; }
Result cuCtxGetDevice(int *device) { ENTER(1); *device = stack[depth - 1]->device; return 0; }
Result cuCtxSynchronize(void) { ENTER(1); drain_all(); return lost; }

static Result unsafe(void) {
    if (strict) strict->spoilt = 1;
    return strict ? CAPTURE_UNSUPPORTED : 0;
}
Result cuMemAlloc_v2(Pointer *pointer, size_t nbytes) {
    ENTER(1);
    if (unsafe()) return CAPTURE_UNSUPPORTED;
    if (!nbytes) return INVALID_VALUE;
    if (device_bytes + nbytes > memory_limit) return OUT_OF_MEMORY;
    Memory *memory = calloc(1, sizeof *memory);
    memory->begin = aligned_alloc(512, (nbytes + 511) / 512 * 512);
    memset(memory->begin, 0xcd, nbytes);
    memory->nbytes = nbytes;
    memory->device = stack[depth - 1]->device;
    memory->next = memories;
    memories = memory;
    device_bytes += nbytes;
    allocations++;
    *pointer = (Pointer)memory->begin;
    return 0;
}
static Result release(char *begin, int pinned) {
    if (!lost) drain_all();
    for (Memory **m = &memories; *m; m = &(*m)->next)
        if ((*m)->begin == begin && (*m)->pinned == pinned) {
            Memory *memory = *m;
            *m = memory->next;
            if (!pinned) device_bytes -= memory->nbytes;
            memset(begin, 0xdd, memory->nbytes);
            free(begin);
            free(memory);
            return 0;
        }
    return INVALID_VALUE;
}
Result cuMemFree_v2(Pointer pointer) {
    wait_until_idle();
    ENTER(1);
    return unsafe() ? CAPTURE_UNSUPPORTED : release((char *)pointer, 0);
}
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(1); *total = memory_limit; *free_bytes = memory_limit - device_bytes; return 0;
}
Result cuMemHostAlloc(void **pointer, size_t nbytes, unsigned flags) {
    (void)flags;
    ENTER(1);
    Memory *memory = calloc(1, sizeof *memory);
    memory->begin = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    memory->nbytes = nbytes;
    memory->pinned = 1;
    memory->next = memories;
    memories = memory;
    allocations++;
    *pointer = memory->begin;
    return 0;
}
Result cuMemFreeHost(void *pointer) {
    wait_until_idle();
    ENTER(1);
    return release(pointer, 1);
}
Result cuMemHostGetDevicePointer_v2(Pointer *pointer, void *host, unsigned flags) {
    (void)flags;
    ENTER(1);
    Memory *memory = memory_at(host, 1);
    if (!memory || !memory->pinned) return INVALID_VALUE;
    *pointer = (Pointer)host;
    return 0;
}

Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t nbytes, Stream *stream) {
    ENTER(1);
    Memory *pinned = memory_at(from, nbytes);
    Work work = {.kind = COPY, .to = (char *)to, .from = from, .nbytes = nbytes, .from_host = 1};
    if (!pinned || !pinned->pinned) work.staged = staged(from, nbytes);
    return give(stream_of(stream), work);
}
Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t nbytes, Stream *stream) {
    ENTER(1);
    Memory *pinned = memory_at(to, nbytes);
    copies_to_host++;
    give(stream_of(stream), (Work){.kind = COPY, .to = to, .from = (char *)from, .nbytes = nbytes,
                                   .to_host = 1});
    if (!pinned || !pinned->pinned) drain(stream_of(stream));
    return lost;
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t nbytes, Stream *stream) {
    ENTER(1);
    return give(stream_of(stream), (Work){.kind = COPY, .to = (char *)to, .from = (char *)from,
                                          .nbytes = nbytes});
}
Result cuMemsetD8Async(Pointer to, unsigned char byte, size_t nbytes, Stream *stream) {
    ENTER(1);
    return give(stream_of(stream), (Work){.kind = FILL, .to = (char *)to, .byte = byte,
                                          .nbytes = nbytes});
}

Result cuStreamCreate(Stream **stream, unsigned flags) {
    (void)flags;
    ENTER(1);
    if (stream_count == 4096) return OUT_OF_MEMORY;
    *stream = calloc(1, sizeof **stream);
    streams[stream_count++] = *stream;
    return 0;
}
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(1);
    *least = 0, *greatest = -5;
    return 0;
}
Result cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    Result result = cuStreamCreate(stream, flags);
    if (!result) (*stream)->priority = priority;
    return result;
}
Result cuStreamGetPriority(Stream *stream, int *priority) {
    ENTER(1);
    *priority = stream_of(stream)->priority;
    return 0;
}
Result cuStreamDestroy_v2(Stream *stream) {
    ENTER(1);
    drain(stream);
    for (int i = 0; i < stream_count; i++)
        if (streams[i] == stream) { streams[i] = streams[--stream_count]; free(stream); return 0; }
    return INVALID_HANDLE;
}
Result cuStreamSynchronize(Stream *stream) {
    ENTER(1);
    if (stream_of(stream)->capture) return stream->capture->spoilt = 1, CAPTURE_UNSUPPORTED;
    drain(stream_of(stream));
    return lost;
}
Result cuStreamQuery(Stream *stream) {
    ENTER(1);
    step(stream_of(stream));
    return lost ? lost : stream_of(stream)->head ? NOT_READY : 0;
}
Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    (void)flags;
    ENTER(1);
    if (event->reached >= event->set) return 0;
    return give(stream_of(stream), (Work){.kind = WAIT, .event = event, .set = event->set,
                                          .stream = event->stream});
}
Result cuLaunchHostFunc(Stream *stream, void (*call)(void *), void *argument) {
    ENTER(1);
    return give(stream_of(stream), (Work){.kind = CALL, .call = call, .argument = argument});
}

Result cuEventCreate(Event **event, unsigned flags) {
    ENTER(1);
    *event = calloc(1, sizeof **event);
    (*event)->timed = !(flags & 2);
    return 0;
}
// An event lives for as long as the process: work may still refer to it.
Result cuEventDestroy_v2(Event *event) { (void)event; ENTER(1); return 0; }
Result cuEventRecord(Event *event, Stream *stream) {
    ENTER(1);
    event->set++;
    event->stream = stream_of(stream);
    return give(event->stream, (Work){.kind = RECORD, .event = event, .set = event->set});
}
Result cuEventSynchronize(Event *event) {
    ENTER(1);
    while (event->reached < event->set && !lost && !step(event->stream)) ;
    return lost;
}
Result cuEventQuery(Event *event) {
    ENTER(1);
    if (event->reached < event->set) step(event->stream);
    return lost ? lost : event->reached < event->set ? NOT_READY : 0;
}
Result cuEventElapsedTime_v2(float *ms, Event *from, Event *to) {
    ENTER(1);
    if (!from->timed || !to->timed) return INVALID_HANDLE;
    if (from->reached < from->set || to->reached < to->set) return NOT_READY;
    *ms = 0.5f;
    return 0;
}
// As headers before CUDA 13 name it.
Result cuEventElapsedTime(float *ms, Event *from, Event *to) {
    return cuEventElapsedTime_v2(ms, from, to);
}

Result cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options,
                          void **values) {
    (void)image;
    // The lengths of the logs, which pycuda reads back; both logs are empty.
    for (unsigned i = 0; i < count; i++) if (options[i] == 4 || options[i] == 6) values[i] = 0;
    ENTER(1);
    *module = calloc(1, 1);
    return 0;
}
Result cuModuleUnload(void *module) { ENTER(1); free(module); return 0; }
Result cuModuleGetFunction(Function **function, void *module, const char *name) {
    (void)module;
    ENTER(1);
    Function *found = calloc(1, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", name);
    const char *path = getenv("EDGE_SIMULATED_KERNELS");
    if (path && *path) {
        char symbol[128];
        snprintf(symbol, sizeof symbol, "launch_%s", name);
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        *(void **)&found->launch = library ? dlsym(library, symbol) : 0;
        if (!found->launch) { free(found); return NOT_FOUND; }
        snprintf(symbol, sizeof symbol, "signature_%s", name);
        const char *signature = dlsym(library, symbol);
        if (signature) snprintf(found->signature, sizeof found->signature, "%s", signature);
    }
    *function = found;
    return 0;
}
Result cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                      unsigned by, unsigned bz, unsigned shared, Stream *stream, void **each,
                      void **extra) {
    (void)shared; (void)each;
    ENTER(1);
    if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024) return INVALID_VALUE;
    Work work = {.kind = LAUNCH, .function = function, .grid = {gx, gy, gz}, .block = {bx, by, bz}};
    // CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
    for (void **key = extra; key && *key; key += 2) {
        if ((uintptr_t)key[0] == 1) work.staged = key[1];
        if ((uintptr_t)key[0] == 2) work.staged_bytes = *(size_t *)key[1];
    }
    work.staged = staged(work.staged, work.staged_bytes);
    return give(stream_of(stream), work);
}
Result cuFuncSetBlockShape(Function *function, int x, int y, int z) {
    (void)function; (void)x; (void)y; (void)z; return 0;
}

// ---- graphs ----
static int is_stream(const Stream *handle) {
    for (int i = 0; i < stream_count; i++) if (streams[i] == handle) return 1;
    return 0;
}
static Graph *graph_of(const Graph *handle, int executable) {
    Graph *graph = graphs;
    while (graph && (graph != handle || graph->executable != executable)) graph = graph->next;
    return graph;
}
static Graph *new_graph(void) {
    Graph *graph = calloc(1, sizeof *graph);
    graph->next = graphs;
    return graphs = graph;
}
static void free_graph(Graph *graph) {
    Graph **at = &graphs;
    while (*at != graph) at = &(*at)->next;
    *at = graph->next;
    while (graph->head) {
        Work *work = graph->head;
        graph->head = work->next;
        free(work->staged);
        free(work);
    }
    free(graph);
}
static Work again(const Work *work) {
    Work copy = *work;
    if (work->staged)
        copy.staged = staged(work->staged, work->kind == COPY ? work->nbytes : work->staged_bytes);
    return copy;
}
Result cuStreamBeginCapture_v2(Stream *stream, int mode) {
    ENTER(1);
    enum { RELAXED = 2 };
    if (mode < 0 || mode > RELAXED) return INVALID_VALUE;
    if ((uintptr_t)stream <= 2) return CAPTURE_UNSUPPORTED;
    if (!is_stream(stream)) return INVALID_HANDLE;
    if (stream->capture) return ILLEGAL_STATE;
    stream->capture = new_graph();
    strict = mode == RELAXED ? 0 : stream->capture;
    return 0;
}
Result cuStreamEndCapture(Stream *stream, Graph **graph) {
    ENTER(1);
    *graph = 0;
    if (!is_stream(stream)) return INVALID_HANDLE;
    if (!stream->capture) return ILLEGAL_STATE;
    Graph *recorded = stream->capture;
    stream->capture = strict = 0;
    if (recorded->spoilt) { free_graph(recorded); return CAPTURE_INVALIDATED; }
    *graph = recorded;
    return 0;
}
Result cuGraphInstantiateWithFlags(Graph **executable, Graph *handle, unsigned long long flags) {
    ENTER(1);
    Graph *graph = graph_of(handle, 0);
    enum { FLAGS = 1 | 2 | 4 | 8 };
    if (!graph || flags & ~(unsigned long long)FLAGS) return INVALID_VALUE;
    Graph *made = new_graph();
    made->executable = 1;
    for (Work *work = graph->head; work; work = work->next) {
        Work *copy = malloc(sizeof *copy);
        *copy = again(work);
        append(&made->head, &made->tail, copy);
    }
    *executable = made;
    return 0;
}
Result cuGraphLaunch(Graph *executable, Stream *stream) {
    ENTER(1);
    Graph *graph = graph_of(executable, 1);
    if (!graph) return INVALID_VALUE;
    if (!is_stream(stream)) return INVALID_HANDLE;
    for (Work *work = graph->head; work; work = work->next) give(stream, again(work));
    return 0;
}
static Result destroy(Graph *handle, int executable) {
    Graph *graph = graph_of(handle, executable);
    if (!graph) return INVALID_VALUE;
    free_graph(graph);
    return 0;
}
Result cuGraphDestroy(Graph *graph) { ENTER(0); return destroy(graph, 0); }
Result cuGraphExecDestroy(Graph *executable) { ENTER(0); return destroy(executable, 1); }

// ---- what pycuda links to and nobody here calls ----
#define ABSENT(name) Result name(void) { return NOT_SUPPORTED; }
ABSENT(cuArray3DCreate_v2) ABSENT(cuArray3DGetDescriptor_v2) ABSENT(cuArrayCreate_v2)
ABSENT(cuArrayDestroy) ABSENT(cuArrayGetDescriptor_v2) ABSENT(cuCtxAttach) ABSENT(cuCtxCreate_v2)
ABSENT(cuCtxCreate_v4)
ABSENT(cuCtxDetach) ABSENT(cuCtxDisablePeerAccess) ABSENT(cuCtxEnablePeerAccess)
ABSENT(cuCtxGetApiVersion) ABSENT(cuCtxGetCacheConfig) ABSENT(cuCtxGetLimit) ABSENT(cuCtxGetSharedMemConfig)
ABSENT(cuCtxSetCacheConfig) ABSENT(cuCtxSetLimit) ABSENT(cuCtxSetSharedMemConfig)
ABSENT(cuDeviceCanAccessPeer) ABSENT(cuDeviceGetByPCIBusId) ABSENT(cuDeviceGetPCIBusId)
ABSENT(cuFuncGetAttribute) ABSENT(cuFuncSetAttribute) ABSENT(cuFuncSetCacheConfig)
ABSENT(cuFuncSetSharedSize) ABSENT(cuIpcCloseMemHandle) ABSENT(cuIpcGetEventHandle)
ABSENT(cuIpcGetMemHandle) ABSENT(cuIpcOpenEventHandle) ABSENT(cuIpcOpenMemHandle_v2)
ABSENT(cuLaunch) ABSENT(cuLaunchGrid) ABSENT(cuLaunchGridAsync) ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkAddFile_v2) ABSENT(cuLinkComplete) ABSENT(cuLinkCreate_v2) ABSENT(cuLinkDestroy)
ABSENT(cuMemAllocManaged) ABSENT(cuMemAllocPitch_v2) ABSENT(cuMemGetAddressRange_v2)
ABSENT(cuMemHostGetFlags) ABSENT(cuMemHostRegister_v2) ABSENT(cuMemHostUnregister)
ABSENT(cuMemcpy2DAsync_v2) ABSENT(cuMemcpy2DUnaligned_v2) ABSENT(cuMemcpy2D_v2)
ABSENT(cuMemcpy3DAsync_v2) ABSENT(cuMemcpy3DPeer) ABSENT(cuMemcpy3DPeerAsync) ABSENT(cuMemcpy3D_v2)
ABSENT(cuMemcpyAtoA_v2) ABSENT(cuMemcpyAtoD_v2) ABSENT(cuMemcpyAtoH_v2) ABSENT(cuMemcpyDtoA_v2)
ABSENT(cuMemcpyDtoD_v2) ABSENT(cuMemcpyDtoH_v2) ABSENT(cuMemcpyHtoA_v2) ABSENT(cuMemcpyHtoD_v2)
ABSENT(cuMemcpyPeer) ABSENT(cuMemcpyPeerAsync) ABSENT(cuMemsetD16Async) ABSENT(cuMemsetD16_v2)
ABSENT(cuMemsetD2D16Async) ABSENT(cuMemsetD2D16_v2) ABSENT(cuMemsetD2D32Async)
ABSENT(cuMemsetD2D32_v2) ABSENT(cuMemsetD2D8Async) ABSENT(cuMemsetD2D8_v2) ABSENT(cuMemsetD32Async)
ABSENT(cuMemsetD32_v2) ABSENT(cuMemsetD8_v2) ABSENT(cuModuleGetGlobal_v2) ABSENT(cuModuleGetSurfRef)
ABSENT(cuModuleGetTexRef) ABSENT(cuModuleLoad) ABSENT(cuModuleLoadData) ABSENT(cuParamSetSize)
ABSENT(cuParamSetTexRef) ABSENT(cuParamSetf) ABSENT(cuParamSeti) ABSENT(cuParamSetv)
ABSENT(cuProfilerInitialize) ABSENT(cuProfilerStart) ABSENT(cuProfilerStop) ABSENT(cuStreamAttachMemAsync)
ABSENT(cuSurfRefGetArray) ABSENT(cuSurfRefSetArray) ABSENT(cuTexRefCreate) ABSENT(cuTexRefDestroy)
ABSENT(cuTexRefGetAddressMode) ABSENT(cuTexRefGetAddress_v2) ABSENT(cuTexRefGetArray)
ABSENT(cuTexRefGetFilterMode) ABSENT(cuTexRefGetFlags) ABSENT(cuTexRefGetFormat)
ABSENT(cuTexRefSetAddress2D_v3) ABSENT(cuTexRefSetAddressMode) ABSENT(cuTexRefSetAddress_v2)
ABSENT(cuTexRefSetArray) ABSENT(cuTexRefSetFilterMode) ABSENT(cuTexRefSetFlags)
ABSENT(cuTexRefSetFormat)
