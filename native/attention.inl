// Paged attention with draft trees (include after one vector_*.h and rows.inl).
//
// Keys are visited in blocks of kKeyBlock positions aligned to 0, 32, 64, ..., whatever pages, chunks or slots they lie in. A score is
// one chain of fused multiply-adds over the head's dimensions; within a block, values are added key by key, and a row stops at its own
// position. kSpanBlocks blocks make a span, worked out by itself; spans are merged in the order of their positions. So a row's result is
// a function of its query and of the keys and values at positions 0 .. its own, and of nothing else - also not of who computed a span.
#include "kernel_table.h"
#include "plan_view.h"

namespace {

using foredraft::AttentionArgs;
using foredraft::AttentionTask;
using foredraft::kKeyBlock;
using foredraft::kMaxTaskQueries;
using foredraft::kSpan;
using foredraft::PlanSegment;

constexpr int kScoreQueries = 6;
constexpr int kValueQueries = kVectorsPerPanel == 2 ? 6 : 3;
constexpr int kValueVectors = kVectorsPerPanel == 2 ? 4 : 2;

inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
inline int between(int64_t x, int lowest, int highest) {
  return x < lowest ? lowest : x > highest ? highest : static_cast<int>(x);
}

// A partial result of one query: padded(dim) sums, then the highest score and the total weight.
inline int64_t partial_floats(int64_t dim) { return padded(dim) + 16; }

// Key heads that one task takes together: as many as fit in half of a first-level cache of 64 KiB.
int64_t task_heads(int64_t dim) {
  const int64_t heads = foredraft::kKeyScratchFloats / (padded(dim) * kKeyBlock);
  return heads < 1 ? 1 : heads;
}

int64_t attention_scratch(int64_t dim) {
  return padded(dim) * kKeyBlock * (1 + task_heads(dim)) + kMaxTaskQueries * (padded(dim) + kKeyBlock + 2 * partial_floats(dim));
}

// The state of the queries of one task; query = head in task * queries per head + query in head.
struct QueryTile {
  float* keys;     // [heads of the task][padded dim][kKeyBlock], one block transposed
  float* values;   // [kKeyBlock][padded dim], only where the cache cannot be read in place
  float* queries;  // [kMaxTaskQueries][padded dim], scaled
  float* scores;   // [kMaxTaskQueries][kKeyBlock]
  float* sums;     // [kMaxTaskQueries][partial], of the span at hand
  float* merged;   // [kMaxTaskQueries][partial], of the spans before it
  const float* value_rows[kKeyBlock];
  float shrink[kMaxTaskQueries];
  int count[kMaxTaskQueries];  // visible keys of the block at hand; the same for each head
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

// Scores become weights relative to the span's highest score so far; older sums will shrink by t.shrink.
void weigh(QueryTile& t, const Selection& s) {
  float change[kMaxTaskQueries + 16] = {};
  float block_total[kMaxTaskQueries];
  const Vec nothing = broadcast(-__builtin_inff());
  for (int i = 0; i < s.size; ++i) {
    const int q = s.ids[i];
    float* scores = t.scores + q * kKeyBlock;
    const Vec a = blend_first(load(scores), nothing, between(t.count[q], 0, 16));
    const Vec b = blend_first(load(scores + 16), nothing, between(t.count[q] - 16, 0, 16));
    const float before = t.highest(q), block_highest = max_lanes(max(a, b));
    const float highest = before > block_highest ? before : block_highest;
    const Vec origin = broadcast(highest);
    const Vec wa = exp_lanes(sub(a, origin)), wb = exp_lanes(sub(b, origin));
    store(scores, wa);
    store(scores + 16, wb);
    block_total[i] = sum_lanes(add(wa, wb));
    change[i] = before - highest;
    t.highest(q) = highest;
  }
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

// Adds the values of keys first .. last - 1, each query as far as it sees.
template <int Q, int V>
void values_at(QueryTile& t, const int* ids, int64_t d, int first, int last) {
  int common = last;
  for (int q = 0; q < Q; ++q) common = t.count[ids[q]] < common ? t.count[ids[q]] : common;
  if (common < first) common = first;
  add_values<Q, V>(t, ids, d, first, common, first == 0);
  for (int q = 0; q < Q; ++q) {
    const int end = t.count[ids[q]] < last ? t.count[ids[q]] : last;
    if (common < end) add_values<1, V>(t, ids + q, d, common, end, false);
  }
}

template <int Q>
void value_queries(QueryTile& t, const int* ids, int first, int last) {
  int64_t d = 0;
  for (; d + 16 * kValueVectors <= t.width; d += 16 * kValueVectors) values_at<Q, kValueVectors>(t, ids, d, first, last);
  for (; d < t.width; d += 16) values_at<Q, 1>(t, ids, d, first, last);
}

template <int Q>
struct Steps {
  static void scores(int n, QueryTile& t, const float* keys, const int* ids) {
    n == Q ? score_queries<Q>(t, keys, ids) : Steps<Q - 1>::scores(n, t, keys, ids);
  }
  static void values(int n, QueryTile& t, const int* ids, int first, int last) {
    n == Q ? value_queries<Q>(t, ids, first, last) : Steps<Q - 1>::values(n, t, ids, first, last);
  }
};
template <>
struct Steps<0> {
  static void scores(int, QueryTile&, const float*, const int*) {}
  static void values(int, QueryTile&, const int*, int, int) {}
};

struct Walk {
  const AttentionArgs& a;
  const AttentionTask& task;
  const PlanSegment& segment;
  int group;    // query heads of a key head
  int heads;    // key heads of the task
  int queries;  // of one key head in the task
  const PlanRow& row(int query) const {
    return a.plan->rows[segment.first_row + (task.first_query + query) / group];
  }
  // Where query `query` of the task's head `head` lies in tensors of [row, query head].
  int64_t flat(int head, int query) const {
    const int index = task.first_query + query;
    return (segment.first_row + index / group) * a.heads + (task.first_head + head) * group + index % group;
  }
  int64_t head_stride() const { return a.cache.page_size * a.cache.dim; }
};

// Elements of the keys at slots first .. first + n - 1 for the task's first head, without a division a slot.
void shared_elements(const Walk& w, int64_t first, int n, int64_t* at) {
  const CacheView& c = w.a.cache;
  const int32_t* page = w.a.plan->page_table + w.segment.pages + first / c.page_size;
  int64_t offset = first % c.page_size;
  for (int j = 0; j < n; ++j) {
    at[j] = ((*page * c.heads + w.task.first_head) * c.page_size + offset) * c.dim;
    if (++offset == c.page_size) {
      offset = 0;
      ++page;
    }
  }
}

// The queries (of the first head) whose visible keys of this block lie at the slots of their positions; the others keep their own
// ancestors.
void select(const Walk& w, QueryTile& t, int64_t block, Selection& shared, Selection& own) {
  shared.size = own.size = 0;
  for (int q = 0; q < w.queries;) {
    const PlanRow& row = w.row(q);
    const int count = between(row.position + 1 - block, 0, kKeyBlock);
    Selection& s = row.diverges >= block + count ? shared : own;
    const int end = between((w.task.first_query + q) / w.group * w.group + w.group - w.task.first_query, 0, w.queries);
    for (; q < end; ++q) {
      for (int head = 0; head < w.heads; ++head) t.count[head * w.queries + q] = count;
      if (count != 0) s.ids[s.size++] = q;
    }
  }
}

Selection of_head(const Selection& s, int head, int queries) {
  Selection out;
  out.size = s.size;
  for (int i = 0; i < s.size; ++i) out.ids[i] = s.ids[i] + head * queries;
  return out;
}

// One block of keys for every head; at[] holds elements of the first one. Keys, and then values, are read by halves of a block and
// heads within them, which for pages of 16 is the order in which they lie: the hardware then fetches ahead by itself. Head after head
// came at half of the speed from memory, and prefetch instructions made it slower.
void visit_heads(const Walk& w, QueryTile& t, const int64_t* at, int keys, const Selection& s) {
  const CacheView& c = w.a.cache;
  const int64_t head_keys = t.width * kKeyBlock;
  for (int half = 0; half < kKeyBlock; half += 16)
    for (int head = 0; head < w.heads; ++head)
      gather_keys(c, at + half, head * w.head_stride(), keys - half, t.keys + head * head_keys + half);
  for (int head = 0; head < w.heads; ++head) {
    const Selection one = of_head(s, head, w.queries);
    for (int i = 0; i < s.size; i += kScoreQueries)
      Steps<kScoreQueries>::scores(between(s.size - i, 1, kScoreQueries), t, t.keys + head * head_keys, one.ids + i);
    weigh(t, one);
  }
  for (int half = 0; half < keys; half += 16)
    for (int head = 0; head < w.heads; ++head) {
      const Selection one = of_head(s, head, w.queries);
      const int last = between(keys, 0, half + 16);
      gather_values(c, at, head * w.head_stride(), half, last, t);
      for (int i = 0; i < s.size; i += kValueQueries)
        Steps<kValueQueries>::values(between(s.size - i, 1, kValueQueries), t, one.ids + i, half, last);
    }
}

void visit_own(const Walk& w, QueryTile& t, int64_t block, const Selection& own) {
  const CacheView& c = w.a.cache;
  int64_t at[kKeyBlock];
  for (int i = 0; i < own.size;) {
    const PlanRow& row = w.row(own.ids[i]);
    const int n = t.count[own.ids[i]];
    Selection one;
    one.size = 0;
    for (; i < own.size && &w.row(own.ids[i]) == &row; ++i) one.ids[one.size++] = own.ids[i];
    for (int j = 0; j < n; ++j) {
      const int64_t slot = w.a.plan->physical(w.segment, w.a.plan->slot_at(w.segment, row, block + j));
      at[j] = ((slot / c.page_size * c.heads + w.task.first_head) * c.page_size + slot % c.page_size) * c.dim;
    }
    visit_heads(w, t, at, n, one);
  }
}

void visit_shared(const Walk& w, QueryTile& t, int64_t block, const Selection& shared) {
  int64_t at[kKeyBlock];
  int keys = 0;
  for (int i = 0; i < shared.size; ++i)
    if (t.count[shared.ids[i]] > keys) keys = t.count[shared.ids[i]];
  shared_elements(w, block, keys, at);
  visit_heads(w, t, at, keys, shared);
}

void start_queries(const Walk& w, QueryTile& t) {
  const Vec scale = broadcast(w.a.scale);
  for (int head = 0; head < w.heads; ++head)
    for (int q = 0; q < w.queries; ++q) {
      const float* in = w.a.queries + w.flat(head, q) * t.dim;
      float* out = t.queries + (head * w.queries + q) * t.width;
      for (int64_t d = 0; d < t.dim; d += 16) store(out + d, mul(load_first(in + d, between(t.dim - d, 0, 16)), scale));
    }
}

void start_span(QueryTile& t, int queries) {
  for (int q = 0; q < queries; ++q) {
    for (int64_t d = 0; d < t.width; d += 16) store(t.sum(q) + d, zero());
    t.highest(q) = -__builtin_inff();
    t.total(q) = 0.0f;
  }
}

// Adds a later span's partial result to an earlier one's. A span without a visible key has total 0 and changes nothing.
void merge(float* into, const float* part, int64_t width) {
  if (part[width + 1] == 0.0f) return;
  const float highest = into[width] > part[width] ? into[width] : part[width];
  float factors[16] = {into[width] - highest, part[width] - highest};
  store(factors, exp_lanes(load(factors)));
  const Vec a = broadcast(factors[0]), b = broadcast(factors[1]);
  for (int64_t d = 0; d < width; d += 16) store(into + d, fma(load(part + d), b, mul(load(into + d), a)));
  into[width] = highest;
  into[width + 1] = into[width + 1] * factors[0] + part[width + 1] * factors[1];
}

void copy_partial(float* to, const float* from, int64_t floats) {
  for (int64_t i = 0; i < floats; i += 16) store(to + i, load(from + i));
}

void write_result(const float* part, int64_t dim, int64_t width, float* out) {
  for (int64_t d = 0; d < dim; d += 16)
    store_first(out + d, div(load(part + d), broadcast(part[width + 1])), between(dim - d, 0, 16));
}

QueryTile make_tile(int64_t dim, float* scratch) {
  QueryTile t;
  t.dim = dim;
  t.width = padded(dim);
  t.stride = partial_floats(dim);
  t.keys = scratch;
  t.values = t.keys + t.width * kKeyBlock * task_heads(dim);
  t.queries = t.values + t.width * kKeyBlock;
  t.scores = t.queries + kMaxTaskQueries * t.width;
  t.sums = t.scores + kMaxTaskQueries * kKeyBlock;
  t.merged = t.sums + kMaxTaskQueries * t.stride;
  return t;
}

// The spans first_span .. last_span - 1 of a task's queries: merged and written to the output, or, where task.partials is given, left
// there as [span][head][query] for merge_attention.
void attention(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  const Walk w{a,
               task,
               a.plan->segments[task.segment],
               static_cast<int>(a.heads / a.cache.heads),
               task.last_head - task.first_head,
               task.last_query - task.first_query};
  QueryTile t = make_tile(a.cache.dim, scratch);
  const int queries = w.heads * w.queries;
  start_queries(w, t);
  int64_t last = 0;
  for (int q = 0; q < w.queries; ++q)
    if (w.row(q).position > last) last = w.row(q).position;
  Selection shared, own;
  for (int64_t span = task.first_span; span < task.last_span && span * kSpan <= last; ++span) {
    start_span(t, queries);
    for (int64_t block = span * kSpan; block < (span + 1) * kSpan && block <= last; block += kKeyBlock) {
      select(w, t, block, shared, own);
      if (shared.size != 0) visit_shared(w, t, block, shared);
      visit_own(w, t, block, own);
    }
    if (task.partials != nullptr) {
      float* out = task.partials + (span - task.first_span) * queries * t.stride;
      for (int q = 0; q < queries; ++q) copy_partial(out + q * t.stride, t.sum(q), t.stride);
      continue;
    }
    for (int q = 0; q < queries; ++q)
      if (span == task.first_span)
        copy_partial(t.merged + q * t.stride, t.sum(q), t.stride);
      else
        merge(t.merged + q * t.stride, t.sum(q), t.width);
  }
  if (task.partials != nullptr) return;
  for (int head = 0; head < w.heads; ++head)
    for (int q = 0; q < w.queries; ++q)
      write_result(t.merged + (head * w.queries + q) * t.stride, t.dim, t.width, a.out + w.flat(head, q) * t.dim);
}

// The end of a task that was shared out by spans: its partial results [span][head][query], merged in place and written.
void merge_attention(const AttentionArgs& a, const AttentionTask& task) {
  const Walk w{a,
               task,
               a.plan->segments[task.segment],
               static_cast<int>(a.heads / a.cache.heads),
               task.last_head - task.first_head,
               task.last_query - task.first_query};
  const int64_t stride = partial_floats(a.cache.dim), width = padded(a.cache.dim);
  const int64_t queries = w.heads * w.queries;
  for (int head = 0; head < w.heads; ++head)
    for (int q = 0; q < w.queries; ++q) {
      float* first = task.partials + (head * w.queries + q) * stride;
      for (int64_t span = 1; span < task.last_span - task.first_span; ++span) merge(first, first + span * queries * stride, width);
      write_result(first, a.cache.dim, width, a.out + w.flat(head, q) * a.cache.dim);
    }
}

}  // namespace
