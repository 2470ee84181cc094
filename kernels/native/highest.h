// The highest of many scores, of equal ones the first.
//
// Not here: which scores.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int64_t STEP = 16;   // one of so many scores is in the sample,
constexpr int64_t SLACK = 16;  // of which so many more may lie above the threshold than k asks for, and a quarter

// Memory of one choice after the other.
struct Choosing {
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

// The k-th highest of n ranks, bit by bit from the highest in which they differ: a count of those above a border takes
// the processor less than to move a few of them.
inline uint32_t kth_highest(const uint32_t *ranks, int64_t n, int64_t k) {
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
inline int64_t filter(const float *scores, int64_t n, uint32_t least, uint32_t *ranks, int32_t *places) {
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
inline uint32_t suggested(const float *scores, int64_t n, int64_t k, Choosing &room) {
    if (k >= n / 4) return 0;
    room.sample.clear();
    for (int64_t i = 0; i < n; i += STEP) room.sample.push_back(rank_of(scores[i]));
    const int64_t size = room.sample.size();
    return kth_highest(room.sample.data(), size, std::min(size, k * 5 / 4 / STEP + SLACK + 1));
}

// Places of the k highest of n > k scores, ascending; of equal ones the first.
inline void choose_top(const float *scores, int64_t n, int64_t k, Choosing &room, int64_t *out) {
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
