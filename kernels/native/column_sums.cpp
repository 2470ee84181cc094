// Attention that keys get from queries, given the queries' log-sum-exps: products, exponentials and sums of a tile stay
// in registers, so that no logit is ever stored. Two forms: sums over the queries after a key, or the nearest of them,
// and the largest over all.
#include "pairs.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace {

constexpr int VECTORS = 2;                          // of keys, side by side
constexpr int ROWS = WIDTH == 4 ? 4 : WIDTH == 8 ? 6 : 12;  // queries at once: their sums fill the registers
constexpr int TILE = VECTORS * WIDTH;
constexpr int64_t KEYS = 8 * TILE;   // of one task, packed so that a channel of a tile is contiguous
constexpr int64_t CHUNK = 8 * ROWS;  // queries that are converted at a time, and added up in float32

// Products of ROWS queries with the keys of a tile.
INLINE void multiply(const float *queries, const float *tile, int64_t d, vf products[ROWS][VECTORS]) {
    for (int64_t c = 0; c < d; c++) {
        vf keys[VECTORS];
        for (int v = 0; v < VECTORS; v++) keys[v] = load(tile + c * TILE + v * WIDTH);
        for (int row = 0; row < ROWS; row++) {
            const vf x = splat(queries[row * d + c]);
            for (int v = 0; v < VECTORS; v++) products[row][v] += x * keys[v];
        }
    }
}

// What products of ROWS queries, the first of them at position `at`, give to the keys `first`, `first` + 1, … of a tile:
// with MASKED to those alone that are less than `window` before a query, or itself. With LARGEST, `totals` keep the
// largest logarithm instead.
template <bool MASKED, bool LARGEST>
INLINE void weigh(const vf products[ROWS][VECTORS], const float *minus_lse, const float *weights, float scale,
                  int64_t at, int64_t first, int64_t window, vf *totals) {
    vi lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) {
            const vf logarithm = products[row][v] * splat(scale) + splat(minus_lse[row]);
            if (LARGEST) {
                totals[v] = maximum(totals[v], logarithm);
                continue;
            }
            vf weight = exponential(logarithm);
            if (MASKED) {
                const int32_t last = (int32_t)(at + row - first - v * WIDTH);  // lane of the query itself
                weight = choose((lane <= last) & (lane > last - (int32_t)window), weight, vf{});
            }
            totals[v] += weight * splat(weights[row]);
        }
}

template <bool MASKED, bool LARGEST>
void add_block(const float *queries, const float *minus_lse, const float *weights, const float *tile, int64_t d,
               float scale, int64_t at, int64_t first, int64_t window, vf *totals) {
    vf products[ROWS][VECTORS] = {};
    multiply(queries, tile, d, products);
    weigh<MASKED, LARGEST>(products, minus_lse, weights, scale, at, first, window, totals);
}

#ifdef HAS_PAIRS
// The same; d is the number of pairs.
template <bool MASKED, bool LARGEST>
PAIRED void add_block(const pair *queries, const float *minus_lse, const float *weights, const pair *tile, int64_t d,
                      float scale, int64_t at, int64_t first, int64_t window, vf *totals) {
    vf products[ROWS][VECTORS] = {};
    for (int64_t c = 0; c < d; c++) {
        vi keys[VECTORS];
        for (int v = 0; v < VECTORS; v++) memcpy(&keys[v], tile + c * TILE + v * WIDTH, sizeof keys[v]);
        for (int row = 0; row < ROWS; row++) {
            const vi x = vi{} + (int32_t)queries[row * d + c];
            for (int v = 0; v < VECTORS; v++) products[row][v] = add_products(products[row][v], x, keys[v]);
        }
    }
    weigh<MASKED, LARGEST>(products, minus_lse, weights, scale, at, first, window, totals);
}
#endif

// So many numbers of memory as products want them.
template <class T>
INLINE void bring(const T *from, int64_t n, float *to) {
    const int64_t whole = n / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) store(to + i, load(from + i));
    if (whole == n) return;
    const vf rest = load_some(from + whole, (int)(n - whole));
    for (int64_t i = whole; i < n; i++) to[i] = rest[i - whole];
}

#ifdef HAS_PAIRS
INLINE void bring(const pair *from, int64_t n, pair *to) { memcpy(to, from, n * sizeof *to); }
#endif

// Keys [first, first + KEYS) of one head; the r queries are the last of s tokens, or stand after all s. T is what memory
// holds, N what products are of.
template <bool LARGEST, class N, class T>
void sums_of(int64_t s, int64_t r, int64_t d, const T *q, const T *k, const float *lse, const float *row_weights,
             float scale, int64_t window, int64_t first, double *out) {
    const int64_t n = s - first < KEYS ? s - first : KEYS, start = LARGEST ? s : s - r;
    const float none = LARGEST ? -INFINITY : 0.0f;
    std::vector<N> packed(KEYS * d), queries(CHUNK * d), one(d);
    std::vector<double> sums(KEYS, none);
    float minus_lse[CHUNK], weights[CHUNK];
    for (int64_t i = 0; i < n; i++) {
        bring(k + (first + i) * d, d, one.data());
        for (int64_t c = 0; c < d; c++) packed[(i / TILE * d + c) * TILE + i % TILE] = one[c];
    }
    const int64_t seen = first > start ? (first - start) / ROWS * ROWS : 0;  // rows before it see none of these keys
    const int64_t stop = std::min(r, first + n - 1 + window - start);        // nor do those from here on
    for (int64_t row = seen; row < stop; row += CHUNK) {
        const int64_t rows = r - row < CHUNK ? r - row : CHUNK;
        bring(q + row * d, rows * d, queries.data());
        // Rows behind the last weigh nothing: what is left in their place would have weights beyond all numbers.
        for (int64_t i = 0; i < CHUNK; i++) {
            minus_lse[i] = i < rows ? -lse[row + i] : -INFINITY;
            weights[i] = LARGEST || i >= rows ? 0.0f : row_weights[row + i];
        }
        for (int64_t key = 0; key < n; key += TILE) {
            vf totals[VECTORS];
            for (int v = 0; v < VECTORS; v++) totals[v] = splat(none);
            const N *tile = packed.data() + key * d;
            for (int64_t i = 0; i < rows; i += ROWS) {
                const int64_t at = start + row + i, low = first + key;
                if (at + ROWS <= low || at >= low + TILE - 1 + window) continue;
                const bool is_whole = LARGEST || (at >= low + TILE - 1 && at + ROWS <= low + window);
                const N *own = queries.data() + i * d;
                if (is_whole)
                    add_block<false, LARGEST>(own, minus_lse + i, weights + i, tile, d, scale, at, low, window, totals);
                else
                    add_block<true, LARGEST>(own, minus_lse + i, weights + i, tile, d, scale, at, low, window, totals);
            }
            for (int v = 0; v < VECTORS; v++)
                for (int i = 0; i < WIDTH; i++) {
                    double &sum = sums[key + v * WIDTH + i];
                    sum = LARGEST ? (sum < totals[v][i] ? totals[v][i] : sum) : sum + totals[v][i];
                }
        }
    }
    for (int64_t i = 0; i < n; i++) out[first + i] = sums[i];
}

#ifdef HAS_TILES
// As `sums_of`, by the matrix unit; d is a multiple of 32.
template <bool LARGEST>
TILED void sums_by_tiles(int64_t s, int64_t r, int64_t d, const uint16_t *q, const uint16_t *k, const float *lse,
                         const float *row_weights, float scale, int64_t window, int64_t first, double *out) {
    constexpr int64_t SOME = 2 * SIDE;
    const int64_t n = s - first < KEYS ? s - first : KEYS, n_some = (n + SOME - 1) / SOME, start = LARGEST ? s : s - r;
    const float none = LARGEST ? -INFINITY : 0.0f;
    std::vector<uint16_t> keys(n_some * SOME * d), last(SOME * d);
    for (int64_t i = 0; i < n_some; i++)
        pack_right(k + (first + i * SOME) * d, n - i * SOME < SOME ? n - i * SOME : SOME, d, keys.data() + i * SOME * d);
    std::vector<double> sums(n_some * SOME, none);
    alignas(64) float products[2][2][SIDE][SIDE];
    vi lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
    const int64_t seen = first > start ? (first - start) / SOME * SOME : 0;  // rows before it see none of these keys
    const int64_t stop = std::min(r, first + n - 1 + window - start);        // nor do those from here on
    for (int64_t row = seen; row < stop; row += SOME) {
        const int64_t rows = r - row < SOME ? r - row : SOME, at = start + row;
        const uint16_t *queries = q + row * d;
        if (rows < SOME) {  // what stands behind the last may not be ours to read
            std::copy(queries, queries + rows * d, last.begin());
            queries = last.data();
        }
        for (int64_t i = 0; i < n_some; i++) {
            const int64_t low = first + i * SOME;
            if (at + rows <= low) break;
            if (at >= low + SOME - 1 + window) continue;
            const bool is_whole = at >= low + SOME - 1 && at + rows <= low + window;
            multiply_32(queries, keys.data() + i * SOME * d, d, &products[0][0][0][0]);
            for (int side = 0; side < 2; side++) {
                vf total = splat(none);
                for (int64_t j = 0; j < rows; j++) {
                    const vf product = load(products[j / SIDE][side][j % SIDE]);
                    const vf logarithm = product * splat(scale) - splat(lse[row + j]);
                    if (LARGEST) {
                        total = maximum(total, logarithm);
                        continue;
                    }
                    vf weight = exponential(logarithm);
                    const int32_t own = (int32_t)(at + j - low - side * SIDE);  // lane of the query itself
                    if (!is_whole) weight = choose((lane <= own) & (lane > own - (int32_t)window), weight, vf{});
                    total += weight * splat(row_weights[row + j]);
                }
                double *sum = sums.data() + i * SOME + side * SIDE;
                for (int l = 0; l < SIDE; l++) sum[l] = LARGEST ? (sum[l] < total[l] ? total[l] : sum[l]) : sum[l] + total[l];
            }
        }
    }
    _tile_release();
    for (int64_t i = 0; i < n; i++) out[first + i] = sums[i];
}
#endif

template <bool LARGEST, class T>
void sums(int64_t h, int64_t h_kv, int64_t s, int64_t r, int64_t d, const T *q, int64_t q_stride, const T *k,
          int64_t k_stride, const float *lse, const float *row_weights, float scale, int64_t window, double *out,
          int n_threads) {
    // The first keys, which most queries see, come first: threads end together.
    parallel_for(h * ((s + KEYS - 1) / KEYS), n_threads, [&](int64_t item) {
        const int64_t head = item % h, first = item / h * KEYS;
        const T *queries = q + head * q_stride, *keys = k + head * h_kv / h * k_stride;
        const auto go = [&](auto of, int64_t d, auto *queries, auto *keys) {
            of(s, r, d, queries, keys, lse + head * r, row_weights, scale, window, first, out + head * s);
        };
#ifdef HAS_TILES
        if constexpr (std::is_same_v<T, bf16>)
            if (d % DEPTH == 0 && may_tile())
                return go(sums_by_tiles<LARGEST>, d, (const uint16_t *)queries, (const uint16_t *)keys);
#endif
#ifdef HAS_PAIRS
        if constexpr (std::is_same_v<T, bf16>)
            if (d % 2 == 0 && may_pair())
                return go(sums_of<LARGEST, pair, pair>, d / 2, (const pair *)queries, (const pair *)keys);
#endif
        go(sums_of<LARGEST, float, T>, d, queries, keys);
    });
}

}  // namespace

// row_weights: null for the logarithm of the largest weight that a key gets from any query, all of which see it. A key
// gets nothing from queries that are `window` or more behind it; s and r together are more than any is.
extern "C" void column_sums(int64_t dtype, int64_t h, int64_t h_kv, int64_t s, int64_t r, int64_t d, const void *q,
                            int64_t q_stride, const void *k, int64_t k_stride, const float *lse,
                            const float *row_weights, float scale, int64_t window, double *out,
                            int64_t n_threads) {
    const auto go = [&](auto *queries, auto *keys) {
        const auto f = row_weights ? sums<false, std::remove_cv_t<std::remove_pointer_t<decltype(keys)>>>
                                   : sums<true, std::remove_cv_t<std::remove_pointer_t<decltype(keys)>>>;
        f(h, h_kv, s, r, d, queries, q_stride, keys, k_stride, lse, row_weights, scale, window, out, n_threads);
    };
    if (dtype == FLOAT32)
        go((const float *)q, (const float *)k);
    else if (dtype == BFLOAT16)
        go((const bf16 *)q, (const bf16 *)k);
    else
        go((const f16 *)q, (const f16 *)k);
}
