// Products of bfloat16 matrices by a processor's matrix unit (AMX), where it has one and Linux lets us use it: sums in
// float32, a sixth of the time of AVX-512's products of single numbers.
//
// Not here: any op.
#pragma once

#include "simd.h"

#if defined(__clang_major__)
#define KNOWS_TILES (__clang_major__ >= 12)
#elif defined(__GNUC__)
#define KNOWS_TILES (__GNUC__ >= 11)
#else
#define KNOWS_TILES 0
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__AVX512F__) && KNOWS_TILES
#define HAS_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILED __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw")))

constexpr int SIDE = 16;   // rows of a tile, and float32 sums of a row
constexpr int DEPTH = 32;  // bfloat16 numbers of a row

// Whether this process may use it; asked once.
inline bool may_tile() {
    static const bool may = [] {
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
        const bool is_there = (d >> 22 & 1) && (d >> 24 & 1);
        return is_there && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    }();
    return may;
}

// All eight tiles have 16 rows of 64 bytes. Sums lie in 0 to 3, their left operands in 4 and 5, the right ones in 6 and 7.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// In sums 0 to 3: rows i of `left` times rows j of what was packed as `right`, 32 of each, over d numbers (a multiple of
// 32). A row of `left` has d numbers; `right` has for each 32 numbers and each 16 rows a tile of pairs (`pack_right`).
TILED inline void sum_32(const uint16_t *left, const uint16_t *right, int64_t d) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < d; c += DEPTH) {
        const uint16_t *tiles = right + c / DEPTH * 2 * SIDE * DEPTH;
        _tile_loadd(4, left + c, 2 * d);
        _tile_loadd(5, left + SIDE * d + c, 2 * d);
        _tile_loadd(6, tiles, 2 * DEPTH);
        _tile_loadd(7, tiles + SIDE * DEPTH, 2 * DEPTH);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// out[2][2][16][16]: these sums, square by square.
TILED inline void multiply_32(const uint16_t *left, const uint16_t *right, int64_t d, float *out) {
    sum_32(left, right, d);
    _tile_stored(0, out, 4 * SIDE);
    _tile_stored(1, out + SIDE * SIDE, 4 * SIDE);
    _tile_stored(2, out + 2 * SIDE * SIDE, 4 * SIDE);
    _tile_stored(3, out + 3 * SIDE * SIDE, 4 * SIDE);
}

// 32 rows of d numbers, `n` of them there and the others 0, as the right operand of `multiply_32`.
inline void pack_right(const uint16_t *rows, int64_t n, int64_t d, uint16_t *to) {
    for (int64_t c = 0; c < d; c++)
        for (int64_t i = 0; i < 2 * SIDE; i++) {
            const int64_t tile = (c / DEPTH * 2 + i / SIDE) * SIDE * DEPTH;
            to[tile + c % DEPTH / 2 * DEPTH + i % SIDE * 2 + c % 2] = i < n ? rows[i * d + c] : 0;
        }
}
#endif
