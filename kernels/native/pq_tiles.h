// Nearest centroids of a tile of points: products stay in registers, and of each only the best so far is kept.
//
// Not here: what becomes of the labels.
#pragma once

#include "simd.h"

#include <limits>
#include <memory>
#include <vector>

constexpr int VECTORS = WIDTH == 16 ? 3 : 2;  // of points, side by side
constexpr int ROWS = WIDTH == 16 ? 8 : 4;     // centroids at once: their products with a tile fill the registers
constexpr int TILE = VECTORS * WIDTH;

INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Floats that nobody has set; vectors of them do not straddle cache lines.
class Floats {
    std::unique_ptr<float[]> room;
    float *first;

  public:
    explicit Floats(int64_t n = 0) : room(new float[n + 16]) {
        first = (float *)(((uintptr_t)room.get() + 63) / 64 * 64);
    }
    float *data() const { return first; }
};

// Centroids in the order in which a tile meets them: ROWS of them channel by channel, then the next ROWS.
struct Centroids {
    int64_t c, d, padded;
    std::vector<float> rows, bias;

    Centroids(int64_t c, int64_t d)
        : c(c), d(d), padded(round_up(c, ROWS)), rows(padded * d),
          bias(padded, -std::numeric_limits<float>::infinity()) {}

    // The nearest of them has the largest product less half its own square; without it, the largest product.
    void set(const float *from, bool by_distance = true) {
        for (int64_t i = 0; i < c; i++) {
            float *to = rows.data() + i / ROWS * ROWS * d + i % ROWS;
            double square = 0;
            for (int64_t k = 0; k < d; k++) {
                to[k * ROWS] = from[i * d + k];
                square += (double)from[i * d + k] * from[i * d + k];
            }
            bias[i] = by_distance ? (float)(-0.5 * square) : 0.0f;
        }
    }
};

// Labels of the TILE points of a tile, where channel k of point i is tile[k * TILE + i]; of equal ones the first.
INLINE void assign_tile(const float *tile, const Centroids &centroids, int32_t *labels) {
    const int64_t d = centroids.d;
    vf best[VECTORS];
    vi which[VECTORS] = {};
    for (int v = 0; v < VECTORS; v++) best[v] = splat(-std::numeric_limits<float>::infinity());
    for (int64_t first = 0; first < centroids.padded; first += ROWS) {
        const float *rows = centroids.rows.data() + first * d, *bias = centroids.bias.data() + first;
        vf products[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) products[r][v] = splat(bias[r]);
        for (int64_t k = 0; k < d; k++) {
            vf x[VECTORS];
            for (int v = 0; v < VECTORS; v++) x[v] = load(tile + k * TILE + v * WIDTH);
            for (int r = 0; r < ROWS; r++) {
                const vf y = splat(rows[k * ROWS + r]);
                for (int v = 0; v < VECTORS; v++) products[r][v] += x[v] * y;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) {
                const vi better = products[r][v] > best[v], mine = vi{} + (int32_t)(first + r);
                which[v] = better ? mine : which[v];
                best[v] = better ? products[r][v] : best[v];
            }
    }
    memcpy(labels, which, sizeof which);
}
