// The best tokens of every head by products of a few numbers per token with a few of its query.
#include <algorithm>
#include <functional>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t ALONE = 20000;  // scores below which no second thread is woken
constexpr int64_t STEP = 16;      // one of so many scores is in the sample,
constexpr int64_t SLACK = 16;     // of which so many more may lie above the threshold than k asks for, and a quarter

struct Room {
    std::vector<float> scores, sample, weights;
    std::vector<const float *> rows;
    std::vector<int32_t> places;
    std::vector<uint32_t> border;
};

// Integers that rise with the float; -0 is 0.
INLINE uint32_t rising(float x) {
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Sums over channels, channel by channel from the first, of four vectors of tokens at a time; channels with a weight of
// zero are not read.
void sum_channels(const float *weights, int64_t c, const float *labels, int64_t stride, int64_t n, Room &room) {
    room.rows.clear();
    room.weights.clear();
    for (int64_t j = 0; j < c; j++) {
        if (weights[j] == 0.0f) continue;
        room.rows.push_back(labels + j * stride);
        room.weights.push_back(weights[j]);
    }
    const int64_t m = room.rows.size();
    const float *const *rows = room.rows.data();
    const float *by = room.weights.data();
    float *out = room.scores.data();
    int64_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH) {
        vf sums[4] = {};
        for (int64_t j = 0; j < m; j++) {
            const vf weight = splat(by[j]);
            for (int part = 0; part < 4; part++) sums[part] += weight * load(rows[j] + i + part * WIDTH);
        }
        for (int part = 0; part < 4; part++) store(out + i + part * WIDTH, sums[part]);
    }
    for (; i < n; i++) {
        vf sum = {};
        for (int64_t j = 0; j < m; j++) sum += splat(by[j]) * splat(rows[j][i]);
        out[i] = sum[0];
    }
}

// Places of scores that may be among the k highest, ascending, by a threshold that a sample suggests; fewer than k where
// the sample misled. A place is written whether it counts or not: nothing is branched on.
int64_t filter(const float *scores, int64_t n, int64_t k, Room &room) {
    room.sample.clear();
    for (int64_t i = 0; i < n; i += STEP) room.sample.push_back(scores[i]);
    const auto at = room.sample.begin() + std::min<int64_t>(room.sample.size() - 1, k * 5 / 4 / STEP + SLACK);
    std::nth_element(room.sample.begin(), at, room.sample.end(), std::greater<float>());
    const float least = *at;
    int32_t *places = room.places.data();
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        places[found] = (int32_t)i;
        found += scores[i] >= least;
    }
    return found;
}

// Places of the k highest of n > k scores, ascending; of equal ones the first.
void choose_top(const float *scores, int64_t n, int64_t k, Room &room, int64_t *out) {
    room.places.resize(n + 1);
    int32_t *places = room.places.data();
    int64_t found = k < n / 4 ? filter(scores, n, k, room) : 0;
    if (found < k) {
        for (int64_t i = 0; i < n; i++) places[i] = (int32_t)i;
        found = n;
    }
    room.border.resize(found);
    uint32_t *border = room.border.data();
    for (int64_t i = 0; i < found; i++) border[i] = rising(scores[places[i]]);
    std::nth_element(border, border + (k - 1), border + found, std::greater<uint32_t>());
    const uint32_t lowest = border[k - 1];
    int64_t left = k;
    for (int64_t i = 0; i < k; i++) left -= border[i] > lowest;  // what is left are equals of the lowest
    for (int64_t i = 0; i < found; i++) {
        const uint32_t value = rising(scores[places[i]]);
        if (value > lowest || (value == lowest && left-- > 0)) *out++ = places[i];
    }
}

}  // namespace

// `weights` (heads, c); the labels of head h are those of stored head h / (heads / stored), channel j at
// labels + stored * head_stride + j * channel_stride; `out` (heads, k), 0 < k < n.
extern "C" void label_top(int64_t heads, int64_t stored, int64_t c, const float *weights, const float *labels,
                          int64_t head_stride, int64_t channel_stride, int64_t n, int64_t k, int64_t *out,
                          int64_t n_threads) {
    const int64_t g = heads / stored;
    if (n * heads < ALONE) n_threads = 1;
    parallel_for(heads, (int)n_threads, [&](int64_t head) {
        thread_local Room room;
        room.scores.resize(n);
        sum_channels(weights + head * c, c, labels + head / g * head_stride, channel_stride, n, room);
        choose_top(room.scores.data(), n, k, room, out + head * k);
    });
}
