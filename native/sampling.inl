// The law of a row: temperature, min_p, top_k, top_p, softmax; and the token that a seed draws from it (include after noise.inl).
// What is kept is always the beginning of the row's ids from the largest value on, ties to the lowest id. core/truncation.py is the
// plain statement of the same; sums are in double and in an order that the row alone decides.
#include <math.h>

#include "kernel_table.h"

namespace {

using foredraft::Truncation;

constexpr int kBuckets = 2048;
constexpr float kBucketsPerNat = 64.0f;

template <class T>
struct SamplingScratch {
  double* weights;  // [n]
  double* sums;     // [kBuckets]
  T* scaled;        // [n]
  T* masked;        // [n]
  int32_t* ids;     // [n]
};

template <class T>
SamplingScratch<T> carve(void* scratch, int64_t n) {
  double* weights = static_cast<double*>(scratch);
  double* sums = weights + n;
  T* scaled = reinterpret_cast<T*>(sums + kBuckets);
  return {weights, sums, scaled, scaled + n, reinterpret_cast<int32_t*>(scaled + 2 * n)};
}

int64_t sampling_scratch(int64_t n, bool wide) { return 8 * (n + kBuckets) + (wide ? 16 : 8) * n + 4 * n; }

// e[j] = exp(x[j] - top) for x[j] <= top, to 1e-15; 0 where x[j] < low or the difference is below -700.
template <class T>
inline void exponentials(const T* x, int64_t count, double top, T low, double* e) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: the low bits of a sum with it are the rounded integer
  for (int64_t j = 0; j < count; ++j) {
    const double d = static_cast<double>(x[j]) - top;
    const double clamped = d < -700.0 ? -700.0 : d;
    const double shifted = __builtin_fma(clamped, 1.4426950408889634, kMagic);
    const double k = shifted - kMagic;
    const double r = __builtin_fma(k, -1.9082149292705877e-10, __builtin_fma(k, -0.6931471803691238, clamped));
    // The series of exp up to r^13 / 13!, |r| <= log(2) / 2.
    double p = 1.0 / 6227020800.0;
    p = __builtin_fma(p, r, 1.0 / 479001600.0);
    p = __builtin_fma(p, r, 1.0 / 39916800.0);
    p = __builtin_fma(p, r, 1.0 / 3628800.0);
    p = __builtin_fma(p, r, 1.0 / 362880.0);
    p = __builtin_fma(p, r, 1.0 / 40320.0);
    p = __builtin_fma(p, r, 1.0 / 5040.0);
    p = __builtin_fma(p, r, 1.0 / 720.0);
    p = __builtin_fma(p, r, 1.0 / 120.0);
    p = __builtin_fma(p, r, 1.0 / 24.0);
    p = __builtin_fma(p, r, 1.0 / 6.0);
    p = __builtin_fma(p, r, 0.5);
    p = __builtin_fma(p, r, 1.0);
    p = __builtin_fma(p, r, 1.0);
    uint64_t bits;
    __builtin_memcpy(&bits, &shifted, 8);
    bits = (bits << 52) + 0x3FF0000000000000u;
    double scale;
    __builtin_memcpy(&scale, &bits, 8);
    e[j] = (d < -700.0) | (x[j] < low) ? 0.0 : p * scale;
  }
}

// The sum of all exponentials, lane by lane; with `out`, they are stored there too.
template <class T>
double sum_exponentials(const T* x, int64_t n, double top, T low, double* out) {
  constexpr int kChunk = 64;
  double lanes[8] = {};
  double chunk[kChunk];
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t count = n - first < kChunk ? n - first : kChunk;
    double* e = out != nullptr && count == kChunk ? out + first : chunk;
    if (count == kChunk) {
      exponentials(x + first, kChunk, top, low, e);
    } else {
      for (int j = 0; j < kChunk; ++j) chunk[j] = 0.0;
      exponentials(x + first, count, top, low, chunk);
      if (out != nullptr)
        for (int64_t j = 0; j < count; ++j) out[first + j] = chunk[j];
    }
    for (int j = 0; j < kChunk; j += 8)
      for (int lane = 0; lane < 8; ++lane) lanes[lane] += e[j + lane];
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// The first position from `i` on, in whole blocks of 16 ids and a rest, of which some value is not below `low`; its mask.
inline uint32_t reaches(const float* x, int lanes, float low) {
  const uint32_t mask = not_less_mask(lanes < 16 ? load_first(x, lanes) : load(x), broadcast(low));
  return lanes < 16 ? mask & ((1u << lanes) - 1u) : mask;
}
inline uint32_t reaches(const double* x, int lanes, double low) {
  uint32_t mask = 0;
  for (int i = 0; i < lanes; ++i) mask |= (x[i] < low ? 0u : 1u) << i;
  return mask;
}

// visit(id) for every id whose value is not below what `low` is by then, in order.
template <class T, class Visit>
inline void for_each_reaching(const T* x, int64_t n, const T& low, const Visit& visit) {
  for (int64_t first = 0; first < n; first += 16) {
    uint32_t mask = reaches(x + first, n - first < 16 ? static_cast<int>(n - first) : 16, low);
    for (; mask != 0; mask &= mask - 1) visit(static_cast<int32_t>(first + __builtin_ctz(mask)));
  }
}

template <class T>
inline bool comes_before(const T* x, int32_t a, int32_t b) {
  return x[a] > x[b] || (x[a] == x[b] && a < b);
}

// A heap of ids whose root is the one that comes last.
template <class T>
void sift_down(int32_t* heap, int64_t count, int64_t at, const T* x) {
  const int32_t moved = heap[at];
  for (int64_t child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && comes_before(x, heap[child], heap[child + 1])) ++child;
    if (!comes_before(x, moved, heap[child])) break;
    heap[at] = heap[child];
  }
  heap[at] = moved;
}
template <class T>
void make_heap(int32_t* ids, int64_t count, const T* x) {
  for (int64_t at = count / 2; at-- > 0;) sift_down(ids, count, at, x);
}
// A heap into the order from the largest value on.
template <class T>
void sort_heap(int32_t* heap, int64_t count, const T* x) {
  while (count > 1) {
    --count;
    const int32_t last = heap[0];
    heap[0] = heap[count];
    heap[count] = last;
    sift_down(heap, count, 0, x);
  }
}

// The k < n ids of the largest values, largest first.
template <class T>
void largest(const T* x, int64_t n, int64_t k, int32_t* ids) {
  for (int64_t i = 0; i < k; ++i) ids[i] = static_cast<int32_t>(i);
  make_heap(ids, k, x);
  T low = x[ids[0]];
  for_each_reaching(x + k, n - k, low, [&](int32_t offset) {
    const int32_t id = static_cast<int32_t>(k) + offset;
    if (!(x[id] > low)) return;  // of equals, those in the heap come before it
    ids[0] = id;
    sift_down(ids, k, 0, x);
    low = x[ids[0]];
  });
  sort_heap(ids, k, x);
}

struct Kept {
  int64_t count;  // of the ids in scratch.ids; -1: all that are not below `low`
  double total;   // of their weights exp(x - top), which lie in scratch.weights in the same order; without ids, not computed
};

// Of `count` sorted ids the shortest beginning whose weights reach `share` of all.
inline Kept beginning(const double* weights, int64_t count, double share) {
  double all = 0.0;
  for (int64_t i = 0; i < count; ++i) all += weights[i];
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    total += weights[i];
    if (share < 1.0 && total >= share * all) return {i + 1, total};
  }
  return {count, total};
}

// top_p of the ids that are not below `low`. No full sort: weights are summed by buckets of values, and only the bucket in which the sum
// is reached is sorted.
template <class T>
Kept nucleus(const T* x, int64_t n, T top, T low, double top_p, const SamplingScratch<T>& s) {
  const double all = sum_exponentials(x, n, static_cast<double>(top), low, static_cast<double*>(nullptr));
  // Ids below (1 - top_p) / n add up to less than 1 - top_p: the nucleus never reaches them.
  const double reach = log(all * (1.0 - top_p) / static_cast<double>(n));
  const double margin = 1e-6 * (1.0 + fabs(static_cast<double>(top)) - (reach < 0 ? reach : 0.0));
  const T floor = static_cast<T>(static_cast<double>(top) + reach - margin);
  const T bar = floor > low ? floor : low;
  int64_t count = 0;
  for_each_reaching(x, n, bar, [&](int32_t id) {
    s.ids[count] = id;
    s.masked[count++] = x[id];
  });
  exponentials(s.masked, count, static_cast<double>(top), low, s.weights);
  const auto bucket = [&](int32_t id) {
    const float at = static_cast<float>(top - x[id]) * kBucketsPerNat;
    return at < kBuckets - 1 ? static_cast<int>(at) : kBuckets - 1;
  };
  for (int b = 0; b < kBuckets; ++b) s.sums[b] = 0.0;
  for (int64_t i = 0; i < count; ++i) s.sums[bucket(s.ids[i])] += s.weights[i];
  const double needed = top_p * all;
  double total = 0.0;
  int last = 0;
  while (last < kBuckets - 1 && total + s.sums[last] < needed) total += s.sums[last++];
  // Ids before the last bucket go to the front; those of it are sorted behind them.
  int64_t before = 0, inside = 0;
  int32_t* const sorted = reinterpret_cast<int32_t*>(s.masked);
  for (int64_t i = 0; i < count; ++i) {
    const int b = bucket(s.ids[i]);
    if (b < last) {
      s.weights[before] = s.weights[i];
      s.ids[before++] = s.ids[i];
    } else if (b == last) {
      sorted[inside++] = s.ids[i];
    }
  }
  make_heap(sorted, inside, x);
  sort_heap(sorted, inside, x);
  for (int64_t i = 0; i < inside && (i == 0 || total < needed); ++i) {
    s.ids[before] = sorted[i];
    exponentials(x + sorted[i], 1, static_cast<double>(top), low, s.weights + before);
    total += s.weights[before++];
  }
  return {before, total};
}

template <class T>
Kept keep(const T* x, int64_t n, T top, T low, const Truncation& t, const SamplingScratch<T>& s) {
  if (t.top_k > 0 && t.top_k < n) {
    largest(x, n, t.top_k, s.ids);
    int64_t count = t.top_k;
    while (count > 1 && x[s.ids[count - 1]] < low) --count;
    for (int64_t i = 0; i < count; ++i) s.masked[i] = x[s.ids[i]];
    exponentials(s.masked, count, static_cast<double>(top), low, s.weights);
    return beginning(s.weights, count, t.top_p);
  }
  if (t.top_p < 1.0) return nucleus(x, n, top, low, t.top_p, s);
  return {-1, 0.0};
}

template <class T>
const T* at_temperature(const T* row, int64_t n, double temperature, T* scaled) {
  if (temperature == 1.0) return row;
  const T divisor = static_cast<T>(temperature);
  for (int64_t i = 0; i < n; ++i) scaled[i] = row[i] / divisor;
  return scaled;
}

template <class T>
inline bool is_finite(T x) {
  return x - x == 0;
}

// min_p: what lies below top + log(min_p) goes.
template <class T>
T lowest_kept(T top, double min_p) {
  return min_p > 0.0 ? top + static_cast<T>(log(min_p)) : -static_cast<T>(__builtin_inf());
}

// The id of the largest value, or of a NaN; where that is a number, out [n] holds the law. Else out is zeros.
template <class T>
int64_t law(const T* row, int64_t n, const Truncation& t, void* scratch, double* out) {
  const SamplingScratch<T> s = carve<T>(scratch, n);
  const T* x = at_temperature(row, n, t.temperature, s.scaled);
  const int64_t best = argmax_of(x, n);
  if (!is_finite(x[best])) {
    for (int64_t i = 0; i < n; ++i) out[i] = 0.0;
    return best;
  }
  const T top = x[best], low = lowest_kept(top, t.min_p);
  const Kept kept = keep(x, n, top, low, t, s);
  if (kept.count < 0) {
    const double scale = 1.0 / sum_exponentials(x, n, static_cast<double>(top), low, out);
    for (int64_t i = 0; i < n; ++i) out[i] *= scale;
    return best;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = 0.0;
  const double scale = 1.0 / kept.total;
  for (int64_t i = 0; i < kept.count; ++i) out[s.ids[i]] = s.weights[i] * scale;
  return best;
}

// The id of the largest kept value + G of (seed, position); where the largest value is no number, its id.
template <class T>
int64_t draw_with_noise(const T* row, int64_t n, const Truncation& t, uint64_t seed, uint64_t position, void* scratch) {
  const SamplingScratch<T> s = carve<T>(scratch, n);
  const T* x = at_temperature(row, n, t.temperature, s.scaled);
  const int64_t best = argmax_of(x, n);
  if (!is_finite(x[best])) return best;
  const T low = lowest_kept(x[best], t.min_p);
  const Kept kept = keep(x, n, x[best], low, t, s);
  if (kept.count < 0 && t.min_p <= 0.0) return argmax_with_noise(x, n, seed, position, best);
  const T nothing = -static_cast<T>(__builtin_inf());
  for (int64_t i = 0; i < n; ++i) s.masked[i] = kept.count < 0 && x[i] >= low ? x[i] : nothing;
  for (int64_t i = 0; i < kept.count; ++i) s.masked[s.ids[i]] = x[s.ids[i]];
  return argmax_with_noise(s.masked, n, seed, position, best);
}

int64_t law_float(const float* row, int64_t n, const Truncation& t, void* scratch, double* out) { return law(row, n, t, scratch, out); }
int64_t law_double(const double* row, int64_t n, const Truncation& t, void* scratch, double* out) { return law(row, n, t, scratch, out); }
int64_t draw_float(const float* row, int64_t n, const Truncation& t, uint64_t seed, uint64_t position, void* scratch) {
  return draw_with_noise(row, n, t, seed, position, scratch);
}
int64_t draw_double(const double* row, int64_t n, const Truncation& t, uint64_t seed, uint64_t position, void* scratch) {
  return draw_with_noise(row, n, t, seed, position, scratch);
}

}  // namespace
