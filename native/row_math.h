// The sampler's sums over a row of the vocabulary, in double and in the order of the ids.
#pragma once
#include <cstdint>

namespace foredraft {

// exp(row - max) / sum; returns false where the row holds NaN or no finite number.
template <class T>
bool softmax(const T* row, double* out, int64_t n);
template <class T>
bool log_softmax(const T* row, double* out, int64_t n);
template <class T>
void cumulative_sum(const T* row, double* out, int64_t n);

}  // namespace foredraft
