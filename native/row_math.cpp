#include "row_math.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

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

constexpr int64_t kBlock = 256;

// The sum of one block, in eight lanes.
double block_sum(const double* weights, int64_t n) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += weights[i + lane];
  for (; i < n; ++i) lanes[i % 8] += weights[i];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

int64_t block_size(int64_t first, int64_t n) { return n - first < kBlock ? n - first : kBlock; }

// The largest value of a whole block; NaN is passed over.
template <class T>
T block_best(const T* row) {
  constexpr int kLanes = 32;
  T lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = row[i + lane] > lanes[lane] ? row[i + lane] : lanes[lane];
  return *std::max_element(lanes, lanes + kLanes);
}

int64_t last_positive(const double* weights, int64_t n) {
  while (n > 0 && !(weights[n - 1] > 0.0)) --n;
  return n - 1;
}

}  // namespace

template <class T>
void log_softmax(const T* row, double* out, int64_t n) {
  const double top = largest(row, n);
  if (!std::isfinite(top)) {
    for (int64_t i = 0; i < n; ++i) out[i] = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i)
    if (row[i] != -std::numeric_limits<T>::infinity()) sum += std::exp(static_cast<double>(row[i]) - top);
  const double log_sum = std::log(sum);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(row[i]) - top - log_sum;
}

double total(const double* weights, int64_t n) {
  double sum = 0.0;
  for (int64_t first = 0; first < n; first += kBlock) sum += block_sum(weights + first, block_size(first, n));
  return sum;
}

int64_t draw(const double* weights, int64_t n, double coin) {
  const double all = total(weights, n);
  if (!(all > 0.0)) return -1;
  const double target = coin * all;
  double before = 0.0;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t size = block_size(first, n);
    const double after = before + block_sum(weights + first, size);
    if (after > target) {
      double running = before;
      for (int64_t i = first; i < first + size; ++i)
        if (weights[i] > 0.0 && (running += weights[i]) > target) return i;
      return first + last_positive(weights + first, size);  // by rounding: the lanes add up to a little more
    }
    before = after;
  }
  return last_positive(weights, n);  // a total of a few denormals can round coin * total up to the total itself
}

template <class T>
void top_ids(const T* row, int64_t n, int64_t k, int64_t* ids) {
  // The best so far in order; a block is looked into only if it holds something better than the worst of them.
  std::vector<T> best(static_cast<size_t>(k), -std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < k; ++i) ids[i] = i;
  int64_t found = 0;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t size = block_size(first, n);
    if (found == k && size == kBlock && !(block_best(row + first) > best[k - 1])) continue;
    for (int64_t i = first; i < first + size; ++i) {
      if (!(found < k ? row[i] == row[i] : row[i] > best[k - 1])) continue;
      int64_t at = found < k ? found++ : k - 1;
      for (; at > 0 && row[i] > best[at - 1]; --at) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
      }
      best[at] = row[i];
      ids[at] = i;
    }
  }
}

template void log_softmax(const float*, double*, int64_t);
template void log_softmax(const double*, double*, int64_t);
template void top_ids(const float*, int64_t, int64_t, int64_t*);
template void top_ids(const double*, int64_t, int64_t, int64_t*);

}  // namespace foredraft
