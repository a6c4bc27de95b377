// Paged attention with draft trees (include after one vector_*.h, rows.inl and attention_block.inl).
//
// Keys are visited in blocks of kKeyBlock positions aligned to 0, 32, 64, ..., whatever pages, chunks or slots they lie in. A score is
// one chain of fused multiply-adds over the head's dimensions; within a block, values are added key by key, and a row stops at its own
// position. kSpanBlocks blocks make a span, worked out by itself; spans are merged in the order of their positions. So a row's result is
// a function of its query and of the keys and values at the positions that it sees, and of nothing else - also not of who computed a span,
// nor of blocks that others of its task see.
#include "kernel_table.h"
#include "plan_view.h"

namespace {

using foredraft::AttentionArgs;
using foredraft::AttentionTask;
using foredraft::kSpan;
using foredraft::PlanSegment;

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
  // The first position that a row sees.
  int64_t lowest(const PlanRow& row) const { return row.position < a.window ? 0 : row.position - a.window + 1; }
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
    const int begin = between(w.lowest(row) - block, 0, kKeyBlock), finish = between(row.position + 1 - block, 0, kKeyBlock);
    Selection& s = row.diverges >= block + finish ? shared : own;
    const int end = between((w.task.first_query + q) / w.group * w.group + w.group - w.task.first_query, 0, w.queries);
    for (; q < end; ++q) {
      for (int head = 0; head < w.heads; ++head) {
        t.begin[head * w.queries + q] = begin;
        t.end[head * w.queries + q] = finish;
      }
      if (begin < finish) s.ids[s.size++] = q;
    }
  }
}

Selection of_head(const Selection& s, int head, int queries) {
  Selection out;
  out.size = s.size;
  for (int i = 0; i < s.size; ++i) out.ids[i] = s.ids[i] + head * queries;
  return out;
}

// Keys first .. last - 1 of a block for every head; at[] holds elements of the first one.
void visit_heads(const Walk& w, QueryTile& t, const int64_t* at, int first, int last, const Selection& s) {
  const CacheView& c = w.a.cache;
  for (int head = 0; head < w.heads; ++head) {
    const int64_t offset = head * w.head_stride();
    const Selection one = of_head(s, head, w.queries);
    for (int half = first / 16 * 16; half < last; half += 16) gather_keys(c, at + half, offset, last - half, t.keys + half);
    for (int i = 0; i < s.size; i += kScoreQueries)
      Steps<kScoreQueries>::scores(between(s.size - i, 1, kScoreQueries), t, t.keys, one.ids + i);
    weigh(t, one);
    gather_values(c, at, offset, first, last, t);
    for (int i = 0; i < s.size; i += kValueQueries)
      Steps<kValueQueries>::values(between(s.size - i, 1, kValueQueries), t, one.ids + i);
  }
}

void visit_own(const Walk& w, QueryTile& t, int64_t block, const Selection& own) {
  const CacheView& c = w.a.cache;
  int64_t at[kKeyBlock];
  for (int i = 0; i < own.size;) {
    const PlanRow& row = w.row(own.ids[i]);
    const int begin = t.begin[own.ids[i]], end = t.end[own.ids[i]];
    Selection one;
    one.size = 0;
    for (; i < own.size && &w.row(own.ids[i]) == &row; ++i) one.ids[one.size++] = own.ids[i];
    for (int j = begin / 16 * 16; j < end; ++j) {  // keys are read by halves of a block
      const int64_t slot = w.a.plan->physical(w.segment, w.a.plan->slot_at(w.segment, row, block + j));
      at[j] = ((slot / c.page_size * c.heads + w.task.first_head) * c.page_size + slot % c.page_size) * c.dim;
    }
    visit_heads(w, t, at, begin, end, one);
  }
}

void visit_shared(const Walk& w, QueryTile& t, int64_t block, const Selection& shared) {
  int64_t at[kKeyBlock];
  int first = kKeyBlock, last = 0;
  for (int i = 0; i < shared.size; ++i) {
    first = between(t.begin[shared.ids[i]], 0, first);
    last = between(t.end[shared.ids[i]], last, kKeyBlock);
  }
  shared_elements(w, block, last, at);
  visit_heads(w, t, at, first, last, shared);
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

// Reads a word of each cache line of the keys and values in slots first .. last - 1, page by page as they lie: memory gives them at its
// full speed, which it does neither in the order of use nor by prefetch instructions (dropped where many are under way).
void touch(const Walk& w, int64_t first, int64_t last) {
  const CacheView& c = w.a.cache;
  const int64_t row = c.dim * (c.bf16 ? 2 : 4), head = c.page_size * row;
  const void* const tensors[] = {c.keys, c.values};
  for (const void* base : tensors)
    for (int64_t slot = first, count; slot < last; slot += count) {
      const int64_t offset = slot % c.page_size;
      count = smaller(c.page_size - offset, last - slot);
      const int32_t page = w.a.plan->page_table[w.segment.pages + slot / c.page_size];
      const char* memory = static_cast<const char*>(base) + (page * c.heads + w.task.first_head) * head + offset * row;
      for (int h = 0; h < w.heads; ++h, memory += head)
        for (int64_t byte = 0; byte < count * row; byte += 64) static_cast<void>(*static_cast<const volatile char*>(memory + byte));
    }
}

// Partial results without a key.
void start_span(QueryTile& t, int queries) {
  for (int q = 0; q < queries; ++q) {
    for (int64_t d = 0; d < t.width; d += 16) store(t.sum(q) + d, zero());
    t.highest(q) = -__builtin_inff();
    t.total(q) = 0.0f;
  }
}

void copy_partial(float* to, const float* from, int64_t floats) {
  for (int64_t i = 0; i < floats; i += 16) store(to + i, load(from + i));
}

// Adds the partial results of a later span to those of earlier ones, both of `queries` queries `stride` apart. One without a visible key
// has total 0 and changes nothing.
void merge(float* into, const float* parts, int64_t stride, int64_t width, int queries) {
  for (int first = 0; first < queries; first += 16, into += 16 * stride, parts += 16 * stride) {
    const int count = between(queries - first, 0, 16);
    float highest[16], factors[2][16] = {};
    for (int q = 0; q < count; ++q) {
      const float before = into[q * stride + width], later = parts[q * stride + width];
      highest[q] = before > later ? before : later;
      factors[0][q] = before - highest[q];
      factors[1][q] = later - highest[q];
    }
    for (float* one : factors) store(one, exp_lanes(load(one)));
    for (int q = 0; q < count; ++q) {
      float* sum = into + q * stride;
      const float* part = parts + q * stride;
      if (part[width + 1] == 0.0f) continue;
      if (sum[width + 1] == 0.0f) {
        copy_partial(sum, part, stride);
        continue;
      }
      const Vec a = broadcast(factors[0][q]), b = broadcast(factors[1][q]);
      for (int64_t d = 0; d < width; d += 16) store(sum + d, fma(load(part + d), b, mul(load(sum + d), a)));
      sum[width] = highest[q];
      sum[width + 1] = sum[width + 1] * factors[0][q] + part[width + 1] * factors[1][q];
    }
  }
}

void write_results(const Walk& w, const float* partials, int64_t stride) {
  const int64_t dim = w.a.cache.dim, width = padded(dim);
  for (int head = 0; head < w.heads; ++head)
    for (int q = 0; q < w.queries; ++q, partials += stride) {
      float* out = w.a.out + w.flat(head, q) * dim;
      for (int64_t d = 0; d < dim; d += 16)
        store_first(out + d, div(load(partials + d), broadcast(partials[width + 1])), between(dim - d, 0, 16));
    }
}

QueryTile make_tile(const AttentionArgs& a, float* scratch) {
  const int64_t dim = a.cache.dim;
  QueryTile t;
  t.soft_cap = a.soft_cap;
  t.dim = dim;
  t.width = padded(dim);
  t.stride = partial_floats(dim);
  t.keys = scratch;
  t.values = t.keys + t.width * kKeyBlock;
  t.queries = t.values + t.width * kKeyBlock;
  t.scores = t.queries + kMaxTaskQueries * t.width;
  t.sums = t.scores + kMaxTaskQueries * kKeyBlock;
  t.merged = t.sums + kMaxTaskQueries * t.stride;
  return t;
}

// The spans first_span .. last_span - 1 of a task's queries: merged and written to the output, or left as [span][head][query] in
// task.partials for merge_attention.
void attention(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  const Walk w{a,
               task,
               a.plan->segments[task.segment],
               static_cast<int>(a.heads / a.cache.heads),
               task.last_head - task.first_head,
               task.last_query - task.first_query};
  QueryTile t = make_tile(a, scratch);
  const int queries = w.heads * w.queries;
  start_queries(w, t);
  int64_t first = w.lowest(w.row(0)), last = w.row(0).position;
  for (int q = 1; q < w.queries; ++q) {
    first = smaller(first, w.lowest(w.row(q)));
    if (w.row(q).position > last) last = w.row(q).position;
  }
  const int64_t first_span = first / kSpan > task.first_span ? first / kSpan : task.first_span;
  Selection shared, own;
  for (int64_t span = first_span; span < task.last_span && span * kSpan <= last; ++span) {
    start_span(t, queries);
    for (int64_t block = span * kSpan; block < (span + 1) * kSpan && block <= last; block += kKeyBlock) {
      select(w, t, block, shared, own);
      touch(w, block, smaller(block + kKeyBlock, w.segment.prefix));
      if (shared.size != 0) visit_shared(w, t, block, shared);
      visit_own(w, t, block, own);
    }
    if (task.partials != nullptr && !task.merged)
      copy_partial(task.partials + (span - task.first_span) * queries * t.stride, t.sums, queries * t.stride);
    else if (span == first_span)
      copy_partial(t.merged, t.sums, queries * t.stride);
    else
      merge(t.merged, t.sums, t.stride, t.width, queries);
  }
  if (task.partials == nullptr)
    write_results(w, t.merged, t.stride);
  else if (task.merged)
    copy_partial(task.partials, t.merged, queries * t.stride);
}

// The end of a task that was shared out by spans: `count` partial results of each query, merged in place and written.
void merge_attention(const AttentionArgs& a, const AttentionTask& task, int64_t count) {
  const Walk w{a,
               task,
               a.plan->segments[task.segment],
               static_cast<int>(a.heads / a.cache.heads),
               task.last_head - task.first_head,
               task.last_query - task.first_query};
  const int64_t stride = partial_floats(a.cache.dim), width = padded(a.cache.dim);
  const int queries = w.heads * w.queries;
  for (int64_t i = 1; i < count; ++i) merge(task.partials, task.partials + i * queries * stride, stride, width, queries);
  write_results(w, task.partials, stride);
}

}  // namespace
