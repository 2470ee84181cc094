// Products of pairs of bfloat16 numbers (AVX-512's BF16), where the processor has them: sums in float32, of two numbers
// in the time of one.
//
// Not here: whole tiles of a matrix (`tiles.h`), any op.
#pragma once

#include "simd.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__AVX512F__)
#define HAS_PAIRS 1
#include <cpuid.h>

#define PAIRED __attribute__((target("avx512bf16")))

typedef uint32_t pair;  // two numbers, as they lie beside each other

// Whether this processor has them; asked once.
inline bool may_pair() {
    static const bool may = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
    }();
    return may;
}

// WIDTH sums, to each of which the products of two numbers of x with two of y are added.
PAIRED INLINE vf add_products(vf sums, vi x, vi y) {
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)y);
}
#endif
