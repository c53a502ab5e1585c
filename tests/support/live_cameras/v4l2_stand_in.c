/* A stand-in for a USB camera at the border of the kernel: preloaded, it answers the system calls
 * on /dev/video77 as the driver uvcvideo does, with grey images whose brightness counts up. It offers
 * YUY2 640 x 480 at 30 and 15 frames per second. EDGE_V4L2_FRAMES: after so many frames the device
 * is unplugged. EDGE_V4L2_BUSY: another program streams from it. EDGE_V4L2_NO_BANDWIDTH: the USB bus
 * has none left. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/videodev2.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WIDTH = 640, HEIGHT = 480, BYTES = WIDTH * HEIGHT * 2, BUFFERS = 32 };

/* The descriptors of the device; GStreamer's pool of buffers duplicates its own. */
static char of_device[4096];
static unsigned count, queued[BUFFERS], first, waiting, sequence, rate = 30;
static unsigned char *memory[BUFFERS];

static void format(struct v4l2_pix_format *pix) {
    pix->width = WIDTH, pix->height = HEIGHT, pix->pixelformat = V4L2_PIX_FMT_YUYV;
    pix->field = V4L2_FIELD_NONE, pix->bytesperline = WIDTH * 2, pix->sizeimage = BYTES;
    pix->colorspace = V4L2_COLORSPACE_SRGB, pix->ycbcr_enc = V4L2_YCBCR_ENC_601;
    pix->quantization = V4L2_QUANTIZATION_LIM_RANGE, pix->xfer_func = V4L2_XFER_FUNC_SRGB;
}

static void describe(struct v4l2_buffer *buffer, unsigned index) {
    buffer->index = index, buffer->length = BYTES, buffer->m.offset = index * BYTES;
    buffer->memory = V4L2_MEMORY_MMAP, buffer->field = V4L2_FIELD_NONE;
    buffer->flags = V4L2_BUF_FLAG_TIMESTAMP_MONOTONIC | V4L2_BUF_FLAG_MAPPED;
}

static int is_device(int descriptor) {
    return descriptor >= 0 && descriptor < (int)sizeof of_device && of_device[descriptor];
}

static int remember(int descriptor) {
    if (descriptor >= 0 && descriptor < (int)sizeof of_device) of_device[descriptor] = 1;
    return descriptor;
}

static int fail(int number) {
    errno = number;
    return -1;
}

static int dequeue(struct v4l2_buffer *buffer) {
    const char *limit = getenv("EDGE_V4L2_FRAMES");
    struct timespec now, pause = {0, 1000000000L / rate};
    nanosleep(&pause, NULL);
    if (limit && sequence >= (unsigned)atoi(limit)) return fail(ENODEV);
    if (!waiting) return fail(EAGAIN);
    unsigned index = queued[first];
    first = (first + 1) % BUFFERS, waiting--;
    describe(buffer, index);
    for (int at = 0; at < BYTES; at += 2) {
        memory[index][at] = 16 + sequence % 200, memory[index][at + 1] = 128;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    buffer->timestamp.tv_sec = now.tv_sec, buffer->timestamp.tv_usec = now.tv_nsec / 1000;
    buffer->bytesused = BYTES, buffer->sequence = sequence++;
    return 0;
}

static int answer(unsigned long request, void *argument) {
    switch (request) {
    case VIDIOC_QUERYCAP: {
        struct v4l2_capability *found = argument;
        memset(found, 0, sizeof *found);
        strcpy((char *)found->driver, "uvcvideo"), strcpy((char *)found->card, "Stand-in");
        found->device_caps = V4L2_CAP_VIDEO_CAPTURE | V4L2_CAP_STREAMING;
        found->capabilities = found->device_caps | V4L2_CAP_DEVICE_CAPS;
        return 0;
    }
    case VIDIOC_ENUM_FMT: {
        struct v4l2_fmtdesc *found = argument;
        if (found->index || found->type != V4L2_BUF_TYPE_VIDEO_CAPTURE) return fail(EINVAL);
        found->pixelformat = V4L2_PIX_FMT_YUYV, found->flags = 0;
        return 0;
    }
    case VIDIOC_ENUM_FRAMESIZES: {
        struct v4l2_frmsizeenum *found = argument;
        if (found->index) return fail(EINVAL);
        found->type = V4L2_FRMSIZE_TYPE_DISCRETE;
        found->discrete.width = WIDTH, found->discrete.height = HEIGHT;
        return 0;
    }
    case VIDIOC_ENUM_FRAMEINTERVALS: {
        struct v4l2_frmivalenum *found = argument;
        if (found->index > 1) return fail(EINVAL);
        found->type = V4L2_FRMIVAL_TYPE_DISCRETE;
        found->discrete.numerator = 1, found->discrete.denominator = found->index ? 15 : 30;
        return 0;
    }
    case VIDIOC_G_FMT:
    case VIDIOC_TRY_FMT:
    case VIDIOC_S_FMT: {
        struct v4l2_format *wanted = argument;
        if (wanted->type != V4L2_BUF_TYPE_VIDEO_CAPTURE) return fail(EINVAL);
        if (request == VIDIOC_S_FMT && getenv("EDGE_V4L2_BUSY")) return fail(EBUSY);
        format(&wanted->fmt.pix);
        return 0;
    }
    case VIDIOC_G_PARM:
    case VIDIOC_S_PARM: {
        struct v4l2_streamparm *wanted = argument;
        if (wanted->type != V4L2_BUF_TYPE_VIDEO_CAPTURE) return fail(EINVAL);
        struct v4l2_captureparm *capture = &wanted->parm.capture;
        if (request == VIDIOC_S_PARM && capture->timeperframe.numerator) {
            rate = capture->timeperframe.denominator / capture->timeperframe.numerator;
        }
        capture->capability = V4L2_CAP_TIMEPERFRAME;
        capture->timeperframe.numerator = 1, capture->timeperframe.denominator = rate;
        return 0;
    }
    case VIDIOC_REQBUFS: {
        struct v4l2_requestbuffers *wanted = argument;
        if (wanted->memory != V4L2_MEMORY_MMAP) return fail(EINVAL);
        if (wanted->count > BUFFERS) wanted->count = BUFFERS;
        count = wanted->count, first = waiting = 0;
        wanted->capabilities = V4L2_BUF_CAP_SUPPORTS_MMAP;
        return 0;
    }
    case VIDIOC_QUERYBUF: {
        struct v4l2_buffer *buffer = argument;
        if (buffer->index >= count) return fail(EINVAL);
        describe(buffer, buffer->index);
        return 0;
    }
    case VIDIOC_QBUF: {
        struct v4l2_buffer *buffer = argument;
        if (buffer->index >= count || waiting == BUFFERS) return fail(EINVAL);
        queued[(first + waiting++) % BUFFERS] = buffer->index;
        buffer->flags |= V4L2_BUF_FLAG_QUEUED;
        return 0;
    }
    case VIDIOC_DQBUF:
        return dequeue(argument);
    case VIDIOC_STREAMON:
        return getenv("EDGE_V4L2_NO_BANDWIDTH") ? fail(ENOSPC) : 0;
    case VIDIOC_STREAMOFF:
        first = waiting = 0;
        return 0;
    case VIDIOC_G_INPUT:
        *(int *)argument = 0;
        return 0;
    case VIDIOC_ENUMINPUT: {
        struct v4l2_input *found = argument;
        if (found->index) return fail(EINVAL);
        strcpy((char *)found->name, "Camera 1");
        found->type = V4L2_INPUT_TYPE_CAMERA, found->status = 0;
        return 0;
    }
    case VIDIOC_QUERYCTRL:
        return fail(EINVAL);
    default:
        return fail(ENOTTY);
    }
}

int ioctl(int descriptor, unsigned long request, ...) {
    static int (*real)(int, unsigned long, ...);
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (is_device(descriptor)) return answer(request & 0xffffffffUL, argument);
    if (!real) real = dlsym(RTLD_NEXT, "ioctl");
    return real(descriptor, request, argument);
}

static int opened(const char *name, const char *path, int flags, int mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if (strcmp(path, "/dev/video77")) return real(path, flags, mode);
    /* A character device, always ready: a frame is waited for where it is taken. */
    return remember(real("/dev/null", O_RDWR | (flags & O_CLOEXEC), 0));
}

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        va_list arguments;                                                                         \
        va_start(arguments, flags);                                                                \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, int) : 0;                     \
        va_end(arguments);                                                                         \
        return opened(#name, path, flags, mode);                                                   \
    }
OPEN(open)
OPEN(open64)


int dup(int descriptor) {
    int (*real)(int) = dlsym(RTLD_NEXT, "dup");
    return is_device(descriptor) ? remember(real(descriptor)) : real(descriptor);
}

int close(int descriptor) {
    int (*real)(int) = dlsym(RTLD_NEXT, "close");
    if (is_device(descriptor)) of_device[descriptor] = 0;
    return real(descriptor);
}

#define STAT(name, type)                                                                           \
    int name(const char *path, struct type *found) {                                               \
        int (*real)(const char *, struct type *) = dlsym(RTLD_NEXT, #name);                        \
        return real(strcmp(path, "/dev/video77") ? path : "/dev/null", found);                     \
    }
STAT(stat, stat)
STAT(stat64, stat64)

#define MMAP(name, offset_type)                                                                    \
    void *name(void *at, size_t length, int protection, int flags, int descriptor,                 \
               offset_type offset) {                                                               \
        void *(*real)(void *, size_t, int, int, int, offset_type) = dlsym(RTLD_NEXT, #name);       \
        if (!is_device(descriptor)) {                                                  \
            return real(at, length, protection, flags, descriptor, offset);                        \
        }                                                                                          \
        unsigned index = offset / BYTES;                                                           \
        memory[index] = real(NULL, length, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);        \
        return memory[index];                                                                      \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)
