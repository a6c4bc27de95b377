// Paged attention with draft trees (include after one vector_*.h, rows.inl and attention_block.inl).
//
// Keys are visited in blocks of kKeyBlock positions aligned to multiples of it, whatever pages, chunks or slots they lie in. A score is
// one chain of fused multiply-adds over the head's dimensions; values are added position by position, and a row stops at its own
// position. The blocks of kSpan positions make a span, worked out by itself; spans are merged in pairs, pairs of pairs and so on, by
// their numbers. So a row's result is a function of its query and of the keys and values at the positions that it sees, and of nothing
// else - also not of who computed a span, nor of what others of its task see.
#include "kernel_table.h"
#include "plan_view.h"

namespace {

using foredraft::AttentionArgs;
using foredraft::AttentionTask;
using foredraft::kMaxPartials;
using foredraft::kSpan;
using foredraft::PlanSegment;

constexpr int64_t kLeadBytes = 64 * 1024;

struct Walk {
  const AttentionArgs& a;
  const AttentionTask& task;
  const PlanSegment& segment;
  int group;    // query heads of a key head
  int heads;    // key heads of the task
  int queries;  // of one key head in the task

  Walk(const AttentionArgs& args, const AttentionTask& one)
      : a(args),
        task(one),
        segment(args.plan->segments[one.segment]),
        group(static_cast<int>(args.heads / args.cache.heads)),
        heads(one.last_head - one.first_head),
        queries(one.last_query - one.first_query) {}

  const PlanRow& row(int query) const { return a.plan->rows[segment.first_row + (task.first_query + query) / group]; }
  // The first query of the next row.
  int next_row(int query) const { return between(((task.first_query + query) / group + 1) * group - task.first_query, 0, queries); }
  // The first position that a row sees.
  int64_t lowest(const PlanRow& row) const { return row.position < a.window ? 0 : row.position - a.window + 1; }
  // Where query `query` of the task's head `head` lies in tensors of [row, query head].
  int64_t flat(int head, int query) const {
    const int index = task.first_query + query;
    return (segment.first_row + index / group) * a.heads + (task.first_head + head) * group + index % group;
  }
  // Elements of a key, or of a value, of the task's first head at a physical slot; and from head to head.
  int64_t key_at(int64_t slot) const {
    const int64_t page = a.plan->page_of(slot);
    return (page * a.cache.heads + task.first_head) * head_elements() + (slot - page * a.cache.page_size);
  }
  int64_t value_at(int64_t slot) const {
    const int64_t page = a.plan->page_of(slot), offset = slot - page * a.cache.page_size;
    return ((page * a.cache.heads + task.first_head) * a.cache.page_size + offset) * a.cache.dim;
  }
  int64_t head_elements() const { return a.cache.page_size * a.cache.dim; }
  int64_t straight_slot(int64_t position) const { return a.plan->physical(segment, position); }
  int64_t own_slot(const PlanRow& row, int64_t position) const {
    return a.plan->physical(segment, a.plan->slot_at(segment, row, position));
  }
};

// What a task will read, in the order of its use: of each block the units (group, head) of the keys, then those of the values. With each
// step of the work as many pieces are asked for ahead as the step uses: memory gives its full speed to one steady stream, and neither to
// bursts of prefetches nor to reading that waits for computing.
class Ahead {
 public:
  Ahead(const Walk& w, int64_t first, int64_t end) : w_(w), end_(end), block_(first), group_(first) { find(); }

  Fetch next() {
    const Fetch out{memory_, step_};
    advance();
    return out;
  }

 private:
  void advance() {
    if (++head_ != w_.heads) {
      memory_ += head_bytes_;
      return;
    }
    head_ = 0;
    group_ += kGroup;
    if (group_ >= smaller(block_ + kKeyBlock, end_)) {
      if (values_) block_ += kKeyBlock;
      values_ = !values_;
      group_ = block_;
    }
    find();
  }
  void find() {
    if (group_ >= end_) {
      step_ = head_bytes_ = 0;  // nothing is left: the last line again
      return;
    }
    const CacheView& c = w_.a.cache;
    const int64_t bytes = c.bf16 ? 2 : 4, slot = w_.straight_slot(group_);
    memory_ = values_ ? static_cast<const char*>(c.values) + w_.value_at(slot) * bytes : static_cast<const char*>(c.keys) + w_.key_at(slot) * bytes;
    head_bytes_ = w_.head_elements() * bytes;
    step_ = (values_ ? kGroup : c.page_size) * bytes;
  }

  const Walk& w_;
  int64_t end_, block_, group_;  // positions
  int head_ = 0;
  bool values_ = false;
  const char* memory_ = nullptr;  // of the unit
  int64_t step_ = 0, head_bytes_ = 0;
};

// The beginning has nobody who fetches it ahead: it is read by plain loads, which are not dropped where many are under way.
void read_lead(Ahead& ahead, const CacheView& c) {
  if (c.page_size % kGroup != 0) return;  // a unit is then no piece of one page: what may be asked for may not be read
  for (int64_t units = kLeadBytes / (c.dim * kGroup * (c.bf16 ? 2 : 4)); units > 0; --units) {
    const Fetch unit = ahead.next();
    if (unit.step == 0) return;  // that was all
    for (int64_t i = 0; i < c.dim; ++i) static_cast<void>(*static_cast<const volatile char*>(unit.memory + i * unit.step));
  }
}

// What each query sees of the block; the number of its positions that any of them sees. Most blocks are whole, which is known before.
int select(const Walk& w, QueryTile& t, int64_t block) {
  if (block >= t.whole_begin && block + kKeyBlock <= t.whole_end && t.soft_cap == 0.0f) {
    t.whole = true;
    return kKeyBlock;
  }
  int seen = 0;
  t.whole = true;
  for (int q = 0; q < w.queries;) {
    const PlanRow& row = w.row(q);
    const int begin = between(w.lowest(row) - block, 0, kKeyBlock), end = between(row.position + 1 - block, 0, kKeyBlock);
    const int straight = between(row.diverges - block, 0, end);
    for (const int last = w.next_row(q); q < last; ++q) {
      t.begin[q] = begin;
      t.end[q] = end;
      t.straight[q] = straight;
    }
    if (begin < end && end > seen) seen = end;
    t.whole = t.whole && begin == 0 && straight == kKeyBlock;
  }
  return seen;
}

// The scores of the queries of a head that see something of the groups, whose first is at `group` in the block.
template <int G, bool Bf16>
void score_straight(const QueryTile& t, int head, int group, const KeyGroups& keys, const Fetch* units) {
  Fetch shares[G];
  for (int tile = 0; tile < t.scoring.tiles(); ++tile) {
    for (int g = 0; g < G; ++g) shares[g] = t.scoring.of(units, tile * G + g, t.dim);
    int first = tile * t.tile, last = between(first + t.tile, 0, t.count);
    const auto sees = [&](int q) { return t.begin[q] < group + G * kGroup && t.end[q] > group; };
    while (!t.whole && first < last && !sees(first)) ++first;
    while (!t.whole && first < last && !sees(last - 1)) --last;
    if (first == last) continue;
    const float* const queries = t.tile_of(head, tile) + (first - tile * t.tile);
    Steps<kScoreQueries, Bf16>::template scores<G>(last - first, keys, shares, queries, t.tile, t.dim, t.score(head, first) + group);
  }
}

// Keys of a group whose positions don't lie side by side.
void gather_keys(const Walk& w, const QueryTile& t, int64_t position, int count, int64_t offset) {
  const CacheView& c = w.a.cache;
  for (int j = 0; j < kGroup; ++j) {
    const int64_t at = j < count ? w.key_at(w.straight_slot(position + j)) + offset : 0;
    for (int64_t d = 0; d < c.dim; ++d) t.keys[d * kGroup + j] = j < count ? load_one(c, c.keys, at + d * c.page_size) : 0.0f;
  }
}

// Over the keys at first .. end - 1 of the block that rows see at slots of their own: f(first and last query of the row, position in
// block, physical slot).
template <class Function>
void over_own(const Walk& w, const QueryTile& t, int64_t block, int first, int end, const Function& f) {
  for (int q = 0; !t.whole && q < w.queries; q = w.next_row(q)) {
    const int begin = t.begin[q] > t.straight[q] ? t.begin[q] : t.straight[q];
    const int last = between(t.end[q], 0, end);
    for (int j = begin > first ? begin : first; j < last; ++j) f(q, w.next_row(q), j, w.own_slot(w.row(q), block + j));
  }
}

void score_own(const Walk& w, const QueryTile& t, int first, int last, int position, int64_t at) {
  float lanes[16];
  for (int head = 0; head < w.heads; ++head, at += w.head_elements())
    for (int q = first, n; q < last; q += n) {
      n = between(last - q, 0, t.tile - q % t.tile);
      store(lanes, score_one(w.a.cache, at, t.tile_of(head, q / t.tile) + q % t.tile, t.tile, n));
      for (int i = 0; i < n; ++i) t.score(head, q + i)[position] = lanes[i];
    }
}

template <int G>
void score_heads(const Walk& w, const QueryTile& t, int64_t block, int group, int seen, Ahead& ahead) {
  const CacheView& c = w.a.cache;
  KeyGroups keys{c.keys, {}, c.page_size};
  Fetch units[G];
  for (int g = 0; g < G; ++g) keys.at[g] = w.key_at(w.straight_slot(block + group + g * kGroup));
  for (int head = 0; head < w.heads; ++head) {
    for (Fetch& unit : units) unit = ahead.next();
    if (c.page_size % kGroup != 0) {
      gather_keys(w, t, block + group, between(seen - group, 0, kGroup), head * w.head_elements());
      score_straight<1, false>(t, head, group, {t.keys, {0}, kGroup}, units);
    } else if (c.bf16) {
      score_straight<G, true>(t, head, group, keys, units);
    } else {
      score_straight<G, false>(t, head, group, keys, units);
    }
    for (int g = 0; g < G; ++g) keys.at[g] += w.head_elements();
  }
}

void score_block(const Walk& w, const QueryTile& t, int64_t block, int seen, Ahead& ahead) {
  for (int group = 0, end; group < seen; group = end) {
    const bool several = w.a.cache.page_size % kGroup == 0 && group + (kScoreGroups - 1) * kGroup < seen;
    end = group + (several ? kScoreGroups : 1) * kGroup;
    several ? score_heads<kScoreGroups>(w, t, block, group, seen, ahead) : score_heads<1>(w, t, block, group, seen, ahead);
    over_own(w, t, block, group, end,
             [&](int first, int last, int position, int64_t slot) { score_own(w, t, first, last, position, w.key_at(slot)); });
  }
}

void weigh_block(const Walk& w, const QueryTile& t) {
  for (int head = 0; head < w.heads; ++head) t.whole && t.soft_cap == 0.0f ? weigh<true>(t, head) : weigh<false>(t, head);
}

// Adds values first .. last - 1 of each group to `queries` queries from `query` on.
inline void add(const ValueGroups& v, const Fetch* fetches, bool bf16, int query, int queries, int first, int last) {
  if (first >= last) return;
  bf16 ? Steps<kValueQueries, true>::values(queries, v, fetches, query, first, last)
       : Steps<kValueQueries, false>::values(queries, v, fetches, query, first, last);
}

ValueGroups value_groups(const Walk& w, const QueryTile& t, int head, int group, const int64_t* at, int groups) {
  const float* const weights = t.score(head, 0) + group;
  return {w.a.cache.values, at, head * w.head_elements(), t.dim, weights, t.partial(head, 0).sums, t.stride, groups, t.fresh};
}

// What a query sees of a group at the slots of its positions.
struct Sight {
  int begin, end;
  Sight(const QueryTile& t, int query, int group)
      : begin(between(t.begin[query] - group, 0, kGroup)), end(between(smaller(t.end[query], t.straight[query]) - group, 0, kGroup)) {}
};

// For queries first .. last - 1: values that all see for all together, and what a query sees before and after them by itself, so that each
// adds its own in order.
void add_seen(const QueryTile& t, const ValueGroups& v, const Fetch* fetches, bool bf16, int group, int first, int last) {
  int begin = 0, end = kGroup;
  for (int q = first; q < last; ++q) {
    const Sight s(t, q, group);
    begin = s.begin > begin ? s.begin : begin;
    end = s.end < end ? s.end : end;
  }
  if (end < begin) end = begin;
  for (int q = first; q < last; ++q) add(v, fetches, bf16, q, 1, Sight(t, q, group).begin, between(Sight(t, q, group).end, 0, begin));
  add(v, fetches, bf16, first, last - first, begin, end);
  for (int q = first; q < last; ++q) add(v, fetches, bf16, q, 1, between(Sight(t, q, group).begin, end, kGroup), Sight(t, q, group).end);
}

// The values of groups that lie at the slots of their positions, in tiles of queries of nearly equal height.
void add_straight(const Walk& w, const QueryTile& t, int group, const ValueGroups& v, const Fetch* units) {
  const int tiles = t.adding.tiles();
  Fetch shares[kValueGroups];
  for (int tile = 0, q = 0, last; tile < tiles; ++tile, q = last) {
    for (int g = 0; g < v.groups; ++g) shares[g] = t.adding.of(units, tile * v.groups + g, t.dim);
    last = q + (w.queries - q + tiles - tile - 1) / (tiles - tile);
    t.whole ? add(v, shares, w.a.cache.bf16, q, last - q, 0, kGroup) : add_seen(t, v, shares, w.a.cache.bf16, group, q, last);
  }
}

void add_own(const Walk& w, const QueryTile& t, int first, int last, int group, int position, int64_t slot) {
  int64_t at[kGroup];
  const Fetch nothing{reinterpret_cast<const char*>(at), 0};  // one line again and again, at hand anyway
  const int j = position - group;
  at[j] = w.value_at(slot);
  for (int head = 0; head < w.heads; ++head)
    for (int q = first; q < last; q += kValueQueries)
      add(value_groups(w, t, head, group, at, 1), &nothing, w.a.cache.bf16, q, between(last - q, 0, kValueQueries), j, j + 1);
}

void value_block(const Walk& w, const QueryTile& t, int64_t block, int seen, Ahead& ahead) {
  const CacheView& c = w.a.cache;
  int64_t at[kValueGroups * kGroup];
  Fetch units[kValueGroups];
  for (int group = 0, end; group < seen; group = end) {
    const int groups = t.whole ? kValueGroups : 1;
    end = group + groups * kGroup;
    const int count = between(seen - group, 0, end - group);
    for (int j = 0; j < count; ++j)
      at[j] = c.page_size % kGroup == 0 && j % kGroup != 0 ? at[j - 1] + c.dim : w.value_at(w.straight_slot(block + group + j));
    for (int head = 0; head < w.heads; ++head) {
      for (int g = 0; g < groups; ++g) units[g] = ahead.next();
      add_straight(w, t, group, value_groups(w, t, head, group, at, groups), units);
    }
    over_own(w, t, block, group, end,
             [&](int first, int last, int position, int64_t slot) { add_own(w, t, first, last, group, position, slot); });
  }
}

void start_queries(const Walk& w, QueryTile& t) {
  const float scale = t.soft_cap == 0.0f ? w.a.scale * kUnits : w.a.scale;  // a cap is of scores as they are
  for (int head = 0; head < w.heads; ++head)
    for (int q = 0; q < w.queries; ++q) {
      const float* in = w.a.queries + w.flat(head, q) * t.dim;
      float* out = t.queries + ((head * t.scoring.tiles() + q / t.tile) * t.width * t.tile) + q % t.tile;
      for (int64_t d = 0; d < t.dim; ++d) out[d * t.tile] = in[d] * scale;
    }
}

// Partial results without a key. The sums are left to the first values where all queries add them.
void start_span(QueryTile& t, int queries) {
  t.fresh = t.whole;
  float* sums = t.sums;
  for (int q = 0; q < queries; ++q, sums += t.stride) {
    for (int64_t d = t.fresh ? t.width : 0; d < t.width + 16; d += 16) store(sums + d, zero());
    const Partial p{sums, t.width};
    p.origin() = 0.0f;
    p.floor() = -kReach;
  }
}

// Adds the partial results of a later span to those of earlier ones, both of `queries` queries `stride` apart.
void merge(float* into, float* parts, int64_t stride, int64_t width, int queries) {
  for (int q = 0; q < queries; ++q, into += stride, parts += stride) {
    const Partial sum{into, width}, part{parts, width};
    if (part.empty()) continue;
    if (sum.empty()) {
      for (int64_t i = 0; i < stride; i += 16) store(into + i, load(parts + i));
      continue;
    }
    if (sum.origin() < part.origin()) move_origin(sum, part.origin());
    if (part.origin() < sum.origin()) move_origin(part, sum.origin());
    for (int64_t i = 0; i < width + 16; i += 16) store(into + i, add(load(into + i), load(parts + i)));
  }
}

void write_results(const Walk& w, const float* partials, int64_t stride) {
  const int64_t dim = w.a.cache.dim, width = padded(dim);
  for (int head = 0; head < w.heads; ++head)
    for (int q = 0; q < w.queries; ++q, partials += stride) {
      float* out = w.a.out + w.flat(head, q) * dim;
      const Vec total = broadcast(sum_lanes(load(partials + width)));
      for (int64_t d = 0; d < dim; d += 16)
        store_first(out + d, div(load(partials + d), total), between(dim - d, 0, 16));
    }
}

// Neighbouring partial results that wait for their turn to be merged. The boundary before span number m comes in its turn by the number
// of zeros at m's end, as in a binary tree over all spans; where a side is missing nobody of the task sees it.
struct Pending {
  float* parts[kMaxPartials];
  int32_t starts[kMaxPartials];
  int size = 0;
  int32_t lowest;  // the first span of all: nothing is before it

  explicit Pending(int32_t first) : lowest(first) {}
  int turn(int32_t start) const { return start == lowest ? 32 : __builtin_ctz(static_cast<unsigned>(start)); }
  void push(float* part, int32_t start) {
    parts[size] = part;
    starts[size++] = start;
  }
  // Whether the last two are to be merged before the boundary at `next`.
  bool ready(int32_t next) const {
    if (size < 2) return false;
    const int own = turn(starts[size - 1]);
    return own < turn(next) && own < turn(starts[size - 2]);
  }
};

void merge_ready(Pending& pending, int32_t next, const QueryTile& t, int queries) {
  for (; pending.ready(next); --pending.size) merge(pending.parts[pending.size - 2], pending.parts[pending.size - 1], t.stride, t.width, queries);
}

void merge_rest(Pending& pending, const QueryTile& t, int queries) {
  for (; pending.size > 1; --pending.size) merge(pending.parts[pending.size - 2], pending.parts[pending.size - 1], t.stride, t.width, queries);
}

QueryTile make_tile(const Walk& w, float* scratch) {
  const int64_t dim = w.a.cache.dim;
  const auto tiles = [&](int queries) { return Sharing((w.queries + queries - 1) / queries); };
  QueryTile t(tiles(kScoreQueries), tiles(kValueQueries));
  t.soft_cap = w.a.soft_cap;
  t.dim = dim;
  t.width = padded(dim);
  t.stride = partial_size(dim);
  t.count = w.queries;
  t.tile = (w.queries + t.scoring.tiles() - 1) / t.scoring.tiles();
  t.keys = scratch;
  t.scores = t.keys + kGroup * t.width;
  t.queries = t.scores + kMaxTaskQueries * kKeyBlock;
  t.sums = t.queries + kTileRoom * t.width;
  return t;
}

// The spans first_span .. last_span - 1 of a task's queries: merged and written to the output, or left in task.partials, merged as far as
// what lies beyond doesn't matter.
void attention(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  const Walk w(a, task);
  QueryTile t = make_tile(w, scratch);
  const int queries = w.heads * w.queries;
  start_queries(w, t);
  int64_t first = w.lowest(w.row(0)), last = w.row(0).position;
  t.whole_begin = first;
  t.whole_end = last + 1;
  for (int q = 0; q < w.queries; q = w.next_row(q)) {
    const PlanRow& row = w.row(q);
    first = smaller(first, w.lowest(row));
    if (row.position > last) last = row.position;
    if (w.lowest(row) > t.whole_begin) t.whole_begin = w.lowest(row);
    t.whole_end = smaller(t.whole_end, smaller(row.position + 1, row.diverges));
  }
  const int32_t first_span = first / kSpan > task.first_span ? static_cast<int32_t>(first / kSpan) : task.first_span;
  const int64_t start = first > first_span * kSpan ? first / kKeyBlock * kKeyBlock : first_span * kSpan;
  const int64_t end = smaller(last + 1, task.last_span * kSpan);
  Ahead ahead(w, start, end);
  read_lead(ahead, a.cache);
  Pending pending(static_cast<int32_t>(first / kSpan));
  float* const base = task.partials == nullptr ? t.sums : task.partials;
  int32_t span = first_span;
  for (; span * kSpan < end; ++span) {
    t.sums = base + pending.size * queries * t.stride;
    const int64_t begin = span * kSpan > start ? span * kSpan : start;
    for (int64_t block = begin; block < smaller((span + 1) * kSpan, end); block += kKeyBlock) {
      const int seen = select(w, t, block);
      if (block == begin) start_span(t, queries);
      score_block(w, t, block, seen, ahead);
      weigh_block(w, t);
      value_block(w, t, block, seen, ahead);
      t.fresh = false;
    }
    pending.push(t.sums, span);
    merge_ready(pending, span + 1, t, queries);
  }
  if (task.partials != nullptr) return;
  merge_rest(pending, t, queries);
  write_results(w, pending.parts[0], t.stride);
}

// The end of a task that was shared out in `count` runs of spans: what each of them left is merged and written.
void merge_attention(const AttentionArgs& a, const AttentionTask* runs, int64_t count) {
  const Walk w(a, runs[0]);
  const QueryTile t = make_tile(w, nullptr);
  const int queries = w.heads * w.queries;
  Pending pending(runs[0].first_span);
  for (const AttentionTask* run = runs; run != runs + count; ++run) {
    Pending left(pending.lowest);  // goes through the steps of attention()
    for (int32_t span = run->first_span; span < run->last_span; ++span) {
      left.push(run->partials + left.size * queries * t.stride, span);
      while (left.ready(span + 1)) --left.size;
    }
    for (int i = 0; i < left.size; ++i) {
      pending.push(left.parts[i], left.starts[i]);
      merge_ready(pending, i + 1 < left.size ? left.starts[i + 1] : run->last_span, t, queries);
    }
  }
  merge_rest(pending, t, queries);
  write_results(w, pending.parts[0], t.stride);
}

}  // namespace
