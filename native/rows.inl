// Operations on whole rows: norm, activation, rope, argmax, coupled argmax (include after one vector_*.h).
#include <math.h>

#include "kernel_table.h"
#include "plan_view.h"

namespace {

using foredraft::CacheView;
using foredraft::PlanRow;
using foredraft::RopeArgs;

// e^x by range reduction to |r| <= ln2/2 and the polynomial of Cephes' expf; 0 below -87.3, e^88 above 88; exactly 1 at 0.
inline Vec exp_lanes(Vec x) {
  const Vec lowest = broadcast(-87.3f);
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec clamped = min(max(x, lowest), broadcast(88.0f));
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
  p = fma(p, mul(r, r), r);
  p = add(p, broadcast(1.0f));
  return zero_where_less(x, lowest, mul(p, power_of_two(biased)));
}

void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t rows, int64_t width) {
  const int64_t whole = width / 16 * 16;
  const int rest = static_cast<int>(width - whole);
  for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
    Vec squares = zero();
    for (int64_t i = 0; i < whole; i += 16) squares = fma(load(x + i), load(x + i), squares);
    if (rest != 0) {
      const Vec last = load_first(x + whole, rest);
      squares = fma(last, last, squares);
    }
    const float mean = sum_lanes(squares) / static_cast<float>(width);
    const Vec scale = broadcast(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < whole; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
    if (rest != 0)
      store_first(out + whole, mul(mul(load_first(x + whole, rest), scale), load_first(weight + whole, rest)), rest);
  }
}

inline Vec silu(Vec gate) { return div(gate, add(broadcast(1.0f), exp_lanes(sub(zero(), gate)))); }

void silu_multiply(const float* gate_up, float* out, int64_t rows, int64_t width) {
  const int64_t whole = width / 16 * 16;
  const int rest = static_cast<int>(width - whole);
  for (int64_t row = 0; row < rows; ++row, gate_up += 2 * width, out += width) {
    const float* up = gate_up + width;
    for (int64_t i = 0; i < whole; i += 16) store(out + i, mul(silu(load(gate_up + i)), load(up + i)));
    if (rest != 0)
      store_first(out + whole, mul(silu(load_first(gate_up + whole, rest)), load_first(up + whole, rest)), rest);
  }
}

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

inline void store_row(const CacheView& c, void* base, int64_t head, int64_t slot, const float* row) {
  const int64_t at = ((slot / c.page_size * c.heads + head) * c.page_size + slot % c.page_size) * c.dim;
  if (c.bf16) {
    uint16_t* out = static_cast<uint16_t*>(base) + at;
    for (int64_t i = 0; i < c.dim; ++i) out[i] = to_bf16(row[i]);
  } else {
    float* out = static_cast<float*>(base) + at;
    for (int64_t i = 0; i < c.dim; ++i) out[i] = row[i];
  }
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
  float turned[foredraft::kMaxHeadDim];
  for (int64_t r = first_row; r < last_row; ++r) {
    const PlanRow& row = a.plan->rows[r];
    const float* in = a.qkv + r * (a.heads + 2 * c.heads) * c.dim;
    const float* cos = a.cos + row.position * half;
    const float* sin = a.sin + row.position * half;
    for (int64_t h = 0; h < a.heads; ++h, in += c.dim)
      rotate(in, cos, sin, a.queries + (r * a.heads + h) * c.dim, half);
    for (int64_t h = 0; h < c.heads; ++h, in += c.dim) {
      rotate(in, cos, sin, turned, half);
      store_row(c, c.keys, h, row.slot, turned);
    }
    for (int64_t h = 0; h < c.heads; ++h, in += c.dim) store_row(c, c.values, h, row.slot, in);
  }
}

}  // namespace
