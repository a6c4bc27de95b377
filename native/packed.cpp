#include "packed.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace foredraft {

namespace {

constexpr size_t kAlign = 4096;

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
constexpr size_t kChunk = size_t{64} << 20;
constexpr size_t kHugePage = size_t{2} << 20;

// A mapping on huge pages: with small ones, address translation costs a noticeable part of the read bandwidth.
struct Chunk {
  char* base = nullptr;
  size_t mapped = 0, size = 0, used = 0;
  char* mapping = nullptr;

  explicit Chunk(size_t bytes) : mapped(bytes + kHugePage), size(bytes) {
    void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping = static_cast<char*>(p);
    base = mapping + (kHugePage - reinterpret_cast<uintptr_t>(p) % kHugePage) % kHugePage;
    madvise(base, size, MADV_HUGEPAGE);
  }
  ~Chunk() { munmap(mapping, mapped); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
};

// Weights of one model lie one after the other; a chunk goes back when its last weight does.
std::shared_ptr<void> allocate(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Chunk> open;
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  if (bytes > kChunk / 2) {
    auto own = std::make_shared<Chunk>((bytes + kHugePage - 1) / kHugePage * kHugePage);
    return std::shared_ptr<void>(own, own->base);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Chunk> chunk = open.lock();
  if (!chunk || chunk->used + bytes > chunk->size) open = chunk = std::make_shared<Chunk>(kChunk);
  char* p = chunk->base + chunk->used;
  chunk->used += bytes;
  return std::shared_ptr<void>(chunk, p);
}
#else
// Each weight by itself, so that a sanitizer sees its ends.
std::shared_ptr<void> allocate(size_t bytes) {
  void* p = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  if (p == nullptr) throw std::bad_alloc();
  return std::shared_ptr<void>(p, std::free);
}
#endif

void pack_float(const float* w, float* out, int64_t n, int64_t k, int panel) {
  for (int64_t first = 0; first < n; first += panel, out += k * panel)
    for (int64_t lane = 0; lane < std::min<int64_t>(panel, n - first); ++lane) {
      const float* row = w + (first + lane) * k;
      for (int64_t i = 0; i < k; ++i) out[i * panel + lane] = row[i];
    }
}

void pack_bf16(const uint16_t* w, uint32_t* out, int64_t n, int64_t k, int panel) {
  const int64_t pairs = (k + 1) / 2;
  for (int64_t first = 0; first < n; first += panel, out += pairs * panel)
    for (int64_t lane = 0; lane < std::min<int64_t>(panel, n - first); ++lane) {
      const uint16_t* row = w + (first + lane) * k;
      for (int64_t i = 0; i < pairs; ++i) {
        const uint32_t high = 2 * i + 1 < k ? row[2 * i + 1] : 0;
        out[i * panel + lane] = high << 16 | row[2 * i];
      }
    }
}

int64_t groups_of(int64_t k) { return (k + kScaleGroup - 1) / kScaleGroup; }

void pack_eight_bit(const int8_t* w, const float* scales, char* out, int64_t n, int64_t k, int panel) {
  const int64_t groups = groups_of(k), scale_bytes = panel * static_cast<int64_t>(sizeof(float)), group_bytes = scale_bytes + kScaleGroup * panel;
  for (int64_t first = 0; first < n; first += panel)
    for (int64_t g = 0; g < groups; ++g, out += group_bytes)
      for (int64_t lane = 0; lane < std::min<int64_t>(panel, n - first); ++lane) {
        const int64_t row = first + lane, start = g * kScaleGroup;
        std::memcpy(out + lane * static_cast<int64_t>(sizeof(float)), scales + row * groups + g, sizeof(float));
        for (int64_t i = start; i < std::min(start + kScaleGroup, k); ++i)
          out[scale_bytes + (i - start) * panel + lane] = static_cast<char>(w[row * k + i]);
      }
}

// Bytes of one column of a panel.
int64_t column_bytes(WeightFormat format, int64_t k) {
  switch (format) {
    case WeightFormat::kBf16: return (k + 1) / 2 * 4;
    case WeightFormat::kEightBit: return groups_of(k) * (static_cast<int64_t>(sizeof(float)) + kScaleGroup);
    default: return k * 4;
  }
}

}  // namespace

PackedWeight::PackedWeight(const void* weight, const float* scales, const float* bias, int64_t n, int64_t k, WeightFormat format, int panel)
    : n_(n), k_(k), format_(format), panel_(panel) {
  bytes_ = static_cast<size_t>(panels() * panel_ * column_bytes(format, k));
  data_ = allocate(bytes_);
  std::memset(data_.get(), 0, bytes_);
  switch (format) {
    case WeightFormat::kBf16: pack_bf16(static_cast<const uint16_t*>(weight), static_cast<uint32_t*>(data_.get()), n, k, panel); break;
    case WeightFormat::kEightBit: pack_eight_bit(static_cast<const int8_t*>(weight), scales, static_cast<char*>(data_.get()), n, k, panel); break;
    default: pack_float(static_cast<const float*>(weight), static_cast<float*>(data_.get()), n, k, panel);
  }
  if (bias != nullptr) {
    bias_ = std::make_unique<float[]>(static_cast<size_t>(n));
    std::copy(bias, bias + n, bias_.get());
  }
}

void PackedWeight::row(int64_t id, float* out) const {
  const int64_t lane = id % panel_, panel = id / panel_;
  if (format_ == WeightFormat::kEightBit) {
    const int64_t scale_bytes = panel_ * static_cast<int64_t>(sizeof(float));
    const char* group = static_cast<const char*>(data_.get()) + panel * panel_ * column_bytes(format_, k_);
    for (int64_t i = 0; i < k_; i += kScaleGroup, group += scale_bytes + kScaleGroup * panel_) {
      float scale;
      std::memcpy(&scale, group + lane * static_cast<int64_t>(sizeof(float)), sizeof scale);
      const int8_t* values = reinterpret_cast<const int8_t*>(group) + scale_bytes + lane;
      for (int64_t j = i; j < std::min(i + kScaleGroup, k_); ++j) out[j] = static_cast<float>(values[(j - i) * panel_]) * scale;
    }
    return;
  }
  if (format_ == WeightFormat::kFloat) {
    const float* p = static_cast<const float*>(data_.get()) + panel * k_ * panel_ + lane;
    for (int64_t i = 0; i < k_; ++i) out[i] = p[i * panel_];
    return;
  }
  const uint32_t* p = static_cast<const uint32_t*>(data_.get()) + panel * ((k_ + 1) / 2) * panel_ + lane;
  for (int64_t i = 0; i < k_; ++i) {
    const uint32_t word = p[i / 2 * panel_];
    const uint32_t wide = i % 2 == 0 ? word << 16 : word & 0xFFFF0000u;
    std::memcpy(out + i, &wide, 4);
  }
}

}  // namespace foredraft
