// Lloyd's k-means of many problems of one size, as kernels/pq_fit.py describes it.
#include "pq_tiles.h"

#include <algorithm>
#include <numeric>

namespace {

constexpr int64_t MEAN_ROWS = 256;       // added up in float32 before they are added in float64
constexpr int64_t LEAST_CHUNK = 2048;    // points whose sums are made at a time
constexpr int64_t MOST_CHUNKS = 32;      // of a problem

struct Shape {
    int64_t n, d, c, chunk, chunks;

    Shape(int64_t n, int64_t d, int64_t c)
        : n(n), d(d), c(c), chunk(round_up(std::max(LEAST_CHUNK, (n + MOST_CHUNKS - 1) / MOST_CHUNKS), TILE)),
          chunks((n + chunk - 1) / chunk) {}
};

// One problem on its way. Points and centroids are less the points' mean.
struct Problem {
    const Shape &shape;
    const float *points;
    Floats tiles, sums;  // sums: per chunk, cluster and channel
    std::vector<float> mean, centroids, moved;
    std::vector<int32_t> labels, counts;
    std::vector<char> changed;  // per chunk
    Centroids packed;
    double stays = 0;
    int64_t n_iter = 0;
    bool ended = false, repeated = false;

    Problem(const Shape &shape, const float *points)
        : shape(shape), points(points), tiles(round_up(shape.n, TILE) * shape.d),
          sums(shape.chunks * shape.c * shape.d), mean(shape.d), centroids(shape.c * shape.d),
          moved(shape.c * shape.d), labels(round_up(shape.n, TILE), -1), counts(shape.chunks * shape.c),
          changed(shape.chunks), packed(shape.c, shape.d) {}

    // Take the mean off, lay the points out in tiles, and find out how far centroids may move and still rest.
    void begin(const float *start, double tol) {
        const int64_t n = shape.n, d = shape.d;
        std::vector<double> total(d);
        std::vector<float> part(d);
        for (int64_t first = 0; first < n; first += MEAN_ROWS) {
            std::fill(part.begin(), part.end(), 0.0f);
            float *sum = part.data();
            for (int64_t i = first; i < std::min(n, first + MEAN_ROWS); i++) {
                const float *row = points + i * d;
                for (int64_t k = 0; k < d; k++) sum[k] += row[k];
            }
            for (int64_t k = 0; k < d; k++) total[k] += part[k];
        }
        for (int64_t k = 0; k < d; k++) mean[k] = (float)(total[k] / n);
        double squares = 0;
        for (int64_t first = 0; first < round_up(n, TILE); first += TILE) {
            float *tile = tiles.data() + first * d;
            const int64_t rows = std::min<int64_t>(TILE, n - first);
            if (rows < TILE) memset(tile, 0, TILE * d * sizeof(float));
            for (int64_t i = 0; i < rows; i++) {
                const float *row = points + (first + i) * d;
                for (int64_t k = 0; k < d; k++) tile[k * TILE + i] = row[k] - mean[k];
            }
            vf square = {};
            for (int64_t i = 0; i < TILE * d; i += WIDTH) {
                const vf x = load(tile + i);
                square += x * x;
            }
            squares += sum(square);
        }
        stays = tol * squares / ((double)n * d);
        for (int64_t i = 0; i < shape.c; i++)
            for (int64_t k = 0; k < d; k++) centroids[i * d + k] = start[i * d + k] - mean[k];
        packed.set(centroids.data());
    }

    void assign(int64_t at, bool adds) {
        const int64_t d = shape.d, first = at * shape.chunk, stop = std::min(shape.n, first + shape.chunk);
        float *sum = sums.data() + at * shape.c * d;
        int32_t *count = counts.data() + at * shape.c;
        if (adds) {
            memset(sum, 0, shape.c * d * sizeof(float));
            memset(count, 0, shape.c * sizeof(int32_t));
        }
        bool differs = false;
        const float *centre = mean.data();
        for (int64_t i = first; i < stop; i += TILE) {
            int32_t found[TILE];
            assign_tile(tiles.data() + i * d, packed, found);
            const int64_t rows = std::min<int64_t>(TILE, stop - i);
            differs |= memcmp(found, labels.data() + i, rows * sizeof(int32_t)) != 0;
            memcpy(labels.data() + i, found, rows * sizeof(int32_t));
            for (int64_t j = 0; adds && j < rows; j++) {
                const float *row = points + (i + j) * d;
                float *to = sum + found[j] * d;
                count[found[j]]++;
                for (int64_t k = 0; k < d; k++) to[k] += row[k] - centre[k];
            }
        }
        changed[at] = differs;
    }

    // Squared distance of a point to its centroid.
    double distance(int64_t i) const {
        const float *row = points + i * shape.d, *own = centroids.data() + labels[i] * shape.d;
        vf total = {};
        const int64_t whole = shape.d / WIDTH * WIDTH;
        for (int64_t k = 0; k < whole; k += WIDTH) {
            const vf x = load(row + k) - load(mean.data() + k) - load(own + k);
            total += x * x;
        }
        float out = sum(total);
        for (int64_t k = whole; k < shape.d; k++) {
            const float x = row[k] - mean[k] - own[k];
            out += x * x;
        }
        return out;
    }

    void repair(float *sum, int32_t *count, int64_t n_empty) const {
        const int64_t n = shape.n, d = shape.d;
        std::vector<double> far(n);
        for (int64_t i = 0; i < n; i++) far[i] = distance(i);
        std::vector<int64_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        n_empty = std::min(n_empty, n);
        std::partial_sort(order.begin(), order.begin() + n_empty, order.end(),
                          [&](int64_t a, int64_t b) { return far[a] != far[b] ? far[a] > far[b] : a < b; });
        if (n_empty == 0 || far[order[0]] == 0) return;
        std::vector<int64_t> empty;
        for (int64_t j = 0; j < shape.c; j++)
            if (count[j] == 0) empty.push_back(j);
        for (int64_t e = 0; e < n_empty; e++) {
            const int64_t i = order[e], from = labels[i], to = empty[e];
            for (int64_t k = 0; k < d; k++) {
                const float x = points[i * d + k] - mean[k];
                sum[from * d + k] -= x;
                sum[to * d + k] = x;
            }
            count[from]--;
            count[to] = 1;
        }
    }

    // Once all chunks are assigned: the next centroids, and whether these are the last.
    void update(bool farthest) {
        const int64_t d = shape.d, c = shape.c;
        float *sum = sums.data();
        int32_t *count = counts.data();
        for (int64_t at = 1; at < shape.chunks; at++) {
            for (int64_t j = 0; j < c * d; j++) sum[j] += sum[at * c * d + j];
            for (int64_t j = 0; j < c; j++) count[j] += count[at * c + j];
        }
        const int64_t n_empty = std::count(count, count + c, 0);
        if (farthest && n_empty) repair(sum, count, n_empty);
        double shift = 0;
        for (int64_t j = 0; j < c; j++)
            for (int64_t k = 0; count[j] > 0 && k < d; k++) {
                const float next = sum[j * d + k] / count[j], step = next - centroids[j * d + k];
                centroids[j * d + k] = next;
                shift += (double)step * step;
            }
        packed.set(centroids.data());
        n_iter++;
        repeated = n_iter > 1 && std::none_of(changed.begin(), changed.end(), [](char x) { return x; });
        ended = repeated || shift <= stays;
    }

    template <class Code>
    void finish(float *out, Code *codes, double *inertia) const {
        for (int64_t j = 0; j < shape.c; j++)
            for (int64_t k = 0; k < shape.d; k++) out[j * shape.d + k] = centroids[j * shape.d + k] + mean[k];
        double total = 0;
        for (int64_t i = 0; i < shape.n; i++) {
            codes[i] = (Code)labels[i];
            total += distance(i);
        }
        *inertia = total;
    }
};

}  // namespace

// `start` (p, c, d) -> `centroids` (p, c, d), `codes` (p, n) of one byte, or two where c > 256, `n_iter` and `inertia` (p).
extern "C" void pq_fit(int64_t p, int64_t n, int64_t d, int64_t c, const float *points, const float *start,
                       int64_t n_rounds, double tol, int64_t farthest, float *centroids, void *codes, int64_t *n_iter,
                       double *inertia, int64_t n_threads) {
    const Shape shape(n, d, c);
    const auto finish = [&](const Problem &problem, int64_t i) {
        n_iter[i] = problem.n_iter;
        if (c <= 256)
            problem.finish(centroids + i * c * d, (uint8_t *)codes + i * n, inertia + i);
        else
            problem.finish(centroids + i * c * d, (int16_t *)codes + i * n, inertia + i);
    };
    if (n_threads <= 1 || p % n_threads == 0 || p >= 4 * n_threads) {  // a problem stays in its thread's cache
        parallel_for(p, n_threads, [&](int64_t i) {
            Problem problem(shape, points + i * n * d);
            problem.begin(start + i * c * d, tol);
            while (problem.n_iter < n_rounds && !problem.ended) {
                for (int64_t at = 0; at < shape.chunks; at++) problem.assign(at, true);
                problem.update(farthest);
            }
            if (!problem.repeated)
                for (int64_t at = 0; at < shape.chunks; at++) problem.assign(at, false);
            finish(problem, i);
        });
        return;
    }
    std::vector<std::unique_ptr<Problem>> problems(p);
    parallel_for(p, n_threads, [&](int64_t i) {
        problems[i].reset(new Problem(shape, points + i * n * d));
        problems[i]->begin(start + i * c * d, tol);
    });
    for (int64_t round = 0; round < n_rounds; round++) {
        parallel_for(p * shape.chunks, n_threads, [&](int64_t item) {
            Problem &problem = *problems[item / shape.chunks];
            if (!problem.ended) problem.assign(item % shape.chunks, true);
        });
        parallel_for(p, n_threads, [&](int64_t i) {
            if (!problems[i]->ended) problems[i]->update(farthest);
        });
    }
    parallel_for(p * shape.chunks, n_threads, [&](int64_t item) {
        Problem &problem = *problems[item / shape.chunks];
        if (!problem.repeated) problem.assign(item % shape.chunks, false);
    });
    parallel_for(p, n_threads, [&](int64_t i) { finish(*problems[i], i); });
}
