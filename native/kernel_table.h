// The one table through which the CPU's features are dispatched: each instruction set fills one entry.
#pragma once
#include <cstddef>
#include <cstdint>

namespace foredraft {

constexpr int kKeyBlock = 64;     // positions of one attention block, aligned to multiples of itself
constexpr int kSpan = 128;        // positions of one span: two blocks
constexpr int kMaxPartials = 64;  // of 2^30 spans that wait to be merged
constexpr int kMaxTaskQueries = 96;
constexpr int kTallTaskQueries = 48;  // of a prompt's tasks: their state stays in the first-level cache
constexpr int kMaxHeadDim = 256;
constexpr int64_t kNoWindow = int64_t{1} << 60;

enum class Activation : int { kSilu, kGeluTanh };

// kEightBit: 32 neighbours in a row of the weight share a scale (GGUF's Q8_0).
enum class WeightFormat : int { kFloat, kBf16, kEightBit };

constexpr int64_t kScaleGroup = 32;

// out[rows, n] = x[rows, k] W^T (+ bias) (+ residual), weights packed in panels (packed.h).
struct LinearArgs {
  const float* x;
  const void* weights;
  const float* bias;      // [n] or null
  const float* residual;  // [rows, n] or null; may be out itself
  float* out;
  int64_t rows, n, k;
  WeightFormat format;
};

// One layer's keys [pages, heads, dim, page_size] and values [pages, heads, page_size, dim], float or bfloat16.
struct CacheView {
  void* keys;
  void* values;
  int64_t pages, heads, page_size, dim;
  bool bf16;
};

// A part of one segment's attention. Query = row in segment * group + query head in group, counted for each key head.
struct AttentionTask {
  int32_t segment;
  int32_t first_head, last_head;    // key heads
  int32_t first_query, last_query;  // at most kMaxTaskQueries with all heads together
  int32_t first_span, last_span;
  // Null: merge the spans and write the output. Otherwise partial results are left here for merge_attention.
  float* partials;
};

struct PlanView;  // plan_view.h

struct AttentionArgs {
  const PlanView* plan;
  CacheView cache;
  const float* queries;  // [rows, heads, dim]
  float* out;            // [rows, heads * dim]
  int64_t heads;         // query heads
  float scale;
  int64_t window;  // a row at position p sees positions above p - window
  float soft_cap;  // 0: none
};

struct RopeArgs {
  const PlanView* plan;
  CacheView cache;
  const float* qkv;
  const float* cos;  // [positions, dim / 2]
  const float* sin;
  float* queries;
  int64_t heads;
  const float* query_norm;  // [dim], or null: heads are rotated as they are
  const float* key_norm;
  float norm_eps;
};

// What is kept of a row of logits, in this order: over the temperature, min_p, top_k (0: all), top_p of what top_k left.
struct Truncation {
  double temperature;
  double min_p;
  int64_t top_k;
  double top_p;
};

struct KernelTable {
  const char* name;
  int panel;            // output rows of one panel of packed weights
  int max_tile_rows;
  void (*linear)(const LinearArgs&, int64_t first_panel, int64_t last_panel);
  // residual is [rows, width] or null, and may be out itself.
  void (*rms_norm)(const float* x, const float* weight, float eps, const float* residual, float* out, int64_t rows, int64_t width);
  void (*gate_multiply)(const float* gate_up, Activation activation, float* out, int64_t rows, int64_t width);
  void (*soft_cap)(const float* x, float cap, float* out, int64_t n);
  void (*rope_and_store)(const RopeArgs&, int64_t first_row, int64_t last_row);
  void (*attention)(const AttentionArgs&, const AttentionTask&, float* scratch);
  void (*merge_attention)(const AttentionArgs&, const AttentionTask* runs, int64_t count);
  int64_t (*attention_scratch)(int64_t dim, int64_t spans);  // floats of a task
  int64_t (*partial_floats)(int64_t dim, int64_t spans);     // of one query of a task that leaves partial results
  int64_t (*argmax_float)(const float* row, int64_t n);
  int64_t (*argmax_double)(const double* row, int64_t n);
  void (*philox)(uint64_t seed, uint64_t position, uint32_t stream, int64_t first_block, int64_t blocks, uint32_t* words);
  int64_t (*sampling_scratch)(int64_t n, bool wide);  // bytes, for the four below
  // out [n] is the law; the result is the id of the largest value, or of a NaN: unless that is a finite number there is no law.
  int64_t (*law_float)(const float* row, int64_t n, const Truncation&, void* scratch, double* out);
  int64_t (*law_double)(const double* row, int64_t n, const Truncation&, void* scratch, double* out);
  // The id that the Gumbel noise of (seed, position) draws; where the largest value is no finite number, its id.
  int64_t (*draw_float)(const float* row, int64_t n, const Truncation&, uint64_t seed, uint64_t position, void* scratch);
  int64_t (*draw_double)(const double* row, int64_t n, const Truncation&, uint64_t seed, uint64_t position, void* scratch);
  float (*read_memory)(const float* p, int64_t n);
};

extern const KernelTable kPortable;
#if defined(FOREDRAFT_X86)
extern const KernelTable kAvx2;
extern const KernelTable kAvx512;
#endif

}  // namespace foredraft
