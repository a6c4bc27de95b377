// Weights rearranged once, so that every thread reads memory strictly forward.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernel_table.h"

namespace foredraft {

// A weight [n, k] in panels of `panel` output rows, padded with zero rows. Within a panel, float weights lie as [k][panel]; bfloat16
// ones as [(k + 1) / 2][panel] words, the even k in the low half and the odd k in the high half; 8-bit ones in groups of 32 k, each
// [panel] scales and then [32][panel] bytes, the last group padded with zeros.
class PackedWeight {
 public:
  // `weight` is [n, k] of the format; `scales`, of 8-bit weights, [n, groups of k]; `bias` [n] or null. Throws std::bad_alloc.
  PackedWeight(const void* weight, const float* scales, const float* bias, int64_t n, int64_t k, WeightFormat format, int panel);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  WeightFormat format() const { return format_; }
  int panel() const { return panel_; }
  int64_t panels() const { return (n_ + panel_ - 1) / panel_; }
  size_t bytes() const { return bytes_; }
  const void* data() const { return data_.get(); }
  const float* bias() const { return bias_.get(); }

  // Row `id` as k floats.
  void row(int64_t id, float* out) const;

 private:
  int64_t n_, k_;
  WeightFormat format_;
  int panel_;
  size_t bytes_;
  std::shared_ptr<void> data_;
  std::unique_ptr<float[]> bias_;
};

}  // namespace foredraft
