// Scores of tokens by their codes, and the best tokens, as kernels/pq_scores.py describes them.
//
// The exponential of a sum over parts is a product of exponentials, of which there are few. Products are float64, so
// that neither their order nor rounding decides between tokens. Where codes of all parts together take few values, the
// work is done once per value, weighted by how many tokens have it.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t MOST_VALUES = 4096;  // joint values of a token's codes that are worked on instead of tokens
constexpr int64_t ALONE = 200000;       // tokens of all query heads, a tenth of a millisecond: no second thread is woken
constexpr int BIN_SHIFT = 47;          // of a score's bits: 32 bins per power of two
constexpr int64_t BINS = 4096;         // from the highest score down to 2^-128 of it
// An exponential is no smaller than e^-700 = 1e-304. Where weights add up to more than one bound and the last chosen
// token's score is above the other, what that cut off is lost in rounding.
constexpr double LEAST_TOTAL = 1e-100, LEAST_SCORE = 1e-180;

// Codes of one KV head: bytes, or bit planes as kernels/pq_codes.py lays them.
struct Codes {
    const uint8_t *first;
    int64_t stride, planes;  // bytes from part to part; 0: bytes
};

// Bytes of n codes, from groups of 64 tokens; `out` has room for whole groups.
void unpack(const uint8_t *groups, int64_t b, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i += 64, groups += 8 * b) {
#if defined(__AVX512BW__)
        __m512i codes = _mm512_setzero_si512();
        for (int64_t j = 0; j < b; j++) {
            uint64_t plane;
            memcpy(&plane, groups + 8 * j, 8);
            codes = _mm512_mask_add_epi8(codes, plane, codes, _mm512_set1_epi8((char)(1 << j)));
        }
        _mm512_storeu_si512(out + i, codes);
#else
        for (int64_t part = 0; part < 8; part++) {  // each of eight bits becomes a byte
            uint64_t codes = 0;
            for (int64_t j = 0; j < b; j++) {
                const uint64_t spread = groups[8 * j + part] * 0x0101010101010101u & 0x8040201008040201u;
                codes |= (spread + 0x7f7f7f7f7f7f7f7fu >> 7 & 0x0101010101010101u) << j;
            }
            memcpy(out + i + 8 * part, &codes, 8);
        }
#endif
    }
}

constexpr int REALS = WIDTH / 2;
typedef double vd __attribute__((vector_size(8 * REALS)));
typedef int64_t vl __attribute__((vector_size(8 * REALS)));

// e^x for -700 <= x <= 0 in float64: 2^n * e^r with |r| <= ln 2 / 2, and e^r by its series.
INLINE vd exponential(vd x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
    const vd shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
    const vd r = x - n * 0.6931471803691238 - n * 1.9082149292705877e-10;
    vd y = vd{} + 1.0 / 6227020800.0;
    constexpr double factorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                                     120.0,       24.0,       6.0,       2.0,      1.0,     1.0};
    for (double f : factorials) y = y * r + 1.0 / f;
    return y * (vd)(((vl)shifted - (vl)(vd{} + magic) + 1023) << 52);
}

// What a thread needs for one KV head, kept from call to call.
struct Room {
    std::vector<uint8_t> codes;
    std::vector<uint16_t> values;
    std::vector<uint32_t> counts, bins;
    std::vector<double> tables, weights, scores;
    std::vector<uint8_t> flags;
    std::vector<std::pair<uint64_t, int64_t>> border;
};

INLINE uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

struct Border {
    uint64_t bits;   // what is above is chosen
    int64_t equal;   // and so are that many of those that equal it
};

// The k-th highest of n scores >= 0, each of which counts `count(i)` times.
template <class Count>
Border find_border(const double *scores, int64_t n, int64_t k, Room &room, const Count &count) {
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = scores[i] > most ? scores[i] : most;
    const uint64_t top = bits_of(most) >> BIN_SHIFT;
    const auto bin_of = [&](int64_t i) { return std::min<uint64_t>(top - (bits_of(scores[i]) >> BIN_SHIFT), BINS - 1); };
    room.bins.assign(BINS, 0);
    uint32_t *bins = room.bins.data();
    for (int64_t i = 0; i < n; i++) bins[bin_of(i)] += count(i);
    int64_t left = k;
    uint64_t bin = 0;
    while (bin < BINS - 1 && left > bins[bin]) left -= bins[bin++];
    room.border.clear();
    for (int64_t i = 0; i < n; i++)
        if (bin_of(i) == bin && count(i)) room.border.emplace_back(bits_of(scores[i]), count(i));
    std::sort(room.border.rbegin(), room.border.rend());
    size_t i = 0;
    while (true) {
        const uint64_t bits = room.border[i].first;
        int64_t equal = 0;
        for (; i < room.border.size() && room.border[i].first == bits; i++) equal += room.border[i].second;
        if (equal >= left) return {bits, left};
        left -= equal;
    }
}

double as_real(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

// exp(scale * (entry - the largest of its part)): of query head i, part j and centroid z at [(j * c + z) * lanes + i].
void make_tables(const float *entries, int64_t g, int64_t m, int64_t c, int64_t lanes, double scale, double *out) {
    for (int64_t i = 0; i < g; i++)
        for (int64_t j = 0; j < m; j++) {
            const float *row = entries + (i * m + j) * c;
            const double most = *std::max_element(row, row + c);
            for (int64_t z = 0; z < c; z += REALS) {
                vd x = {};
                const int64_t some = std::min<int64_t>(REALS, c - z);
                for (int64_t lane = 0; lane < some; lane++) x[lane] = row[z + lane];
                x = (x - most) * scale;
                for (int64_t lane = 0; lane < some; lane++) x[lane] = std::max(x[lane], -700.0);
                x = exponential(x);
                for (int64_t lane = 0; lane < some; lane++) out[(j * c + z + lane) * lanes + i] = x[lane];
            }
        }
}

// The best tokens by their joint values. False: numbers were too small to tell.
bool top_by_value(const float *entries, int64_t g, int64_t m, int64_t c, const uint8_t *const *codes, int64_t n,
                  int64_t k, double scale, int64_t n_values, Room &room, int64_t *out) {
    room.values.resize(n);
    uint16_t *values = room.values.data();
    for (int64_t i = 0; i < n; i++) values[i] = codes[m - 1][i];
    for (int64_t j = m - 2; j >= 0; j--)
        for (int64_t i = 0; i < n; i++) values[i] = (uint16_t)(values[i] * c + codes[j][i]);
    room.counts.assign(2 * n_values, 0);  // neighbours are often equal: they go to different counters
    uint32_t *counts = room.counts.data(), *odd = counts + n_values;
    int64_t at = 0;
    for (; at + 1 < n; at += 2) {
        counts[values[at]]++;
        odd[values[at + 1]]++;
    }
    if (at < n) counts[values[at]]++;
    for (int64_t v = 0; v < n_values; v++) counts[v] += odd[v];

    room.tables.resize(m * c);
    room.weights.resize(n_values);
    room.scores.assign(n_values, 0.0);
    double *weights = room.weights.data(), *scores = room.scores.data();
    for (int64_t i = 0; i < g; i++) {
        make_tables(entries + i * m * c, 1, m, c, 1, scale, room.tables.data());
        std::copy(room.tables.begin(), room.tables.begin() + c, weights);
        int64_t size = c;
        for (int64_t j = 1; j < m; j++, size *= c)
            for (int64_t z = c - 1; z >= 0; z--) {
                const double factor = room.tables[j * c + z];
                for (int64_t v = 0; v < size; v++) weights[z * size + v] = weights[v] * factor;
            }
        double totals[8] = {};
        int64_t v = 0;
        for (; v + 8 <= n_values; v += 8)
            for (int lane = 0; lane < 8; lane++) totals[lane] += weights[v + lane] * (int32_t)counts[v + lane];
        for (; v < n_values; v++) totals[0] += weights[v] * counts[v];
        double total = 0;
        for (double x : totals) total += x;
        if (!(total > LEAST_TOTAL)) return false;
        const double factor = 1 / total;
        for (v = 0; v < n_values; v++) scores[v] += weights[v] * factor;
    }
    const Border border = find_border(scores, n_values, k, room, [&](int64_t v) { return counts[v]; });
    if (!(as_real(border.bits) > LEAST_SCORE)) return false;
    room.flags.resize(n_values);
    uint8_t *flags = room.flags.data();
    for (int64_t v = 0; v < n_values; v++)
        flags[v] = bits_of(scores[v]) > border.bits ? 1 : bits_of(scores[v]) == border.bits ? 2 : 0;
    int64_t equal = border.equal;
    for (int64_t i = 0, taken = 0; taken < k; i++) {
        const uint8_t flag = flags[values[i]];
        if (flag == 1 || (flag == 2 && equal-- > 0)) out[taken++] = i;
    }
    return true;
}

// Sums over lanes of four vectors.
template <class V>
INLINE void sum_lanes(const V *x, double *out) {
    constexpr int L = sizeof(V) / 8;
#if defined(__AVX2__)
    __m256d y[4];
    for (int i = 0; i < 4; i++) {
        if constexpr (L == 4) {
            y[i] = (__m256d)x[i];
        } else if constexpr (L == 8) {
            __m256d halves[2];
            memcpy(halves, &x[i], sizeof halves);
            y[i] = halves[0] + halves[1];
        } else {
            y[i] = _mm256_castpd128_pd256((__m128d)x[i]);
        }
    }
    const __m256d ab = _mm256_hadd_pd(y[0], y[1]), cd = _mm256_hadd_pd(y[2], y[3]);
    if constexpr (L == 2)
        _mm256_storeu_pd(out, _mm256_permute2f128_pd(ab, cd, 0x20));
    else
        _mm256_storeu_pd(out, _mm256_permute2f128_pd(ab, cd, 0x20) + _mm256_permute2f128_pd(ab, cd, 0x31));
#else
    for (int i = 0; i < 4; i++) {
        double total = 0;
        for (int lane = 0; lane < L; lane++) total += x[i][lane];
        out[i] = total;
    }
#endif
}

// Products of table entries of four tokens, all query heads of up to L at once; M parts, 0: m of them.
template <class V, int M>
INLINE void four_products(const double *tables, int64_t m, int64_t c, const uint8_t *const *codes, int64_t at, V *out) {
    constexpr int64_t L = sizeof(V) / 8;
    for (int64_t j = 0; j < (M ? M : m); j++) {
        uint32_t four;
        memcpy(&four, codes[j] + at, 4);
        for (int i = 0; i < 4; i++) {
            V entry;
            memcpy(&entry, tables + (j * c + (four >> 8 * i & 255)) * L, sizeof entry);
            out[i] = j ? out[i] * entry : entry;
        }
    }
}

// Adds the weights of g <= L query heads to the scores of all tokens. Rows of codes may be read up to a multiple of 4.
template <class V, int M>
bool add_weights(const float *entries, int64_t g, int64_t m, int64_t c, const uint8_t *const *codes, int64_t n,
                 double scale, Room &room, double *scores) {
    constexpr int64_t L = sizeof(V) / 8;
    room.tables.assign(m * c * L + 8, 0.0);
    double *tables = (double *)(((uintptr_t)room.tables.data() + 63) / 64 * 64);
    make_tables(entries, g, m, c, L, scale, tables);
    V totals[4] = {}, four[4];
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        four_products<V, M>(tables, m, c, codes, i, four);
        for (int lane = 0; lane < 4; lane++) totals[lane] += four[lane];
    }
    if (i < n) {
        four_products<V, M>(tables, m, c, codes, i, four);
        for (int lane = 0; lane < n - i; lane++) totals[lane] += four[lane];
    }
    const V total = totals[0] + totals[1] + totals[2] + totals[3];
    for (int64_t head = 0; head < g; head++) {
        if (!(total[head] > LEAST_TOTAL)) return false;
        for (int64_t z = 0; z < c; z++) tables[z * L + head] /= total[head];
    }
    for (i = 0; i < n; i += 4) {
        double sums[4];
        four_products<V, M>(tables, m, c, codes, i, four);
        sum_lanes(four, sums);
        for (int lane = 0; lane < 4; lane++) scores[i + lane] += sums[lane];
    }
    return true;
}

template <class V>
bool add_parts(const float *entries, int64_t g, int64_t m, int64_t c, const uint8_t *const *codes, int64_t n,
               double scale, Room &room, double *scores) {
    switch (m) {
        case 1: return add_weights<V, 1>(entries, g, m, c, codes, n, scale, room, scores);
        case 2: return add_weights<V, 2>(entries, g, m, c, codes, n, scale, room, scores);
        case 4: return add_weights<V, 4>(entries, g, m, c, codes, n, scale, room, scores);
        case 8: return add_weights<V, 8>(entries, g, m, c, codes, n, scale, room, scores);
        default: return add_weights<V, 0>(entries, g, m, c, codes, n, scale, room, scores);
    }
}

typedef double two __attribute__((vector_size(16)));
typedef double four __attribute__((vector_size(32)));
typedef double eight __attribute__((vector_size(64)));

bool top_by_token(const float *entries, int64_t g, int64_t m, int64_t c, const uint8_t *const *codes, int64_t n,
                  int64_t k, double scale, Room &room, int64_t *out) {
    room.scores.assign(n + 4, 0.0);
    double *scores = room.scores.data();
    for (int64_t head = 0; head < g; head += 8) {
        const int64_t some = std::min<int64_t>(8, g - head);
        const auto add = some > 4 ? add_parts<eight> : some > 2 ? add_parts<four> : add_parts<two>;
        if (!add(entries + head * m * c, some, m, c, codes, n, scale, room, scores)) return false;
    }
    const Border border = find_border(scores, n, k, room, [](int64_t) { return 1; });
    const double least = as_real(border.bits);
    if (!(least > LEAST_SCORE)) return false;
    int64_t equal = border.equal;
    for (int64_t i = 0, taken = 0; taken < k; i++)
        if (scores[i] > least || (scores[i] == least && equal-- > 0)) out[taken++] = i;
    return true;
}

// Rows of bytes of one KV head's codes, which may be read up to the next multiple of 64.
void read_codes(const Codes &codes, int64_t m, int64_t n, Room &room, std::vector<const uint8_t *> &rows) {
    const int64_t length = (n + 63) / 64 * 64;
    room.codes.resize(m * length);
    for (int64_t j = 0; j < m; j++) {
        uint8_t *to = room.codes.data() + j * length;
        if (codes.planes)
            unpack(codes.first + j * codes.stride, codes.planes, n, to);
        else
            memcpy(to, codes.first + j * codes.stride, n);
        if (length > n) memset(to + n, 0, length - n);
        rows[j] = to;
    }
}

}  // namespace

// `entries` (h, m, c) -> `out` (h_kv, k), ascending; 0 < k < n. Returns whether all of it could be told.
extern "C" int64_t pq_top(int64_t h, int64_t h_kv, int64_t m, int64_t c, const float *entries, const uint8_t *codes,
                          int64_t head_stride, int64_t part_stride, int64_t planes, int64_t n, int64_t k, double scale,
                          int64_t *out, int64_t n_threads) {
    const int64_t g = h / h_kv;
    int64_t n_values = 1;
    for (int64_t j = 0; j < m && n_values <= MOST_VALUES; j++) n_values *= c;
    std::vector<char> told(h_kv);
    if (n * h < ALONE) n_threads = 1;
    parallel_for(h_kv, (int)n_threads, [&](int64_t head) {
        thread_local Room room;
        std::vector<const uint8_t *> rows(m);
        read_codes({codes + head * head_stride, part_stride, planes}, m, n, room, rows);
        const float *mine = entries + head * g * m * c;
        told[head] = n_values <= std::min(MOST_VALUES, 2 * n)
                         ? top_by_value(mine, g, m, c, rows.data(), n, k, scale, n_values, room, out + head * k)
                         : top_by_token(mine, g, m, c, rows.data(), n, k, scale, room, out + head * k);
    });
    return std::all_of(told.begin(), told.end(), [](char x) { return x; });
}
