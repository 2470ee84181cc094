// Attention of one query per head over packed K and V: codes become numbers in registers, never in memory.
//
// A code stands for code * scale + zero, or for an entry of a table times a scale, where a token's entries may be
// brought to length 1 first. Codes of one group lie next to each other, the first in the lowest bits. Keys are grouped
// over tokens, channel by channel, or within a token; values within a token. After the packed tokens come exact ones.
// The tokens of a KV head are cut into chunks, which are joined by their largest logits and sums, always in the same
// order.
#include <memory>
#include <type_traits>

#include "simd.h"
#include "soften.h"

namespace {

enum { BY_CHANNEL = 0, BY_TOKEN = 1, BY_TABLE = 2, BY_UNIT_TABLE = 3 };

// As kernels/packed/attend.py packs them, 64 bits each.
struct Side {
    int64_t kind, bits, group, n;     // of codes; packed tokens
    const uint8_t *codes;             // BY_CHANNEL: (kv, groups, d, group) codes, else (kv, tokens, d) codes
    const char *scales, *zeros;       // BY_CHANNEL: (kv, groups, d), else of tokens and their groups
    int64_t code_stride, scale_stride;  // bytes from head to head
    int64_t token_step, group_step;   // numbers from a token's scale to the next one's, and from a group's
    int64_t scale_type;
    const char *exact;                // (kv, tokens, d), from token n on
    int64_t exact_stride;             // bytes from head to head
    const float *table;               // BY_TABLE, BY_UNIT_TABLE: 16 numbers
};

typedef uint8_t vb __attribute__((vector_size(WIDTH)));
typedef uint64_t vq __attribute__((vector_size(WIDTH >= 8 ? WIDTH : 8)));
typedef uint32_t vw __attribute__((vector_size(WIDTH)));

// What one load of bytes holds: BYTES of them, repeated if a vector has more lanes.
template <int BITS, int BYTES>
struct Load {
    static constexpr int PER = 8 / BITS, REPEATS = WIDTH / BYTES, VECTORS = PER / REPEATS, CODES = BYTES * PER;
    static_assert(VECTORS >= 1, "more lanes than codes");

    // Which of the load's codes is in a lane of vector j.
    static constexpr int place(int j, int lane) { return lane % BYTES * PER + j * REPEATS + lane / BYTES; }

    INLINE vi bytes(const uint8_t *p) {
        vb x;
        if constexpr (BYTES == WIDTH) {
            memcpy(&x, p, sizeof x);
        } else if constexpr (BYTES == 8) {
            uint64_t word;
            memcpy(&word, p, 8);
            const vq many = vq{} + word;
            memcpy(&x, &many, sizeof x);
        } else {
            uint32_t word;
            memcpy(&word, p, 4);
            const vw many = vw{} + word;
            memcpy(&x, &many, sizeof x);
        }
#if defined(__AVX512F__)
        return (vi)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
        return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else
        return __builtin_convertvector(x, vi);
#endif
    }

    INLINE vi codes(vi x, int j) {
        if constexpr (BITS == 8) return x;
        vi shift;
        for (int lane = 0; lane < WIDTH; lane++) shift[lane] = BITS * (j * REPEATS + lane / BYTES);
        return (x >> shift) & ((1 << BITS) - 1);
    }

    INLINE void numbers(const uint8_t *p, vf *out) {
        const vi x = bytes(p);
        for (int j = 0; j < VECTORS; j++) out[j] = __builtin_convertvector(codes(x, j), vf);
    }
};

INLINE float scalar(float x) { return x; }
INLINE float scalar(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
INLINE float scalar(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    return load_one(&x);
#endif
}

INLINE float one_of(const char *p, int64_t i, int64_t type) {
    if (type == FLOAT32) return ((const float *)p)[i];
    return type == BFLOAT16 ? scalar(((const bf16 *)p)[i]) : scalar(((const f16 *)p)[i]);
}

template <class T>
INLINE void strided(const T *p, int64_t stride, int n, float *out) {
    for (int t = 0; t < n; t++) out[t] = scalar(p[t * stride]);
}

INLINE void floats_of(const char *p, int64_t start, int64_t n, int64_t type, float *out) {
    for (int64_t at = 0; at < n; at += WIDTH) {
        const int64_t i = start + at, left = n - at;
        vf x;
        if (type == FLOAT32)
            x = load_part((const float *)p + i, 0, left);
        else if (type == BFLOAT16)
            x = load_part((const bf16 *)p + i, 0, left);
        else
            x = load_part((const f16 *)p + i, 0, left);
        store(out + at, x);
    }
}

// Every `stride`-th number, for the groups of values.
INLINE void column_of(const char *p, int64_t start, int64_t stride, int n, int64_t type, float *out) {
    if (stride == 1) return floats_of(p, start, n, type, out);
    if (type == FLOAT32)
        strided((const float *)p + start, stride, n, out);
    else if (type == BFLOAT16)
        strided((const bf16 *)p + start, stride, n, out);
    else
        strided((const f16 *)p + start, stride, n, out);
}

constexpr int64_t MOST_D = 512;

// x in every lane; a sum with zero would be computed, because of the sign of zero.
INLINE vf every(float x) { return x - vf{}; }

// Logits of one group of tokens whose keys are packed channel by channel.
template <int G, int BITS, int BYTES>
void by_channel(const uint8_t *rows, int64_t row_bytes, int64_t d, const float *factors, const float *base,
                float (*logits)[CHUNK], int at) {
    using L = Load<BITS, BYTES>;
    for (int64_t slice = 0; slice < row_bytes; slice += BYTES) {
        vf sums[G][L::VECTORS] = {};
        for (int64_t c = 0; c < d; c++) {
            vf x[L::VECTORS];
            L::numbers(rows + c * row_bytes + slice, x);
            for (int g = 0; g < G; g++)
                for (int j = 0; j < L::VECTORS; j++) sums[g][j] += every(factors[g * MOST_D + c]) * x[j];
        }
        const int64_t first = at + slice * L::PER;
        for (int g = 0; g < G; g++)
            for (int j = 0; j < L::VECTORS; j++)
                for (int lane = 0; lane < WIDTH; lane++)
                    logits[g][first + L::place(j, lane)] = sums[g][j][lane] + base[g];
    }
}

// Logits of tokens whose keys are packed one by one; queries lie as the codes come out of their loads.
template <int G, int BITS, int BYTES>
void by_token(const Side &k, const uint8_t *codes, const char *scales, const char *zeros, int64_t start, int n,
              int64_t d, const float *turned, float (*logits)[CHUNK]) {
    using L = Load<BITS, BYTES>;
    const int64_t row_bytes = d * BITS / 8, n_groups = d / k.group, loads = k.group * BITS / 8 / BYTES;
    float table[16];
    const bool by_table = k.kind == BY_TABLE || k.kind == BY_UNIT_TABLE;
    if (by_table) memcpy(table, k.table, sizeof table);
    for (int t = 0; t < n; t++) {
        const uint8_t *row = codes + (start + t) * row_bytes;
        vf sums[G] = {}, squares = {};
        const float *x = turned;
        for (int64_t group = 0; group < n_groups; group++) {
            const int64_t at = (start + t) * k.token_step + group * k.group_step;
            const float scale = one_of(scales, at, k.scale_type);
            const float zero = by_table ? 0.0f : one_of(zeros, at, k.scale_type);
            for (int64_t i = 0; i < loads; i++, row += BYTES) {
                const vi bytes = L::bytes(row);
                for (int j = 0; j < L::VECTORS; j++, x += WIDTH) {
                    const vi code = L::codes(bytes, j);
                    vf number;
                    if (by_table) {
#if defined(__AVX512F__)
                        number = (vf)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#else
                        for (int lane = 0; lane < WIDTH; lane++) number[lane] = table[code[lane]];
#endif
                        number *= every(scale);
                        squares += number * number;
                    } else {
                        number = __builtin_convertvector(code, vf) * every(scale) + every(zero);
                    }
                    for (int g = 0; g < G; g++) sums[g] += load(x + g * MOST_D) * number;
                }
            }
        }
        float length = 1;  // of the table's entries alone
        if (k.kind == BY_UNIT_TABLE) {
            const float scale = one_of(scales, (start + t) * k.token_step, k.scale_type);
            length = scale == 0 ? 1 : std::sqrt(sum(squares) / (scale * scale) + 1e-16f);
        }
        for (int g = 0; g < G; g++) logits[g][t] = sum(sums[g]) / length;
    }
}

// Queries in the order in which codes come out of their loads.
template <int BITS, int BYTES>
void turn(const float *q, int64_t d, float *out) {
    using L = Load<BITS, BYTES>;
    for (int64_t first = 0; first < d; first += L::CODES)
        for (int j = 0; j < L::VECTORS; j++)
            for (int lane = 0; lane < WIDTH; lane++) *out++ = q[first + L::place(j, lane)];
}

// Weighted sums of one group's channels of n packed tokens.
template <int G, int BITS, int BYTES>
void sums_of(const uint8_t *codes, int64_t row_bytes, int64_t first, int64_t group_bytes, int n,
             const float (*weights)[CHUNK], const float *base, float *out, int64_t stride) {
    using L = Load<BITS, BYTES>;
    for (int64_t slice = 0; slice < group_bytes; slice += BYTES) {
        vf sums[G][L::VECTORS] = {};
        const uint8_t *p = codes + first * BITS / 8 + slice;
        for (int t = 0; t < n; t++, p += row_bytes) {
            vf x[L::VECTORS];
            L::numbers(p, x);
            for (int g = 0; g < G; g++)
                for (int j = 0; j < L::VECTORS; j++) sums[g][j] += every(weights[g][t]) * x[j];
        }
        for (int g = 0; g < G; g++)
            for (int j = 0; j < L::VECTORS; j++)
                for (int lane = 0; lane < WIDTH; lane++)
                    out[g * stride + first + slice * L::PER + L::place(j, lane)] += sums[g][j][lane] + base[g];
    }
}

// The widest load that divides a group's bytes, for the templates above.
template <class Run>
INLINE void with_load(int64_t bits, int64_t group_bytes, const Run &run) {
    using std::integral_constant;
    constexpr int WIDE = WIDTH, HALF = WIDTH >= 8 ? WIDTH / 2 : WIDTH, QUARTER = WIDTH >= 16 ? WIDTH / 4 : HALF;
    const auto sized = [&](auto b, auto fewest) {
        if (group_bytes % WIDE == 0) return run(b, integral_constant<int, WIDE>{});
        if constexpr (decltype(fewest)::value >= 2)
            if (group_bytes % HALF == 0) return run(b, integral_constant<int, HALF>{});
        if constexpr (decltype(fewest)::value >= 4) return run(b, integral_constant<int, QUARTER>{});
    };
    if (bits == 2)
        sized(integral_constant<int, 2>{}, integral_constant<int, 4>{});
    else if (bits == 4)
        sized(integral_constant<int, 4>{}, integral_constant<int, 2>{});
    else
        sized(integral_constant<int, 8>{}, integral_constant<int, 1>{});
}

// G query heads of a KV head over tokens start to stop, start being the first of a group.
template <class T, int G>
Partial *heads_over(const Side &k, const Side &v, int64_t owner, int64_t d, int64_t start, int64_t stop,
                    const float *q, float cap, float *out, int64_t stride, Partial *partials, int64_t partial_stride) {
    alignas(64) float logits[G][CHUNK], factors[G * MOST_D], column[MOST_D > CHUNK ? MOST_D : CHUNK];
    const int n = stop - start;
    const int n_k = k.n < start ? 0 : (k.n < stop ? k.n - start : n);
    const int n_v = v.n < start ? 0 : (v.n < stop ? v.n - start : n);
    const uint8_t *codes = k.codes + owner * k.code_stride;
    const char *scales = k.scales + owner * k.scale_stride, *zeros = k.zeros + owner * k.scale_stride;
    const int64_t key_bytes = k.group * k.bits / 8;
    if (n_k && k.kind == BY_CHANNEL) {
        for (int t = 0; t < n_k; t += k.group) {
            const int64_t at = (start + t) / k.group;
            float base[G];
            floats_of(scales, at * d, d, k.scale_type, column);
            for (int g = 0; g < G; g++)
                for (int64_t c = 0; c < d; c++) factors[g * MOST_D + c] = q[g * d + c] * column[c];
            floats_of(zeros, at * d, d, k.scale_type, column);
            for (int g = 0; g < G; g++) {
                vf total = {};
                for (int64_t c = 0; c < d; c += WIDTH) total += load_part(q + g * d, c, d) * load_part(column, c, d);
                base[g] = sum(total);
            }
            with_load(k.bits, key_bytes, [&](auto bits, auto bytes) {
                by_channel<G, decltype(bits)::value, decltype(bytes)::value>(codes + at * d * key_bytes, key_bytes, d,
                                                                             factors, base, logits, t);
            });
        }
    } else if (n_k) {
        with_load(k.bits, key_bytes, [&](auto bits, auto bytes) {
            constexpr int BITS = decltype(bits)::value, BYTES = decltype(bytes)::value;
            for (int g = 0; g < G; g++) turn<BITS, BYTES>(q + g * d, d, factors + g * MOST_D);
            by_token<G, BITS, BYTES>(k, codes, scales, zeros, start, n_k, d, factors, logits);
        });
    }
    const T *keys = (const T *)(k.exact + owner * k.exact_stride);
    for (int t = n_k; t < n; t++) {
        const T *row = keys + (start + t - k.n) * d;
        vf sums[G] = {};
        for (int64_t c = 0; c < d; c += WIDTH)
            for (int g = 0; g < G; g++) sums[g] += load_part(q + g * d, c, d) * load_part(row, c, d);
        for (int g = 0; g < G; g++) logits[g][t] = sum(sums[g]);
    }

    if (cap > 0)
        for (int g = 0; g < G; g++) bend(logits[g], n, cap);
    for (int g = 0; g < G; g++) partials[g * partial_stride] = soften(logits[g], n);
    for (int g = 0; g < G; g++) memset(out + g * stride, 0, d * sizeof(float));
    const int64_t row_bytes = d * v.bits / 8, n_groups = n_v ? d / v.group : 0;
    alignas(64) float weights[G][CHUNK];
    for (int64_t group = 0; group < n_groups; group++) {
        float base[G];
        const int64_t at = start * v.token_step + group * v.group_step;
        column_of(v.zeros + owner * v.scale_stride, at, v.token_step, n_v, v.scale_type, column);
        for (int g = 0; g < G; g++) {
            vf total = {};
            for (int t = 0; t < n_v; t += WIDTH) total += load_part(logits[g], t, n_v) * load_part(column, t, n_v);
            base[g] = sum(total);
        }
        column_of(v.scales + owner * v.scale_stride, at, v.token_step, n_v, v.scale_type, column);
        for (int g = 0; g < G; g++)
            for (int t = 0; t < n_v; t++) weights[g][t] = logits[g][t] * column[t];
        with_load(v.bits, v.group * v.bits / 8, [&](auto bits, auto bytes) {
            sums_of<G, decltype(bits)::value, decltype(bytes)::value>(
                v.codes + owner * v.code_stride + start * row_bytes, row_bytes, group * v.group,
                v.group * v.bits / 8, n_v, weights, base, out, stride);
        });
    }
    const T *values = (const T *)(v.exact + owner * v.exact_stride);
    for (int t = n_v; t < n; t++) {
        const T *row = values + (start + t - v.n) * d;
        for (int64_t c = 0; c < d; c += WIDTH) {
            const vf x = load_part(row, c, d);
            for (int g = 0; g < G; g++) {
                float *sums = out + g * stride + c;
                const vf more = every(logits[g][t]) * x;
                if (c + WIDTH <= d)
                    store(sums, load(sums) + more);
                else
                    for (int64_t i = 0; c + i < d; i++) sums[i] += more[i];
            }
        }
    }
    return partials;
}

template <class T>
void attend(int64_t h, int64_t kv, int64_t d, int64_t n, const T *q, float scale, float cap, const Side &k, const Side &v, T *out,
            float *lse, int n_threads) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK, g = h / kv;
    if (n * h * d < 100000) n_threads = 1;
    const std::unique_ptr<float[]> room(new float[h * d * (1 + chunks) + WIDTH]);
    float *queries = room.get(), *sums = queries + h * d;
    const std::unique_ptr<Partial[]> partials(new Partial[h * chunks]);
    for (int64_t i = 0; i < h * d; i++) queries[i] = scalar(q[i]) * scale;

    parallel_for(kv * chunks, n_threads, [&](int64_t item) {
        const int64_t owner = item / chunks, chunk = item % chunks, start = chunk * CHUNK;
        const int64_t stop = start + CHUNK < n ? start + CHUNK : n;
        for (int64_t i = 0; i < g;) {
            const int64_t head = owner * g + i, at = head * chunks + chunk;
            const auto over = [&](auto run, int64_t step) {
                run(k, v, owner, d, start, stop, queries + head * d, cap, sums + at * d, chunks * d, partials.get() + at,
                    chunks);
                i += step;
            };
            const int64_t left = g - i;
            if (BLOCK == 4 && left >= 4)
                over(heads_over<T, BLOCK>, BLOCK);
            else if (BLOCK == 4 && left == 3)
                over(heads_over<T, BLOCK - 1>, BLOCK - 1);
            else if (left >= 2)
                over(heads_over<T, 2>, 2);
            else
                over(heads_over<T, 1>, 1);
        }
    });

    for (int64_t head = 0; head < h; head++) {
        const Partial *mine = partials.get() + head * chunks;
        float highest = -INFINITY, total = 0;
        for (int64_t c = 0; c < chunks; c++) highest = mine[c].highest > highest ? mine[c].highest : highest;
        float *row = queries + head * d;  // no longer needed
        memset(row, 0, d * sizeof(float));
        for (int64_t c = 0; c < chunks; c++) {
            const float factor = std::exp(mine[c].highest - highest);
            total += factor * mine[c].total;
            for (int64_t i = 0; i < d; i++) row[i] += factor * sums[(head * chunks + c) * d + i];
        }
        lse[head] = highest + std::log(total);
        for (int64_t i = 0; i < d; i++) store_one(out + head * d + i, row[i] / total);
    }
}

}  // namespace

extern "C" void attend_packed(int64_t dtype, int64_t h, int64_t kv, int64_t d, int64_t n, const void *q, float scale,
                              float cap, const void *sides, void *out, float *lse, int64_t n_threads) {
    const Side &k = ((const Side *)sides)[0], &v = ((const Side *)sides)[1];
    if (dtype == FLOAT32)
        attend(h, kv, d, n, (const float *)q, scale, cap, k, v, (float *)out, lse, n_threads);
    else if (dtype == BFLOAT16)
        attend(h, kv, d, n, (const bf16 *)q, scale, cap, k, v, (bf16 *)out, lse, n_threads);
    else
        attend(h, kv, d, n, (const f16 *)q, scale, cap, k, v, (f16 *)out, lse, n_threads);
}
