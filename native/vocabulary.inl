// Reductions over a row of the vocabulary (include after one vector_*.h).
#include <stdint.h>

namespace {

int64_t first_equal(const float* row, int64_t n, float value) {
  int64_t i = 0;
  while (i < n - 1 && row[i] != value) ++i;
  return i;
}

template <class T>
int64_t first_nan(const T* row, int64_t n) {
  int64_t i = 0;
  while (i < n - 1 && row[i] == row[i]) ++i;
  return i;
}

// The lowest id of the largest value; that of a NaN where the row holds one.
int64_t argmax_float(const float* row, int64_t n) {
  const float lowest = -__builtin_inff();
  Vec best[4] = {broadcast(lowest), broadcast(lowest), broadcast(lowest), broadcast(lowest)};
  bool nan = false;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int v = 0; v < 4; ++v) {
      const Vec x = load(row + i + 16 * v);
      nan |= any_nan(x);
      best[v] = max(best[v], x);
    }
  for (; i < n; i += 16) {
    const int lanes_left = n - i < 16 ? static_cast<int>(n - i) : 16;
    const Vec x = blend_first(load_first(row + i, lanes_left), broadcast(lowest), lanes_left);
    nan |= any_nan(x);
    best[0] = max(best[0], x);
  }
  if (nan) return first_nan(row, n);
  return first_equal(row, n, max_lanes(max(max(best[0], best[1]), max(best[2], best[3]))));
}

int64_t argmax_double(const double* row, int64_t n) {
  int64_t best = 0;
  bool nan = false;
  for (int64_t i = 0; i < n; ++i) {
    nan |= row[i] != row[i];
    if (row[i] > row[best]) best = i;
  }
  return nan ? first_nan(row, n) : best;
}

int64_t argmax_of(const float* row, int64_t n) { return argmax_float(row, n); }
int64_t argmax_of(const double* row, int64_t n) { return argmax_double(row, n); }

// Reads n floats (a multiple of 128) as fast as memory gives them; the sum only keeps the loads alive.
float read_memory(const float* p, int64_t n) {
  Vec sums[8];
  for (int v = 0; v < 8; ++v) sums[v] = zero();
  for (int64_t i = 0; i < n; i += 128)
    for (int v = 0; v < 8; ++v) sums[v] = add(sums[v], load(p + i + 16 * v));
  for (int v = 1; v < 8; ++v) sums[0] = add(sums[0], sums[v]);
  return sum_lanes(sums[0]);
}

}  // namespace
