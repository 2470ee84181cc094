// Causal attention of a prompt over the keys that each head and block of queries keeps, and what keys get of it. Vectors
// run along queries: a key's row is read where it lies, however scattered keys are, and a softmax over keys needs no sum
// across a vector. Products of bfloat16 go to the matrix unit where there is one.
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t TILE = 64;  // keys at a time

struct Rule {
    int64_t h, h_kv, s, d, d_v, block, block_k, dense_from, n_init, n_local, of_head, of_row;
    float scale, cap;
    const uint8_t *mask, *met;  // blocks and null, or columns and which distances are met
};

// A block of queries: those from `first` on, and whether they see their whole past.
struct Item {
    int64_t first, stop;
    bool is_dense;
};

Item item_of(const Rule &r, int64_t number) {
    const int64_t n_sparse = (r.dense_from + r.block - 1) / r.block;
    const bool is_dense = number >= n_sparse;
    const int64_t first = is_dense ? r.dense_from + (number - n_sparse) * r.block : number * r.block;
    return {first, std::min(first + r.block, is_dense ? r.s : r.dense_from), is_dense};
}

// Keys that an item lists, ascending.
void list_keys(const Rule &r, int64_t head, const Item &item, std::vector<int32_t> &keys) {
    keys.clear();
    if (item.is_dense) {
        for (int64_t key = 0; key < item.stop; key++) keys.push_back(key);
    } else if (r.met) {
        const uint8_t *vertical = r.mask + head * r.of_head;
        const uint8_t *met = r.met + head * r.of_row + item.first + r.block - 1;
        for (int64_t key = 0; key < item.stop; key++)
            if (vertical[key] | met[-key]) keys.push_back(key);
    } else {
        const uint8_t *row = r.mask + head * r.of_head + item.first / r.block * r.of_row;
        for (int64_t start = 0, unit = 0; start < item.stop; start += r.block_k, unit++)
            if (row[unit])
                for (int64_t key = start; key < std::min(start + r.block_k, item.stop); key++) keys.push_back(key);
    }
}

// The query after the last that sees a key.
INLINE int64_t until(const Rule &r, const Item &item, int64_t key) {
    return item.is_dense || key < r.n_init ? item.stop : std::min(item.stop, key + r.n_local);
}

template <class T>
INLINE void as_floats(const T *row, int64_t d, float *to) {
    int64_t c = 0;
    for (; c + WIDTH <= d; c += WIDTH) store(to + c, load(row + c));
    if (c < d) {
        const vf rest = load_some(row + c, (int)(d - c));
        for (int64_t i = 0; c + i < d; i++) to[c + i] = rest[i];
    }
}

// To nearest even; the upper halves are bfloat16.
INLINE vi rounded(vf x) {
    const vi bits = float_as_bits(x);
    return (vi)choose((vi)(x == x), (vf)(bits + 0x7fff + ((bits >> 16) & 1)), (vf)(vi{} + 0x7fc00000));
}

INLINE void store_all(float *p, vf x) { store(p, x); }

INLINE void store_all(bf16 *p, vf x) {
    const vh bits = __builtin_convertvector((rounded(x) >> 16) & 0xffff, vh);
    memcpy(p, &bits, sizeof bits);
}

INLINE void store_all(f16 *p, vf x) {
    for (int i = 0; i < WIDTH; i++) store_one(p + i, x[i]);
}

#ifdef HAS_TILES
// 16 vectors of 16 numbers of 32 bits, rows to columns.
TILED inline void transpose_16(__m512i *x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c);
        y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d);
        y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

#endif

// All of it for CHUNK queries at a time.
template <int64_t CHUNK>
struct By {

static constexpr int NQ = CHUNK / WIDTH;                     // vectors of queries
static constexpr int SIDE_BY_SIDE = NQ > 8 ? 8 : NQ;         // of which so many are worked on at a time …
static constexpr int AT_ONCE = SIDE_BY_SIDE > 4 ? 1 : 6;  // … for so many keys or channels: their sums stay in registers

// to[i][q] (+)= sum over c of rows[i][c] * by[c][q], for n rows of CHUNK queries; `step`: from a row to the next channel.
template <int ROWS, bool ADDS>
INLINE void multiply_rows(const float *const *rows, int64_t step, const float *by, int64_t depth, float *to) {
    for (int first = 0; first < NQ; first += SIDE_BY_SIDE) {
        vf sums[ROWS][SIDE_BY_SIDE];
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < SIDE_BY_SIDE; v++)
                sums[i][v] = ADDS ? load(to + i * CHUNK + (first + v) * WIDTH) : vf{};
        for (int64_t c = 0; c < depth; c++) {
            vf x[SIDE_BY_SIDE];
            for (int v = 0; v < SIDE_BY_SIDE; v++) x[v] = load(by + c * CHUNK + (first + v) * WIDTH);
            for (int i = 0; i < ROWS; i++) {
                const vf y = splat(rows[i][c * step]);
                for (int v = 0; v < SIDE_BY_SIDE; v++) sums[i][v] += y * x[v];
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < SIDE_BY_SIDE; v++) store(to + i * CHUNK + (first + v) * WIDTH, sums[i][v]);
    }
}

template <bool ADDS>
static void multiply(const float *const *rows, int64_t n, int64_t step, const float *by, int64_t depth, float *to) {
    int64_t i = 0;
    for (; i + AT_ONCE <= n; i += AT_ONCE) multiply_rows<AT_ONCE, ADDS>(rows + i, step, by, depth, to + i * CHUNK);
    for (; i < n; i++) multiply_rows<1, ADDS>(rows + i, step, by, depth, to + i * CHUNK);
}

// Products by float32 arithmetic.
template <class T>
struct Plain {
    static constexpr bool IS_SCALED = true;
    const Rule &r;
    std::vector<float> queries, keys, values;
    const float *key_rows[TILE];
    std::vector<const float *> channels;

    Plain(const Rule &rule) : r(rule), queries(rule.d * CHUNK), channels(rule.d_v) {
        if constexpr (sizeof(T) == 2) keys.resize(TILE * rule.d);
        values.resize(TILE * rule.d_v);
    }

    void set_queries(const T *q, int64_t n) {
        std::vector<float> row(r.d);
        std::fill(queries.begin(), queries.end(), 0.0f);
        for (int64_t i = 0; i < n; i++) {
            as_floats(q + i * r.d, r.d, row.data());
            for (int64_t c = 0; c < r.d; c++) queries[c * CHUNK + i] = row[c] * r.scale;
        }
    }

    // logits[key][query], scaled
    void logits(const T *k, const int32_t *tokens, int64_t n, float *out) {
        for (int64_t i = 0; i < n; i++) {
            if constexpr (sizeof(T) == 4) {
                key_rows[i] = k + tokens[i] * r.d;
            } else {
                as_floats(k + tokens[i] * r.d, r.d, keys.data() + i * r.d);
                key_rows[i] = keys.data() + i * r.d;
            }
        }
        multiply<false>(key_rows, n, 1, queries.data(), r.d, out);
    }

    // sums[channel][query] += values * weights
    void add(const T *v, const int32_t *tokens, int64_t n, const float *weights, float *sums) {
        for (int64_t i = 0; i < n; i++) as_floats(v + tokens[i] * r.d_v, r.d_v, values.data() + i * r.d_v);
        for (int64_t c = 0; c < r.d_v; c++) channels[c] = values.data() + c;
        multiply<true>(channels.data(), r.d_v, r.d_v, weights, n, sums);
    }

    void begin() {}
    void end() {}
    static int64_t padded(int64_t d_v) { return d_v; }
};

#ifdef HAS_TILES
// Products by the matrix unit: bfloat16 with sums in float32. Channels are padded to whole tiles by zeros.
struct Tiled {
    static constexpr bool IS_SCALED = false;
    const Rule &r;
    int64_t d, d_v;
    std::vector<uint16_t> queries, some, keys, values;
    std::vector<uint32_t> pairs;

    Tiled(const Rule &rule)
        : r(rule), d(padded(rule.d)), d_v(padded(rule.d_v)), queries(CHUNK * d), some(CHUNK * d), keys(TILE * d),
          values(d_v * TILE), pairs(TILE / 2 * CHUNK) {}

    static int64_t padded(int64_t n) { return (n + DEPTH - 1) / DEPTH * DEPTH; }

    // GCC 12 does not know that a tile's load reads memory.
    static void written() { asm volatile("" ::: "memory"); }

    TILED void begin() {
        static const TileShapes shapes{};
        _tile_loadconfig(&shapes);
    }
    TILED void end() { _tile_release(); }

    TILED void set_queries(const bf16 *q, int64_t n) {
        std::fill(some.begin(), some.end(), 0);
        for (int64_t i = 0; i < n; i++) memcpy(some.data() + i * d, q + i * r.d, r.d * 2);
        for (int64_t i = 0; i < CHUNK; i += SIDE)
            for (int64_t c = 0; c < d; c += DEPTH) {  // pairs of channels, rows to columns
                __m512i x[SIDE];
                for (int64_t j = 0; j < SIDE; j++) x[j] = _mm512_loadu_si512(some.data() + (i + j) * d + c);
                transpose_16(x);
                uint16_t *to = queries.data() + i / (2 * SIDE) * 2 * SIDE * d + (c / DEPTH * 2 + i / SIDE % 2) * SIDE * DEPTH;
                for (int64_t j = 0; j < SIDE; j++) _mm512_storeu_si512(to + j * DEPTH, x[j]);
            }
    }

    TILED void logits(const bf16 *k, const int32_t *tokens, int64_t n, float *out) {
        for (int64_t i = 0; i < n; i++) {
            memcpy(keys.data() + i * d, k + tokens[i] * r.d, r.d * 2);
            for (int64_t c = r.d; c < d; c++) keys[i * d + c] = 0;
        }
        written();
        for (int64_t i = 0; i < n; i += 2 * SIDE)  // rows after the last are of an earlier tile, and nobody reads them
            for (int64_t j = 0; j < CHUNK; j += 2 * SIDE) {
                sum_32(keys.data() + i * d, queries.data() + j * d, d);
                float *to = out + i * CHUNK + j;
                _tile_stored(0, to, 4 * CHUNK);
                _tile_stored(1, to + SIDE, 4 * CHUNK);
                _tile_stored(2, to + SIDE * CHUNK, 4 * CHUNK);
                _tile_stored(3, to + SIDE * CHUNK + SIDE, 4 * CHUNK);
            }
    }

    TILED void add(const bf16 *v, const int32_t *tokens, int64_t n, const float *weights, float *sums) {
        const int64_t depth = (n + DEPTH - 1) / DEPTH * DEPTH;
        // Weights of two neighbouring keys side by side, rounded to nearest even.
        for (int64_t i = 0; i < depth; i += 2)
            for (int64_t j = 0; j < CHUNK; j += WIDTH) {
                const vi low = i < n ? rounded(load(weights + i * CHUNK + j)) : vi{};
                const vi high = i + 1 < n ? rounded(load(weights + (i + 1) * CHUNK + j)) : vi{};
                const vi both = ((low >> 16) & 0xffff) | (high & (int32_t)0xffff0000);
                memcpy(pairs.data() + i / 2 * CHUNK + j, &both, sizeof both);
            }
        // Values by channel: pairs of neighbouring keys, then rows to columns.
        for (int64_t i = 0; i < depth; i += DEPTH)
            for (int64_t c = 0; c < d_v; c += SIDE) {
                const int64_t width = std::min<int64_t>(SIDE, r.d_v - c);
                __m512i x[SIDE];
                for (int64_t j = 0; j < SIDE; j++) {
                    const int64_t at = i + 2 * j;
                    x[j] = _mm512_or_si512(channels_of(v, tokens, at, n, c, width),
                                           _mm512_slli_epi32(channels_of(v, tokens, at + 1, n, c, width), 16));
                }
                transpose_16(x);
                for (int64_t j = 0; j < SIDE; j++) _mm512_storeu_si512(values.data() + (c + j) * TILE + i, x[j]);
            }
        written();
        for (int64_t c = 0; c < d_v; c += 2 * SIDE)
            for (int64_t j = 0; j < CHUNK; j += 2 * SIDE) {
                float *to = sums + c * CHUNK + j;
                _tile_loadd(0, to, 4 * CHUNK);
                _tile_loadd(1, to + SIDE, 4 * CHUNK);
                _tile_loadd(2, to + SIDE * CHUNK, 4 * CHUNK);
                _tile_loadd(3, to + SIDE * CHUNK + SIDE, 4 * CHUNK);
                for (int64_t i = 0; i < depth; i += DEPTH) {
                    _tile_loadd(4, values.data() + c * TILE + i, 2 * TILE);
                    _tile_loadd(5, values.data() + (c + SIDE) * TILE + i, 2 * TILE);
                    _tile_loadd(6, pairs.data() + i / 2 * CHUNK + j, 4 * CHUNK);
                    _tile_loadd(7, pairs.data() + i / 2 * CHUNK + j + SIDE, 4 * CHUNK);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                _tile_stored(0, to, 4 * CHUNK);
                _tile_stored(1, to + SIDE, 4 * CHUNK);
                _tile_stored(2, to + SIDE * CHUNK, 4 * CHUNK);
                _tile_stored(3, to + SIDE * CHUNK + SIDE, 4 * CHUNK);
            }
    }

    // Channels c to c + width of a key, 16 bits in each lane; zeros where there is no such key.
    TILED __m512i channels_of(const bf16 *v, const int32_t *tokens, int64_t at, int64_t n, int64_t c, int64_t width) {
        if (at >= n || width <= 0) return _mm512_setzero_si512();
        const bf16 *from = v + tokens[at] * r.d_v + c;
        if (width == SIDE) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
        alignas(32) uint16_t padded[SIDE] = {};
        memcpy(padded, from, width * 2);
        return _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)padded));
    }
};
#endif

// Bounds logits, and hides keys from queries that do not see them; whether it did either.
static bool bound(const Rule &r, const Item &item, int64_t first, const int32_t *tokens, int64_t n, int64_t window,
           float factor, float *logits) {
    bool hides = false;
    if (r.cap > 0)
        for (int64_t i = 0; i < n * CHUNK; i += WIDTH) {
            const vf x = minimum(maximum(load(logits + i) * splat(-2.0f * factor / r.cap), splat(-80.0f)), splat(80.0f));
            store(logits + i, splat(r.cap) * (splat(2.0f) / (splat(1.0f) + exponential(x)) - splat(1.0f)));
        }
    for (int64_t i = 0; i < n; i++) {
        const int64_t low = tokens[i] - first, high = std::min(until(r, item, tokens[i]), tokens[i] + window) - first;
        if (low <= 0 && high >= std::min(CHUNK, item.stop - first)) continue;
        hides = true;
        vi lane;
        for (int j = 0; j < WIDTH; j++) lane[j] = j;
        for (int v = 0; v < NQ; v++, lane += WIDTH) {
            float *at = logits + i * CHUNK + v * WIDTH;
            store(at, choose((lane >= (int32_t)low) & (lane < (int32_t)high), load(at), splat(-INFINITY)));
        }
    }
    return hides;
}

template <class T, class Products>
static void attend_item(const Rule &r, int64_t head, const Item &item, const T *q, const T *k, const T *v, T *out, float *lse,
                 int64_t *pairs) {
    const int64_t d_v = Products::padded(r.d_v);
    std::vector<int32_t> tokens;
    list_keys(r, head, item, tokens);
    const bool is_limited = !item.is_dense && r.n_local < r.s;
    int64_t n_pairs = 0;
    for (size_t i = tokens.size(); i-- > 0;) {
        if (!is_limited && tokens[i] <= item.first) {
            n_pairs += (i + 1) * (item.stop - item.first);
            break;
        }
        const int64_t behind = until(r, item, tokens[i]) - std::max<int64_t>(tokens[i], item.first);
        n_pairs += behind > 0 ? behind : 0;
    }
    *pairs = n_pairs;
    Products products(r);
    const float scale = Products::IS_SCALED ? 1.0f : r.scale, factor = r.cap > 0 ? 1.0f : scale;
    std::vector<float> logits(TILE * CHUNK), sums(d_v * CHUNK);
    float highest[CHUNK], total[CHUNK];
    products.begin();
    for (int64_t first = item.first; first < item.stop; first += CHUNK) {
        const int64_t n_queries = std::min(CHUNK, item.stop - first);
        products.set_queries(q + first * r.d, n_queries);
        std::fill(sums.begin(), sums.end(), 0.0f);
        std::fill(highest, highest + CHUNK, -1e30f);  // finite: nothing minus nothing would be no number
        std::fill(total, total + CHUNK, 0.0f);
        for (size_t start = 0; start < tokens.size(); start += TILE) {
            const int32_t *some = tokens.data() + start;
            const int64_t n = std::min<int64_t>(TILE, tokens.size() - start);
            if (some[0] >= first + n_queries) break;  // and so are all after it
            products.logits(k, some, n, logits.data());
            const bool hides = bound(r, item, first, some, n, r.s, scale, logits.data());
            vf shrink[NQ];
            bool is_higher = false;
            for (int j = 0; j < NQ; j++) {
                float *column = logits.data() + j * WIDTH;
                const vf before = load(highest + j * WIDTH);
                vf most = load(column);
                for (int64_t i = 1; i < n; i++) most = maximum(most, load(column + i * CHUNK));
                most = maximum(before, most * splat(factor));
                shrink[j] = exponential(before - most);
                for (int l = 0; l < WIDTH; l++) is_higher |= most[l] > before[l];
                store(highest + j * WIDTH, most);
                vf so_far = load(total + j * WIDTH) * shrink[j];
                for (int64_t i = 0; i < n; i++) {
                    const vf x = load(column + i * CHUNK) * splat(factor) - most;
                    const vf weight = hides ? choose(x > splat(-1e30f), exponential(x), vf{}) : exponential(x);
                    store(column + i * CHUNK, weight);
                    so_far += weight;
                }
                store(total + j * WIDTH, so_far);
            }
            if (is_higher)
                for (int64_t c = 0; c < r.d_v; c++)
                    for (int j = 0; j < NQ; j++) {
                        float *at = sums.data() + c * CHUNK + j * WIDTH;
                        store(at, load(at) * shrink[j]);
                    }
            products.add(v, some, n, logits.data(), sums.data());
        }
        for (int64_t i = 0; i < n_queries; i++) {
            lse[first + i] = total[i] > 0 ? highest[i] + std::log(total[i]) : -INFINITY;
            total[i] = total[i] > 0 ? total[i] : 1.0f;
        }
        for (int64_t c = 0; c < r.d_v; c++) {
            T column[CHUNK];
            for (int j = 0; j < CHUNK; j += WIDTH) store_all(column + j, load(sums.data() + c * CHUNK + j) / load(total + j));
            for (int64_t i = 0; i < n_queries; i++) out[(first + i) * r.d_v + c] = column[i];
        }
    }
    products.end();
}

// What keys get of one item, added to `sums`.
template <class T, class Products>
static void sum_item(const Rule &r, int64_t head, const Item &item, const T *q, const T *k, const float *lse, int64_t window,
              double *sums) {
    std::vector<int32_t> tokens;
    list_keys(r, head, item, tokens);
    Products products(r);
    const float scale = Products::IS_SCALED ? 1.0f : r.scale, factor = r.cap > 0 ? 1.0f : scale;
    std::vector<float> logits(TILE * CHUNK);
    float normaliser[CHUNK];
    products.begin();
    for (int64_t first = item.first; first < item.stop; first += CHUNK) {
        const int64_t n_queries = std::min(CHUNK, item.stop - first);
        products.set_queries(q + first * r.d, n_queries);
        for (int64_t i = 0; i < CHUNK; i++) normaliser[i] = i < n_queries ? lse[first + i] : INFINITY;
        for (size_t start = 0; start < tokens.size(); start += TILE) {
            const int32_t *some = tokens.data() + start;
            const int64_t n = std::min<int64_t>(TILE, tokens.size() - start);
            if (some[0] >= first + n_queries) break;
            if (some[n - 1] + window <= first) continue;
            products.logits(k, some, n, logits.data());
            bound(r, item, first, some, n, window, scale, logits.data());
            for (int64_t i = 0; i < n; i++) {
                vf got = {};
                for (int j = 0; j < NQ; j++) {
                    const vf x = load(logits.data() + i * CHUNK + j * WIDTH) * splat(factor) - load(normaliser + j * WIDTH);
                    got += choose(x > splat(-1e30f), exponential(x), vf{});
                }
                sums[some[i]] += sum(got);
            }
        }
    }
    products.end();
}

template <class T, class Products>
static void attend_all(const Rule &r, const T *q, const T *k, const T *v, T *out, float *lse, int64_t *pairs, int threads) {
    const int64_t n_items = (r.dense_from + r.block - 1) / r.block + (r.s - r.dense_from + r.block - 1) / r.block;
    parallel_for(r.h * n_items, threads, [&](int64_t work) {  // the last items, the longest, come first
        const int64_t number = n_items - 1 - work / r.h, head = work % r.h, owner = head * r.h_kv / r.h;
        attend_item<T, Products>(r, head, item_of(r, number), q + head * r.s * r.d, k + owner * r.s * r.d,
                                 v + owner * r.s * r.d_v, out + head * r.s * r.d_v, lse + head * r.s,
                                 pairs + head * n_items + number);
    });
}

template <class T, class Products>
static void sum_all(const Rule &r, const T *q, const T *k, const float *lse, int64_t window, double *sums, int threads) {
    const int64_t n_items = (r.dense_from + r.block - 1) / r.block + (r.s - r.dense_from + r.block - 1) / r.block;
    parallel_for(r.h, threads, [&](int64_t head) {  // a head's items in their order: sums do not depend on threads
        for (int64_t number = 0; number < n_items; number++)
            sum_item<T, Products>(r, head, item_of(r, number), q + head * r.s * r.d,
                                  k + head * r.h_kv / r.h * r.s * r.d, lse + head * r.s, window, sums + head * r.s);
    });
}

template <class T, class Products>
static void go(const Rule &r, const void *q, const void *k, const void *v, void *out, float *lse, int64_t *pairs,
        int64_t window, double *sums, int threads) {
    if (sums)
        sum_all<T, Products>(r, (const T *)q, (const T *)k, lse, window, sums, threads);
    else
        attend_all<T, Products>(r, (const T *)q, (const T *)k, (const T *)v, (T *)out, lse, pairs, threads);
}


    static void run(int64_t dtype, const Rule &r, const void *q, const void *k, const void *v, void *out, float *lse,
                    int64_t *pairs, int64_t window, double *sums, int threads) {
        if (dtype == FLOAT32) return go<float, Plain<float>>(r, q, k, v, out, lse, pairs, window, sums, threads);
        if (dtype == FLOAT16) return go<f16, Plain<f16>>(r, q, k, v, out, lse, pairs, window, sums, threads);
#ifdef HAS_TILES
        if (may_tile()) return go<bf16, Tiled>(r, q, k, v, out, lse, pairs, window, sums, threads);
#endif
        go<bf16, Plain<bf16>>(r, q, k, v, out, lse, pairs, window, sums, threads);
    }
};

}  // namespace

// `sizes`: the integers of Rule in its order. `sums`: null for attention; else zeros, to which what keys get of the next
// `window` queries is added, by the log-sum-exps that attention wrote.
extern "C" void attend_kept(int64_t dtype, const int64_t *sizes, float scale, float cap, const uint8_t *mask,
                            const uint8_t *met, const void *q, const void *k, const void *v, void *out, float *lse,
                            int64_t *pairs, int64_t window, double *sums, int64_t threads) {
    const Rule r{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5],  sizes[6], sizes[7],
                 sizes[8], sizes[9], sizes[10], sizes[11], scale,    cap,       mask,     met};
    const auto run = r.block <= 32 ? By<32>::run : By<64>::run;  // a lane without a query is lost
    run(dtype, r, q, k, v, out, lse, pairs, window, sums, threads);
}
