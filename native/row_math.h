// The sampler's sums over a row of the vocabulary, in double and in an order that the row alone decides.
#pragma once
#include <cstdint>

namespace foredraft {

// row - max - log(sum exp(row - max)); NaN everywhere where the row holds one, or no finite number.
template <class T>
void log_softmax(const T* row, double* out, int64_t n);

// The sum of weights [n] >= 0.
double total(const double* weights, int64_t n);

// The id at which the running sum first exceeds coin * total, coin in (0, 1); never one of weight 0; -1 unless the total is above 0.
int64_t draw(const double* weights, int64_t n, double coin);

// The ids of the k <= n largest of row [n], best first, ties to the lowest id; NaN is passed over.
template <class T>
void top_ids(const T* row, int64_t n, int64_t k, int64_t* ids);

}  // namespace foredraft
