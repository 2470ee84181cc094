// Softmax piece by piece: a piece's weights, and what joins pieces; logits that bend towards a cap before.
//
// Not here: logits, sums of values.
#pragma once

#include <cmath>

#include "simd.h"

constexpr int CHUNK = 256;  // tokens at most: their K and V rows stay in the second-level cache between two blocks

struct Partial {
    float highest, total;
};

// cap * tanh(x / cap), of room for whole vectors.
INLINE void bend(float *logits, int n, float cap) {
    for (int t = 0; t < n; t += WIDTH) {
        const vf x = load(logits + t), size = maximum(x, -x);
        const vf e = exponential(size * splat(-2.0f / cap));  // of what is not above 0
        const vf bent = splat(cap) * (splat(1.0f) - e) / (splat(1.0f) + e);
        store(logits + t, choose(x < vf{}, -bent, bent));
    }
}

// Logits become weights that are not yet divided by their sum.
INLINE Partial soften(float *logits, int n) {
    vf highest = splat(-INFINITY);
    const int padded = (n + WIDTH - 1) / WIDTH * WIDTH;
    for (int t = n; t < padded; t++) logits[t] = -INFINITY;
    for (int t = 0; t < padded; t += WIDTH) highest = maximum(highest, load(logits + t));
    float top = -INFINITY;
    for (int i = 0; i < WIDTH; i++) top = highest[i] > top ? highest[i] : top;
    vf total = {};
    for (int t = 0; t < padded; t += WIDTH) {
        vf weight = exponential(load(logits + t) - splat(top));
        if (t + WIDTH > n)
            for (int i = n - t; i < WIDTH; i++) weight[i] = 0;
        store(logits + t, weight);
        total += weight;
    }
    return {top, sum(total)};
}
