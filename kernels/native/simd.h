// Vectors of floats for all ops, by the compiler's own vector types: the same source for AVX-512, AVX2, NEON and
// anything else. Memory may hold float32, bfloat16 or float16; arithmetic is in float32.
//
// Not here: any op.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

#if defined(__AVX512F__)
constexpr int BLOCK = 4;  // query heads at once: four rows' sums of each fit into 32 registers, else 16
#else
constexpr int BLOCK = 2;
#endif

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));

// As kernels/build.py counts dtypes.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE vf splat(float x) { return vf{} + x; }
INLINE vf bits_as_float(vi x) { return (vf)x; }
INLINE vi float_as_bits(vf x) { return (vi)x; }
// Lanes of a where the mask (a comparison's result) is set, else of b.
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf minimum(vf a, vf b) { return choose(a < b, a, b); }

INLINE vf load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE vi load_u16(const void *p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vi);
}

INLINE vf load(const bf16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return bits_as_float(load_u16(p) << 16);
#endif
}

INLINE vf widen(vh halves) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)halves);
#else
    // Exponent and fraction moved to their places, the bias made good by a product, which also normalises subnormals.
    const vi x = __builtin_convertvector(halves, vi), magnitude = x & 0x7fff;
    const vf scaled = bits_as_float(magnitude << 13) * splat(0x1p112f);
    const vi special = (vi)(magnitude >= 0x7c00);  // infinite, or not a number
    const vi out = float_as_bits(scaled) | (special & 0x7f800000) | ((x & 0x8000) << 16);
    return bits_as_float(out);
#endif
}

INLINE vf load(const f16 *p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return widen(x);
}

INLINE void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

// The first n < WIDTH values, zeros after them.
template <class T>
INLINE vf load_some(const T *p, int n) {
    T padded[WIDTH];
    memset(padded, 0, sizeof padded);
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

template <class T>
INLINE float load_one(const T *p) {
    return load_some(p, 1)[0];
}

// One value to memory, rounded to nearest even.
INLINE void store_one(float *p, float x) { *p = x; }

INLINE void store_one(bf16 *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    p->bits = nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE void store_one(f16 *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    uint32_t out;
    if (bits > 0x7f800000) {
        out = 0x7e00;
    } else if (bits >= 0x477ff000) {  // rounds to more than the largest
        out = 0x7c00;
    } else if (bits < 0x38800000) {  // subnormal: adding a half shifts the fraction to its place, rounded
        float magic = 0.5f, y;
        memcpy(&y, &bits, 4);
        y += magic;
        uint32_t shifted;
        memcpy(&shifted, &y, 4);
        out = shifted - 0x3f000000;
    } else {
        out = (bits + 0xc8000fff + ((bits >> 13) & 1)) >> 13;
    }
    p->bits = (uint16_t)(sign | out);
}

// Sum of all lanes, pairwise: always in the same order.
INLINE float sum(vf x) {
    float lanes[WIDTH];
    memcpy(lanes, &x, sizeof x);
    for (int n = WIDTH / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return lanes[0];
}

#if defined(__x86_64__)
INLINE __m128 fold(vf x) {
#if defined(__AVX512F__)
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
#elif defined(__AVX2__)
    return _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
    return (__m128)x;
#endif
}
#endif

// The sums of four vectors' lanes, times a factor.
INLINE void four_sums(const vf *x, float factor, float *out) {
#if defined(__x86_64__)
    const __m128 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    const __m128 all = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
    _mm_storeu_ps(out, _mm_mul_ps(all, _mm_set1_ps(factor)));
#else
    for (int i = 0; i < 4; i++) out[i] = sum(x[i]) * factor;
#endif
}

// WIDTH values of a row of d from `at` on, zeros after its end.
template <class T>
INLINE vf load_part(const T *row, int64_t at, int64_t d) {
    return at + WIDTH <= d ? load(row + at) : load_some(row + at, d - at);
}

// e^x for x <= 0 or little above, within 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2 (Cephes' polynomial).
INLINE vf exponential(vf x) {
    x = maximum(x, splat(-87.0f));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vf n = (x * splat(1.44269504088896341f) + magic) - magic;
    vf r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf y = splat(1.9875691500e-4f);
    y = y * r + splat(1.3981999507e-3f);
    y = y * r + splat(8.3334519073e-3f);
    y = y * r + splat(4.1665795894e-2f);
    y = y * r + splat(1.6666665459e-1f);
    y = y * r + splat(5.0000001201e-1f);
    y = y * r * r + r + splat(1.0f);
    const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return y * bits_as_float(power);
}

// body(i) for i in [0, n) on so many threads; no team is woken for one.
template <class Body>
INLINE void parallel_for(int64_t n, int n_threads, const Body &body) {
    if (n_threads <= 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++) body(i);
        return;
    }
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) body(i);
}
