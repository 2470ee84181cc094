// The best tokens of every head by products of a few numbers per token with a few of its query.
#include <vector>

#include "highest.h"

namespace {

constexpr int64_t ALONE = 20000;  // scores below which no second thread is woken

struct Room {
    std::vector<float> scores, weights;
    std::vector<int64_t> channels;
    Choosing choosing;
};

// Sums over channels, channel by channel from the first, of four vectors of tokens at a time; channels with a weight of
// zero are not read.
template <class T>
void sum_channels(const float *weights, int64_t c, const T *labels, int64_t stride, int64_t n, Room &room) {
    room.channels.clear();
    room.weights.clear();
    for (int64_t j = 0; j < c; j++) {
        if (weights[j] == 0.0f) continue;
        room.channels.push_back(j * stride);
        room.weights.push_back(weights[j]);
    }
    const int64_t m = room.channels.size(), *channels = room.channels.data();
    const float *by = room.weights.data();
    float *out = room.scores.data();
    int64_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH) {
        vf sums[4] = {};
        for (int64_t j = 0; j < m; j++) {
            const vf weight = splat(by[j]);
            const T *from = labels + channels[j] + i;
            for (int part = 0; part < 4; part++) sums[part] += weight * load(from + part * WIDTH);
        }
        for (int part = 0; part < 4; part++) store(out + i + part * WIDTH, sums[part]);
    }
    for (; i < n; i++) {
        vf sum = {};
        for (int64_t j = 0; j < m; j++) sum += splat(by[j]) * splat(load_one(labels + channels[j] + i));
        out[i] = sum[0];
    }
}

template <class T>
void choose(int64_t heads, int64_t stored, int64_t c, const float *weights, const T *labels, int64_t head_stride,
            int64_t channel_stride, int64_t n, int64_t k, int64_t *out, int64_t n_threads) {
    const int64_t g = heads / stored;
    if (n * heads < ALONE) n_threads = 1;
    parallel_for(heads, (int)n_threads, [&](int64_t head) {
        thread_local Room room;
        if ((int64_t)room.scores.size() < n) room.scores.resize(n);
        sum_channels(weights + head * c, c, labels + head / g * head_stride, channel_stride, n, room);
        choose_top(room.scores.data(), n, k, room.choosing, out + head * k);
    });
}

}  // namespace

// `weights` (heads, c); the labels of head h are those of stored head h / (heads / stored), channel j at
// labels + stored * head_stride + j * channel_stride, in numbers; `out` (heads, k), 0 < k < n.
extern "C" void label_top(int64_t dtype, int64_t heads, int64_t stored, int64_t c, const float *weights,
                          const void *labels, int64_t head_stride, int64_t channel_stride, int64_t n, int64_t k,
                          int64_t *out, int64_t n_threads) {
    const auto run = [&](auto *typed) {
        choose(heads, stored, c, weights, typed, head_stride, channel_stride, n, k, out, n_threads);
    };
    if (dtype == FLOAT32)
        run((const float *)labels);
    else if (dtype == BFLOAT16)
        run((const bf16 *)labels);
    else
        run((const f16 *)labels);
}
