// Bounds of pages of keys, and the largest inner products within them.
#include "simd.h"

namespace {

constexpr int64_t PAGES = 64;  // scored together: the bounds of one task are some 10 to 30 kB

template <class T>
void bounds(int64_t heads, int64_t s, int64_t d, int64_t page_len, const T *keys, int64_t stride, T *low, T *high,
            int n_threads) {
    const int64_t n_pages = (s + page_len - 1) / page_len;
    parallel_for(heads * ((n_pages + PAGES - 1) / PAGES), n_threads, [&](int64_t item) {
        const int64_t head = item % heads, first = item / heads * PAGES;
        const int64_t last = first + PAGES < n_pages ? first + PAGES : n_pages;
        for (int64_t page = first; page < last; page++) {
            const int64_t start = page * page_len, stop = start + page_len < s ? start + page_len : s;
            const T *rows = keys + head * stride;
            for (int64_t at = 0; at < d; at += WIDTH) {
                vf least = load_part(rows + start * d, at, d), most = least;
                for (int64_t row = start + 1; row < stop; row++) {
                    const vf x = load_part(rows + row * d, at, d);
                    least = minimum(x, least);
                    most = maximum(x, most);
                }
                const int64_t place = (head * n_pages + page) * d + at;
                const int n = d - at < WIDTH ? (int)(d - at) : WIDTH;
                for (int i = 0; i < n; i++) {
                    store_one(low + place + i, least[i]);
                    store_one(high + place + i, most[i]);
                }
            }
        }
    });
}

// Scores of G query heads over n pages, four pages at a time.
template <class T, int G>
void scores_of(const float *positive, const float *negative, int64_t d, int64_t padded, const T *low, const T *high,
               int64_t n, float *out, int64_t stride) {
    for (int64_t page = 0; page < n; page += 4) {
        vf sums[G][4] = {};
        for (int64_t at = 0; at < padded; at += WIDTH) {
            vf least[4], most[4];
            for (int64_t i = 0; i < 4; i++) {
                const int64_t row = page + i < n ? page + i : n - 1;
                least[i] = load_part(low + row * d, at, d);
                most[i] = load_part(high + row * d, at, d);
            }
            for (int g = 0; g < G; g++) {
                const vf p = load(positive + g * padded + at), m = load(negative + g * padded + at);
                for (int i = 0; i < 4; i++) sums[g][i] += p * most[i] + m * least[i];
            }
        }
        for (int g = 0; g < G; g++) {
            float four[4];
            four_sums(sums[g], 1.0f, four);
            for (int64_t i = 0; i < 4 && page + i < n; i++) out[g * stride + page + i] = four[i];
        }
    }
}

template <class T>
void scores(int64_t h, int64_t h_kv, int64_t n_pages, int64_t d, const T *q, const T *low, const T *high,
            int64_t stride, float *room, float *out, int n_threads) {
    const int64_t padded = (d + WIDTH - 1) / WIDTH * WIDTH, g = h / h_kv;
    float *positive = room, *negative = room + h * padded;
    for (int64_t head = 0; head < h; head++)
        for (int64_t at = 0; at < padded; at += WIDTH) {
            const vf x = load_part(q + head * d, at, d), zero = {};
            store(positive + head * padded + at, maximum(x, zero));
            store(negative + head * padded + at, minimum(x, zero));
        }
    if (h * n_pages * d < 100000) n_threads = 1;
    parallel_for(h_kv * ((n_pages + PAGES - 1) / PAGES), n_threads, [&](int64_t item) {
        const int64_t head = item % h_kv, first = item / h_kv * PAGES;
        const int64_t n = n_pages - first < PAGES ? n_pages - first : PAGES;
        const T *least = low + head * stride + first * d, *most = high + head * stride + first * d;
        for (int64_t i = 0; i < g;) {
            const int64_t mine = head * g + i, left = g - i;
            const auto over = [&](auto run, int64_t step) {
                run(positive + mine * padded, negative + mine * padded, d, padded, least, most, n,
                    out + mine * n_pages + first, n_pages);
                i += step;
            };
            if (BLOCK >= 4 && left >= 4)
                over(scores_of<T, BLOCK>, BLOCK);
            else if (BLOCK >= 3 && left == 3)
                over(scores_of<T, BLOCK >= 3 ? 3 : 1>, 3);
            else if (left >= 2)
                over(scores_of<T, 2>, 2);
            else
                over(scores_of<T, 1>, 1);
        }
    });
}

}  // namespace

extern "C" void page_bounds(int64_t dtype, int64_t heads, int64_t s, int64_t d, int64_t page_len, const void *keys,
                            int64_t stride, void *low, void *high, int64_t n_threads) {
    if (dtype == FLOAT32)
        bounds(heads, s, d, page_len, (const float *)keys, stride, (float *)low, (float *)high, n_threads);
    else if (dtype == BFLOAT16)
        bounds(heads, s, d, page_len, (const bf16 *)keys, stride, (bf16 *)low, (bf16 *)high, n_threads);
    else
        bounds(heads, s, d, page_len, (const f16 *)keys, stride, (f16 *)low, (f16 *)high, n_threads);
}

// `room` is for 2 * h * (d + 16) floats.
extern "C" void page_scores(int64_t dtype, int64_t h, int64_t h_kv, int64_t n_pages, int64_t d, const void *q,
                            const void *low, const void *high, int64_t stride, float *room, float *out,
                            int64_t n_threads) {
    if (dtype == FLOAT32)
        scores(h, h_kv, n_pages, d, (const float *)q, (const float *)low, (const float *)high, stride, room, out, n_threads);
    else if (dtype == BFLOAT16)
        scores(h, h_kv, n_pages, d, (const bf16 *)q, (const bf16 *)low, (const bf16 *)high, stride, room, out, n_threads);
    else
        scores(h, h_kv, n_pages, d, (const f16 *)q, (const f16 *)low, (const f16 *)high, stride, room, out, n_threads);
}
