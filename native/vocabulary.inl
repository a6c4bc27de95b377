// Reductions over a row of the vocabulary: argmax, and argmax under Gumbel noise (include after one vector_*.h).
#include <math.h>

#include "kernel_table.h"

namespace {

int64_t first_equal(const float* row, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i)
    if (row[i] == value) return i;
  return -1;
}

// The lowest id of the largest value; -1 where the row holds NaN.
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
  if (nan) return -1;
  return first_equal(row, n, max_lanes(max(max(best[0], best[1]), max(best[2], best[3]))));
}

int64_t argmax_double(const double* row, int64_t n) {
  int64_t best = 0;
  bool nan = false;
  for (int64_t i = 0; i < n; ++i) {
    nan |= row[i] != row[i];
    if (row[i] > row[best]) best = i;
  }
  return nan ? -1 : best;
}

int64_t argmax_of(const float* row, int64_t n) { return argmax_float(row, n); }
int64_t argmax_of(const double* row, int64_t n) { return argmax_double(row, n); }

constexpr int kPhiloxLanes = 32;

// Philox4x32-10 (Salmon et al., SC 2011); the counter layout is core/coins.py's: (block, position low, stream, position high).
void philox_blocks(uint64_t seed, uint64_t position, uint32_t stream, int64_t first_block, uint32_t (&w)[4][kPhiloxLanes]) {
  for (int j = 0; j < kPhiloxLanes; ++j) {
    w[0][j] = static_cast<uint32_t>(first_block + j);
    w[1][j] = static_cast<uint32_t>(position);
    w[2][j] = stream;
    w[3][j] = static_cast<uint32_t>(position >> 32);
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int j = 0; j < kPhiloxLanes; ++j) {
      const uint64_t product0 = static_cast<uint64_t>(w[0][j]) * 0xD2511F53u;
      const uint64_t product1 = static_cast<uint64_t>(w[2][j]) * 0xCD9E8D57u;
      const uint32_t word1 = w[1][j], word3 = w[3][j];
      w[0][j] = static_cast<uint32_t>(product1 >> 32) ^ word1 ^ key0;
      w[1][j] = static_cast<uint32_t>(product1);
      w[2][j] = static_cast<uint32_t>(product0 >> 32) ^ word3 ^ key1;
      w[3][j] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

void philox(uint64_t seed, uint64_t position, uint32_t stream, int64_t first_block, int64_t blocks, uint32_t* words) {
  uint32_t w[4][kPhiloxLanes];
  for (int64_t b = 0; b < blocks; b += kPhiloxLanes) {
    philox_blocks(seed, position, stream, first_block + b, w);
    for (int64_t j = 0; j < kPhiloxLanes && b + j < blocks; ++j)
      for (int c = 0; c < 4; ++c) words[4 * (b + j) + c] = w[c][j];
  }
}

// G = -log(-log u) <= -log(1 - u), and 1 - u >= 2^(e - 24) with e the exponent of the top 24 bits of the word's complement: a bound
// without a logarithm. A complement of zero reads as exponent -127, whose bound is far above any G.
inline double gumbel_bound(uint32_t word) {
  const float complement = static_cast<float>(static_cast<int32_t>(~word >> 8));
  uint32_t u;
  __builtin_memcpy(&u, &complement, 4);
  return (151 - static_cast<int32_t>(u >> 23)) * 0.69314718056 + 1e-9;
}

inline double gumbel(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * (1.0 / 4294967296.0);
  return -log(-log(u));
}

// argmax of row + G without taking the logarithms of ids that cannot win; equal to the full argmax, ties to the lowest id.
template <class T>
int64_t coupled_argmax(const T* row, int64_t n, uint64_t seed, uint64_t position) {
  int64_t best_id = argmax_of(row, n);
  if (best_id < 0) return -1;
  uint32_t w[4][kPhiloxLanes];
  uint32_t words[4 * kPhiloxLanes];
  const int64_t home = best_id / 4;
  philox_blocks(seed, position, 0, home, w);
  double best = static_cast<double>(row[best_id]) + gumbel(w[best_id % 4][0]);
  for (int64_t first = 0; first < n; first += 4 * kPhiloxLanes) {
    philox_blocks(seed, position, 0, first / 4, w);
    const int64_t count = n - first < 4 * kPhiloxLanes ? n - first : 4 * kPhiloxLanes;
    for (int j = 0; j < kPhiloxLanes; ++j)
      for (int c = 0; c < 4; ++c) words[4 * j + c] = w[c][j];
    int candidates = 0;
    for (int64_t i = 0; i < count; ++i)
      candidates += static_cast<double>(row[first + i]) + gumbel_bound(words[i]) >= best ? 1 : 0;
    if (candidates == 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      if (static_cast<double>(row[first + i]) + gumbel_bound(words[i]) < best) continue;
      const double value = static_cast<double>(row[first + i]) + gumbel(words[i]);
      if (value > best || (value == best && first + i < best_id)) {
        best = value;
        best_id = first + i;
      }
    }
  }
  return best_id;
}

int64_t coupled_argmax_float(const float* row, int64_t n, uint64_t seed, uint64_t position) {
  return coupled_argmax(row, n, seed, position);
}
int64_t coupled_argmax_double(const double* row, int64_t n, uint64_t seed, uint64_t position) {
  return coupled_argmax(row, n, seed, position);
}

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
