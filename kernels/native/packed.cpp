// Attention of one query per head over packed K and V: codes become numbers in registers, never in memory.
//
// A code stands for code * scale + zero, or for an entry of a table times a scale, where a token's entries may be
// brought to length 1 first, or it is a float of its own, times a scale. Codes of one group lie next to each other, the
// first in the lowest bits. Keys are grouped over tokens, channel by channel, or within a token; values within a token.
// After the packed tokens come exact ones.
// The tokens of a KV head are cut into chunks, which are joined by their largest logits and sums, always in the same
// order.
#include <memory>
#include <type_traits>

#include "simd.h"
#include "soften.h"

namespace {

enum { BY_CHANNEL = 0, BY_TOKEN = 1, BY_TABLE = 2, BY_UNIT_TABLE = 3, BY_FLOAT = 4 };
enum { BYTE = 3 };  // of scales that are looked up, after the types of simd.h

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
    const float *table;               // BY_TABLE, BY_UNIT_TABLE, floats of 4 bits: 16 numbers
    const float *scale_table;         // 256 numbers, where scales are bytes
    int64_t exponent;                 // bits of it in a float of 8
};

// What numbers are made of codes by.
enum Code { UNIFORM, TABLE, UNIT, E4M3, E5M2 };

typedef uint8_t vb __attribute__((vector_size(WIDTH)));
typedef int8_t vc __attribute__((vector_size(WIDTH)));
typedef int16_t vs __attribute__((vector_size(2 * WIDTH)));
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

};

INLINE vf looked_up(const float *table, vi code) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)code);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
    vf number;
    for (int lane = 0; lane < WIDTH; lane++) number[lane] = table[code[lane]];
    return number;
#endif
}

// Floats of 8 bits as float16: e5m2 is its upper half. An e4m3 moved to its place lacks a bit of the exponent, and so is
// 2^8 too small; the bit is that of its sign, to be cleared, but for the code of no number, whose exponent is to be full:
// adding one to the code carries into it.
template <Code CODE>
INLINE vf of_floats(const uint8_t *p) {
    vb x;
    memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
    const vs code = (vs)_mm256_cvtepi8_epi16((__m128i)x);
#elif defined(__AVX2__)
    const vs code = (vs)_mm_cvtepi8_epi16(_mm_cvtsi64_si128((int64_t)x));
#else
    const vs code = __builtin_convertvector((vc)x, vs);
#endif
    if (CODE == E5M2) return widen((vh)(code << 8));
    const vs moved = code << 7;
    return widen((vh)(moved ^ ((moved + 0x80) & 0x4000)));
}

// A load's codes as numbers, but for their scales.
template <Code OF, int OF_BITS, int OF_BYTES>
struct Numbers : Load<OF_BITS, OF_BYTES> {
    using L = Load<OF_BITS, OF_BYTES>;
    static constexpr Code CODE = OF;
    static constexpr int BITS = OF_BITS, BYTES = OF_BYTES;
    static constexpr float LIFT = OF == E4M3 ? 256 : 1;  // what a scale makes good

    INLINE auto read(const uint8_t *p) {
        if constexpr (CODE == E4M3 || CODE == E5M2)
            return of_floats<CODE>(p);
        else
            return L::bytes(p);
    }

    template <class Read>
    INLINE vf number(Read x, int j, const float *table) {
        if constexpr (CODE == E4M3 || CODE == E5M2)
            return x;
        else if constexpr (CODE == UNIFORM)
            return __builtin_convertvector(L::codes(x, j), vf);
        else
            return looked_up(table, L::codes(x, j));
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

INLINE float one_of(const Side &side, const char *p, int64_t i) {
    if (side.scale_type == FLOAT32) return ((const float *)p)[i];
    if (side.scale_type == BYTE) return side.scale_table[(uint8_t)p[i]];
    return side.scale_type == BFLOAT16 ? scalar(((const bf16 *)p)[i]) : scalar(((const f16 *)p)[i]);
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
INLINE void column_of(const Side &side, const char *p, int64_t start, int n, float *out) {
    const int64_t stride = side.token_step, type = side.scale_type;
    if (type == BYTE) {
        for (int t = 0; t < n; t++) out[t] = side.scale_table[(uint8_t)p[start + t * stride]];
        return;
    }
    if (stride == 1) return floats_of(p, start, n, type, out);
    if (type == FLOAT32)
        strided((const float *)p + start, stride, n, out);
    else if (type == BFLOAT16)
        strided((const bf16 *)p + start, stride, n, out);
    else
        strided((const f16 *)p + start, stride, n, out);
}

constexpr int64_t MOST_D = 512;
constexpr int AT_ONCE = 4;  // tokens, whose sums are added up together; they divide a chunk

// x in every lane; a sum with zero would be computed, because of the sign of zero.
INLINE vf every(float x) { return x - vf{}; }

// Logits of one group of tokens whose keys are packed channel by channel.
template <int G, class L>
void by_channel(const uint8_t *rows, int64_t row_bytes, int64_t d, const float *factors, const float *base,
                float (*logits)[CHUNK], int at) {
    for (int64_t slice = 0; slice < row_bytes; slice += L::BYTES) {
        vf sums[G][L::VECTORS] = {};
        for (int64_t c = 0; c < d; c++) {
            const auto x = L::read(rows + c * row_bytes + slice);
            for (int j = 0; j < L::VECTORS; j++) {
                const vf number = L::number(x, j, nullptr);
                for (int g = 0; g < G; g++) sums[g][j] += every(factors[g * MOST_D + c]) * number;
            }
        }
        const int64_t first = at + slice * L::PER;
        for (int g = 0; g < G; g++)
            for (int j = 0; j < L::VECTORS; j++)
                for (int lane = 0; lane < WIDTH; lane++)
                    logits[g][first + L::place(j, lane)] = sums[g][j][lane] + base[g];
    }
}

// Logits of tokens whose keys are packed one by one; queries lie as the codes come out of their loads. Floats of a token
// with one scale are multiplied by it when they are one logit.
template <int G, class L, bool IS_LATE>
void by_token(const Side &k, const uint8_t *codes, const char *scales, const char *zeros, int64_t start, int n,
              int64_t d, const float *turned, float (*logits)[CHUNK]) {
    const int64_t row_bytes = d * L::BITS / 8, n_groups = d / k.group;
    const int64_t loads = k.group * L::BITS / 8 / L::BYTES;
    float table[16];
    if (L::CODE == TABLE || L::CODE == UNIT) memcpy(table, k.table, sizeof table);
    for (int t = 0; t < n; t += AT_ONCE) {
        int64_t token[AT_ONCE];  // the last one again, where none is left
        for (int i = 0; i < AT_ONCE; i++) token[i] = start + (t + i < n ? t + i : n - 1);
        vf sums[G][AT_ONCE] = {}, squares[AT_ONCE] = {};
        float scale[AT_ONCE] = {}, zero[AT_ONCE] = {};
        const float *query = turned;
        int64_t at = 0;
        for (int64_t group = 0; group < n_groups; group++) {
            for (int i = 0; i < AT_ONCE; i++) {
                const int64_t number = token[i] * k.token_step + group * k.group_step;
                scale[i] = one_of(k, scales, number) * L::LIFT;
                if (L::CODE == UNIFORM) zero[i] = one_of(k, zeros, number);
            }
            for (int64_t load_of = 0; load_of < loads; load_of++, at += L::BYTES) {
                decltype(L::read(codes)) x[AT_ONCE];
                for (int i = 0; i < AT_ONCE; i++) x[i] = L::read(codes + token[i] * row_bytes + at);
                for (int j = 0; j < L::VECTORS; j++, query += WIDTH) {
                    vf number[AT_ONCE];
                    for (int i = 0; i < AT_ONCE; i++) {
                        number[i] = L::number(x[i], j, table);
                        if (L::CODE == UNIFORM)
                            number[i] = number[i] * every(scale[i]) + every(zero[i]);
                        else if (!IS_LATE)
                            number[i] *= every(scale[i]);
                        if (L::CODE == UNIT) squares[i] += number[i] * number[i];
                    }
                    for (int g = 0; g < G; g++) {
                        const vf asked = load(query + g * MOST_D);
                        for (int i = 0; i < AT_ONCE; i++) sums[g][i] += asked * number[i];
                    }
                }
            }
        }
        for (int g = 0; g < G; g++) four_sums(sums[g], 1, logits[g] + t);
        for (int i = 0; i < AT_ONCE; i++) {
            float length = 1;  // of the table's entries alone
            if (L::CODE == UNIT) {
                const float norm = one_of(k, scales, token[i] * k.token_step);
                length = norm == 0 ? 1 : std::sqrt(sum(squares[i]) / (norm * norm) + 1e-16f);
            }
            for (int g = 0; g < G; g++) {
                if (IS_LATE) logits[g][t + i] *= scale[i];
                if (L::CODE == UNIT) logits[g][t + i] /= length;
            }
        }
    }
}

// Queries in the order in which codes come out of their loads.
template <class L>
void turn(const float *q, int64_t d, float *out) {
    for (int64_t first = 0; first < d; first += L::CODES)
        for (int j = 0; j < L::VECTORS; j++)
            for (int lane = 0; lane < WIDTH; lane++) *out++ = q[first + L::place(j, lane)];
}

// Weighted sums of the channels in N loads of each of n packed tokens.
template <int G, class L, int N>
INLINE void sums_of_loads(const float *entries, const uint8_t *codes, int64_t row_bytes, int n,
                          const float (*weights)[CHUNK], const float *base, float *out, int64_t stride) {
    float table[16];
    if (L::CODE == TABLE) memcpy(table, entries, sizeof table);
    vf sums[G][N][L::VECTORS] = {};
    for (int t = 0; t < n; t++, codes += row_bytes)
        for (int i = 0; i < N; i++) {
            const auto x = L::read(codes + i * L::BYTES);
            for (int j = 0; j < L::VECTORS; j++) {
                const vf number = L::number(x, j, table);
                for (int g = 0; g < G; g++) sums[g][i][j] += every(weights[g][t]) * number;
            }
        }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < N; i++)
            for (int j = 0; j < L::VECTORS; j++)
                for (int lane = 0; lane < WIDTH; lane++)
                    out[g * stride + i * L::CODES + L::place(j, lane)] += sums[g][i][j][lane] + base[g];
}

// Those of one group's channels, from `first` on.
template <int G, class L>
void sums_of(const Side &v, const uint8_t *codes, int64_t row_bytes, int64_t first, int n,
             const float (*weights)[CHUNK], const float *base, float *out, int64_t stride) {
    constexpr int MOST = L::VECTORS < 4 ? 4 / L::VECTORS : 1;  // loads, whose sums registers have room for
    const int64_t end = (first + v.group) * L::BITS / 8;
    int64_t at = first * L::BITS / 8;
    for (; at + MOST * L::BYTES <= end; at += MOST * L::BYTES)
        sums_of_loads<G, L, MOST>(v.table, codes + at, row_bytes, n, weights, base, out + at * L::PER, stride);
    for (; at < end; at += L::BYTES)
        sums_of_loads<G, L, 1>(v.table, codes + at, row_bytes, n, weights, base, out + at * L::PER, stride);
}

// The numbers of a side's codes by the widest load that divides a group's bytes, for the templates above.
template <class Run>
INLINE void with_numbers(const Side &side, const Run &run) {
    using std::integral_constant;
    constexpr int WIDE = WIDTH, HALF = WIDTH >= 8 ? WIDTH / 2 : WIDTH, QUARTER = WIDTH >= 16 ? WIDTH / 4 : HALF;
    const int64_t group_bytes = side.group * side.bits / 8;
    const auto of_code = [&](auto code) {
        constexpr Code CODE = decltype(code)::value;
        if (side.bits == 2) {
            if (group_bytes % WIDE == 0) return run(Numbers<CODE, 2, WIDE>{});
            if (group_bytes % HALF == 0) return run(Numbers<CODE, 2, HALF>{});
            return run(Numbers<CODE, 2, QUARTER>{});
        }
        if (group_bytes % WIDE == 0) return run(Numbers<CODE, 4, WIDE>{});
        if (group_bytes % HALF == 0) return run(Numbers<CODE, 4, HALF>{});
    };
    if (side.bits < 8 && side.kind < BY_TABLE) return of_code(integral_constant<Code, UNIFORM>{});
    if (side.bits < 8 && side.kind == BY_UNIT_TABLE) return of_code(integral_constant<Code, UNIT>{});
    if (side.bits < 8) return of_code(integral_constant<Code, TABLE>{});
    if (side.kind != BY_FLOAT) return run(Numbers<UNIFORM, 8, WIDE>{});
    if (side.exponent == 4) return run(Numbers<E4M3, 8, WIDE>{});
    return run(Numbers<E5M2, 8, WIDE>{});
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
            with_numbers(k, [&](auto numbers) {
                using L = decltype(numbers);
                if constexpr (L::CODE == UNIFORM)
                    by_channel<G, L>(codes + at * d * key_bytes, key_bytes, d, factors, base, logits, t);
            });
        }
    } else if (n_k) {
        with_numbers(k, [&](auto numbers) {
            using L = decltype(numbers);
            for (int g = 0; g < G; g++) turn<L>(q + g * d, d, factors + g * MOST_D);
            if constexpr (L::CODE == E4M3 || L::CODE == E5M2)
                if (k.group == d) return by_token<G, L, true>(k, codes, scales, zeros, start, n_k, d, factors, logits);
            by_token<G, L, false>(k, codes, scales, zeros, start, n_k, d, factors, logits);
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
        float base[G] = {};
        const int64_t at = start * v.token_step + group * v.group_step;
        if (v.kind == BY_TOKEN) {
            column_of(v, v.zeros + owner * v.scale_stride, at, n_v, column);
            for (int g = 0; g < G; g++) {
                vf total = {};
                for (int t = 0; t < n_v; t += WIDTH) total += load_part(logits[g], t, n_v) * load_part(column, t, n_v);
                base[g] = sum(total);
            }
        }
        column_of(v, v.scales + owner * v.scale_stride, at, n_v, column);
        with_numbers(v, [&](auto numbers) {
            using L = decltype(numbers);
            for (int g = 0; g < G; g++)
                for (int t = 0; t < n_v; t++) weights[g][t] = logits[g][t] * (column[t] * L::LIFT);
            if constexpr (L::CODE != UNIT)
                sums_of<G, L>(v, v.codes + owner * v.code_stride + start * row_bytes, row_bytes, group * v.group, n_v,
                              weights, base, out, stride);
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
