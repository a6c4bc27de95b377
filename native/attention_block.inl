// One group of 16 positions for the queries of a task: scores, weights, sums (include after one vector_*.h and rows.inl).
//
// Keys lie dimension after dimension with their positions side by side, values position after position: so a score is a lane, a sum over
// values has its dimensions in lanes, and nothing is transposed or summed across lanes where much is read.
#include "kernel_table.h"

namespace {

using foredraft::kKeyBlock;
using foredraft::kMaxTaskQueries;

constexpr int kGroup = 16;  // positions
constexpr int kGroups = kKeyBlock / kGroup;
constexpr int kScoreQueries = kVectorsPerPanel == 2 ? 16 : 6;
constexpr int kValueQueries = kVectorsPerPanel == 2 ? 6 : 3;
constexpr int kValueVectors = kVectorsPerPanel == 2 ? 4 : 2;

inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
inline int between(int64_t x, int lowest, int highest) {
  return x < lowest ? lowest : x > highest ? highest : static_cast<int>(x);
}

// A partial result of one query: padded(dim) sums, then the highest score and the total weight.
inline int64_t partial_size(int64_t dim) { return padded(dim) + 16; }

// Room for the partial results of a query that wait to be merged; of n spans these are no more than 2 log2(n) + 3.
int64_t partial_floats(int64_t dim, int64_t spans) {
  int64_t count = 3;
  for (; spans > 1; spans /= 2) count += 2;
  return count * partial_size(dim);
}

// Queries of all tiles, where a head's last tile may have fewer than others.
constexpr int kTileRoom = kMaxTaskQueries * 4 / 3;

int64_t attention_scratch(int64_t dim, int64_t spans) {
  return kGroup * padded(dim) + kMaxTaskQueries * (kKeyBlock + partial_floats(dim, spans)) + kTileRoom * padded(dim);
}

// Sixteen elements of a cache that lie 16 * i elements, or i rows of a page's keys, behind the first ones; see Ahead.
struct Fetch {
  const char* memory;
  int64_t step;  // bytes
  void operator()(int64_t i) const { __builtin_prefetch(memory + i * step); }
};

// The state of the queries of one task; query = head in task * queries per head + query in head.
struct QueryTile {
  float* queries;  // [head][tile][padded dim][queries of a tile], scaled: those of a tile lie side by side
  float* scores;   // [query][kKeyBlock]
  float* sums;     // [query][partial], of the span at hand
  float* keys;     // [dim][kGroup], only where pages don't hold whole groups
  // The positions of the block at hand that a query sees are begin .. end - 1, those from `straight` at slots of their own; the same for
  // each head.
  int begin[kMaxTaskQueries], end[kMaxTaskQueries], straight[kMaxTaskQueries];
  bool whole;                  // every query sees the whole block, and every key of it at the slot of its position
  float soft_cap;              // 0: none
  int64_t dim, width, stride;  // width = padded dim, stride = floats of a partial
  int count, tiles, tile;      // queries of a head; their tiles; queries of a tile

  const float* tile_of(int head, int number) const { return queries + (head * tiles + number) * tile * width; }
  float* score(int head, int query) const { return scores + (head * count + query) * kKeyBlock; }
  float* sum(int head, int query) const { return sums + (head * count + query) * stride; }
};

template <bool Bf16>
inline Vec load_whole(const void* base, int64_t at) {
  if (Bf16) return load_bf16(static_cast<const uint16_t*>(base) + at);
  return load(static_cast<const float*>(base) + at);
}

template <bool Bf16>
inline Vec load_part(const void* base, int64_t at, int n) {
  if (n == 16) return load_whole<Bf16>(base, at);
  if (!Bf16) return load_first(static_cast<const float*>(base) + at, n);
  uint16_t row[16] = {};
  __builtin_memcpy(row, static_cast<const uint16_t*>(base) + at, static_cast<size_t>(n) * 2);
  return load_bf16(row);
}

inline float load_one(const CacheView& c, const void* base, int64_t at) {
  if (!c.bf16) return static_cast<const float*>(base)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(base)[at]) << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// Scores of a group for Q queries of a tile: one chain of fused multiply-adds over the dimensions for each query and lane. `keys` are at
// element `at`, `step` elements from dimension to dimension.
template <int Q, bool Bf16>
void score_group(const void* keys, int64_t at, int64_t step, const float* queries, int tile, int64_t dim, const Fetch (&fetch)[4],
                 float* scores) {
  Vec sum[Q];
#pragma GCC unroll 16
  for (int q = 0; q < Q; ++q) sum[q] = zero();
  for (const Fetch& part : fetch)
    for (int64_t i = 0; i < dim / 4; ++i) {
      part(i);
      const Vec key = load_whole<Bf16>(keys, at);
      at += step;
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) sum[q] = fma(key, broadcast(queries[q]), sum[q]);
      queries += tile;
    }
#pragma GCC unroll 16
  for (int q = 0; q < Q; ++q) store(scores + q * kKeyBlock, sum[q]);
}

// The score of one key for up to 16 queries of a tile, by the same chain.
inline Vec score_one(const CacheView& c, int64_t at, const float* queries, int tile, int n) {
  Vec sum = zero();
  for (int64_t d = 0; d < c.dim; ++d) sum = fma(broadcast(load_one(c, c.keys, at + d * c.page_size)), load_first(queries + d * tile, n), sum);
  return sum;
}

// Vectors first .. last - 1 of a query's scores, with nothing outside begin .. end - 1 where Cut; the highest of them.
template <bool Cut>
inline float bound_scores(float* scores, int first, int last, int begin, int end, float soft_cap) {
  const Vec nothing = broadcast(-__builtin_inff());
  Vec highest = nothing;
#pragma GCC unroll 4
  for (int i = first; i < last; ++i) {
    Vec x = load(scores + 16 * i);
    if (soft_cap != 0.0f) x = cap_lanes(x, broadcast(soft_cap));
    if (Cut) x = blend_first(nothing, blend_first(x, nothing, between(end - 16 * i, 0, 16)), between(begin - 16 * i, 0, 16));
    if (Cut || soft_cap != 0.0f) store(scores + 16 * i, x);
    highest = max(highest, x);
  }
  return max_lanes(highest);
}

inline float weigh_scores(float* scores, int first, int last, Vec origin) {
  Vec total = zero();
#pragma GCC unroll 4
  for (int i = first; i < last; ++i) {
    const Vec weight = exp_lanes(sub(load(scores + 16 * i), origin));
    store(scores + 16 * i, weight);
    total = add(total, weight);
  }
  return sum_lanes(total);
}

// Scores of the block become weights relative to the span's highest score so far, to which older sums shrink. In loops of their own, so
// that the waits within one query's reductions are filled with others. fetches(q) is called for each query in turn. Plain: every query
// sees the whole block, and there is no soft cap.
template <bool Plain, class Fetches>
void weigh(QueryTile& t, int head, const Fetches& fetches) {
  float change[kMaxTaskQueries + 16], total[kMaxTaskQueries];
  float *const scores = t.score(head, 0), *const sums = t.sum(head, 0);
  const auto sees = [&](int q) { return Plain || t.begin[q] < t.end[q]; };
  for (int q = 0; q < t.count; ++q) {
    float& highest = sums[q * t.stride + t.width];
    const float before = highest;
    float of_block = before;
    if (Plain)
      of_block = bound_scores<false>(scores + q * kKeyBlock, 0, kGroups, 0, kKeyBlock, 0.0f);
    else if (sees(q))
      of_block = bound_scores<true>(scores + q * kKeyBlock, t.begin[q] / 16, (t.end[q] + 15) / 16, t.begin[q], t.end[q], t.soft_cap);
    highest = before > of_block ? before : of_block;
    change[q] = before - highest;
  }
  for (int q = 0; q < t.count; ++q) {
    fetches(q);
    const Vec origin = broadcast(sums[q * t.stride + t.width]);
    if (Plain)
      total[q] = weigh_scores(scores + q * kKeyBlock, 0, kGroups, origin);
    else if (sees(q))
      total[q] = weigh_scores(scores + q * kKeyBlock, t.begin[q] / 16, (t.end[q] + 15) / 16, origin);
  }
  for (int q = t.count; q % 16 != 0; ++q) change[q] = 0.0f;
  for (int q = 0; q < t.count; q += 16) store(change + q, exp_lanes(load(change + q)));
  for (int q = 0; q < t.count; ++q) {
    if (!sees(q)) continue;
    float* const sum = sums + q * t.stride;
    const bool as_before = change[q] == 1.0f || sum[t.width + 1] == 0.0f;  // or there is nothing yet
    sum[t.width + 1] = sum[t.width + 1] * change[q] + total[q];
    if (as_before) continue;
    const Vec factor = broadcast(change[q]);
    for (int64_t d = 0; d < t.width; d += 16) store(sum + d, mul(load(sum + d), factor));
  }
}

// Values of a group, at elements at[] + offset, and the weights and sums of the first query that they are added to.
struct GroupValues {
  const void* values;
  const int64_t* at;
  int64_t offset, dim;
  const float* weights;
  float* sums;
  int64_t stride;

  GroupValues of(int query) const { return {values, at, offset, dim, weights + query * kKeyBlock, sums + query * stride, stride}; }
};

// Adds values first .. last - 1 to Q queries, position by position: V vectors of `lanes` dimensions each, from dimension d.
template <int Q, int V, bool Bf16>
inline void add_vectors(const GroupValues& g, int64_t d, int lanes, int first, int last) {
  Vec sum[Q][V];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[q][v] = load(g.sums + q * g.stride + d + 16 * v);
  for (int j = first; j < last; ++j) {
    const int64_t at = g.at[j] + g.offset + d;
    Vec value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) value[v] = V == 1 ? load_part<Bf16>(g.values, at, lanes) : load_whole<Bf16>(g.values, at + 16 * v);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const Vec weight = broadcast(g.weights[q * kKeyBlock + j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[q][v] = fma(value[v], weight, sum[q][v]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(g.sums + q * g.stride + d + 16 * v, sum[q][v]);
}

template <int Q, bool Bf16>
void add_values(const GroupValues& g, int first, int last) {
  int64_t d = 0;
  for (; d + 16 * kValueVectors <= g.dim; d += 16 * kValueVectors) add_vectors<Q, kValueVectors, Bf16>(g, d, 16, first, last);
  for (; d < g.dim; d += 16) add_vectors<Q, 1, Bf16>(g, d, between(g.dim - d, 0, 16), first, last);
}

template <int Q, bool Bf16>
struct Steps {
  template <class... Arguments>
  static void scores(int n, Arguments&&... arguments) {
    n == Q ? score_group<Q, Bf16>(arguments...) : Steps<Q - 1, Bf16>::scores(n, arguments...);
  }
  static void values(int n, const GroupValues& g, int first, int last) {
    n == Q ? add_values<Q, Bf16>(g, first, last) : Steps<Q - 1, Bf16>::values(n, g, first, last);
  }
};
template <bool Bf16>
struct Steps<0, Bf16> {
  template <class... Arguments>
  static void scores(int, Arguments&&...) {}
  static void values(int, const GroupValues&, int, int) {}
};

}  // namespace
