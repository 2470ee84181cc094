// The highest of the scores of every row.
#include "highest.h"

namespace {

constexpr int64_t ALONE = 20000;  // scores below which no second thread is woken

}  // namespace

// Row i of `scores` begins at i * stride, in numbers; `out` (rows, k), 0 < k < n, ascending.
extern "C" void top(int64_t rows, int64_t n, int64_t stride, const float *scores, int64_t k, int64_t *out,
                    int64_t n_threads) {
    parallel_for(rows, n * rows < ALONE ? 1 : (int)n_threads, [&](int64_t row) {
        thread_local Choosing room;
        choose_top(scores + row * stride, n, k, room, out + row * k);
    });
}
