// Philox words and argmax under Gumbel noise (include after one vector_*.h and reductions.inl).
#include <math.h>

namespace {

constexpr int kNoiseBlocks = 16;             // Philox blocks side by side
constexpr int kNoiseIds = 4 * kNoiseBlocks;  // ids they make words for

// Philox4x32-10 (Salmon et al., SC 2011); the counter layout is core/coins.py's: (block, position low, stream, position high).
// w[k] holds the words 16 k .. 16 k + 15 of blocks first .. first + 15, four words a block.
inline void philox_words(uint64_t seed, uint64_t position, uint32_t stream, int64_t first, Words (&w)[4]) {
  // Lane 4 q + k works on block 4 k + q, so that transposing quarters puts the words in order.
  alignas(64) static const uint32_t kBlockOfLane[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  w[0] = add_words(load_words(kBlockOfLane), broadcast_word(static_cast<uint32_t>(first)));
  w[1] = broadcast_word(static_cast<uint32_t>(position));
  w[2] = broadcast_word(stream);
  w[3] = broadcast_word(static_cast<uint32_t>(position >> 32));
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Words high0, low0, high1, low1;
    multiply_words(w[0], 0xD2511F53u, high0, low0);
    multiply_words(w[2], 0xCD9E8D57u, high1, low1);
    w[0] = xor_words(xor_words(high1, w[1]), broadcast_word(key0));
    w[1] = low1;
    w[2] = xor_words(xor_words(high0, w[3]), broadcast_word(key1));
    w[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  transpose_quarters(w);
}

void philox(uint64_t seed, uint64_t position, uint32_t stream, int64_t first_block, int64_t blocks, uint32_t* words) {
  uint32_t chunk[kNoiseIds];
  for (int64_t b = 0; b < blocks; b += kNoiseBlocks) {
    Words w[4];
    philox_words(seed, position, stream, first_block + b, w);
    for (int k = 0; k < 4; ++k) store_words(chunk + 16 * k, w[k]);
    const int64_t count = 4 * (blocks - b < kNoiseBlocks ? blocks - b : kNoiseBlocks);
    for (int64_t i = 0; i < count; ++i) words[4 * b + i] = chunk[i];
  }
}

// G = -log(-log u) <= -log(1 - u), and 1 - u >= 2^(e - 24) with e the exponent of the top 24 bits of the word's complement: a bound
// without a logarithm. A complement of zero reads as exponent -127, whose bound is far above any G.
inline Vec gumbel_bound(Words w) { return add(mul(leading_bits(w), broadcast(0.69314724f)), broadcast(1e-4f)); }

constexpr float kLargestGumbel = 22.9f;  // -log(-log(1 - 2^-33)) = 22.87

inline double gumbel(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * (1.0 / 4294967296.0);
  return -log(-log(u));
}

// A float that no sum of a logit and a bound falls below, rounded, if the sum in double reaches `best`.
inline float float_bar(double best) {
  const double size = best < 0 ? -best : best;
  return static_cast<float>(best - size * 1e-6 - 1e-6);
}

// Lanes that may reach `bar` with the noise of words w, x 16 logits; `lanes` of them count.
inline uint32_t may_win(const float* x, int lanes, Words w, float bar) {
  const Vec logits = lanes < 16 ? load_first(x, lanes) : load(x);
  const uint32_t mask = not_less_mask(add(logits, gumbel_bound(w)), broadcast(bar));
  return lanes < 16 ? mask & ((1u << lanes) - 1u) : mask;
}
inline uint32_t may_win(const double* x, int lanes, Words w, float bar) {
  float bounds[16];
  store(bounds, gumbel_bound(w));
  uint32_t mask = 0;
  for (int i = 0; i < lanes; ++i) mask |= (x[i] + bounds[i] < bar ? 0u : 1u) << i;
  return mask;
}

// Whether any of up to 64 logits can reach `bar` with the largest noise there is.
inline bool any_reaches(const float* x, int64_t count, float bar) {
  const Vec low = broadcast(bar - kLargestGumbel);
  uint32_t mask = 0;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) mask |= not_less_mask(load(x + i), low);
  if (i < count) mask |= not_less_mask(load_first(x + i, static_cast<int>(count - i)), low) & ((1u << (count - i)) - 1u);
  return mask != 0;
}
inline bool any_reaches(const double* x, int64_t count, float bar) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= x[i] >= static_cast<double>(bar - kLargestGumbel);
  return found;
}

// argmax of row + G without the noise of ids that cannot win; equal to the full argmax, ties to the lowest id. `top` is the id of the
// largest value of the row, which holds no NaN.
template <class T>
int64_t argmax_with_noise(const T* row, int64_t n, uint64_t seed, uint64_t position, int64_t top) {
  Words w[4];
  uint32_t words[kNoiseIds];
  philox(seed, position, 0, top / 4, 1, words);
  int64_t best_id = top;
  double best = static_cast<double>(row[top]) + gumbel(words[top % 4]);
  for (int64_t first = 0; first < n; first += kNoiseIds) {
    const float bar = float_bar(best);
    const int64_t count = n - first < kNoiseIds ? n - first : kNoiseIds;
    if (!any_reaches(row + first, count, bar)) continue;
    philox_words(seed, position, 0, first / 4, w);
    for (int k = 0; 16 * k < count; ++k) {
      const int lanes = count - 16 * k < 16 ? static_cast<int>(count - 16 * k) : 16;
      uint32_t mask = may_win(row + first + 16 * k, lanes, w[k], bar);
      if (mask != 0) store_words(words, w[k]);
      for (; mask != 0; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        const int64_t id = first + 16 * k + lane;
        const double value = static_cast<double>(row[id]) + gumbel(words[lane]);
        if (value > best || (value == best && id < best_id)) {
          best = value;
          best_id = id;
        }
      }
    }
  }
  return best_id;
}

}  // namespace
