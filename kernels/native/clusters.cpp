// The order of clusters by score, and the first tokens of clusters in an order.
#include <algorithm>
#include <memory>

#include "simd.h"

namespace {

// Descending order of n scores, of equal ones the first: sorts by 4 bytes, each a stable count.
void order_of(const float *scores, int64_t n, int64_t *order, uint64_t *room) {
    uint64_t *from = room, *to = room + n;
    uint32_t counts[4][256] = {};
    for (int64_t i = 0; i < n; i++) {
        const float score = scores[i] + 0.0f;  // no negative zero
        uint32_t key;
        memcpy(&key, &score, 4);
        key = key & 0x80000000 ? key : ~(key | 0x80000000);  // ascends where scores fall
        for (int byte = 0; byte < 4; byte++) counts[byte][key >> 8 * byte & 255]++;
        from[i] = (uint64_t)key << 32 | (uint64_t)i;
    }
    for (int byte = 0; byte < 4; byte++) {
        uint32_t start = 0, *places = counts[byte];
        if (places[from[0] >> (32 + 8 * byte) & 255] == n) continue;  // all have the same
        for (int i = 0; i < 256; i++) {
            const uint32_t count = places[i];
            places[i] = start;
            start += count;
        }
        for (int64_t i = 0; i < n; i++) to[places[from[i] >> (32 + 8 * byte) & 255]++] = from[i];
        std::swap(from, to);
    }
    for (int64_t i = 0; i < n; i++) order[i] = (int64_t)(uint32_t)from[i];
}

}  // namespace

extern "C" void cluster_order(int64_t heads, int64_t c, const float *scores, int64_t *order, int64_t n_threads) {
    if (c == 0) return;
    parallel_for(heads, heads * c < 4000 ? 1 : n_threads, [&](int64_t head) {
        const std::unique_ptr<uint64_t[]> room(new uint64_t[2 * c]);
        order_of(scores + head * c, c, order + head * c, room.get());
    });
}

// `order` (rows, r), of which `heads` follow each other per query, names some of c clusters; `tokens` (h_kv, n);
// `out` (rows, k).
extern "C" void cluster_tokens(int64_t rows, int64_t heads, int64_t h_kv, int64_t r, int64_t c, int64_t n,
                               int64_t k, const int64_t *order, const int64_t *sizes, const int64_t *ends, const int64_t *tokens,
                               int64_t *out, int64_t n_threads) {
    parallel_for(rows, rows * k < 20000 ? 1 : n_threads, [&](int64_t row) {
        const int64_t owner = row % heads * h_kv / heads;
        int64_t *to = out + row * k, left = k;
        for (int64_t i = 0; i < r && left > 0; i++) {
            const int64_t cluster = owner * c + order[row * r + i], size = sizes[cluster];
            const int64_t count = size < left ? size : left;
            memcpy(to, tokens + owner * n + ends[cluster] - size, count * sizeof(int64_t));
            to += count;
            left -= count;
        }
        for (int64_t i = 0; i < left; i++) to[i] = -1;
    });
}
