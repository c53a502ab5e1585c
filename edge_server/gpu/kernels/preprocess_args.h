// What a preprocessing kernel is told: one struct, passed by value as its only parameter.
//
// This file is the ABI. `preprocess.py` beside it mirrors the struct field by field (a test compares
// size and offsets), and nothing else fills it. Little endian, natural alignment, no padding.
#pragma once

// Frames that one launch takes (blockIdx.z); their addresses travel in the struct itself, so the
// frames of a batch may lie anywhere: each camera keeps its own mapped buffer, nothing is gathered.
#define PREPROCESS_MAX_FRAMES 16

// Threads are laid out as (32, tile_height): one warp per row of output, four columns per lane.
#define PREPROCESS_LANES 32
#define PREPROCESS_COLUMNS_PER_LANE 4
#define PREPROCESS_MAX_TILE_WIDTH 128
#define PREPROCESS_MAX_TILE_HEIGHT 8

// Shared memory for the piece of a frame that one block of threads needs. Four blocks of 256
// threads fit into 100 KiB, six (all the threads it has) into the 164 KiB of an Orin's SM.
#define PREPROCESS_STAGED_BYTES 24576

struct PreprocessArgs {
    // (frames, 3, out_height, out_width), float or half, planes B, G, R.
    unsigned long long out;
    // Only for *_undistorted: for every output pixel the frame's column and row, int16 pairs,
    // and uint16 (row fraction << 5 | column fraction) in 1/32 px: cv2's CV_16SC2 and CV_16UC1.
    unsigned long long map_position;
    unsigned long long map_fraction;
    // The first plane; then NV12's interleaved chroma or I420's U, and I420's V (else 0).
    unsigned long long pixels[PREPROCESS_MAX_FRAMES];
    unsigned long long chroma[PREPROCESS_MAX_FRAMES];
    unsigned long long chroma_v[PREPROCESS_MAX_FRAMES];
    // Region pixels per output pixel, as cv2.resize computes it: 1 / (out / region).
    double step_x;
    double step_y;
    double chroma_step_x;
    double chroma_step_y;
    int pixels_stride_bytes;
    int chroma_stride_bytes;
    int frame_width;
    int frame_height;
    // What is resized; pixels outside it are never mixed in. Ignored by *_undistorted.
    int region_x;
    int region_y;
    int region_width;
    int region_height;
    // The same region in pixels of the chroma.
    int chroma_region_x;
    int chroma_region_y;
    int chroma_region_width;
    int chroma_region_height;
    int out_width;
    int out_height;
    // Output columns per block; the rows are blockDim.y. The caller chooses both so that what they
    // stage fits into PREPROCESS_STAGED_BYTES.
    int tile_width;
    int out_is_half;
    float scale;
    // pixels.YuvToBgr; without effect on BGR, whose black is 0.
    int black;
    int luma;
    int blue_u;
    int green_u;
    int green_v;
    int red_v;
    int reserved;
};
