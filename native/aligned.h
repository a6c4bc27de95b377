// Memory for floats that grows and never shrinks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace foredraft {

// Floats that start on a cache line: a vector across two lines costs two accesses.
class AlignedFloats {
 public:
  // Room for `floats`; what was there before is lost where it must grow.
  float* room(int64_t floats) {
    const size_t wanted = static_cast<size_t>(floats) + kLine;
    if (memory_.size() < wanted) memory_.resize(wanted);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (kLine - address / sizeof(float) % kLine) % kLine;
  }

 private:
  static constexpr size_t kLine = 16;
  std::vector<float> memory_;
};

}  // namespace foredraft
