// A camera frame becomes a network's input in one pass: colour, resize, scale, layout.
//
// The numbers are those of `backends/vision/preprocess_cpu.py`, bit for bit: OpenCV's 8-bit
// INTER_LINEAR resize (or remap) of BGR, or of luma and chroma apart; then Y, U and V become BGR in
// whole numbers; then value * scale in 32-bit floats. Every order of rounding below is OpenCV's;
// the tests compare.
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

// ---- pixel formats: where a row has which byte -------------------------------------------------

// pixels.YuvToBgr: 9 fractional bits.
DEVICE void yuv_to_bgr(const PreprocessArgs& args, int y, int u, int v, int bgr[3]) {
    const int luma = (y - args.black) * args.luma + 256;
    u -= 128;
    v -= 128;
    bgr[0] = clip((luma + args.blue_u * u) >> 9, 0, 255);
    bgr[1] = clip((luma + args.green_u * u + args.green_v * v) >> 9, 0, 255);
    bgr[2] = clip((luma + args.red_v * v) >> 9, 0, 255);
}

// PIXEL_BYTES from column to column of BGR or luma. Where the format HAS_CHROMA: CHROMA_PLANES
// behind the first plane (0: within it), U at byte FIRST_U of a chroma pixel of CHROMA_BYTES and V
// at FIRST_V; half the columns, and HALF_ROWS.
struct Bgr {
    static constexpr int PIXEL_BYTES = 3, HAS_CHROMA = 0, CHROMA_PLANES = 0;
    static constexpr int CHROMA_BYTES = 0, FIRST_U = 0, FIRST_V = 0, HALF_ROWS = 0;
};
struct Grey {
    static constexpr int PIXEL_BYTES = 1, HAS_CHROMA = 0, CHROMA_PLANES = 0;
    static constexpr int CHROMA_BYTES = 0, FIRST_U = 0, FIRST_V = 0, HALF_ROWS = 0;
};
struct Yuy2 {
    static constexpr int PIXEL_BYTES = 2, HAS_CHROMA = 1, CHROMA_PLANES = 0;
    static constexpr int CHROMA_BYTES = 4, FIRST_U = 1, FIRST_V = 3, HALF_ROWS = 0;
};
struct Nv12 {
    static constexpr int PIXEL_BYTES = 1, HAS_CHROMA = 1, CHROMA_PLANES = 1;
    static constexpr int CHROMA_BYTES = 2, FIRST_U = 0, FIRST_V = 1, HALF_ROWS = 1;
};
struct I420 {
    static constexpr int PIXEL_BYTES = 1, HAS_CHROMA = 1, CHROMA_PLANES = 2;
    static constexpr int CHROMA_BYTES = 1, FIRST_U = 0, FIRST_V = 0, HALF_ROWS = 1;
};
const int BGR_BYTES = 3;

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

// What of a plane is resized, and its pixels per output pixel.
struct Region {
    int x;
    int y;
    int width;
    int height;
    double step_x;
    double step_y;
};

// Where the samples of a tile lie in a plane.
struct Taps {
    int lefts[PREPROCESS_MAX_TILE_WIDTH];  // columns of the plane, by entry_of
    int column_weights[PREPROCESS_MAX_TILE_WIDTH];  // far << 16 | near, by entry_of
    int row_weights[PREPROCESS_MAX_TILE_HEIGHT];
    int rows[MAX_SLOTS];  // of the plane: top and bottom for each row of output
    u8 slots[MAX_SLOTS];
};

// What the threads of a block share: taps of BGR or luma, then of the chroma.
template <class Format>
struct Tile {
    __align__(16) u8 staged[PREPROCESS_STAGED_BYTES];
    Taps taps[1 + Format::HAS_CHROMA];
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
DEVICE int slot_of(const int* rows, int entry) {
    const int row = rows[entry];
    int slot = entry;
    // All reads at once: a search that stops would wait for each before the next.
#pragma unroll
    for (int k = MAX_SLOTS - 1; k >= 0; --k)
        if (k < entry && rows[k] == row) slot = k;
    return slot;
}

// Where a column's entry lies: the lanes of a warp, four columns apart, read 32 banks.
DEVICE int entry_of(int column) {
    return column % PREPROCESS_COLUMNS_PER_LANE * PREPROCESS_LANES +
           column / PREPROCESS_COLUMNS_PER_LANE;
}

// Finds the taps of a tile whose upper left corner is `tile_x`, `tile_y`. Doubles are slow on an
// Orin, so the whole tile shares them.
DEVICE void find_taps(Taps& taps, const Region& region, int tile_x, int tile_y, int columns,
                      int out_height) {
    const int thread = threadIdx.y * PREPROCESS_LANES + threadIdx.x;
    const int threads = PREPROCESS_LANES * blockDim.y;
#pragma unroll 1
    for (int i = thread; i < columns; i += threads) {
        const Tap tap = column_at(tile_x + i, region.step_x, region.width);
        taps.lefts[entry_of(i)] = region.x + tap.index;
        taps.column_weights[entry_of(i)] = tap.far << 16 | tap.near;
    }
#pragma unroll 1
    for (int i = thread; i < (int)blockDim.y; i += threads) {
        const Tap tap = tap_at(min(tile_y + i, out_height - 1), region.step_y);
        const int last = region.height - 1;
        const int top = clip(tap.index, 0, last);
        taps.row_weights[i] = tap.far << 16 | tap.near;
        taps.rows[2 * i] = region.y + top;
        // A row without weight is not read: an exact threefold downscale reads every third row.
        taps.rows[2 * i + 1] = region.y + (tap.far ? clip(tap.index + 1, 0, last) : top);
    }
}

DEVICE int last_column(const Taps& taps, const Region& region, int columns) {
    return min(taps.lefts[entry_of(columns - 1)] + 1, region.x + region.width - 1);
}

// Starts the copies of this warp's slots.
DEVICE void stage(u8* staged, const Piece& piece, const Taps& taps) {
#pragma unroll 1
    for (int slot = threadIdx.y; slot < 2 * (int)blockDim.y; slot += blockDim.y) {
        if (taps.slots[slot] != slot) continue;
        const address row = piece.row(taps.rows[slot]);
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

// Two rows as they are staged; byte 0 is that of the plane's row, had the whole row been staged.
struct Rows {
    const u8* top;
    const u8* bottom;
};

DEVICE Rows rows_of(const u8* staged, const Piece& piece, const Taps& taps) {
    const u8* of[2];
    for (int k = 0; k < 2; ++k) {
        const int slot = 2 * threadIdx.y + k;
        of[k] = staged + taps.slots[slot] * piece.pitch +
                ((piece.row(taps.rows[slot]) + piece.begin) & 15) - piece.begin;
    }
    return Rows{of[0], of[1]};
}

// The weights of a sample's two columns and two rows, each pair 2048 together.
struct Weights {
    int near;
    int far;
    int above;
    int below;
};

DEVICE Weights weights_at(const Taps& taps, int entry) {
    const int columns = taps.column_weights[entry], rows = taps.row_weights[threadIdx.y];
    return Weights{columns & 0xffff, columns >> 16, rows & 0xffff, rows >> 16};
}

// The sample at byte `left` and the byte `pixel_bytes` after it; a byte without weight is not read.
DEVICE int sample(const Rows& rows, int left, int pixel_bytes, const Weights& weights) {
    int top = rows.top[left] * weights.near, bottom = 0;
    if (weights.far) top += rows.top[left + pixel_bytes] * weights.far;
    if (weights.below) {
        bottom = rows.bottom[left] * weights.near;
        if (weights.far) bottom += rows.bottom[left + pixel_bytes] * weights.far;
    }
    return ((weights.above * (top >> 4) >> 16) + (weights.below * (bottom >> 4) >> 16) + 2) >> 2;
}

template <class Format>
DEVICE void resize(const PreprocessArgs& args, Tile<Format>& tile) {
    const int tile_x = blockIdx.x * args.tile_width;
    const int tile_y = blockIdx.y * blockDim.y;
    const int columns = min(args.tile_width, args.out_width - tile_x);
    const Region region{args.region_x,      args.region_y, args.region_width,
                        args.region_height, args.step_x,   args.step_y};
    const Region half{args.chroma_region_x,      args.chroma_region_y, args.chroma_region_width,
                      args.chroma_region_height, args.chroma_step_x,   args.chroma_step_y};
    const Taps& taps = tile.taps[0];
    const Taps& chroma_taps = tile.taps[Format::HAS_CHROMA];
    find_taps(tile.taps[0], region, tile_x, tile_y, columns, args.out_height);
    if (Format::HAS_CHROMA)
        find_taps(tile.taps[Format::HAS_CHROMA], half, tile_x, tile_y, columns, args.out_height);
    __syncthreads();

    int begin = taps.lefts[entry_of(0)] * Format::PIXEL_BYTES;
    int end = (last_column(taps, region, columns) + 1) * Format::PIXEL_BYTES;
    int chroma_begin = 0, chroma_end = 0;
    if (Format::HAS_CHROMA) {
        chroma_begin = chroma_taps.lefts[entry_of(0)] * Format::CHROMA_BYTES;
        chroma_end = (last_column(chroma_taps, half, columns) + 1) * Format::CHROMA_BYTES;
        if (Format::CHROMA_PLANES == 0) {
            begin = min(begin, chroma_begin);
            end = max(end, chroma_end);
        }
    }
    const Piece pixels = piece_of(args.pixels[blockIdx.z], args.pixels_stride_bytes,
                                  args.frame_width * Format::PIXEL_BYTES, begin, end);
    Piece chroma = pixels, second = pixels;
    u8* staged_chroma = tile.staged;
    u8* staged_second = tile.staged;
    int staged_bytes = 2 * blockDim.y * pixels.pitch;
    if (Format::CHROMA_PLANES > 0) {
        chroma = piece_of(args.chroma[blockIdx.z], args.chroma_stride_bytes,
                          args.frame_width / 2 * Format::CHROMA_BYTES, chroma_begin, chroma_end);
        staged_chroma = staged_second = tile.staged + staged_bytes;
        staged_bytes += 2 * blockDim.y * chroma.pitch;
        second = chroma;
    }
    if (Format::CHROMA_PLANES > 1) {
        second.base = args.chroma_v[blockIdx.z];
        staged_second = tile.staged + staged_bytes;
        staged_bytes += 2 * blockDim.y * chroma.pitch;
    }
    KERNEL_ASSERT(staged_bytes <= PREPROCESS_STAGED_BYTES);
    const int thread = threadIdx.y * PREPROCESS_LANES + threadIdx.x;
    const int plane = thread / MAX_SLOTS, entry = thread % MAX_SLOTS;
    if (plane <= (Format::CHROMA_PLANES > 0) && entry < 2 * (int)blockDim.y)
        tile.taps[plane].slots[entry] = slot_of(tile.taps[plane].rows, entry);
    __syncthreads();

    stage(tile.staged, pixels, taps);
    if (Format::CHROMA_PLANES > 0) stage(staged_chroma, chroma, chroma_taps);
    if (Format::CHROMA_PLANES > 1) stage(staged_second, second, chroma_taps);
    wait_for_copies();
    __syncthreads();

    const int y = tile_y + threadIdx.y;
    const int column = threadIdx.x * PREPROCESS_COLUMNS_PER_LANE;
    const int count = min(columns - column, PREPROCESS_COLUMNS_PER_LANE);
    if (y >= args.out_height || count <= 0) return;

    const Rows rows = rows_of(tile.staged, pixels, taps);
    Rows u_rows = rows, v_rows = rows;
    if (Format::CHROMA_PLANES > 0) u_rows = v_rows = rows_of(staged_chroma, chroma, chroma_taps);
    if (Format::CHROMA_PLANES > 1) v_rows = rows_of(staged_second, second, chroma_taps);
    unsigned packed[3] = {0, 0, 0};
#pragma unroll 2
    for (int i = 0; i < PREPROCESS_COLUMNS_PER_LANE; ++i) {
        // A column that does not exist repeats the last one; it is not stored.
        const int at = entry_of(column + min(i, count - 1));
        const Weights weights = weights_at(taps, at);
        const int left = taps.lefts[at] * Format::PIXEL_BYTES;
        int bgr[3];
        if (Format::PIXEL_BYTES == BGR_BYTES) {
            for (int c = 0; c < 3; ++c) bgr[c] = sample(rows, left + c, BGR_BYTES, weights);
        } else {
            const int luma = sample(rows, left, Format::PIXEL_BYTES, weights);
            int u = 128, v = 128;
            if (Format::HAS_CHROMA) {
                const Weights mixed = weights_at(chroma_taps, at);
                const int pair = chroma_taps.lefts[at] * Format::CHROMA_BYTES;
                u = sample(u_rows, pair + Format::FIRST_U, Format::CHROMA_BYTES, mixed);
                v = sample(v_rows, pair + Format::FIRST_V, Format::CHROMA_BYTES, mixed);
            }
            yuv_to_bgr(args, luma, u, v, bgr);
        }
        for (int c = 0; c < 3; ++c) packed[c] |= (unsigned)bgr[c] << 8 * i;
    }
    store(args, tile_x + column, y, count, packed);
}

// ---- undistorted ------------------------------------------------------------------------------

// A plane of values, and its value outside.
struct Plane {
    const u8* first;
    int stride_bytes;
    int width;
    int height;
    int pixel_bytes;
    int black;
};

// The value at `x`, `y` in 1/32 px, of four pixels with weights of 1024 together.
DEVICE int value_between(const Plane& plane, int x, int y) {
    const int column = x >> 5, row = y >> 5, right = x & 31, below = y & 31;
    int sum = 512;
    for (int k = 0; k < 4; ++k) {
        const int dx = k & 1, dy = k >> 1;
        const int weight = (dx ? right : 32 - right) * (dy ? below : 32 - below);
        const bool inside = column + dx >= 0 && row + dy >= 0 && column + dx < plane.width &&
                            row + dy < plane.height;
        int value = plane.black;
        if (weight && inside)
            value = plane.first[(address)(row + dy) * plane.stride_bytes +
                                (column + dx) * plane.pixel_bytes];
        sum += value * weight;
    }
    return sum >> 10;
}

// The same position in a plane of half the pixels, whose first centre lies at 0.5 px.
DEVICE int halved(int position) { return (position >> 1) - 8; }

// Where a tile's pixels lie in the frame only the map knows, so nothing is staged: four taps each,
// which neighbours share through the cache where the frame's memory has one.
template <class Format>
DEVICE void undistort(const PreprocessArgs& args) {
    const int x = blockIdx.x * args.tile_width + threadIdx.x * PREPROCESS_COLUMNS_PER_LANE;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    const int count = min(args.out_width - x, PREPROCESS_COLUMNS_PER_LANE);
    if (y >= args.out_height || count <= 0) return;
    Plane pixels{(const u8*)args.pixels[blockIdx.z], args.pixels_stride_bytes, args.frame_width,
                 args.frame_height, Format::PIXEL_BYTES, args.black};
    Plane chroma{pixels.first, pixels.stride_bytes, args.frame_width / 2,
                 args.frame_height >> Format::HALF_ROWS, Format::CHROMA_BYTES, 128};
    const u8* second = chroma.first;
    if (Format::CHROMA_PLANES > 0) {
        chroma.first = second = (const u8*)args.chroma[blockIdx.z];
        chroma.stride_bytes = args.chroma_stride_bytes;
    }
    if (Format::CHROMA_PLANES > 1) second = (const u8*)args.chroma_v[blockIdx.z];
    unsigned packed[3] = {0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < PREPROCESS_COLUMNS_PER_LANE; ++i) {
        const address at = (address)y * args.out_width + x + min(i, count - 1);
        const short* position = (const short*)args.map_position + 2 * at;
        const int fraction = ((const unsigned short*)args.map_fraction)[at];
        const int frame_x = position[0] * 32 + (fraction & 31);
        const int frame_y = position[1] * 32 + (fraction >> 5);
        int bgr[3];
        if (Format::PIXEL_BYTES == BGR_BYTES) {
            for (int c = 0; c < 3; ++c) {
                Plane channel = pixels;
                channel.first += c;
                bgr[c] = value_between(channel, frame_x, frame_y);
            }
        } else {
            const int luma = value_between(pixels, frame_x, frame_y);
            int u = 128, v = 128;
            if (Format::HAS_CHROMA) {
                const int half_x = halved(frame_x);
                const int half_y = Format::HALF_ROWS ? halved(frame_y) : frame_y;
                Plane each = chroma;
                each.first = chroma.first + Format::FIRST_U;
                u = value_between(each, half_x, half_y);
                each.first = second + Format::FIRST_V;
                v = value_between(each, half_x, half_y);
            }
            yuv_to_bgr(args, luma, u, v, bgr);
        }
        for (int c = 0; c < 3; ++c) packed[c] |= (unsigned)bgr[c] << 8 * i;
    }
    store(args, x, y, count, packed);
}

#define KERNEL extern "C" __global__ void \
    __launch_bounds__(PREPROCESS_LANES * PREPROCESS_MAX_TILE_HEIGHT)
#define ARGS const __grid_constant__ PreprocessArgs args

#define KERNELS(name, Format)              \
    KERNEL name##_to_nchw(ARGS) {          \
        __shared__ Tile<Format> tile;      \
        resize<Format>(args, tile);        \
    }                                      \
    KERNEL name##_to_nchw_undistorted(ARGS) { undistort<Format>(args); }

KERNELS(bgr, Bgr)
KERNELS(grey, Grey)
KERNELS(yuy2, Yuy2)
KERNELS(nv12, Nv12)
KERNELS(i420, I420)
