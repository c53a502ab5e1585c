// A camera frame becomes a network's input in one pass: colour, resize, scale, layout.
//
// The numbers are those of `backends/preprocess_cpu.py`, bit for bit: OpenCV's 8-bit cvtColor,
// then its 8-bit INTER_LINEAR resize (or remap), then value * scale in 32-bit floats. Every constant
// and every order of rounding below is OpenCV's; the tests compare.
//
// A block of threads makes a tile of output. It first copies the piece of the frame that the tile
// needs into shared memory, in 16-byte words, each word once and only rows that carry weight; then
// it computes from there. Mapped memory, uncached on an Orin's GPU, is so read about once.
#include "preprocess_args.h"
#ifdef __CUDACC__
#include "device.cuh"
#else
#include "cuda_on_cpu.h"
#endif

typedef unsigned char u8;
typedef unsigned long long address;

#define DEVICE static __device__ __forceinline__

DEVICE int clip(int value, int low, int high) { return min(max(value, low), high); }

// ---- pixel formats: the bytes of a pixel, and OpenCV's BGR of it -------------------------------

// BT.601, 20 fractional bits: imgproc/color_yuv.simd.hpp.
DEVICE void yuv_to_bgr(int y, int u, int v, int bgr[3]) {
    const int luma = max(y - 16, 0) * 1220542 + (1 << 19);
    u -= 128;
    v -= 128;
    bgr[0] = clip((luma + 2116026 * u) >> 20, 0, 255);
    bgr[1] = clip((luma - 409993 * u - 852492 * v) >> 20, 0, 255);
    bgr[2] = clip((luma + 1673527 * v) >> 20, 0, 255);
}

// `pixels` and `chroma` point at byte 0 of a frame's row, x counts from there. `begin` and `end`
// bound the bytes that hold the columns first..last.
struct Bgr {
    enum { HAS_CHROMA = 0 };
    static __device__ int begin(int first) { return first * 3; }
    static __device__ int end(int last) { return last * 3 + 3; }
    static __device__ void at(const u8* pixels, const u8*, int x, int bgr[3]) {
        for (int c = 0; c < 3; ++c) bgr[c] = pixels[3 * x + c];
    }
};

struct Nv12 {
    enum { HAS_CHROMA = 1 };
    static __device__ int begin(int first) { return first; }
    static __device__ int end(int last) { return last + 1; }
    static __device__ void at(const u8* pixels, const u8* chroma, int x, int bgr[3]) {
        yuv_to_bgr(pixels[x], chroma[x & ~1], chroma[x | 1], bgr);
    }
};

struct Yuy2 {
    enum { HAS_CHROMA = 0 };
    static __device__ int begin(int first) { return (first & ~1) * 2; }
    static __device__ int end(int last) { return (last | 1) * 2 + 2; }
    static __device__ void at(const u8* pixels, const u8*, int x, int bgr[3]) {
        const u8* pair = pixels + (x & ~1) * 2;
        yuv_to_bgr(pixels[2 * x], pair[1], pair[3], bgr);
    }
};

// ---- where a bilinear sample lies: imgproc/resize.cpp -------------------------------------------

struct Tap {
    int index;
    int near;  // of 2048, belongs to `index`; `far` to the pixel after it
    int far;
};

// Doubles, then a float, then 11 bits, each rounded as OpenCV does and none of it fused.
DEVICE Tap tap_at(int position, double step) {
    const float centre = (float)__dadd_rn(__dmul_rn(position + 0.5, step), -0.5);
    const float whole = floorf(centre);
    const float fraction = centre - whole;
    return Tap{(int)whole, __float2int_rn((1.f - fraction) * 2048.f), __float2int_rn(fraction * 2048.f)};
}

// Columns lose their fraction at the border; rows (below) keep it and repeat the border's row.
DEVICE Tap column_at(int position, double step, int width) {
    Tap tap = tap_at(position, step);
    if (tap.index < 0) tap = Tap{0, 2048, 0};
    if (tap.index >= width - 1) tap = Tap{width - 1, 2048, 0};
    return tap;
}

// ---- writing ----------------------------------------------------------------------------------

DEVICE float value_at(unsigned packed, int i, float scale) {
    return (packed >> 8 * i & 0xff) * scale;
}

DEVICE unsigned half_at(unsigned packed, int i, float scale) {
    return half_bits(value_at(packed, i, scale));
}

// Four neighbouring columns, packed in each plane's word lowest byte first; `count` of them exist.
DEVICE void store(const PreprocessArgs& args, int x, int y, int count, const unsigned packed[3]) {
    const address plane = (address)args.out_width * args.out_height;
    const address first = blockIdx.z * 3 * plane + (address)y * args.out_width + x;
    const float scale = args.scale;
    float* const floats = (float*)args.out + first;
    unsigned short* const halves = (unsigned short*)args.out + first;
    // Every row then begins at a multiple of the width of the store.
    if (count == 4 && args.out_width % 4 == 0 && x % 4 == 0 && args.out % 16 == 0) {
        for (int c = 0; c < 3; ++c) {
            const unsigned p = packed[c];
            if (args.out_is_half) {
                *(uint2*)(halves + c * plane) =
                    make_uint2(half_at(p, 0, scale) | half_at(p, 1, scale) << 16,
                               half_at(p, 2, scale) | half_at(p, 3, scale) << 16);
            } else {
                *(float4*)(floats + c * plane) =
                    make_float4(value_at(p, 0, scale), value_at(p, 1, scale),
                                value_at(p, 2, scale), value_at(p, 3, scale));
            }
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        for (int c = 0; c < 3; ++c) {
            if (args.out_is_half) {
                halves[c * plane + i] = half_at(packed[c], i, scale);
            } else {
                floats[c * plane + i] = value_at(packed[c], i, scale);
            }
        }
    }
}

// ---- resized ----------------------------------------------------------------------------------

enum { MAX_SLOTS = 2 * PREPROCESS_MAX_TILE_HEIGHT };

// What the threads of a block share.
struct Tile {
    __align__(16) u8 staged[PREPROCESS_STAGED_BYTES];
    int lefts[PREPROCESS_MAX_TILE_WIDTH];  // columns of the frame, by entry_of
    int column_weights[PREPROCESS_MAX_TILE_WIDTH];  // far << 16 | near, by entry_of
    int row_weights[PREPROCESS_MAX_TILE_HEIGHT];
    int rows[MAX_SLOTS];  // of the frame: top and bottom for each row of output
    u8 slots[2][MAX_SLOTS];  // of pixels, of chroma
};

// One plane's part of a tile: slot s holds the bytes begin..end of the s-th row that the tile needs
// (two per row of output), starting at the 16-byte word that holds `begin`.
struct Piece {
    address base;
    int stride_bytes;
    int row_bytes;
    int begin;
    int end;
    int pitch;  // bytes from slot to slot

    __device__ address row(int y) const { return base + (address)y * (address)stride_bytes; }
};

DEVICE Piece piece_of(address base, int stride_bytes, int row_bytes, int begin, int end) {
    // The word that holds `begin` may start 15 bytes before it.
    return Piece{base, stride_bytes, row_bytes, begin, end, (end - begin + 15 + 15) & ~15};
}

// The slot that holds the row of slot `entry`: the first one with the same row, so that a row is
// read once however many rows of output want it.
DEVICE int slot_of(const int* rows, int entry, int shift) {
    const int row = rows[entry] >> shift;
    int slot = entry;
    // All reads at once: a search that stops would wait for each before the next.
#pragma unroll
    for (int k = MAX_SLOTS - 1; k >= 0; --k)
        if (k < entry && rows[k] >> shift == row) slot = k;
    return slot;
}

// Where a column's entry lies: the lanes of a warp, four columns apart, read 32 banks.
DEVICE int entry_of(int column) {
    return column % PREPROCESS_COLUMNS_PER_LANE * PREPROCESS_LANES +
           column / PREPROCESS_COLUMNS_PER_LANE;
}

// Starts the copies of this warp's slots.
DEVICE void stage(u8* staged, const Piece& piece, const int* rows, const u8* slots, int shift) {
#pragma unroll 1
    for (int slot = threadIdx.y; slot < 2 * (int)blockDim.y; slot += blockDim.y) {
        if (slots[slot] != slot) continue;
        const address row = piece.row(rows[slot] >> shift);
        const address row_end = row + piece.row_bytes;
        const address first = (row + piece.begin) & ~15ull;
        u8* to = staged + slot * piece.pitch;
#pragma unroll 1
        for (int at = threadIdx.x * 16; first + at < row + piece.end; at += PREPROCESS_LANES * 16) {
            const address word = first + at;
            if (word >= row && word + 16 <= row_end) {
                copy_16(to + at, (const void*)word);
            } else {
                // A row that begins or ends within this word: what lies beside it is not ours.
#pragma unroll 1
                for (int i = 0; i < 16; ++i)
                    if (word + i >= row && word + i < row_end) to[at + i] = *(const u8*)(word + i);
            }
        }
    }
}

// One row's part of a sample: two columns mixed, times 2048.
template <class Format>
DEVICE void across(const u8* pixels, const u8* chroma, int x, int near, int far, int mixed[3]) {
    int bgr[3];
    Format::at(pixels, chroma, x, bgr);
    for (int c = 0; c < 3; ++c) mixed[c] = bgr[c] * near;
    if (far) {
        Format::at(pixels, chroma, x + 1, bgr);
        for (int c = 0; c < 3; ++c) mixed[c] += bgr[c] * far;
    }
}

template <class Format>
DEVICE void resize(const PreprocessArgs& args, Tile& tile) {
    const int tile_x = blockIdx.x * args.tile_width;
    const int tile_y = blockIdx.y * blockDim.y;
    const int columns = min(args.tile_width, args.out_width - tile_x);
    const int thread = threadIdx.y * PREPROCESS_LANES + threadIdx.x;
    const int threads = PREPROCESS_LANES * blockDim.y;

    // Doubles are slow on an Orin, so the whole tile shares these.
#pragma unroll 1
    for (int i = thread; i < columns; i += threads) {
        const Tap tap = column_at(tile_x + i, args.step_x, args.region_width);
        tile.lefts[entry_of(i)] = args.region_x + tap.index;
        tile.column_weights[entry_of(i)] = tap.far << 16 | tap.near;
    }
#pragma unroll 1
    for (int i = thread; i < (int)blockDim.y; i += threads) {
        const Tap tap = tap_at(min(tile_y + i, args.out_height - 1), args.step_y);
        const int last = args.region_height - 1;
        const int top = clip(tap.index, 0, last);
        tile.row_weights[i] = tap.far << 16 | tap.near;
        tile.rows[2 * i] = args.region_y + top;
        // A row without weight is not read: an exact threefold downscale reads every third row.
        tile.rows[2 * i + 1] = args.region_y + (tap.far ? clip(tap.index + 1, 0, last) : top);
    }
    __syncthreads();

    const int first = tile.lefts[entry_of(0)];
    const int last =
        min(tile.lefts[entry_of(columns - 1)] + 1, args.region_x + args.region_width - 1);
    const Piece pixels =
        piece_of(args.pixels[blockIdx.z], args.pixels_stride_bytes,
                 Format::end(args.frame_width - 1), Format::begin(first), Format::end(last));
    const Piece chroma =
        piece_of(Format::HAS_CHROMA ? args.chroma[blockIdx.z] : 0, args.chroma_stride_bytes,
                 args.frame_width, first & ~1, (last | 1) + 1);
    u8* staged_chroma = tile.staged + 2 * blockDim.y * pixels.pitch;
    KERNEL_ASSERT(2 * blockDim.y * (pixels.pitch + (Format::HAS_CHROMA ? chroma.pitch : 0)) <=
                  PREPROCESS_STAGED_BYTES);
    const int shift = thread / MAX_SLOTS, entry = thread % MAX_SLOTS;
    if (shift <= Format::HAS_CHROMA && entry < 2 * (int)blockDim.y)
        tile.slots[shift][entry] = slot_of(tile.rows, entry, shift);
    __syncthreads();

    stage(tile.staged, pixels, tile.rows, tile.slots[0], 0);
    if (Format::HAS_CHROMA) stage(staged_chroma, chroma, tile.rows, tile.slots[1], 1);
    wait_for_copies();
    __syncthreads();

    const int y = tile_y + threadIdx.y;
    const int column = threadIdx.x * PREPROCESS_COLUMNS_PER_LANE;
    const int count = min(columns - column, PREPROCESS_COLUMNS_PER_LANE);
    if (y >= args.out_height || count <= 0) return;

    // Byte 0 of the frame's top and bottom row, had the whole row been staged.
    const u8* pixel_row[2];
    const u8* chroma_row[2];
    for (int k = 0; k < 2; ++k) {
        const int slot = 2 * threadIdx.y + k;
        const int row = tile.rows[slot];
        pixel_row[k] = tile.staged + tile.slots[0][slot] * pixels.pitch +
                       ((pixels.row(row) + pixels.begin) & 15) - pixels.begin;
        chroma_row[k] = Format::HAS_CHROMA
                            ? staged_chroma + tile.slots[1][slot] * chroma.pitch +
                                  ((chroma.row(row >> 1) + chroma.begin) & 15) - chroma.begin
                            : tile.staged;
    }
    const int above = tile.row_weights[threadIdx.y] & 0xffff;
    const int below = tile.row_weights[threadIdx.y] >> 16;
    unsigned packed[3] = {0, 0, 0};
#pragma unroll 2
    for (int i = 0; i < PREPROCESS_COLUMNS_PER_LANE; ++i) {
        // A column that does not exist repeats the last one; it is not stored.
        const int at = entry_of(column + min(i, count - 1));
        const int near = tile.column_weights[at] & 0xffff, far = tile.column_weights[at] >> 16;
        int top[3], bottom[3] = {0, 0, 0};
        across<Format>(pixel_row[0], chroma_row[0], tile.lefts[at], near, far, top);
        if (below) across<Format>(pixel_row[1], chroma_row[1], tile.lefts[at], near, far, bottom);
        for (int c = 0; c < 3; ++c) {
            const int value =
                ((above * (top[c] >> 4) >> 16) + (below * (bottom[c] >> 4) >> 16) + 2) >> 2;
            packed[c] |= (unsigned)value << 8 * i;
        }
    }
    store(args, tile_x + column, y, count, packed);
}

// ---- undistorted ------------------------------------------------------------------------------

// One of a sample's four pixels, times its weight of 1024; outside the frame lies black.
template <class Format>
DEVICE void add(const PreprocessArgs& args, int x, int y, int weight, int sum[3]) {
    if (!weight || x < 0 || y < 0 || x >= args.frame_width || y >= args.frame_height) return;
    const u8* pixels = (const u8*)args.pixels[blockIdx.z];
    const u8* chroma = (const u8*)args.chroma[blockIdx.z];
    int bgr[3];
    Format::at(pixels + (address)y * args.pixels_stride_bytes,
               Format::HAS_CHROMA ? chroma + (address)(y >> 1) * args.chroma_stride_bytes : pixels,
               x, bgr);
    for (int c = 0; c < 3; ++c) sum[c] += bgr[c] * weight;
}

// Where a tile's pixels lie in the frame only the map knows, so nothing is staged: four taps each,
// which neighbours share through the cache where the frame's memory has one.
template <class Format>
DEVICE void undistort(const PreprocessArgs& args) {
    const int x = blockIdx.x * args.tile_width + threadIdx.x * PREPROCESS_COLUMNS_PER_LANE;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    const int count = min(args.out_width - x, PREPROCESS_COLUMNS_PER_LANE);
    if (y >= args.out_height || count <= 0) return;
    unsigned packed[3] = {0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < PREPROCESS_COLUMNS_PER_LANE; ++i) {
        const address at = (address)y * args.out_width + x + min(i, count - 1);
        const short* position = (const short*)args.map_position + 2 * at;
        const int column = position[0], row = position[1];
        const int fraction = ((const unsigned short*)args.map_fraction)[at];
        const int right = fraction & 31, below = fraction >> 5;
        int sum[3] = {512, 512, 512};
        add<Format>(args, column, row, (32 - right) * (32 - below), sum);
        add<Format>(args, column + 1, row, right * (32 - below), sum);
        add<Format>(args, column, row + 1, (32 - right) * below, sum);
        add<Format>(args, column + 1, row + 1, right * below, sum);
        for (int c = 0; c < 3; ++c) packed[c] |= (unsigned)sum[c] >> 10 << 8 * i;
    }
    store(args, x, y, count, packed);
}

#define KERNEL extern "C" __global__ void \
    __launch_bounds__(PREPROCESS_LANES * PREPROCESS_MAX_TILE_HEIGHT)
#define ARGS const __grid_constant__ PreprocessArgs args

KERNEL bgr_to_nchw(ARGS) {
    __shared__ Tile tile;
    resize<Bgr>(args, tile);
}
KERNEL nv12_to_nchw(ARGS) {
    __shared__ Tile tile;
    resize<Nv12>(args, tile);
}
KERNEL yuy2_to_nchw(ARGS) {
    __shared__ Tile tile;
    resize<Yuy2>(args, tile);
}
KERNEL bgr_to_nchw_undistorted(ARGS) { undistort<Bgr>(args); }
KERNEL nv12_to_nchw_undistorted(ARGS) { undistort<Nv12>(args); }
KERNEL yuy2_to_nchw_undistorted(ARGS) { undistort<Yuy2>(args); }
