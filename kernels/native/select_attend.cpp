// Attention of one query per head over parts, of which some are chosen rows: nothing is copied, K and V are read once.
//
// The tokens of a part's head are cut into chunks of nearly equal length, whatever the number of threads. A chunk takes
// its logits, their softmax and the weighted sum of values for all query heads that share its tokens; chunks are joined
// by their largest logits and sums, always in the same order. Who wants the weights of all tokens gets the logits, and
// from them and what they sum up to the weights.
#include <algorithm>
#include <memory>
#include <vector>

#include "near.h"
#include "soften.h"

namespace {

constexpr int AHEAD = 8;             // rows that are asked for before they are needed; 4 to 16 measured alike
constexpr int64_t LITTLE = 100000;  // products, some 10 us, of which waking a team takes a few

// As select_attend.py packs them, 64 bits each.
struct Part {
    const char *k, *v;                // row 0 of head 0
    int64_t k_stride, v_stride;       // bytes from head to head
    int64_t heads, n;                 // h_kv or h; tokens of each, places in idx included
    const int64_t *idx;               // (heads, n) rows, below 0: none; null: rows 0 to n
    const char *k_late, *v_late;      // rows from n_rows on; null: there are none
    int64_t k_late_stride, v_late_stride, n_rows;  // bytes from head to head; rows of k and v
    int64_t kv_heads;                 // heads of k and v, or 1 where all heads' rows follow each other
    const int64_t *starts, *counts;   // (heads), a head's first row and its rows, at most n; null: rows 0 to n
    const float *bias;                // (heads, n), added to logits; null: nothing is
    int64_t bias_stride;              // numbers from head to head
    int64_t v_row;                    // numbers from value to value: more than it has where values lie within keys
};

INLINE int64_t padded_to(int64_t d) { return (d + WIDTH - 1) / WIDTH * WIDTH; }  // whole vectors

INLINE int64_t chunks_of(int64_t n) { return (n + CHUNK - 1) / CHUNK; }

// What one thread does at a time: a head's tokens from start to stop.
struct Chunk {
    const Part *part;
    int64_t head, place, start, stop;  // place among all chunks of a head; one with fewer rows leaves some empty
    int64_t before;                    // tokens of a head in the parts in front of it
};

// All chunks, head by head: a thread that takes neighbours finds their queries and sums in its cache.
std::vector<Chunk> chunks_in(int64_t n_parts, const Part *parts) {
    std::vector<Chunk> found;
    int64_t place = 0, before = 0;
    for (const Part *part = parts; part < parts + n_parts; part++) {
        for (int64_t head = 0; head < part->heads; head++) {
            const int64_t length = part->counts ? part->counts[head] : part->n, n = chunks_of(length);
            for (int64_t i = 0; i < n; i++)
                found.push_back({part, head, place + i, length * i / n, length * (i + 1) / n, before});
        }
        place += chunks_of(part->n);
        before += part->n;
    }
    return found;
}

INLINE void ask_for(const void *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i);
}

// Scaled logits of G query heads (padded to whole vectors) over n rows; `rows` is padded to whole fours.
template <class T, int G>
INLINE void logits_of(const float *q, int64_t d, const T *const *rows, const T *const *values, int64_t d_v, int n,
                      float scale, float (*logits)[CHUNK], bool first) {
    const int64_t padded = padded_to(d), bytes = d * sizeof(T), value_bytes = d_v * sizeof(T);
    for (int t = 0; t < n; t += 4) {
        if (first)
            for (int i = 0; i < 4; i++) {
                if (t + AHEAD + i < n) ask_for(rows[t + AHEAD + i], bytes);
                ask_for(values[t + i], value_bytes);
            }
        vf sums[G][4] = {};
        for (int64_t at = 0; at < padded; at += WIDTH) {
            vf k[4];
            for (int i = 0; i < 4; i++) k[i] = load_part(rows[t + i], at, d);
            for (int g = 0; g < G; g++) {
                const vf x = load(q + g * padded + at);
                for (int i = 0; i < 4; i++) sums[g][i] += x * k[i];
            }
        }
        for (int g = 0; g < G; g++) four_sums(sums[g], scale, logits[g] + t);
    }
}

// Weighted sums of N vectors of the rows, from column `at` on.
template <class T, int G, int N>
INLINE void columns_of(const float (*weights)[CHUNK], const T *const *rows, int n, int64_t at, int64_t d, float *out,
                       int64_t stride) {
    vf sums[G][N] = {};
    if (at + N * WIDTH <= d) {
        for (int t = 0; t < n; t++)
            for (int i = 0; i < N; i++) {
                const vf x = load(rows[t] + at + i * WIDTH);
                for (int g = 0; g < G; g++) sums[g][i] += splat(weights[g][t]) * x;
            }
    } else {
        for (int t = 0; t < n; t++)
            for (int i = 0; i < N; i++) {
                const vf x = load_part(rows[t], at + i * WIDTH, d);
                for (int g = 0; g < G; g++) sums[g][i] += splat(weights[g][t]) * x;
            }
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < N; i++) store(out + g * stride + at + i * WIDTH, sums[g][i]);
}

template <class T, int G>
INLINE void sums_of(const float (*weights)[CHUNK], const T *const *rows, int n, int64_t d, float *out, int64_t stride) {
    constexpr int MOST = 16 / G >= 8 ? 8 : 4;
    const int64_t padded = padded_to(d);
    int64_t at = 0;
    for (; at + MOST * WIDTH <= padded; at += MOST * WIDTH) columns_of<T, G, MOST>(weights, rows, n, at, d, out, stride);
    if (MOST == 8 && at + 4 * WIDTH <= padded) {
        columns_of<T, G, 4>(weights, rows, n, at, d, out, stride);
        at += 4 * WIDTH;
    }
    for (; at < padded; at += WIDTH) columns_of<T, G, 1>(weights, rows, n, at, d, out, stride);
}

// Where weights go: query heads' rows, and the places of a chunk's tokens in them.
struct Weighing {
    float *rows;  // null: nobody wants them
    int64_t stride;
    const int32_t *places;
};

// G of the query heads that share a chunk's rows.
template <class T, int G>
void heads_over(const float *q, int64_t d, const T *const *k, const T *const *v, int64_t d_v, const float *bias, int n,
                float scale, float cap, float *out, int64_t stride, Partial *partials, int64_t partial_stride, bool first,
                Weighing weighing) {
    alignas(64) float weights[G][CHUNK];
    logits_of<T, G>(q, d, k, v, d_v, n, scale, weights, first);
    if (cap > 0)
        for (int g = 0; g < G; g++) bend(weights[g], n, cap);
    if (bias)
        for (int g = 0; g < G; g++)
            for (int t = 0; t < n; t++) weights[g][t] += bias[t];
    if (weighing.rows)
        for (int g = 0; g < G; g++)
            for (int t = 0; t < n; t++) weighing.rows[g * weighing.stride + weighing.places[t]] = weights[g][t];
    for (int g = 0; g < G; g++) partials[g * partial_stride] = soften(weights[g], n);
    sums_of<T, G>(weights, v, n, d_v, out, stride);
}

// `weighed`: null, or (h, tokens of all parts) for the weights.
template <class T>
void attend(int64_t h, int64_t d, int64_t d_v, const T *q, float scale, float cap, int64_t n_parts, const Part *parts, T *out,
            float *lse, float *weighed, int n_threads) {
    const int64_t padded = padded_to(d), wide = padded_to(d_v);  // of queries, of sums
    const std::vector<Chunk> items = chunks_in(n_parts, parts);
    std::vector<int64_t> work(1);  // of the items so far
    for (const Chunk &item : items) work.push_back(work.back() + (item.stop - item.start) * (h / item.part->heads) * d);
    if (work.back() < LITTLE) n_threads = 1;
    int64_t chunks = 0, tokens = 0;
    for (int64_t p = 0; p < n_parts; p++) chunks += chunks_of(parts[p].n), tokens += parts[p].n;
    if (weighed) std::fill(weighed, weighed + h * tokens, -INFINITY);  // there may be places without a token

    // Queries, then sums of every query head's chunks, then what joins them.
    const std::unique_ptr<float[]> room(new float[h * (padded + wide * (1 + chunks)) + 16]);
    float *queries = room.get(), *joined = queries + h * padded, *sums = joined + h * wide;
    std::vector<Partial> partials(h * chunks, {-INFINITY, 0});
    for (int64_t head = 0; head < h; head++)
        for (int64_t at = 0; at < padded; at += WIDTH) store(queries + head * padded + at, load_part(q + head * d, at, d));

    parallel_near(work, n_threads, [&](int64_t number) {
        const Part *part = items[number].part;
        const int64_t head = items[number].head, first = part->starts ? part->starts[head] : 0;
        const int64_t owner = head * part->kv_heads / part->heads;
        const T *k = (const T *)(part->k + owner * part->k_stride), *v = (const T *)(part->v + owner * part->v_stride);
        const T *k_late = (const T *)(part->k_late + owner * part->k_late_stride);
        const T *v_late = (const T *)(part->v_late + owner * part->v_late_stride);
        const int64_t v_row = part->v_row;

        const T *k_rows[CHUNK + 4], *v_rows[CHUNK + 4];
        float biases[CHUNK];
        int32_t places[CHUNK];
        int n = 0;
        for (int64_t t = items[number].start; t < items[number].stop; t++) {
            const int64_t row = part->idx ? part->idx[head * part->n + t] : first + t;
            if (row < 0) continue;
            if (part->bias) biases[n] = part->bias[head * part->bias_stride + t];
            places[n] = (int32_t)(items[number].before + t);
            const bool is_late = row >= part->n_rows;
            k_rows[n] = is_late ? k_late + (row - part->n_rows) * d : k + row * d;
            v_rows[n++] = is_late ? v_late + (row - part->n_rows) * v_row : v + row * v_row;
        }
        const int64_t g = h / part->heads;
        float *mine = sums + (head * g * chunks + items[number].place) * wide;
        Partial *joins = partials.data() + head * g * chunks + items[number].place;
        if (n == 0) return;
        for (int i = n; i < n + 4; i++) k_rows[i] = k_rows[n - 1], v_rows[i] = v_rows[n - 1];
        for (int i = 0; i < AHEAD && i < n && part->idx; i++) ask_for(k_rows[i], d * sizeof(T));
        const float *asking = queries + head * g * padded;
        for (int64_t i = 0; i < g;) {
            const int64_t left = g - i;
            const auto over = [&](auto run, int64_t step) {
                run(asking + i * padded, d, k_rows, v_rows, d_v, part->bias ? biases : nullptr, n, scale, cap,
                    mine + i * chunks * wide, chunks * wide, joins + i * chunks, chunks, i == 0 && part->idx,
                    Weighing{weighed ? weighed + (head * g + i) * tokens : nullptr, tokens, places});
                i += step;
            };
#if defined(__AVX512F__)
            if (left >= 4) {
                over(heads_over<T, 4>, 4);
                continue;
            }
            if (left == 3) {
                over(heads_over<T, 3>, 3);
                continue;
            }
#endif
            if (left >= 2)
                over(heads_over<T, 2>, 2);
            else
                over(heads_over<T, 1>, 1);
        }
    });

    for (int64_t head = 0; head < h; head++) {
        const Partial *mine = partials.data() + head * chunks;
        float highest = -INFINITY, total = 0;
        for (int64_t c = 0; c < chunks; c++) highest = mine[c].highest > highest ? mine[c].highest : highest;
        float *row = joined + head * wide;
        memset(row, 0, wide * sizeof(float));
        for (int64_t c = 0; c < chunks; c++) {
            if (mine[c].total == 0) continue;
            const float factor = std::exp(mine[c].highest - highest);
            total += factor * mine[c].total;
            for (int64_t at = 0; at < wide; at += WIDTH)
                store(row + at, load(row + at) + splat(factor) * load(sums + (head * chunks + c) * wide + at));
        }
        lse[head] = total > 0 ? highest + std::log(total) : -INFINITY;
        for (int64_t i = 0; i < d_v; i++) store_one(out + head * d_v + i, total > 0 ? row[i] / total : 0.0f);
        for (int64_t t = 0; weighed && t < tokens; t += WIDTH) {
            float *some = weighed + head * tokens + t;
            const int64_t n = std::min<int64_t>(WIDTH, tokens - t);
            const vf logits = load_some(some, (int)n), weights = exponential(logits - splat(lse[head]));
            const vf found = choose(logits > splat(-INFINITY), weights, vf{});
            memcpy(some, &found, n * sizeof(float));
        }
    }
}

}  // namespace

// Queries of n rows (n, h, d), each over parts of its own: those of row i end at ends[i]; out (n, h, d_v). A row without
// parts is left as it is. Each row's numbers are those that it has alone, whatever the number of threads. weighed[i] is
// null, or where row i's weights go, (h, tokens of its parts).
extern "C" void attend_rows(int64_t dtype, int64_t n, int64_t h, int64_t d, int64_t d_v, const void *q, float scale, float cap,
                            const int64_t *ends, const void *parts, void *out, float *lse, float *const *weighed,
                            int64_t n_threads) {
    const Part *all = (const Part *)parts;
    const auto first_of = [&](int64_t i) { return i ? ends[i - 1] : 0; };
    std::vector<int64_t> own(n);
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t p = first_of(i); p < ends[i]; p++) own[i] += all[p].n * h * d;
        total += own[i];
    }
    if (total < LITTLE) n_threads = 1;
    // A row with more than a thread's share is every thread's; the others are shared out whole.
    std::vector<int64_t> large, small, work(1);
    for (int64_t i = 0; i < n; i++) {
        if (ends[i] == first_of(i)) continue;
        if (own[i] * n_threads > total) {
            large.push_back(i);
        } else {
            small.push_back(i);
            work.push_back(work.back() + own[i]);
        }
    }
    const auto run = [&](const auto *queries, auto *outs) {
        const auto row = [&](int64_t i, int threads) {
            attend(h, d, d_v, queries + i * h * d, scale, cap, ends[i] - first_of(i), all + first_of(i), outs + i * h * d_v,
                   lse + i * h, weighed[i], threads);
        };
        for (const int64_t i : large) row(i, (int)n_threads);
        parallel_near(work, (int)n_threads, [&](int64_t at) { row(small[at], 1); });
    };
    if (dtype == FLOAT32)
        run((const float *)q, (float *)out);
    else if (dtype == BFLOAT16)
        run((const bf16 *)q, (bf16 *)out);
    else
        run((const f16 *)q, (f16 *)out);
}

// Many queries (n, h, d) over one part each: that of query i has the places idx + i * heads * n and biases alike.
extern "C" void attend_each(int64_t dtype, int64_t n, int64_t h, int64_t d, int64_t d_v, const void *q, float scale, float cap,
                            const void *part, void *out, float *lse, int64_t n_threads) {
    const Part all = *(const Part *)part;
    const auto run = [&](const auto *queries, auto *outs) {
        parallel_for(n, (int)n_threads, [&](int64_t i) {
            Part own = all;
            own.idx += i * all.heads * all.n;
            if (own.bias) own.bias += i * all.heads * all.bias_stride;
            attend(h, d, d_v, queries + i * h * d, scale, cap, 1, &own, outs + i * h * d_v, lse + i * h, (float *)nullptr, 1);
        });
    };
    if (dtype == FLOAT32)
        run((const float *)q, (float *)out);
    else if (dtype == BFLOAT16)
        run((const bf16 *)q, (bf16 *)out);
    else
        run((const f16 *)q, (f16 *)out);
}
