// Sixteen float lanes in two AVX registers. Same operations, same results to the bit, as vector_avx512.h and vector_portable.h.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

struct Vec {
  __m256 lo, hi;
};

constexpr int kVectorsPerPanel = 1;
constexpr int kMaxTileRows = 6;   // 12 accumulators of the 16 registers
constexpr int kMaxTileRowsBf16 = 4;  // measured: 105 GFLOP/s a core at 4 rows, 77 at 5, 90 at 6, where the registers no longer suffice
constexpr const char* kInstructionSet = "avx2";

// Eight lanes of all ones below n, zeros from there.
inline __m256i first_eight(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load_first(const float* p, int n) {
  if (n <= 8) return {_mm256_maskload_ps(p, first_eight(n)), _mm256_setzero_ps()};
  return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, first_eight(n - 8))};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_first(float* p, Vec a, int n) {
  _mm256_maskstore_ps(p, first_eight(n), a.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, first_eight(n - 8), a.hi);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// b where a is not larger, as the max instruction does: NaN in b survives.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

// Lanes below n of a, the others of b.
inline Vec blend_first(Vec a, Vec b, int n) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(first_eight(n))),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(first_eight(n - 8)))};
}
inline Vec zero_where_less(Vec x, Vec limit, Vec a) {
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ))};
}
// Bit i is set where lane i of x is not below that of limit (NaN counts).
inline uint32_t not_less_mask(Vec x, Vec limit) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ)) |
                               _mm256_movemask_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ)) << 8);
}
inline bool any_nan(Vec a) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q),
                                         _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))) != 0;
}

// Sixteen words of two bfloat16: the even k in the low half, the odd k in the high half.
struct Words {
  __m256i lo, hi;
};
inline Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Vec low_half(Words w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(w.hi, 16))};
}
inline Vec high_half(Words w) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(w.lo, mask)),
          _mm256_castsi256_ps(_mm256_and_si256(w.hi, mask))};
}
inline __m256 eight_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline Vec load_bf16(const uint16_t* p) { return {eight_bf16(p), eight_bf16(p + 8)}; }
inline __m256 eight_bytes(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_bytes(const int8_t* p) { return {eight_bytes(p), eight_bytes(p + 8)}; }

// Sixteen 32-bit words.
inline Words broadcast_word(uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
inline void store_words(uint32_t* p, Words w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), w.hi);
}
inline Words add_words(Words a, Words b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Words xor_words(Words a, Words b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline void multiply_eight(__m256i a, __m256i factor, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
inline void multiply_words(Words a, uint32_t m, Words& high, Words& low) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
  multiply_eight(a.lo, factor, high.lo, low.lo);
  multiply_eight(a.hi, factor, high.hi, low.hi);
}
inline void transpose_quarters(__m256i& w0, __m256i& w1, __m256i& w2, __m256i& w3) {
  const __m256i a = _mm256_unpacklo_epi32(w0, w1), b = _mm256_unpackhi_epi32(w0, w1);
  const __m256i c = _mm256_unpacklo_epi32(w2, w3), d = _mm256_unpackhi_epi32(w2, w3);
  w0 = _mm256_unpacklo_epi64(a, c);
  w1 = _mm256_unpackhi_epi64(a, c);
  w2 = _mm256_unpacklo_epi64(b, d);
  w3 = _mm256_unpackhi_epi64(b, d);
}
// Within each quarter of four lanes: lane j of w[i] becomes lane i of w[j].
inline void transpose_quarters(Words (&w)[4]) {
  transpose_quarters(w[0].lo, w[1].lo, w[2].lo, w[3].lo);
  transpose_quarters(w[0].hi, w[1].hi, w[2].hi, w[3].hi);
}
inline __m256 leading_bits(__m256i w) {
  const __m256 top = _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_xor_si256(w, _mm256_set1_epi32(-1)), 8));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(151), _mm256_srli_epi32(_mm256_castps_si256(top), 23)));
}
// 151 minus the biased exponent of the float next to the top 24 bits of each word's complement.
inline Vec leading_bits(Words w) { return {leading_bits(w.lo), leading_bits(w.hi)}; }

inline __m256 power_of_two(__m256 biased) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(biased), 23),
                                              _mm256_set1_epi32(0x3F800000)));
}
// 2^n for a sum whose low mantissa bits hold the integer n (see exp_lanes).
inline Vec power_of_two(Vec biased) { return {power_of_two(biased.lo), power_of_two(biased.hi)}; }

// ((i + (i+8)) + 4) + 2) + 1: the same tree in every instruction set.
inline float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(Vec a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline void transpose_eight(const __m256* r, float* out, std::size_t stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * stride, _mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
    _mm256_storeu_ps(out + (4 + c) * stride, _mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
  }
}

}  // namespace
