// Operations on whole rows: norm, activation, soft cap, rope (include after one vector_*.h).
#include <math.h>

#include "kernel_table.h"
#include "plan_view.h"

namespace {

using foredraft::CacheView;
using foredraft::PlanRow;
using foredraft::RopeArgs;

inline Vec load_some(const float* p, int n) { return n == 16 ? load(p) : load_first(p, n); }
inline void store_some(float* p, Vec a, int n) { n == 16 ? store(p, a) : store_first(p, a, n); }

// f(i, lanes) for every vector of a row; a whole vector's number of lanes is a constant.
template <class Function>
inline __attribute__((always_inline)) void over_row(int64_t width, const Function& f) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) f(i, 16);
  if (i < width) f(i, static_cast<int>(width - i));
}

constexpr float kLowestExponent = -87.3f;

// x = n ln2 + r with |r| <= ln2 / 2: 2^n, and e^r - 1 by the polynomial of Cephes' expf. NaN stays NaN.
struct Exponential {
  Vec power, rest;
};
inline Exponential exponential(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec clamped = min(broadcast(88.0f), max(broadcast(kLowestExponent), x));
  const Vec biased = fma(clamped, broadcast(1.44269504088896341f), magic);
  const Vec n = sub(biased, magic);
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return {power_of_two(biased), fma(p, mul(r, r), r)};
}

// e^x; 0 below -87.3, e^88 above 88; exactly 1 at 0.
inline Vec exp_lanes(Vec x) {
  const Exponential e = exponential(x);
  return zero_where_less(x, broadcast(kLowestExponent), mul(add(e.rest, broadcast(1.0f)), e.power));
}

// 2^x for x up to 127; 0 below -126; exactly 1 at 0. x = n + r with |r| <= 1/2, which loses no digit; 2^r by its minimax polynomial,
// within 2e-9.
inline Vec power_lanes(Vec x) {
  const Vec magic = broadcast(12582912.0f), lowest = broadcast(-126.0f);
  const Vec clamped = max(lowest, x);
  const Vec biased = add(clamped, magic);
  const Vec r = sub(clamped, sub(biased, magic));
  Vec p = broadcast(1.5357497e-4f);
  p = fma(p, r, broadcast(1.3398905e-3f));
  p = fma(p, r, broadcast(9.6184229e-3f));
  p = fma(p, r, broadcast(5.5503324e-2f));
  p = fma(p, r, broadcast(2.4022648e-1f));
  p = fma(p, r, broadcast(6.9314718e-1f));
  p = fma(p, r, broadcast(1.0f));
  return zero_where_less(x, lowest, mul(p, power_of_two(biased)));
}

// t / (t + 2) with t = e^2x - 1, which loses no digits near 0.
inline Vec tanh_lanes(Vec x) {
  const Exponential e = exponential(add(x, x));
  const Vec t = fma(e.rest, e.power, sub(e.power, broadcast(1.0f)));
  return div(t, add(t, broadcast(2.0f)));
}

inline Vec cap_lanes(Vec x, Vec cap) { return mul(cap, tanh_lanes(div(x, cap))); }

void soft_cap(const float* x, float cap, float* out, int64_t n) {
  over_row(n, [&](int64_t i, int lanes) { store_some(out + i, cap_lanes(load_some(x + i, lanes), broadcast(cap)), lanes); });
}

void norm_row(const float* x, const float* weight, float eps, const float* residual, float* out, int64_t width) {
  Vec squares = zero();
  over_row(width, [&](int64_t i, int lanes) {
    const Vec v = load_some(x + i, lanes);
    squares = fma(v, v, squares);
  });
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  const Vec scale = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  over_row(width, [&](int64_t i, int lanes) {
    Vec v = mul(mul(load_some(x + i, lanes), scale), load_some(weight + i, lanes));
    if (residual != nullptr) v = add(v, load_some(residual + i, lanes));
    store_some(out + i, v, lanes);
  });
}

void rms_norm(const float* x, const float* weight, float eps, const float* residual, float* out, int64_t rows, int64_t width) {
  for (int64_t at = 0; at < rows * width; at += width)
    norm_row(x + at, weight, eps, residual == nullptr ? nullptr : residual + at, out + at, width);
}

// x times the logistic function of z: silu for z = x.
inline Vec times_logistic(Vec x, Vec z) { return div(x, add(broadcast(1.0f), exp_lanes(sub(zero(), z)))); }

inline Vec silu(Vec x) { return times_logistic(x, x); }

// x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3) is x times the logistic function of 2 u.
inline Vec gelu_tanh(Vec x) {
  return times_logistic(x, mul(x, fma(mul(x, x), broadcast(0.0713548163f), broadcast(1.59576912f))));
}

template <Vec (*activate)(Vec)>
void gate_multiply_by(const float* gate_up, float* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, gate_up += 2 * width, out += width)
    over_row(width, [&](int64_t i, int lanes) {
      store_some(out + i, mul(activate(load_some(gate_up + i, lanes)), load_some(gate_up + width + i, lanes)), lanes);
    });
}

void gate_multiply(const float* gate_up, foredraft::Activation activation, float* out, int64_t rows, int64_t width) {
  switch (activation) {
    case foredraft::Activation::kSilu:
      return gate_multiply_by<silu>(gate_up, out, rows, width);
    case foredraft::Activation::kGeluTanh:
      return gate_multiply_by<gelu_tanh>(gate_up, out, rows, width);
  }
}

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

// A row of `dim` numbers, `step` elements from one to the next.
inline void store_row(const CacheView& c, void* base, int64_t at, int64_t step, const float* row) {
  if (c.bf16) {
    uint16_t* out = static_cast<uint16_t*>(base) + at;
    for (int64_t i = 0; i < c.dim; ++i) out[i * step] = to_bf16(row[i]);
  } else {
    float* out = static_cast<float*>(base) + at;
    for (int64_t i = 0; i < c.dim; ++i) out[i * step] = row[i];
  }
}

inline void store_key(const CacheView& c, int64_t head, int64_t slot, const float* row) {
  store_row(c, c.keys, (slot / c.page_size * c.heads + head) * c.dim * c.page_size + slot % c.page_size, c.page_size, row);
}

inline void store_value(const CacheView& c, int64_t head, int64_t slot, const float* row) {
  store_row(c, c.values, ((slot / c.page_size * c.heads + head) * c.page_size + slot % c.page_size) * c.dim, 1, row);
}

// Pairs (i, i + half) turned by the angle of the row's position.
inline void rotate(const float* in, const float* cos, const float* sin, float* out, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const int n = half - i < 16 ? static_cast<int>(half - i) : 16;
    const Vec c = load_first(cos + i, n), s = load_first(sin + i, n);
    const Vec low = load_first(in + i, n), high = load_first(in + half + i, n);
    store_first(out + i, sub(mul(low, c), mul(high, s)), n);
    store_first(out + half + i, add(mul(high, c), mul(low, s)), n);
  }
}

void rope_and_store(const RopeArgs& a, int64_t first_row, int64_t last_row) {
  const CacheView& c = a.cache;
  const int64_t half = c.dim / 2;
  float normed[foredraft::kMaxHeadDim], turned[foredraft::kMaxHeadDim];
  const auto norm = [&](const float* head, const float* weight) {
    if (weight == nullptr) return head;
    norm_row(head, weight, a.norm_eps, nullptr, normed, c.dim);
    return static_cast<const float*>(normed);
  };
  for (int64_t r = first_row; r < last_row; ++r) {
    const PlanRow& row = a.plan->rows[r];
    const float* in = a.qkv + r * (a.heads + 2 * c.heads) * c.dim;
    const float* cos = a.cos + row.position * half;
    const float* sin = a.sin + row.position * half;
    for (int64_t h = 0; h < a.heads; ++h, in += c.dim)
      rotate(norm(in, a.query_norm), cos, sin, a.queries + (r * a.heads + h) * c.dim, half);
    for (int64_t h = 0; h < c.heads; ++h, in += c.dim) {
      rotate(norm(in, a.key_norm), cos, sin, turned, half);
      store_key(c, h, row.slot, turned);
    }
    for (int64_t h = 0; h < c.heads; ++h, in += c.dim) store_value(c, h, row.slot, in);
  }
}

}  // namespace
