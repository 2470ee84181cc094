// Lloyd's rounds as kernels/kmeans.py has them: by angle, inner product or distance, means or their directions; an empty
// cluster keeps its centroid.
#include "pq_tiles.h"

#include <algorithm>
#include <cmath>

namespace {

enum { COSINE = 0, DOT = 1, L2 = 2 };  // as kernels/kmeans.py counts them
constexpr float EPS = 1e-8f;
constexpr int64_t CHUNK = 2048;  // points that are added up before their sums are added

float length(const float *x, int64_t d) {
    double square = 0;
    for (int64_t k = 0; k < d; k++) square += (double)x[k] * x[k];
    return (float)std::sqrt(square);
}

// What ranks centroids by the metric as products do: directions, or themselves.
void set_weights(Centroids &packed, const float *centroids, int64_t metric, std::vector<float> &room) {
    const int64_t c = packed.c, d = packed.d;
    if (metric != COSINE) {
        packed.set(centroids, metric == L2);
        return;
    }
    for (int64_t j = 0; j < c; j++) {
        const float norm = std::max(length(centroids + j * d, d), EPS);
        for (int64_t k = 0; k < d; k++) room[j * d + k] = centroids[j * d + k] / norm;
    }
    packed.set(room.data(), false);
}

void run(int64_t n, int64_t d, int64_t c, int64_t metric, const float *points, float *centroids, int64_t n_rounds,
         bool unit, int64_t *labels, int64_t *rounds) {
    Floats tiles(round_up(n, TILE) * d);
    std::vector<float> room(c * d), sums(c * d), part(c * d);
    std::vector<int64_t> sizes(c);
    Centroids packed(c, d);
    for (int64_t first = 0; first < round_up(n, TILE); first += TILE)
        for (int64_t i = 0; i < TILE; i++)
            for (int64_t k = 0; k < d; k++)
                tiles.data()[first * d + k * TILE + i] = first + i < n ? points[(first + i) * d + k] : 0.0f;
    const auto assign = [&]() {
        bool differs = false;
        set_weights(packed, centroids, metric, room);
        for (int64_t first = 0; first < n; first += TILE) {
            int32_t found[TILE];
            assign_tile(tiles.data() + first * d, packed, found);
            for (int64_t i = 0; i < TILE && first + i < n; i++) {
                differs |= labels[first + i] != found[i];
                labels[first + i] = found[i];
            }
        }
        return differs;
    };
    assign();
    for (*rounds = 0; *rounds < n_rounds;) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        std::fill(sizes.begin(), sizes.end(), 0);
        for (int64_t first = 0; first < n; first += CHUNK) {
            std::fill(part.begin(), part.end(), 0.0f);
            for (int64_t i = first; i < std::min(n, first + CHUNK); i++) {
                float *to = part.data() + labels[i] * d;
                const float *row = points + i * d;
                for (int64_t k = 0; k < d; k++) to[k] += row[k];
                sizes[labels[i]]++;
            }
            for (int64_t j = 0; j < c * d; j++) sums[j] += part[j];
        }
        for (int64_t j = 0; j < c; j++) {
            float by = (float)sizes[j];
            if (unit && sizes[j]) by = std::max(length(sums.data() + j * d, d), EPS);
            for (int64_t k = 0; k < d && sizes[j]; k++) centroids[j * d + k] = sums[j * d + k] / by;
        }
        ++*rounds;
        if (!assign()) break;
    }
}

}  // namespace

// `centroids` (p, c, d) hold the first ones, and the last ones on return; labels (p, n), rounds (p).
extern "C" void kmeans(int64_t p, int64_t n, int64_t d, int64_t c, int64_t metric, const float *points, float *centroids,
                       int64_t n_rounds, int64_t unit, int64_t *labels, int64_t *rounds, int64_t n_threads) {
    parallel_for(p, n_threads, [&](int64_t i) {
        run(n, d, c, metric, points + i * n * d, centroids + i * c * d, n_rounds, unit != 0, labels + i * n, rounds + i);
    });
}
