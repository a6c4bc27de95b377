// The operations over a pool of threads and one entry of the dispatch table: splits work, checks bounds, computes nothing itself.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "block.h"
#include "instruction_sets.h"
#include "packed.h"
#include "plan.h"
#include "threads.h"

namespace foredraft {

// A row of logits and what is to be made of it.
struct SampledRow {
  const void* row;
  Truncation truncation;
  uint64_t seed, position;  // of its noise
};

class Runtime {
 public:
  // threads 0: one for each available core. An empty instruction_set is the best that runs here.
  Runtime(int threads, const std::string& instruction_set);

  const KernelTable& table() const { return *table_; }
  int threads() const { return pool_->threads(); }

  // Everything below throws std::invalid_argument where sizes do not fit; pointers must hold what the shapes say.
  void linear(const PackedWeight& w, const float* x, int64_t rows, int64_t k, const float* residual, float* out) const;
  void embedding(const PackedWeight& w, const int64_t* ids, int64_t rows, float* out) const;
  void rms_norm(const float* x, const float* weight, float eps, const float* residual, float* out, int64_t rows, int64_t width) const;
  void gate_multiply(const float* gate_up, Activation activation, float* out, int64_t rows, int64_t width) const;
  void soft_cap(const float* x, float cap, float* out, int64_t n) const;
  void rope_and_store(const Plan& plan, RopeArgs args, int64_t rows, int64_t positions) const;
  void attention(const Plan& plan, AttentionArgs args, int64_t rows) const;
  // hidden [rows, width] through blocks; the cache is the first block's, those of the others follow it in memory. beside [rows, width]
  // is the second input of blocks that read one, else null.
  void run_blocks(const std::vector<const Block*>& blocks, const Plan& plan, CacheView cache, const float* hidden, const float* beside,
                  int64_t rows, int64_t width, float* out) const;
  void move_slots(const CacheView& cache, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations) const;
  void argmax_rows(const void* rows, int64_t count, int64_t n, bool wide, int64_t* ids) const;
  // ids [count, k]
  void top_ids(const void* rows, int64_t count, int64_t n, bool wide, int64_t k, int64_t* ids) const;
  // One task a row, each [n] of float, or double where wide; laws [rows, n]; ids as the table's law and draw give them.
  void laws(const std::vector<SampledRow>& rows, int64_t n, bool wide, double* laws, int64_t* ids) const;
  void draws(const std::vector<SampledRow>& rows, int64_t n, bool wide, int64_t* ids) const;
  // Reads n floats (whole megabytes of them; a rest is left out) with all threads; the result only keeps the reads alive.
  float read_memory(const float* p, int64_t n) const;

 private:
  template <class T>
  void argmax_rows(const T* rows, int64_t count, int64_t n, int64_t* ids) const;
  void run_block(const Block& block, const Plan& plan, const CacheView& cache, const float* hidden, const float* beside, int64_t rows,
                 float* out) const;

  const KernelTable* table_;
  std::shared_ptr<ThreadPool> pool_;
};

}  // namespace foredraft
