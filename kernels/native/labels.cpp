// The best tokens of every head by products of a few numbers per token with a few of its query.
#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t ALONE = 20000;  // scores below which no second thread is woken
constexpr int64_t STEP = 16;      // one of so many scores is in the sample,
constexpr int64_t SLACK = 16;     // of which so many more may lie above the threshold than k asks for, and a quarter

struct Room {
    std::vector<float> scores, weights;
    std::vector<int64_t> channels;
    std::vector<uint32_t> sample, ranks;
    std::vector<int32_t> places;
};

// Integers that rise with the float; -0 is 0.
INLINE uint32_t rank_of(float x) {
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

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

// The k-th highest of n ranks, bit by bit from the highest in which they differ: a count of those above a border takes
// the processor less than to move a few of them.
uint32_t kth_highest(const uint32_t *ranks, int64_t n, int64_t k) {
    uint32_t differ = 0;
    for (int64_t i = 0; i < n; i++) differ |= ranks[i] ^ ranks[0];
    if (differ == 0) return ranks[0];
    uint32_t bit = 1u << (31 - __builtin_clz(differ));
    uint32_t found = ranks[0] & ~(bit | (bit - 1));
    for (; bit; bit >>= 1) {
        const uint32_t border = found | bit;
        uint32_t above = 0;
        for (int64_t i = 0; i < n; i++) above += ranks[i] >= border;
        if (above >= k) found = border;
    }
    return found;
}

// Places of scores of at least this rank, ascending, and their ranks. A place is written whether it counts or not:
// nothing is branched on.
int64_t filter(const float *scores, int64_t n, uint32_t least, uint32_t *ranks, int32_t *places) {
    int64_t found = 0, i = 0;
#if defined(__AVX512F__)
    const __m512i border = _mm512_set1_epi32((int32_t)least), highest_bit = _mm512_set1_epi32(INT32_MIN);
    __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + WIDTH <= n; i += WIDTH) {
        const __m512i bits = _mm512_castps_si512((__m512)(load(scores + i) + splat(0.0f)));
        const __m512i rank = _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi32(bits, 31), highest_bit));
        const __mmask16 counts = _mm512_cmpge_epu32_mask(rank, border);
        _mm512_storeu_si512(ranks + found, _mm512_maskz_compress_epi32(counts, rank));
        _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(counts, place));
        place = _mm512_add_epi32(place, _mm512_set1_epi32(WIDTH));
        found += __builtin_popcount(counts);
    }
#endif
    for (; i < n; i++) {
        ranks[found] = rank_of(scores[i]);
        places[found] = (int32_t)i;
        found += ranks[found] >= least;
    }
    return found;
}

// A rank that a little more than k of n scores have, as a sample suggests; 0, which all have, where a sample is no help.
uint32_t suggested(const float *scores, int64_t n, int64_t k, Room &room) {
    if (k >= n / 4) return 0;
    room.sample.clear();
    for (int64_t i = 0; i < n; i += STEP) room.sample.push_back(rank_of(scores[i]));
    const int64_t size = room.sample.size();
    return kth_highest(room.sample.data(), size, std::min(size, k * 5 / 4 / STEP + SLACK + 1));
}

// Places of the k highest of n > k scores, ascending; of equal ones the first.
void choose_top(const float *scores, int64_t n, int64_t k, Room &room, int64_t *out) {
    if ((int64_t)room.places.size() < n + WIDTH) {
        room.places.resize(n + WIDTH);
        room.ranks.resize(n + WIDTH);
    }
    uint32_t *ranks = room.ranks.data();
    int32_t *places = room.places.data();
    int64_t found = filter(scores, n, suggested(scores, n, k, room), ranks, places);
    if (found < k) found = filter(scores, n, 0, ranks, places);
    const uint32_t lowest = kth_highest(ranks, found, k);
    int64_t equals = k;
    for (int64_t i = 0; i < found; i++) equals -= ranks[i] > lowest;
    for (int64_t i = 0, taken = 0; taken < k; i++) {
        const bool is_equal = ranks[i] == lowest;
        out[taken] = places[i];
        taken += (ranks[i] > lowest) | (is_equal & (equals > 0));
        equals -= is_equal;
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
        choose_top(room.scores.data(), n, k, room, out + head * k);
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
