// Codes for new keys, and their way into bit planes, as kernels/pq_codes.py describes both.
#include "pq_tiles.h"

#include <algorithm>

namespace {

constexpr int64_t KEYS = 10 * TILE;  // of one task
constexpr int64_t FEW = 8;           // keys for which centroids are not brought into a tile's order

template <class T>
INLINE void load_row(const T *row, int64_t d, float *out) {
    for (int64_t k = 0; k < d; k += WIDTH) store(out + k, load_part(row + k, 0, d - k));
}

// One part of n keys of one head.
template <class T, class Code>
void nearest_few(const T *keys, int64_t stride, int64_t n, int64_t c, int64_t d, const float *centroids, Code *codes) {
    std::vector<float> row(round_up(d, WIDTH));
    for (int64_t i = 0; i < n; i++) {
        load_row(keys + i * stride, d, row.data());
        float least = std::numeric_limits<float>::infinity();
        codes[i] = 0;
        for (int64_t z = 0; z < c; z++) {
            vf total = {};
            for (int64_t k = 0; k < d; k += WIDTH) {
                const vf x = load(row.data() + k) - load_part(centroids + z * d, k, d);
                total += x * x;
            }
            const float far = sum(total);
            if (far < least) {
                least = far;
                codes[i] = (Code)z;
            }
        }
    }
}

// All distances are measured from the centroids' mean, which float32 needs.
struct Prepared {
    std::vector<float> mean;
    Centroids packed;

    Prepared(int64_t c, int64_t d) : mean(d), packed(c, d) {}

    void set(const float *centroids) {
        const int64_t c = packed.c, d = packed.d;
        std::vector<double> total(d);
        std::vector<float> centred(c * d);
        for (int64_t z = 0; z < c; z++)
            for (int64_t k = 0; k < d; k++) total[k] += centroids[z * d + k];
        for (int64_t k = 0; k < d; k++) mean[k] = (float)(total[k] / c);
        for (int64_t z = 0; z < c; z++)
            for (int64_t k = 0; k < d; k++) centred[z * d + k] = centroids[z * d + k] - mean[k];
        packed.set(centred.data());
    }
};

template <class T, class Code>
void nearest_many(const T *keys, int64_t stride, int64_t n, const Prepared &prepared, Code *codes) {
    const int64_t d = prepared.packed.d;
    Floats tile(TILE * d);
    std::vector<float> row(round_up(d, WIDTH));
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t rows = std::min<int64_t>(TILE, n - first);
        if (rows < TILE) memset(tile.data(), 0, TILE * d * sizeof(float));
        for (int64_t i = 0; i < rows; i++) {
            load_row(keys + (first + i) * stride, d, row.data());
            for (int64_t k = 0; k < d; k++) tile.data()[k * TILE + i] = row[k] - prepared.mean[k];
        }
        int32_t labels[TILE];
        assign_tile(tile.data(), prepared.packed, labels);
        for (int64_t i = 0; i < rows; i++) codes[first + i] = (Code)labels[i];
    }
}

template <class T, class Code>
void nearest(int64_t heads, int64_t m, int64_t n, int64_t c, int64_t d, const T *keys, int64_t head_stride,
             int64_t row_stride, const float *centroids, Code *codes, int n_threads) {
    const auto part = [&](int64_t i) { return keys + i / m * head_stride + i % m * d; };
    if (heads * m * n * c * d < 200000) n_threads = 1;
    if (n <= FEW) {
        parallel_for(heads * m, n_threads, [&](int64_t i) {
            nearest_few(part(i), row_stride, n, c, d, centroids + i * c * d, codes + i * n);
        });
        return;
    }
    std::vector<Prepared> prepared(heads * m, Prepared(c, d));
    parallel_for(heads * m, n_threads, [&](int64_t i) { prepared[i].set(centroids + i * c * d); });
    const int64_t pieces = (n + KEYS - 1) / KEYS;
    parallel_for(heads * m * pieces, n_threads, [&](int64_t item) {
        const int64_t i = item / pieces, first = item % pieces * KEYS;
        nearest_many(part(i) + first * row_stride, row_stride, std::min(KEYS, n - first), prepared[i],
                     codes + i * n + first);
    });
}

template <class T>
void nearest_of(int64_t heads, int64_t m, int64_t n, int64_t c, int64_t d, const T *keys, int64_t head_stride,
                int64_t row_stride, const float *centroids, void *codes, int n_threads) {
    if (c <= 256)
        nearest(heads, m, n, c, d, keys, head_stride, row_stride, centroids, (uint8_t *)codes, n_threads);
    else
        nearest(heads, m, n, c, d, keys, head_stride, row_stride, centroids, (int16_t *)codes, n_threads);
}

}  // namespace

// `keys` (heads, n, m * d) with strides in values, `centroids` (heads, m, c, d) -> `codes` (heads, m, n) of one byte, or
// two where c > 256.
extern "C" void pq_codes(int64_t dtype, int64_t heads, int64_t m, int64_t n, int64_t c, int64_t d, const void *keys,
                         int64_t head_stride, int64_t row_stride, const float *centroids, void *codes,
                         int64_t n_threads) {
    if (dtype == FLOAT32)
        nearest_of(heads, m, n, c, d, (const float *)keys, head_stride, row_stride, centroids, codes, n_threads);
    else if (dtype == BFLOAT16)
        nearest_of(heads, m, n, c, d, (const bf16 *)keys, head_stride, row_stride, centroids, codes, n_threads);
    else
        nearest_of(heads, m, n, c, d, (const f16 *)keys, head_stride, row_stride, centroids, codes, n_threads);
}

// Codes (rows, n_new) after the first n tokens of rows of `stride` bytes, whose bits after them are zeros.
extern "C" void pq_append(int64_t rows, int64_t b, int64_t n, int64_t n_new, const uint8_t *codes, uint8_t *data,
                          int64_t stride) {
    for (int64_t row = 0; row < rows; row++, codes += n_new, data += stride) {
        if (b == 8) {
            memcpy(data + n, codes, n_new);
            continue;
        }
        for (int64_t i = 0; i < n_new; i++) {
            const int64_t at = n + i;
            uint8_t *byte = data + at / 64 * 8 * b + at % 64 / 8;
            for (int64_t j = 0; j < b; j++) byte[8 * j] |= (uint8_t)((codes[i] >> j & 1) << at % 8);
        }
    }
}
