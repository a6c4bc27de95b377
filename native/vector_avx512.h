// Sixteen float lanes in one AVX-512 register. Same operations, same results to the bit, as vector_avx2.h and vector_portable.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  __m512 v;
};

constexpr int kVectorsPerPanel = 2;
constexpr int kMaxTileRows = 12;   // 24 accumulators of the 32 registers
constexpr int kMaxTileRowsBf16 = 12;
constexpr const char* kInstructionSet = "avx512";

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store_first(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where a is not larger, as the max instruction does: NaN in b survives.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

// Lanes below n of a, the others of b.
inline Vec blend_first(Vec a, Vec b, int n) {
  return {_mm512_mask_blend_ps(first_lanes(n), b.v, a.v)};
}
inline Vec zero_where_less(Vec x, Vec limit, Vec a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// Bit i is set where lane i of x is not below that of limit (NaN counts).
inline uint32_t not_less_mask(Vec x, Vec limit) { return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ); }
inline bool any_nan(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }

// Sixteen words of two bfloat16: the even k in the low half, the odd k in the high half.
struct Words {
  __m512i v;
};
inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Vec low_half(Words w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
inline Vec high_half(Words w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}
inline Vec load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline Vec load_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// Sixteen 32-bit words.
inline Words broadcast_word(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline void store_words(uint32_t* p, Words w) { _mm512_storeu_si512(p, w.v); }
inline Words add_words(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words xor_words(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline void multiply_words(Words a, uint32_t m, Words& high, Words& low) {
  const __m512i factor = _mm512_set1_epi32(static_cast<int>(m));
  const __m512i even = _mm512_mul_epu32(a.v, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
  high.v = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low.v = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}
// Within each quarter of four lanes: lane j of w[i] becomes lane i of w[j].
inline void transpose_quarters(Words (&w)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(w[0].v, w[1].v), b = _mm512_unpackhi_epi32(w[0].v, w[1].v);
  const __m512i c = _mm512_unpacklo_epi32(w[2].v, w[3].v), d = _mm512_unpackhi_epi32(w[2].v, w[3].v);
  w[0].v = _mm512_unpacklo_epi64(a, c);
  w[1].v = _mm512_unpackhi_epi64(a, c);
  w[2].v = _mm512_unpacklo_epi64(b, d);
  w[3].v = _mm512_unpackhi_epi64(b, d);
}
// 151 minus the biased exponent of the float next to the top 24 bits of each word's complement.
inline Vec leading_bits(Words w) {
  const __m512 top = _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_xor_si512(w.v, _mm512_set1_epi32(-1)), 8));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(151), _mm512_srli_epi32(_mm512_castps_si512(top), 23)))};
}

// 2^n for a sum whose low mantissa bits hold the integer n (see exp_lanes).
inline Vec power_of_two(Vec biased) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(biased.v), 23),
                                               _mm512_set1_epi32(0x3F800000)))};
}

inline __m256 lower(__m512 a) { return _mm512_castps512_ps256(a); }
inline __m256 upper(__m512 a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}

// ((i + (i+8)) + 4) + 2) + 1: the same tree in every instruction set.
inline float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(lower(a.v), upper(a.v));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(Vec a) {
  const __m256 eight = _mm256_max_ps(lower(a.v), upper(a.v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace
