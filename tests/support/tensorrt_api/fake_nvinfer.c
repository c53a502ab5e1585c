// SIMULATION of libnvinfer, behind NVIDIA's own Python bindings of TensorRT 8.6 (-DMAJOR=8) and 10: a
// runtime, an engine and an execution context, as far as edge_server calls them, so that a test can see what the
// bindings do where TensorRT refuses. It calculates nothing.
//
// The plan is a text. Its network adds two inputs, x and z, both (-1, 4) FP32, to an output y, in
// two profiles that take 1 to 8 rows. EDGE_FAKE_NVINFER, read at each call, names what is refused:
// `context`, `profile`, `address`, `allocator` or `enqueue`.
//
// The bindings call by position in a table: each class of NvInferRuntime.h is an object of two
// words, its own table and the object behind it, and the table of that one begins with two
// destructors. Positions are those of NvInferRuntimeBase.h and NvInferImpl.h; within TensorRT 10
// NVIDIA only adds to the end. A position that is not written below ends the process, by name.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MAJOR < 10
typedef int32_t Size;
#else
typedef int64_t Size;
#endif
typedef struct { int32_t count; Size sizes[8]; } Dims;
typedef struct Behind Behind;
typedef struct { void **table; Behind *behind; } Face;
struct Behind { void **table; Face *face; Face *engine; int32_t profile; Dims inputs[2]; };
typedef void Function(void);

enum { ERROR = 1, LINEAR = 0, FLOAT = 0, ON_DEVICE = 0, INPUT = 1, OUTPUT = 2, MOST_ROWS = 8 };
static const char *const NAMES[] = {"x", "z", "y"};
static const Dims NO_DIMS = {-1, {0}}, FREE = {2, {-1, 4}};
static void *logger;

static void say(const char *text) {
    // ILogger's first function.
    ((void (*)(void *, int32_t, const char *))(*(void ***)logger)[0])(logger, ERROR, text);
}
static int refused(const char *what) {
    const char *words = getenv("EDGE_FAKE_NVINFER");
    return words && !strcmp(words, what);
}
static int index_of(const char *name) {
    for (int i = 0; i < 3; i++) if (!strcmp(name, NAMES[i])) return i;
    return -1;
}

static void nothing(void *face) { (void)face; }
static void drop(void *face) { free(((Face *)face)->behind); free(face); }
static void *FACE_TABLE[] = {(void *)nothing, (void *)drop};
static void unknown(void) {
    fputs("fake_nvinfer.c: a function that it does not have was called\n", stderr);
    _Exit(70);
}
static Face *make(void **table) {
    Face *face = calloc(1, sizeof *face);
    face->table = FACE_TABLE;
    face->behind = calloc(1, sizeof *face->behind);
    face->behind->table = table;
    face->behind->face = face;
    return face;
}

// ---- IExecutionContext ----
static Face *context_engine(Behind *self) { return self->engine; }
static int32_t context_profile(Behind *self) { return self->profile; }
static _Bool context_all_dimensions(Behind *self) {
    return self->inputs[0].sizes[0] > 0 && self->inputs[1].sizes[0] > 0;
}
static _Bool context_set_profile(Behind *self, int32_t index, void *stream) {
    (void)stream;
    if (refused("profile") || index < 0 || index > 1) { say("the profile is refused"); return 0; }
    self->profile = index;
    self->inputs[0] = self->inputs[1] = FREE;
    return 1;
}
static _Bool context_set_shape(Behind *self, const char *name, const Dims *dims) {
    int which = index_of(name);
    if (which < 0 || which > 1 || dims->count != 2 || dims->sizes[0] > MOST_ROWS) {
        say("the shape is out of the profile's range");
        return 0;
    }
    self->inputs[which] = *dims;
    return 1;
}
static _Bool fit(Behind *self) {
    if (!memcmp(&self->inputs[0], &self->inputs[1], sizeof(Dims))) return 1;
    say("the shapes do not go together");
    return 0;
}
static Dims context_shape(Behind *self, const char *name) {
    int which = index_of(name);
    if (which < 0) return NO_DIMS;
    if (which < 2) return self->inputs[which];
    if (!context_all_dimensions(self)) return FREE;
    return fit(self) ? self->inputs[0] : NO_DIMS;
}
static int32_t context_infer_shapes(Behind *self, int32_t room, const char **names) {
    int32_t missing = 0;
    for (int i = 0; i < 2; i++)
        if (self->inputs[i].sizes[0] < 0 && missing < room) names[missing++] = NAMES[i];
    return missing ? missing : fit(self) ? 0 : -1;
}
static _Bool context_set_address(Behind *self, const char *name, void *address) {
    (void)self; (void)name; (void)address;
    return !refused("address");
}
static _Bool context_set_allocator(Behind *self, const char *name, void *allocator) {
    (void)self; (void)name; (void)allocator;
    return !refused("allocator");
}
static _Bool context_enqueue(Behind *self, void *stream) {
    (void)self; (void)stream;
    if (refused("enqueue")) say("the run is refused");
    return !refused("enqueue");
}
#define REST(first) [first ... 79] = (Function *)unknown
#define ALL [0 ... 79] = (Function *)unknown
#if MAJOR < 10
static Function *CONTEXT[] = {
    ALL,
    [8] = (Function *)context_engine,
    [14] = (Function *)context_profile,
    [19] = (Function *)context_all_dimensions,
    [25] = (Function *)context_set_profile,
    [29] = (Function *)context_set_shape,
    [30] = (Function *)context_shape,
    [32] = (Function *)context_set_address,
    [35] = (Function *)context_infer_shapes,
    [39] = (Function *)context_set_allocator,
    [44] = (Function *)context_enqueue,
};
#else
static Function *CONTEXT[] = {
    [0 ... 6] = unknown,
    [7] = (Function *)context_engine,
    [8 ... 10] = unknown,
    [11] = (Function *)context_profile,
    [12] = (Function *)context_all_dimensions,
    [13 ... 16] = unknown,
    [17] = (Function *)context_set_profile,
    [18 ... 20] = unknown,
    [21] = (Function *)context_set_shape,
    [22] = (Function *)context_shape,
    [23] = unknown,
    [24] = (Function *)context_set_address,
    [25 ... 27] = unknown,
    [28] = (Function *)context_infer_shapes,
    [29 ... 31] = unknown,
    [32] = (Function *)context_set_allocator,
    [33 ... 36] = unknown,
    [37] = (Function *)context_enqueue,
    REST(38),
};
#endif

// ---- ICudaEngine ----
static Face *engine_context(Behind *self, int32_t strategy) {
    (void)strategy;
    if (refused("context")) { say("out of memory"); return 0; }
    Face *face = make((void **)CONTEXT);
    face->behind->engine = self->face;
    face->behind->inputs[0] = face->behind->inputs[1] = FREE;
    return face;
}
static int32_t engine_profiles(Behind *self) { (void)self; return 2; }
static Dims engine_shape(Behind *self, const char *name) {
    (void)self;
    return index_of(name) < 0 ? NO_DIMS : FREE;
}
static int32_t engine_type(Behind *self, const char *name) { (void)self, (void)name; return FLOAT; }
static int32_t engine_place(Behind *self, const char *name) {
    (void)self; (void)name;
    return ON_DEVICE;
}
static int32_t engine_mode(Behind *self, const char *name) {
    (void)self;
    return index_of(name) < 2 ? INPUT : OUTPUT;
}
static int32_t engine_format(Behind *self, const char *name, int32_t profile) {
    (void)self; (void)name; (void)profile;
    return LINEAR;
}
static Dims engine_profile_shape(Behind *self, const char *name, int32_t profile, int32_t which) {
    (void)self; (void)profile;
    if (index_of(name) < 0) return NO_DIMS;
    return (Dims){2, {which == 0 ? 1 : MOST_ROWS, 4}};
}
static int32_t engine_tensors(Behind *self) { (void)self; return 3; }
static const char *engine_name(Behind *self, int32_t index) { (void)self; return NAMES[index]; }
#if MAJOR < 10
static Function *ENGINE[] = {
    ALL,
    [11] = (Function *)engine_context,
    [22] = (Function *)engine_profiles,
    [34] = (Function *)engine_shape,
    [35] = (Function *)engine_type,
    [36] = (Function *)engine_place,
    [38] = (Function *)engine_mode,
    [41] = (Function *)engine_format,
    [44] = (Function *)engine_profile_shape,
    [45] = (Function *)engine_tensors,
    [46] = (Function *)engine_name,
};
#else
static Function *ENGINE[] = {
    [0 ... 4] = unknown,
    [5] = (Function *)engine_context,
    [6 ... 9] = unknown,
    [10] = (Function *)engine_profiles,
    [11 ... 18] = unknown,
    [19] = (Function *)engine_shape,
    [20] = (Function *)engine_type,
    [21] = (Function *)engine_place,
    [22] = unknown,
    [23] = (Function *)engine_mode,
    [24 ... 25] = unknown,
    [26] = (Function *)engine_format,
    [27 ... 28] = unknown,
    [29] = (Function *)engine_profile_shape,
    [30] = (Function *)engine_tensors,
    [31] = (Function *)engine_name,
    REST(32),
};
#endif

// ---- IRuntime ----
static Face *runtime_engine(Behind *self, const void *plan, size_t nbytes) {
    (void)self;
    if (nbytes < 4 || memcmp(plan, "fake", 4)) { say("Magic tag does not match"); return 0; }
    return make((void **)ENGINE);
}
static int32_t runtime_cores(Behind *self) { (void)self; return 0; }
#if MAJOR < 10
static Function *RUNTIME[] = {
    ALL,
    [2] = (Function *)runtime_engine,
    [5] = (Function *)runtime_cores,
};
#else
static Function *RUNTIME[] = {
    [0 ... 2] = unknown,
    [3] = (Function *)runtime_engine,
    [4 ... 6] = unknown,
    [7] = (Function *)runtime_cores,
    REST(8),
};
#endif

void *createInferRuntime_INTERNAL(void *its_logger, int version) {
    (void)version;
    logger = its_logger;
    return make((void **)RUNTIME);
}
int32_t getInferLibVersion(void) { return 0; }
#define GIVES_NULL(name) void *name(void) { return 0; }
GIVES_NULL(createInferBuilder_INTERNAL)
GIVES_NULL(createInferRefitter_INTERNAL)
GIVES_NULL(createNvOnnxParser_INTERNAL)
GIVES_NULL(createNvOnnxParserRefitter_INTERNAL)
GIVES_NULL(getNvOnnxParserVersion)
GIVES_NULL(getBuilderPluginRegistry)
GIVES_NULL(getPluginRegistry)
#if MAJOR < 10
// What the bindings' parsers for UFF and Caffe want to find.
GIVES_NULL(_ZN11nvuffparser15createUffParserEv)
GIVES_NULL(_ZN11nvuffparser8FieldMapC1EPKcPKvNS_9FieldTypeEi)
GIVES_NULL(_ZN14nvcaffeparser117createCaffeParserEv)
GIVES_NULL(_ZN14nvcaffeparser123shutdownProtobufLibraryEv)
#endif
_Bool initLibNvInferPlugins(void *its_logger, const char *name) { (void)its_logger; (void)name; return 1; }
