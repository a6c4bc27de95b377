// Paged attention with draft trees (include after one vector_*.h and rows.inl).
//
// Keys are visited in blocks of kKeyBlock positions aligned to 0, 32, 64, ..., whatever pages, chunks or slots they lie in. A score is
// one chain of fused multiply-adds over the head's dimensions; within a block, values are added key by key, and a row stops at its own
// position. So a row's result is a function of its query and of the keys and values at positions 0 .. its own, and of nothing else.
#include "kernel_table.h"
#include "plan_view.h"

namespace {

using foredraft::AttentionArgs;
using foredraft::AttentionTask;
using foredraft::kKeyBlock;
using foredraft::kQueryTile;
using foredraft::PlanSegment;

constexpr int kScoreQueries = 6;
constexpr int kValueQueries = kVectorsPerPanel == 2 ? 6 : 3;
constexpr int kValueVectors = kVectorsPerPanel == 2 ? 4 : 2;

inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
inline int between(int64_t x, int lowest, int highest) {
  return x < lowest ? lowest : x > highest ? highest : static_cast<int>(x);
}

int64_t attention_scratch(int64_t dim) {
  return padded(dim) * kKeyBlock * 2 + kQueryTile * (2 * padded(dim) + kKeyBlock);
}

// The running state of the queries of one task; all arrays live in the scratch or on the stack.
struct QueryTile {
  float* keys;     // [padded dim][kKeyBlock], one block transposed
  float* values;   // [kKeyBlock][padded dim], only where the cache cannot be read in place
  float* queries;  // [kQueryTile][padded dim], scaled
  float* scores;   // [kQueryTile][kKeyBlock]
  float* sums;     // [kQueryTile][padded dim]
  const float* value_rows[kKeyBlock];
  float highest[kQueryTile], total[kQueryTile], shrink[kQueryTile];
  int count[kQueryTile];  // visible keys of the block at hand
  int64_t dim, width;     // width = padded dim
};

// A set of queries that see the same keys of a block.
struct Selection {
  int ids[kQueryTile];
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

// Brings the keys at elements at[0 .. count) of the cache into the tile, transposed, and finds or widens their values.
void gather_block(const CacheView& c, const int64_t* at, int count, QueryTile& t) {
  for (int first = 0; first < kKeyBlock; first += 16)
    for (int64_t d = 0; d < t.dim; d += 16) {
      const int n = between(t.dim - d, 0, 16);
      Vec rows[16];
      for (int j = 0; j < 16; ++j)
        rows[j] = first + j < count ? load_cached(c.keys, at[first + j] + d, n, c.bf16) : zero();
      transpose_store(rows, t.keys + d * kKeyBlock + first, kKeyBlock);
    }
  const bool in_place = !c.bf16 && t.width == t.dim;
  for (int j = 0; j < count; ++j) {
    if (in_place) {
      t.value_rows[j] = static_cast<const float*>(c.values) + at[j];
      continue;
    }
    float* row = t.values + j * t.width;
    for (int64_t d = 0; d < t.dim; d += 16)
      store(row + d, load_cached(c.values, at[j] + d, between(t.dim - d, 0, 16), c.bf16));
    t.value_rows[j] = row;
  }
}

template <int Q>
void score_queries(QueryTile& t, const int* ids) {
  const float* query[Q];
  for (int q = 0; q < Q; ++q) query[q] = t.queries + ids[q] * t.width;
  for (int first = 0; first < kKeyBlock; first += 16 * kScoreVectors) {
    Vec sum[Q][kScoreVectors];
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < kScoreVectors; ++v) sum[q][v] = zero();
    for (int64_t d = 0; d < t.dim; ++d) {
      Vec key[kScoreVectors];
      for (int v = 0; v < kScoreVectors; ++v) key[v] = load(t.keys + d * kKeyBlock + first + 16 * v);
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

// Scores become weights relative to the highest score so far; older sums will shrink by t.shrink.
void weigh(QueryTile& t, const Selection& s) {
  float change[kQueryTile + 16] = {};
  float block_total[kQueryTile];
  const Vec nothing = broadcast(-__builtin_inff());
  for (int i = 0; i < s.size; ++i) {
    const int q = s.ids[i];
    float* scores = t.scores + q * kKeyBlock;
    const Vec a = blend_first(load(scores), nothing, between(t.count[q], 0, 16));
    const Vec b = blend_first(load(scores + 16), nothing, between(t.count[q] - 16, 0, 16));
    const float block_highest = max_lanes(max(a, b));
    const float highest = t.highest[q] > block_highest ? t.highest[q] : block_highest;
    const Vec origin = broadcast(highest);
    const Vec wa = exp_lanes(sub(a, origin)), wb = exp_lanes(sub(b, origin));
    store(scores, wa);
    store(scores + 16, wb);
    block_total[i] = sum_lanes(add(wa, wb));
    change[i] = t.highest[q] - highest;
    t.highest[q] = highest;
  }
  for (int i = 0; i < s.size; i += 16) store(change + i, exp_lanes(load(change + i)));
  for (int i = 0; i < s.size; ++i) {
    const int q = s.ids[i];
    t.shrink[q] = change[i];
    t.total[q] = t.total[q] * change[i] + block_total[i];
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
      sum[q][v] = load(t.sums + ids[q] * t.width + d + 16 * v);
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
    for (int v = 0; v < V; ++v) store(t.sums + ids[q] * t.width + d + 16 * v, sum[q][v]);
}

template <int Q>
void value_queries(QueryTile& t, const int* ids) {
  int common = kKeyBlock;
  for (int q = 0; q < Q; ++q) common = t.count[ids[q]] < common ? t.count[ids[q]] : common;
  int64_t d = 0;
  for (; d + 16 * kValueVectors <= t.width; d += 16 * kValueVectors) {
    add_values<Q, kValueVectors>(t, ids, d, 0, common, true);
    for (int q = 0; q < Q; ++q)
      if (common < t.count[ids[q]]) add_values<1, kValueVectors>(t, ids + q, d, common, t.count[ids[q]], false);
  }
  for (; d < t.width; d += 16) {
    add_values<Q, 1>(t, ids, d, 0, common, true);
    for (int q = 0; q < Q; ++q)
      if (common < t.count[ids[q]]) add_values<1, 1>(t, ids + q, d, common, t.count[ids[q]], false);
  }
}

using QueryStep = void (*)(QueryTile&, const int*);
template <int Q>
struct Steps {
  static QueryStep scores(int n) { return n == Q ? score_queries<Q> : Steps<Q - 1>::scores(n); }
  static QueryStep values(int n) { return n == Q ? value_queries<Q> : Steps<Q - 1>::values(n); }
};
template <>
struct Steps<1> {
  static QueryStep scores(int) { return score_queries<1>; }
  static QueryStep values(int) { return value_queries<1>; }
};

// The keys and values at elements at[0 .. count), on their way to the first-level cache while another block is worked on.
inline void prefetch_rows(const CacheView& c, const void* base, const int64_t* at, int count) {
  const int64_t width = c.bf16 ? 2 : 4;
  for (int j = 0; j < count; ++j) {
    const char* row = static_cast<const char*>(base) + at[j] * width;
    for (int64_t byte = 0; byte < c.dim * width; byte += 64) __builtin_prefetch(row + byte, 0, 0);
  }
}

// Visits `keys` keys at elements `at`; `ahead` keys at elements `next` will be visited after them.
void visit_block(const CacheView& c, const int64_t* at, int keys, const int64_t* next, int ahead, QueryTile& t, const Selection& s) {
  gather_block(c, at, keys, t);
  prefetch_rows(c, c.keys, next, ahead);
  for (int i = 0; i < s.size; i += kScoreQueries) {
    const int n = between(s.size - i, 1, kScoreQueries);
    Steps<kScoreQueries>::scores(n)(t, s.ids + i);
  }
  weigh(t, s);
  prefetch_rows(c, c.values, next, ahead);
  for (int i = 0; i < s.size; i += kValueQueries) {
    const int n = between(s.size - i, 1, kValueQueries);
    Steps<kValueQueries>::values(n)(t, s.ids + i);
  }
}

struct Walk {
  const AttentionArgs& a;
  const AttentionTask& task;
  const PlanSegment& segment;
  int64_t group;
  const PlanRow& row(int query) const {
    return a.plan->rows[segment.first_row + (task.first + query) / group];
  }
  int64_t element(int64_t physical) const {
    const CacheView& c = a.cache;
    return ((physical / c.page_size * c.heads + task.kv_head) * c.page_size + physical % c.page_size) * c.dim;
  }
};

// Elements of the keys at slots first .. first + n - 1, without a division a slot.
void shared_elements(const Walk& w, int64_t first, int n, int64_t* at) {
  const CacheView& c = w.a.cache;
  const int32_t* page = w.a.plan->page_table + w.segment.pages + first / c.page_size;
  int64_t offset = first % c.page_size;
  for (int j = 0; j < n; ++j) {
    at[j] = ((*page * c.heads + w.task.kv_head) * c.page_size + offset) * c.dim;
    if (++offset == c.page_size) {
      offset = 0;
      ++page;
    }
  }
}

// The queries whose visible keys of this block lie at the slots of their positions; the others keep their own ancestors.
void select(const Walk& w, QueryTile& t, int64_t block, Selection& shared, Selection& own) {
  shared.size = own.size = 0;
  for (int q = 0; q < w.task.last - w.task.first; ++q) {
    const PlanRow& row = w.row(q);
    t.count[q] = between(row.position + 1 - block, 0, kKeyBlock);
    if (t.count[q] == 0) continue;
    Selection& s = row.diverges >= block + t.count[q] ? shared : own;
    s.ids[s.size++] = q;
  }
}

void visit_own(const Walk& w, QueryTile& t, int64_t block, const Selection& own) {
  int64_t at[kKeyBlock];
  for (int i = 0; i < own.size;) {
    const PlanRow& row = w.row(own.ids[i]);
    const int n = t.count[own.ids[i]];
    Selection one;
    one.size = 0;
    for (; i < own.size && &w.row(own.ids[i]) == &row; ++i) one.ids[one.size++] = own.ids[i];
    for (int j = 0; j < n; ++j)
      at[j] = w.element(w.a.plan->physical(w.segment, w.a.plan->slot_at(w.segment, row, block + j)));
    visit_block(w.a.cache, at, n, nullptr, 0, t, one);
  }
}

void start_tile(const Walk& w, QueryTile& t) {
  const Vec scale = broadcast(w.a.scale);
  for (int q = 0; q < w.task.last - w.task.first; ++q) {
    const int64_t index = w.task.first + q;
    const int64_t row = w.segment.first_row + index / w.group;
    const float* in = w.a.queries + (row * w.a.heads + w.task.kv_head * w.group + index % w.group) * t.dim;
    for (int64_t d = 0; d < t.dim; d += 16) {
      const int n = between(t.dim - d, 0, 16);
      store(t.queries + q * t.width + d, mul(load_first(in + d, n), scale));
      store(t.sums + q * t.width + d, zero());
    }
    t.highest[q] = -__builtin_inff();
    t.total[q] = 0.0f;
  }
}

void finish_attention(const Walk& w, const QueryTile& t) {
  for (int q = 0; q < w.task.last - w.task.first; ++q) {
    const int64_t index = w.task.first + q;
    const int64_t row = w.segment.first_row + index / w.group;
    float* out = w.a.out + (row * w.a.heads + w.task.kv_head * w.group + index % w.group) * t.dim;
    for (int64_t d = 0; d < t.dim; d += 16)
      store_first(out + d, div(load(t.sums + q * t.width + d), broadcast(t.total[q])), between(t.dim - d, 0, 16));
  }
}

void attention(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  const Walk w{a, task, a.plan->segments[task.segment], a.heads / a.cache.heads};
  QueryTile t;
  t.dim = a.cache.dim;
  t.width = padded(t.dim);
  t.keys = scratch;
  t.values = t.keys + t.width * kKeyBlock;
  t.queries = t.values + t.width * kKeyBlock;
  t.sums = t.queries + kQueryTile * t.width;
  t.scores = t.sums + kQueryTile * t.width;
  start_tile(w, t);
  int64_t last = 0;
  for (int q = 0; q < task.last - task.first; ++q)
    if (w.row(q).position > last) last = w.row(q).position;
  // What lies below every row's divergence and every chain row's position may be fetched ahead for all.
  const int64_t straight = w.segment.prefix + w.segment.chain;
  Selection shared, own;
  int64_t at[2][kKeyBlock];
  int found = 0;  // keys of this block whose elements are at hand
  for (int64_t block = 0, turn = 0; block <= last; block += kKeyBlock, turn ^= 1) {
    select(w, t, block, shared, own);
    const int ahead = between(smaller(last + 1, straight) - block - kKeyBlock, 0, kKeyBlock);
    if (ahead != 0) shared_elements(w, block + kKeyBlock, ahead, at[turn ^ 1]);
    if (shared.size != 0) {
      int keys = 0;
      for (int i = 0; i < shared.size; ++i)
        if (t.count[shared.ids[i]] > keys) keys = t.count[shared.ids[i]];
      if (keys > found) shared_elements(w, block, keys, at[turn]);
      visit_block(a.cache, at[turn], keys, at[turn ^ 1], ahead, t, shared);
    }
    visit_own(w, t, block, own);
    found = ahead;
  }
  finish_attention(w, t);
}

}  // namespace
