// Work for several threads, each near to what it did before.
//
// Not here: what the work is.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "simd.h"

// body(i) for the items whose work is summed up in `work`, one number more than items. A thread has a stretch of equal
// work, the same at every call, since what it read there last time may still be in its cache; then it takes what others
// have left.
template <class Body>
INLINE void parallel_near(const std::vector<int64_t> &work, int n_threads, const Body &body) {
    const int64_t n = (int64_t)work.size() - 1;
    if (n_threads <= 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++) body(i);
        return;
    }
    std::vector<int64_t> ends(n_threads);
    std::vector<std::atomic<int64_t>> next(n_threads);
    for (int t = 0; t < n_threads; t++) {
        next[t] = t ? ends[t - 1] : 0;
        ends[t] = std::lower_bound(work.begin(), work.end() - 1, work.back() * (t + 1) / n_threads) - work.begin();
    }
    ends.back() = n;
#pragma omp parallel for num_threads(n_threads) schedule(static, 1)
    for (int t = 0; t < n_threads; t++)
        for (int i = 0; i < n_threads; i++) {
            const int whose = (t + i) % n_threads;
            for (int64_t at = next[whose]++; at < ends[whose]; at = next[whose]++) body(at);
        }
}
