// Attention that keys get from all queries behind them, given the queries' log-sum-exps: products, exponentials and sums
// of a tile stay in registers, so that no logit is ever stored.
#include "simd.h"

#include <vector>

namespace {

constexpr int VECTORS = 2;                          // of keys, side by side
constexpr int ROWS = WIDTH == 4 ? 4 : WIDTH == 8 ? 6 : 12;  // queries at once: their sums fill the registers
constexpr int TILE = VECTORS * WIDTH;
constexpr int64_t KEYS = 8 * TILE;   // of one task, packed so that a channel of a tile is contiguous
constexpr int64_t CHUNK = 8 * ROWS;  // queries that are converted at a time, and added up in float32


// Adds what ROWS queries, the first of them at position `at`, give to the keys `first`, `first` + 1, … of a tile.
template <bool MASKED>
INLINE void add_block(const float *queries, const float *minus_lse, const float *weights, const float *tile, int64_t d,
                      float scale, int64_t at, int64_t first, vf *totals) {
    vf products[ROWS][VECTORS] = {};
    for (int64_t c = 0; c < d; c++) {
        vf keys[VECTORS];
        for (int v = 0; v < VECTORS; v++) keys[v] = load(tile + c * TILE + v * WIDTH);
        for (int row = 0; row < ROWS; row++) {
            const vf x = splat(queries[row * d + c]);
            for (int v = 0; v < VECTORS; v++) products[row][v] += x * keys[v];
        }
    }
    vi lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) {
            vf weight = exponential(products[row][v] * splat(scale) + splat(minus_lse[row]));
            if (MASKED) {
                const int32_t last = (int32_t)(at + row - first - v * WIDTH);  // lane of the query itself
                weight = choose(lane <= last, weight, vf{});
            }
            totals[v] += weight * splat(weights[row]);
        }
}

// Keys [first, first + KEYS) of one head; the r queries are the last of s tokens.
template <class T>
void sums_of(int64_t s, int64_t r, int64_t d, const T *q, const T *k, const float *lse, const float *row_weights,
             float scale, int64_t first, double *out) {
    const int64_t n = s - first < KEYS ? s - first : KEYS, start = s - r;
    std::vector<float> packed(KEYS * d), queries(CHUNK * d);
    std::vector<double> sums(KEYS);
    float minus_lse[CHUNK], weights[CHUNK];
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < d; c++) {
            float x;
            if constexpr (sizeof(T) == 4)
                x = k[(first + i) * d + c];
            else
                x = load_one(k + (first + i) * d + c);
            packed[(i / TILE * d + c) * TILE + i % TILE] = x;
        }
    const int64_t seen = first > start ? (first - start) / ROWS * ROWS : 0;  // rows before it see none of these keys
    for (int64_t row = seen; row < r; row += CHUNK) {
        const int64_t rows = r - row < CHUNK ? r - row : CHUNK;
        const int64_t values = rows * d, whole = values / WIDTH * WIDTH;
        for (int64_t i = 0; i < whole; i += WIDTH) store(queries.data() + i, load(q + row * d + i));
        if (whole < values) {
            const vf rest = load_some(q + row * d + whole, (int)(values - whole));
            for (int64_t i = whole; i < values; i++) queries[i] = rest[i - whole];
        }
        for (int64_t i = 0; i < CHUNK; i++) {  // rows behind the last weigh nothing
            minus_lse[i] = i < rows ? -lse[row + i] : 0.0f;
            weights[i] = i < rows ? row_weights[row + i] : 0.0f;
        }
        for (int64_t key = 0; key < n; key += TILE) {
            vf totals[VECTORS] = {};
            const float *tile = packed.data() + key * d;
            for (int64_t i = 0; i < rows; i += ROWS) {
                const int64_t at = start + row + i, low = first + key;
                if (at + ROWS <= low) continue;
                if (at >= low + TILE - 1)
                    add_block<false>(queries.data() + i * d, minus_lse + i, weights + i, tile, d, scale, at, low, totals);
                else
                    add_block<true>(queries.data() + i * d, minus_lse + i, weights + i, tile, d, scale, at, low, totals);
            }
            for (int v = 0; v < VECTORS; v++)
                for (int i = 0; i < WIDTH; i++) sums[key + v * WIDTH + i] += totals[v][i];
        }
    }
    for (int64_t i = 0; i < n; i++) out[first + i] = sums[i];
}

template <class T>
void sums(int64_t h, int64_t h_kv, int64_t s, int64_t r, int64_t d, const T *q, int64_t q_stride, const T *k,
          int64_t k_stride, const float *lse, const float *row_weights, float scale, double *out, int n_threads) {
    // The first keys, which most queries see, come first: threads end together.
    parallel_for(h * ((s + KEYS - 1) / KEYS), n_threads, [&](int64_t item) {
        const int64_t head = item % h, first = item / h * KEYS;
        sums_of(s, r, d, q + head * q_stride, k + head * h_kv / h * k_stride, lse + head * r, row_weights, scale, first,
                out + head * s);
    });
}

}  // namespace

extern "C" void column_sums(int64_t dtype, int64_t h, int64_t h_kv, int64_t s, int64_t r, int64_t d, const void *q,
                            int64_t q_stride, const void *k, int64_t k_stride, const float *lse,
                            const float *row_weights, float scale, double *out, int64_t n_threads) {
    if (dtype == FLOAT32)
        sums(h, h_kv, s, r, d, (const float *)q, q_stride, (const float *)k, k_stride, lse, row_weights, scale, out, n_threads);
    else if (dtype == BFLOAT16)
        sums(h, h_kv, s, r, d, (const bf16 *)q, q_stride, (const bf16 *)k, k_stride, lse, row_weights, scale, out, n_threads);
    else
        sums(h, h_kv, s, r, d, (const f16 *)q, q_stride, (const f16 *)k, k_stride, lse, row_weights, scale, out, n_threads);
}
