#include "runtime.h"

#include "row_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "aligned.h"

namespace foredraft {

namespace {

// Below this many elements (or multiply-adds, for attention) a second thread costs more than it brings.
constexpr int64_t kElementsWorthSharing = 16 * 1024;
constexpr int64_t kProductsWorthSharing = 64 * 1024;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_cache(const Plan& plan, const CacheView& c, int64_t heads, int64_t rows) {
  if (rows != plan.num_rows()) refuse("the plan has " + std::to_string(plan.num_rows()) + " rows, the tensor " + std::to_string(rows));
  if (c.page_size != plan.page_size())
    refuse("the plan was made for pages of " + std::to_string(plan.page_size()) + " slots, the cache has " + std::to_string(c.page_size));
  if (plan.max_page() >= c.pages)
    refuse("page " + std::to_string(plan.max_page()) + " is outside the cache's " + std::to_string(c.pages) + " pages");
  if (c.dim < 8 || c.dim % 8 != 0 || c.dim > kMaxHeadDim)
    refuse("native kernels need a head size that is a multiple of 8 up to " + std::to_string(kMaxHeadDim) + ", got " + std::to_string(c.dim));
  if (heads < 1 || c.heads < 1 || heads % c.heads != 0)
    refuse(std::to_string(heads) + " query heads cannot share " + std::to_string(c.heads) + " key heads");
}

}  // namespace

Runtime::Runtime(int threads, const std::string& instruction_set)
    : table_(&table_for(instruction_set)), pool_(ThreadPool::shared(threads)) {}

void Runtime::linear(const PackedWeight& w, const float* x, int64_t rows, int64_t k, const float* residual, float* out) const {
  if (k != w.k()) refuse("rows of " + std::to_string(k) + " numbers do not fit a weight of " + std::to_string(w.k()) + " columns");
  if (w.panel() != table_->panel) refuse("the weight was packed for another instruction set");
  // Weights are used in the order in which they were packed, and lie in it.
  if (rows <= table_->max_tile_rows) pool_->expect(static_cast<const char*>(w.data()) + w.bytes(), w.bytes());
  const LinearArgs args{x, w.data(), w.bias(), residual, out, rows, w.n(), k, w.format()};
  const int64_t panels = w.panels(), pieces = std::min(panels, int64_t{ThreadPool::kMaxTasks});
  pool_->parallel_runs(static_cast<int>(pieces), [&](int first, int last) {
    table_->linear(args, panels * first / pieces, panels * last / pieces);
  });
}

void Runtime::embedding(const PackedWeight& w, const int64_t* ids, int64_t rows, float* out) const {
  for (int64_t i = 0; i < rows; ++i)
    if (ids[i] < 0 || ids[i] >= w.n())
      throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside 0 to " + std::to_string(w.n() - 1));
  const int64_t chunk = std::max<int64_t>(1, kElementsWorthSharing / 4 / w.k());
  pool_->parallel(static_cast<int>(divide_up(rows, chunk)), [&](int task) {
    for (int64_t i = task * chunk; i < std::min((task + 1) * chunk, rows); ++i) w.row(ids[i], out + i * w.k());
  });
}

void Runtime::rms_norm(const float* x, const float* weight, float eps, const float* residual, float* out, int64_t rows,
                       int64_t width) const {
  const int64_t chunk = std::max<int64_t>(1, kElementsWorthSharing / width);
  pool_->parallel(static_cast<int>(divide_up(rows, chunk)), [&](int task) {
    const int64_t first = task * chunk;
    const float* added = residual == nullptr ? nullptr : residual + first * width;
    table_->rms_norm(x + first * width, weight, eps, added, out + first * width, std::min(chunk, rows - first), width);
  });
}

void Runtime::soft_cap(const float* x, float cap, float* out, int64_t n) const {
  constexpr int64_t chunk = kElementsWorthSharing;
  pool_->parallel(static_cast<int>(divide_up(n, chunk)), [&](int task) {
    const int64_t first = task * chunk;
    table_->soft_cap(x + first, cap, out + first, std::min(chunk, n - first));
  });
}

void Runtime::gate_multiply(const float* gate_up, Activation activation, float* out, int64_t rows, int64_t width) const {
  const int64_t chunk = std::max<int64_t>(1, kElementsWorthSharing / 4 / width);
  pool_->parallel(static_cast<int>(divide_up(rows, chunk)), [&](int task) {
    const int64_t first = task * chunk;
    table_->gate_multiply(gate_up + 2 * first * width, activation, out + first * width, std::min(chunk, rows - first), width);
  });
}

void Runtime::rope_and_store(const Plan& plan, RopeArgs args, int64_t rows, int64_t positions) const {
  check_cache(plan, args.cache, args.heads, rows);
  if (plan.max_position() >= positions)
    refuse("position " + std::to_string(plan.max_position()) + " is outside the rope table's " + std::to_string(positions));
  args.plan = &plan.view();
  const int64_t width = (args.heads + 2 * args.cache.heads) * args.cache.dim;
  const int64_t chunk = std::max<int64_t>(1, kElementsWorthSharing / width);
  pool_->parallel(static_cast<int>(divide_up(rows, chunk)), [&](int task) {
    table_->rope_and_store(args, task * chunk, std::min((task + 1) * chunk, rows));
  });
}

namespace {

// The tasks of one pass of attention. Those of `wide` are shared out in runs of spans: tasks first .. last - 1, merged afterwards where
// there are several.
struct Runs {
  size_t first, last;
};
struct AttentionWork {
  std::vector<AttentionTask> wide, tasks;
  std::vector<Runs> runs;
  AlignedFloats partials;
};

// The spans that rows of a segment see.
struct Spans {
  int32_t first, last;
  int64_t count() const { return last - first; }
};

Spans spans_of(const Plan& plan, const PlanSegment& s, int64_t window) {
  int64_t last = 0;
  for (int64_t r = s.first_row; r < s.first_row + s.rows; ++r) last = std::max(last, plan.view().rows[r].position);
  const int64_t first = std::max<int64_t>(0, s.prefix - window + 1);
  return {static_cast<int32_t>(first / kSpan), static_cast<int32_t>(last / kSpan + 1)};
}

// A prompt: tiles of queries, each over all its keys. The last rows see the most keys: they go first.
void add_tall(AttentionWork& work, int32_t segment, int32_t kv_heads, int64_t queries, const Spans& spans) {
  const int64_t pieces = divide_up(queries, kTallTaskQueries);
  for (int64_t p = pieces - 1; p >= 0; --p)
    for (int32_t h = 0; h < kv_heads; ++h)
      work.tasks.push_back({segment, h, h + 1, static_cast<int32_t>(queries * p / pieces),
                            static_cast<int32_t>(queries * (p + 1) / pieces), spans.first, spans.last, nullptr});
}

// Few rows: every key is read once, for all queries and heads together, and the spans are shared out.
void add_wide(AttentionWork& work, int32_t segment, int32_t kv_heads, int32_t queries, const Spans& spans) {
  const int32_t together = std::min(kv_heads, kMaxTaskQueries / queries);
  for (int32_t h = 0; h < kv_heads; h += together)
    work.wide.push_back({segment, h, std::min(h + together, kv_heads), 0, queries, spans.first, spans.last, nullptr});
}

// Cuts every wide task into about `pieces` runs of spans (a run reads memory forward) and gives each its room for partial results.
void share_out(AttentionWork& work, const KernelTable& table, int64_t dim, int64_t pieces) {
  const auto room_of = [&](const AttentionTask& t) {
    return (t.last_head - t.first_head) * t.last_query * table.partial_floats(dim, t.last_span - t.first_span);
  };
  int64_t total = 0;
  for (const AttentionTask& t : work.wide) total += std::min<int64_t>(pieces, t.last_span - t.first_span) * room_of(t);
  float* room = work.partials.room(pieces == 1 ? 0 : total);
  for (const AttentionTask& t : work.wide) {
    const int64_t spans = t.last_span - t.first_span, runs = std::min(pieces, spans);
    work.runs.push_back({work.tasks.size(), work.tasks.size() + static_cast<size_t>(runs)});
    for (int64_t run = 0; run < runs; ++run) {
      AttentionTask one = t;
      one.first_span = static_cast<int32_t>(t.first_span + spans * run / runs);
      one.last_span = static_cast<int32_t>(t.first_span + spans * (run + 1) / runs);
      if (runs != 1) {
        one.partials = room;
        room += room_of(t);
      }
      work.tasks.push_back(one);
    }
  }
}

}  // namespace

void Runtime::attention(const Plan& plan, AttentionArgs args, int64_t rows) const {
  check_cache(plan, args.cache, args.heads, rows);
  args.plan = &plan.view();
  const int64_t group = args.heads / args.cache.heads;
  const int32_t kv_heads = static_cast<int32_t>(args.cache.heads);
  thread_local AttentionWork work;
  work.tasks.clear();
  work.wide.clear();
  work.runs.clear();
  int64_t products = 0, longest = 1;
  for (int64_t s = 0; s < plan.num_segments(); ++s) {
    const int64_t queries = plan.segment(s).rows * group;
    const Spans spans = spans_of(plan, plan.segment(s), args.window);
    longest = std::max(longest, spans.count());
    products += queries * spans.count() * kSpan * kv_heads * args.cache.dim;
    if (queries > kMaxTaskQueries)
      add_tall(work, static_cast<int32_t>(s), kv_heads, queries, spans);
    else
      add_wide(work, static_cast<int32_t>(s), kv_heads, static_cast<int32_t>(queries), spans);
  }
  if (!work.wide.empty())
    share_out(work, *table_, args.cache.dim, divide_up(threads(), static_cast<int64_t>(work.wide.size())));
  const int64_t scratch_floats = table_->attention_scratch(args.cache.dim, longest);
  const std::vector<AttentionTask>& tasks = work.tasks;
  const auto one = [&](int task) {
    thread_local AlignedFloats scratch;
    table_->attention(args, tasks[static_cast<size_t>(task)], scratch.room(scratch_floats));
  };
  if (products >= kProductsWorthSharing && tasks.size() <= 0xFFFF)
    pool_->parallel(static_cast<int>(tasks.size()), one);
  else
    for (size_t task = 0; task < tasks.size(); ++task) one(static_cast<int>(task));
  for (const Runs& runs : work.runs)
    if (runs.last - runs.first > 1)
      table_->merge_attention(args, tasks.data() + runs.first, static_cast<int64_t>(runs.last - runs.first));
}

void Runtime::move_slots(const CacheView& c, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations) const {
  if (sources.size() != destinations.size())
    refuse(std::to_string(sources.size()) + " sources for " + std::to_string(destinations.size()) + " destinations");
  const int64_t slots = c.pages * c.page_size;
  for (const auto* list : {&sources, &destinations})
    for (const int64_t slot : *list)
      if (slot < 0 || slot >= slots) refuse("slot " + std::to_string(slot) + " is outside 0 to " + std::to_string(slots - 1));
  const size_t element = c.bf16 ? 2 : 4, row = static_cast<size_t>(c.dim) * element;
  const auto first = [&](int64_t slot, int64_t head) { return (slot / c.page_size * c.heads + head) * c.dim * c.page_size; };
  const auto key = [&](int64_t slot, int64_t head) {
    return static_cast<char*>(c.keys) + static_cast<size_t>(first(slot, head) + slot % c.page_size) * element;
  };
  const auto value = [&](int64_t slot, int64_t head) {
    return static_cast<char*>(c.values) + static_cast<size_t>(first(slot, head) + slot % c.page_size * c.dim) * element;
  };
  const size_t step = static_cast<size_t>(c.page_size) * element;
  for (size_t i = 0; i < sources.size(); ++i)
    for (int64_t h = 0; h < c.heads; ++h) {
      const char* from = key(sources[i], h);
      char* to = key(destinations[i], h);
      for (int64_t d = 0; d < c.dim; ++d, from += step, to += step)
        c.bf16 ? std::memmove(to, from, 2) : std::memmove(to, from, 4);
      std::memmove(value(destinations[i], h), value(sources[i], h), row);
    }
}

namespace {

int64_t argmax_of(const KernelTable& table, const float* row, int64_t n) { return table.argmax_float(row, n); }
int64_t argmax_of(const KernelTable& table, const double* row, int64_t n) { return table.argmax_double(row, n); }

}  // namespace

void Runtime::argmax_rows(const void* rows, int64_t count, int64_t n, bool wide, int64_t* ids) const {
  wide ? argmax_rows(static_cast<const double*>(rows), count, n, ids) : argmax_rows(static_cast<const float*>(rows), count, n, ids);
}

// Where there are fewer rows than threads a row is shared out in pieces, of which the first with a NaN or the largest value says the id.
template <class T>
void Runtime::argmax_rows(const T* rows, int64_t count, int64_t n, int64_t* ids) const {
  constexpr int64_t kLeastPiece = 8192;
  const int64_t pieces = count == 0 ? 1 : std::clamp<int64_t>(threads() / count, 1, std::max<int64_t>(1, n / kLeastPiece));
  std::vector<int64_t> found(static_cast<size_t>(count * pieces));
  pool_->parallel(static_cast<int>(count * pieces), [&](int task) {
    const int64_t first = n * (task % pieces) / pieces, last = n * (task % pieces + 1) / pieces;
    found[static_cast<size_t>(task)] = first + argmax_of(*table_, rows + task / pieces * n + first, last - first);
  });
  for (int64_t row = 0; row < count; ++row) {
    const T* const values = rows + row * n;
    ids[row] = found[static_cast<size_t>(row * pieces)];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const int64_t id = found[static_cast<size_t>(row * pieces + piece)];
      if (std::isnan(values[ids[row]])) break;
      if (values[id] > values[ids[row]] || std::isnan(values[id])) ids[row] = id;
    }
  }
}

void Runtime::top_ids(const void* rows, int64_t count, int64_t n, bool wide, int64_t k, int64_t* ids) const {
  pool_->parallel(static_cast<int>(count), [&](int task) {
    wide ? foredraft::top_ids(static_cast<const double*>(rows) + task * n, n, k, ids + task * k)
         : foredraft::top_ids(static_cast<const float*>(rows) + task * n, n, k, ids + task * k);
  });
}

namespace {

// Room for one row's work, kept by each thread.
void* sampling_room(const KernelTable& table, int64_t n, bool wide) {
  static thread_local std::vector<double> room;
  const size_t doubles = static_cast<size_t>(table.sampling_scratch(n, wide) / 8 + 1);
  if (room.size() < doubles) room.resize(doubles);
  return room.data();
}

}  // namespace

void Runtime::laws(const std::vector<SampledRow>& rows, int64_t n, bool wide, double* laws, int64_t* ids) const {
  pool_->parallel(static_cast<int>(rows.size()), [&](int task) {
    const SampledRow& r = rows[static_cast<size_t>(task)];
    void* const room = sampling_room(*table_, n, wide);
    double* const out = laws + task * n;
    ids[task] = wide ? table_->law_double(static_cast<const double*>(r.row), n, r.truncation, room, out)
                     : table_->law_float(static_cast<const float*>(r.row), n, r.truncation, room, out);
  });
}

void Runtime::draws(const std::vector<SampledRow>& rows, int64_t n, bool wide, int64_t* ids) const {
  pool_->parallel(static_cast<int>(rows.size()), [&](int task) {
    const SampledRow& r = rows[static_cast<size_t>(task)];
    void* const room = sampling_room(*table_, n, wide);
    ids[task] = wide ? table_->draw_double(static_cast<const double*>(r.row), n, r.truncation, r.seed, r.position, room)
                     : table_->draw_float(static_cast<const float*>(r.row), n, r.truncation, r.seed, r.position, room);
  });
}

float Runtime::read_memory(const float* p, int64_t n) const {
  constexpr int64_t piece = 256 * 1024;
  const int64_t tasks = std::min<int64_t>(n / piece, 0xFFFF);
  std::vector<float> sums(static_cast<size_t>(tasks));
  pool_->parallel(static_cast<int>(tasks), [&](int task) { sums[static_cast<size_t>(task)] = table_->read_memory(p + task * piece, piece); });
  float total = 0.0f;
  for (const float s : sums) total += s;
  return total;
}

}  // namespace foredraft
