#include "row_math.h"

#include <cmath>
#include <limits>

namespace foredraft {

namespace {

// The largest value; NaN where the row holds one.
template <class T>
double largest(const T* row, int64_t n) {
  T best = -std::numeric_limits<T>::infinity();
  bool nan = false;
  for (int64_t i = 0; i < n; ++i) {
    nan |= row[i] != row[i];
    best = row[i] > best ? row[i] : best;
  }
  return nan ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(best);
}

}  // namespace

template <class T>
bool softmax(const T* row, double* out, int64_t n) {
  const double top = largest(row, n);
  if (!std::isfinite(top)) return false;
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = row[i] == -std::numeric_limits<T>::infinity() ? 0.0 : std::exp(static_cast<double>(row[i]) - top);
    sum += out[i];
  }
  for (int64_t i = 0; i < n; ++i) out[i] /= sum;
  return true;
}

template <class T>
bool log_softmax(const T* row, double* out, int64_t n) {
  const double top = largest(row, n);
  if (!std::isfinite(top)) return false;
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i)
    if (row[i] != -std::numeric_limits<T>::infinity()) sum += std::exp(static_cast<double>(row[i]) - top);
  const double log_sum = std::log(sum);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(row[i]) - top - log_sum;
  return true;
}

template <class T>
void cumulative_sum(const T* row, double* out, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) out[i] = sum += static_cast<double>(row[i]);
}

template bool softmax(const float*, double*, int64_t);
template bool softmax(const double*, double*, int64_t);
template bool log_softmax(const float*, double*, int64_t);
template bool log_softmax(const double*, double*, int64_t);
template void cumulative_sum(const float*, double*, int64_t);
template void cumulative_sum(const double*, double*, int64_t);

}  // namespace foredraft
