// Sixteen float lanes in plain C++: the fallback of every machine, and the plainest statement of what the others compute.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  float v[16];
};

constexpr int kVectorsPerPanel = 1;
constexpr int kMaxTileRows = 4;
constexpr int kMaxTileRowsBf16 = 4;
constexpr const char* kInstructionSet = "portable";

template <class Function>
inline Vec lanes(Function f) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}
inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline Vec zero() { return Vec{}; }
inline Vec broadcast(float x) {
  return lanes([=](int) { return x; });
}
inline Vec load(const float* p) {
  return lanes([=](int i) { return p[i]; });
}
inline Vec load_first(const float* p, int n) {
  return lanes([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store(float* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline void store_first(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline Vec add(Vec a, Vec b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec div(Vec a, Vec b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return lanes([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
// b where a is not larger, as the max instruction does: NaN in b survives.
inline Vec max(Vec a, Vec b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}

// Lanes below n of a, the others of b.
inline Vec blend_first(Vec a, Vec b, int n) {
  return lanes([&](int i) { return i < n ? a.v[i] : b.v[i]; });
}
inline Vec zero_where_less(Vec x, Vec limit, Vec a) {
  return lanes([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : a.v[i]; });
}
// Bit i is set where lane i of x is not below that of limit (NaN counts).
inline uint32_t not_less_mask(Vec x, Vec limit) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (x.v[i] < limit.v[i] ? 0u : 1u) << i;
  return mask;
}
inline bool any_nan(Vec a) {
  bool found = false;
  for (int i = 0; i < 16; ++i) found |= a.v[i] != a.v[i];
  return found;
}

// Sixteen words of two bfloat16: the even k in the low half, the odd k in the high half.
struct Words {
  uint32_t v[16];
};
inline Words load_words(const uint32_t* p) {
  Words w;
  std::memcpy(w.v, p, sizeof w.v);
  return w;
}
inline Vec low_half(const Words& w) {
  return lanes([&](int i) { return from_bits(w.v[i] << 16); });
}
inline Vec high_half(const Words& w) {
  return lanes([&](int i) { return from_bits(w.v[i] & 0xFFFF0000u); });
}
inline Vec load_bf16(const uint16_t* p) {
  return lanes([=](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}
inline Vec load_bytes(const int8_t* p) {
  return lanes([=](int i) { return static_cast<float>(p[i]); });
}

// Sixteen 32-bit words.
template <class Function>
inline Words word_lanes(Function f) {
  Words out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}
inline Words broadcast_word(uint32_t x) {
  return word_lanes([=](int) { return x; });
}
inline void store_words(uint32_t* p, const Words& w) { std::memcpy(p, w.v, sizeof w.v); }
inline Words add_words(const Words& a, const Words& b) {
  return word_lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline Words xor_words(const Words& a, const Words& b) {
  return word_lanes([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline void multiply_words(const Words& a, uint32_t m, Words& high, Words& low) {
  const Words factors = a;
  high = word_lanes([&](int i) { return static_cast<uint32_t>(static_cast<uint64_t>(factors.v[i]) * m >> 32); });
  low = word_lanes([&](int i) { return factors.v[i] * m; });
}
// Within each quarter of four lanes: lane j of w[i] becomes lane i of w[j].
inline void transpose_quarters(Words (&w)[4]) {
  Words out[4];
  for (int j = 0; j < 4; ++j) out[j] = word_lanes([&](int i) { return w[i % 4].v[i / 4 * 4 + j]; });
  for (int j = 0; j < 4; ++j) w[j] = out[j];
}
// 151 minus the biased exponent of the float next to the top 24 bits of each word's complement.
inline Vec leading_bits(const Words& w) {
  return lanes([&](int i) { return static_cast<float>(151 - static_cast<int>(bits_of(static_cast<float>(~w.v[i] >> 8)) >> 23)); });
}

// 2^n for a sum whose low mantissa bits hold the integer n (see exp_lanes).
inline Vec power_of_two(Vec biased) {
  return lanes([&](int i) { return from_bits((bits_of(biased.v[i]) << 23) + 0x3F800000u); });
}

// ((i + (i+8)) + 4) + 2) + 1: the same tree in every instruction set.
inline float sum_lanes(Vec a) {
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
  return a.v[0];
}
inline float max_lanes(Vec a) {
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) a.v[i] = a.v[i] > a.v[i + step] ? a.v[i] : a.v[i + step];
  return a.v[0];
}

}  // namespace
