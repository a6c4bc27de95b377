// One block of keys for the queries of an attention task: scores, weights, sums (include after one vector_*.h and rows.inl).
#include "kernel_table.h"

namespace {

using foredraft::kKeyBlock;
using foredraft::kMaxTaskQueries;

constexpr int kScoreQueries = 6;
constexpr int kValueQueries = kVectorsPerPanel == 2 ? 6 : 3;
constexpr int kValueVectors = kVectorsPerPanel == 2 ? 4 : 2;

inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
inline int between(int64_t x, int lowest, int highest) {
  return x < lowest ? lowest : x > highest ? highest : static_cast<int>(x);
}

// A partial result of one query: padded(dim) sums, then the highest score and the total weight.
inline int64_t partial_floats(int64_t dim) { return padded(dim) + 16; }

int64_t attention_scratch(int64_t dim) {
  return 2 * padded(dim) * kKeyBlock + kMaxTaskQueries * (padded(dim) + kKeyBlock + 2 * partial_floats(dim));
}

// The state of the queries of one task; query = head in task * queries per head + query in head.
struct QueryTile {
  float* keys;     // [padded dim][kKeyBlock], one block of one head transposed
  float* values;   // [kKeyBlock][padded dim], only where the cache cannot be read in place
  float* queries;  // [kMaxTaskQueries][padded dim], scaled
  float* scores;   // [kMaxTaskQueries][kKeyBlock]
  float* sums;     // [kMaxTaskQueries][partial], of the span at hand
  float* merged;   // [kMaxTaskQueries][partial], of the spans before it
  const float* value_rows[kKeyBlock];
  float shrink[kMaxTaskQueries];
  // The keys of the block at hand that a query sees, begin .. end - 1; the same for each head.
  int begin[kMaxTaskQueries], end[kMaxTaskQueries];
  float soft_cap;              // 0: none
  int64_t dim, width, stride;  // width = padded dim, stride = floats of a partial

  float* sum(int q) const { return sums + q * stride; }
  float& highest(int q) const { return sums[q * stride + width]; }
  float& total(int q) const { return sums[q * stride + width + 1]; }
};

// A set of queries that see the same keys of a block.
struct Selection {
  int ids[kMaxTaskQueries];
  int size;
};

inline Vec load_cached(const void* base, int64_t at, int n, bool bf16) {
  if (!bf16) {
    const float* p = static_cast<const float*>(base) + at;
    return n == 16 ? load(p) : load_first(p, n);
  }
  const uint16_t* p = static_cast<const uint16_t*>(base) + at;
  if (n == 16) return load_bf16(p);
  uint16_t row[16] = {};
  for (int i = 0; i < n; ++i) row[i] = p[i];
  return load_bf16(row);
}

template <bool Bf16>
inline Vec load_whole(const void* base, int64_t at) {
  if (Bf16) return load_bf16(static_cast<const uint16_t*>(base) + at);
  return load(static_cast<const float*>(base) + at);
}

// Sixteen keys, transposed; the loads are unrolled so that no row passes through memory.
template <bool Bf16>
void transpose_whole(const CacheView& c, const int64_t* at, int64_t offset, float* out) {
  for (int64_t d = 0; d < c.dim; d += 16) {
    Vec rows[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) rows[j] = load_whole<Bf16>(c.keys, at[j] + offset + d);
    transpose_store(rows, out + d * kKeyBlock, kKeyBlock);
  }
}

// The same for fewer keys, or for a head size that is no multiple of 16.
void transpose_some(const CacheView& c, const int64_t* at, int64_t offset, int count, float* out) {
  for (int64_t d = 0; d < c.dim; d += 16) {
    const int n = between(c.dim - d, 0, 16);
    Vec rows[16];
    for (int j = 0; j < 16; ++j) rows[j] = j < count ? load_cached(c.keys, at[j] + offset + d, n, c.bf16) : zero();
    transpose_store(rows, out + d * kKeyBlock, kKeyBlock);
  }
}

// Sixteen keys of a head at elements at[0 .. count) + offset of the cache; those beyond count become zeros.
void gather_keys(const CacheView& c, const int64_t* at, int64_t offset, int count, float* out) {
  if (count < 16 || c.dim % 16 != 0)
    transpose_some(c, at, offset, count, out);
  else if (c.bf16)
    transpose_whole<true>(c, at, offset, out);
  else
    transpose_whole<false>(c, at, offset, out);
}

// Finds or widens the values of keys first .. last - 1.
void gather_values(const CacheView& c, const int64_t* at, int64_t offset, int first, int last, QueryTile& t) {
  const bool in_place = !c.bf16 && t.width == t.dim;
  for (int j = first; j < last; ++j) {
    if (in_place) {
      t.value_rows[j] = static_cast<const float*>(c.values) + at[j] + offset;
      continue;
    }
    float* row = t.values + j * t.width;
    for (int64_t d = 0; d < t.dim; d += 16)
      store(row + d, load_cached(c.values, at[j] + offset + d, between(t.dim - d, 0, 16), c.bf16));
    t.value_rows[j] = row;
  }
}

template <int Q>
void score_queries(QueryTile& t, const float* keys, const int* ids) {
  const float* query[Q];
  for (int q = 0; q < Q; ++q) query[q] = t.queries + ids[q] * t.width;
  for (int first = 0; first < kKeyBlock; first += 16 * kScoreVectors) {
    Vec sum[Q][kScoreVectors];
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < kScoreVectors; ++v) sum[q][v] = zero();
    for (int64_t d = 0; d < t.dim; ++d) {
      Vec key[kScoreVectors];
      for (int v = 0; v < kScoreVectors; ++v) key[v] = load(keys + d * kKeyBlock + first + 16 * v);
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const Vec x = broadcast(query[q][d]);
        for (int v = 0; v < kScoreVectors; ++v) sum[q][v] = fma(key[v], x, sum[q][v]);
      }
    }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < kScoreVectors; ++v) store(t.scores + ids[q] * kKeyBlock + first + 16 * v, sum[q][v]);
  }
}

// Scores become weights relative to the span's highest score so far; older sums will shrink by t.shrink. In three loops, so that the
// waits within one query's reductions are filled with others.
void weigh(QueryTile& t, const Selection& s) {
  float change[kMaxTaskQueries + 16], block_total[kMaxTaskQueries];
  const Vec nothing = broadcast(-__builtin_inff());
  for (int i = 0; i < s.size; ++i) {
    const int q = s.ids[i];
    float* scores = t.scores + q * kKeyBlock;
    Vec a = load(scores), b = load(scores + 16);
    if (t.soft_cap != 0.0f) {
      a = cap_lanes(a, broadcast(t.soft_cap));
      b = cap_lanes(b, broadcast(t.soft_cap));
    }
    a = blend_first(a, nothing, between(t.end[q], 0, 16));
    b = blend_first(b, nothing, between(t.end[q] - 16, 0, 16));
    if (t.begin[q] != 0) {
      a = blend_first(nothing, a, between(t.begin[q], 0, 16));
      b = blend_first(nothing, b, between(t.begin[q] - 16, 0, 16));
    }
    const float before = t.highest(q), block_highest = max_lanes(max(a, b));
    const float highest = before > block_highest ? before : block_highest;
    store(scores, a);
    store(scores + 16, b);
    change[i] = before - highest;
    t.highest(q) = highest;
  }
  for (int i = 0; i < s.size; ++i) {
    const int q = s.ids[i];
    float* scores = t.scores + q * kKeyBlock;
    const Vec origin = broadcast(t.highest(q));
    store(scores, exp_lanes(sub(load(scores), origin)));
    store(scores + 16, exp_lanes(sub(load(scores + 16), origin)));
  }
  for (int i = 0; i < s.size; ++i) {
    const float* scores = t.scores + s.ids[i] * kKeyBlock;
    block_total[i] = sum_lanes(add(load(scores), load(scores + 16)));
  }
  for (int i = s.size; i % 16 != 0; ++i) change[i] = 0.0f;
  for (int i = 0; i < s.size; i += 16) store(change + i, exp_lanes(load(change + i)));
  for (int i = 0; i < s.size; ++i) {
    const int q = s.ids[i];
    t.shrink[q] = change[i];
    t.total(q) = t.total(q) * change[i] + block_total[i];
  }
}

// Adds the values of keys first .. last - 1 at dimensions d .. d + 16 V - 1 to Q queries.
template <int Q, int V>
void add_values(QueryTile& t, const int* ids, int64_t d, int first, int last, bool shrink) {
  Vec sum[Q][V];
  const float* weights[Q];
  for (int q = 0; q < Q; ++q) {
    weights[q] = t.scores + ids[q] * kKeyBlock;
    const Vec factor = broadcast(t.shrink[ids[q]]);
    for (int v = 0; v < V; ++v) {
      sum[q][v] = load(t.sum(ids[q]) + d + 16 * v);
      if (shrink) sum[q][v] = mul(sum[q][v], factor);
    }
  }
  for (int j = first; j < last; ++j) {
    const float* row = t.value_rows[j] + d;
    Vec value[V];
    for (int v = 0; v < V; ++v) value[v] = load(row + 16 * v);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const Vec w = broadcast(weights[q][j]);
      for (int v = 0; v < V; ++v) sum[q][v] = fma(value[v], w, sum[q][v]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(t.sum(ids[q]) + d + 16 * v, sum[q][v]);
}

// Adds the values of a block to each query that sees them: those that all see for all together, and what a query sees before and
// after them by itself, so that each adds its own key by key.
template <int Q, int V>
void values_at(QueryTile& t, const int* ids, int64_t d) {
  int begin = 0, end = kKeyBlock;
  for (int q = 0; q < Q; ++q) {
    begin = between(t.begin[ids[q]], begin, kKeyBlock);
    end = between(t.end[ids[q]], 0, end);
  }
  if (end < begin) end = begin;
  for (int q = 0; begin != 0 && q < Q; ++q)
    add_values<1, V>(t, ids + q, d, t.begin[ids[q]], between(t.end[ids[q]], 0, begin), true);
  add_values<Q, V>(t, ids, d, begin, end, begin == 0);
  for (int q = 0; q < Q; ++q) {
    const int own_begin = between(t.begin[ids[q]], end, kKeyBlock);
    if (own_begin < t.end[ids[q]]) add_values<1, V>(t, ids + q, d, own_begin, t.end[ids[q]], false);
  }
}

template <int Q>
void value_queries(QueryTile& t, const int* ids) {
  int64_t d = 0;
  for (; d + 16 * kValueVectors <= t.width; d += 16 * kValueVectors) values_at<Q, kValueVectors>(t, ids, d);
  for (; d < t.width; d += 16) values_at<Q, 1>(t, ids, d);
}

template <int Q>
struct Steps {
  static void scores(int n, QueryTile& t, const float* keys, const int* ids) {
    n == Q ? score_queries<Q>(t, keys, ids) : Steps<Q - 1>::scores(n, t, keys, ids);
  }
  static void values(int n, QueryTile& t, const int* ids) {
    n == Q ? value_queries<Q>(t, ids) : Steps<Q - 1>::values(n, t, ids);
  }
};
template <>
struct Steps<0> {
  static void scores(int, QueryTile&, const float*, const int*) {}
  static void values(int, QueryTile&, const int*) {}
};

}  // namespace
