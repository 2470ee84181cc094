// Hash tables of keys, and the keys that share a bucket with a query in at least two of them, with their log-weights.
#include <cmath>
#include <memory>

#include "simd.h"

// Inner products with the planes of all tables, (n, tables * bits) -> codes, table after table at `stride`: bit i of a
// code is whether the product with its plane i is above zero.
extern "C" void pack_codes(int64_t n, int64_t tables, int64_t bits, const float *x, int16_t *codes, int64_t stride) {
    constexpr int64_t BLOCK_ROWS = 32;  // a cache line of codes
    for (int64_t first = 0; first < n; first += BLOCK_ROWS) {
        const int64_t last = first + BLOCK_ROWS < n ? first + BLOCK_ROWS : n;
        for (int64_t table = 0; table < tables; table++)
            for (int64_t row = first; row < last; row++) {
                const float *mine = x + (row * tables + table) * bits;
                int code = 0;
                for (int64_t i = 0; i < bits; i++) code |= (mine[i] > 0) << i;
                codes[table * stride + row] = (int16_t)code;
            }
    }
}

// codes (heads, tables, n) -> tokens (heads, tables, n) by code and then by number, starts (heads, tables, buckets + 1).
extern "C" void build_tables(int64_t heads, int64_t n, int64_t tables, int64_t buckets, const int16_t *codes,
                             int32_t *tokens, int32_t *starts, int64_t n_threads) {
    parallel_for(heads * tables, n_threads, [&](int64_t item) {
        const int16_t *mine = codes + item * n;
        int32_t *to = tokens + item * n, *start = starts + item * (buckets + 1);
        memset(start, 0, (buckets + 1) * sizeof(int32_t));
        for (int64_t i = 0; i < n; i++) start[mine[i] + 1]++;
        for (int64_t b = 0; b < buckets; b++) start[b + 1] += start[b];
        const std::unique_ptr<int32_t[]> next(new int32_t[buckets]);
        memcpy(next.get(), start, buckets * sizeof(int32_t));
        for (int64_t i = 0; i < n; i++) to[next[mine[i]]++] = (int32_t)i;
    });
}

// Of every query head with codes (h, tables): the numbers found, ascending, in (h, n), how many, and entries read.
extern "C" void find_twice(int64_t h, int64_t h_kv, int64_t n, int64_t tables, int64_t buckets, const int16_t *codes,
                           const int32_t *tokens, const int32_t *starts, int32_t *found, int64_t *counts,
                           int64_t *entries, int64_t n_threads) {
    parallel_for(h, n_threads, [&](int64_t head) {
        const int64_t owner = head * h_kv / h;
        const std::unique_ptr<uint8_t[]> met(new uint8_t[n]());
        int64_t read = 0, count = 0;
        for (int64_t table = 0; table < tables; table++) {
            const int64_t at = owner * tables + table;
            const int32_t *start = starts + at * (buckets + 1) + codes[head * tables + table], *row = tokens + at * n;
            for (int32_t i = start[0]; i < start[1]; i++) met[row[i]] += met[row[i]] < 2;
            read += start[1] - start[0];
        }
        int32_t *to = found + head * n;
        for (int64_t i = 0; i < n; i++)
            if (met[i] == 2) to[count++] = (int32_t)i;
        counts[head] = count;
        entries[head] = read;
    });
}

namespace {

// The chance that a key at this cosine shares a bucket in at least two tables.
double chance(double cosine, int64_t bits, int64_t tables) {
    cosine = cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;
    const double one = std::pow(1 - std::acos(cosine) / M_PI, (double)bits);  // of one table
    const double none = one < 1 ? std::exp((tables - 1) * std::log1p(-one)) : 0;
    return 1 - none * (1 + (tables - 1) * one);
}

template <class T>
void weigh(int64_t h, int64_t h_kv, int64_t d, int64_t n, int64_t bits, int64_t tables, double least, int64_t first,
           const float *q, const T *keys, int64_t stride, const float *means, const float *norms, const int32_t *found,
           const int64_t *counts, int64_t room, int64_t *idx, float *weights, int64_t n_threads) {
    parallel_for(h, n_threads, [&](int64_t head) {
        const int64_t owner = head * h_kv / h, padded = (d + WIDTH - 1) / WIDTH * WIDTH;
        const float *query = q + head * d, *mean = means + owner * d;
        const std::unique_ptr<float[]> copy(new float[padded]);
        double shift = 0, length = 0;
        for (int64_t i = 0; i < d; i++) shift += (double)query[i] * mean[i], length += (double)query[i] * query[i];
        length = std::sqrt(length);
        for (int64_t at = 0; at < padded; at += WIDTH) store(copy.get() + at, load_part(query, at, d));
        for (int64_t i = 0; i < room; i++) {
            const int64_t to = head * room + i;
            idx[to] = -1, weights[to] = 0;
            if (i >= counts[head]) continue;
            const int64_t token = found[head * n + i];
            const T *key = keys + owner * stride + token * d;
            vf total = {};
            for (int64_t at = 0; at < padded; at += WIDTH) total += load(copy.get() + at) * load_part(key, at, d);
            const double lengths = length * norms[owner * n + token];
            const double cosine = lengths > 0 ? (sum(total) - shift) / lengths : 0;
            idx[to] = first + token;
            weights[to] = (float)-std::log(chance(cosine, bits, tables) + least);
        }
    });
}

}  // namespace

// Positions (h, room) of what was found, -1 after the last, and the logarithms of their weights; q (h, d) float32, keys
// from the first token of the tables on, means (h_kv, d) and norms (h_kv, n) of centred keys.
extern "C" void weigh_found(int64_t dtype, int64_t h, int64_t h_kv, int64_t d, int64_t n, int64_t bits, int64_t tables,
                            double least, int64_t first, const float *q, const void *keys, int64_t stride,
                            const float *means, const float *norms, const int32_t *found, const int64_t *counts,
                            int64_t room, int64_t *idx, float *weights, int64_t n_threads) {
    const auto run = [&](auto *typed) {
        weigh(h, h_kv, d, n, bits, tables, least, first, q, typed, stride, means, norms, found, counts, room, idx,
              weights, n_threads);
    };
    if (dtype == FLOAT32)
        run((const float *)keys);
    else if (dtype == BFLOAT16)
        run((const bf16 *)keys);
    else
        run((const f16 *)keys);
}
