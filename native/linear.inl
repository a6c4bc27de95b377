// y = x W^T over packed panels, written once for every instruction set (include after one vector_*.h).
//
// Lanes run along the output rows of a panel, so an output is a sum of chains of fused multiply-adds, one for each kChain of k, in
// order: no horizontal sum, and nothing about a result depends on the other rows, on threads or on the width of a register. One chain
// over all of k would lose twice the digits that a library's blocked sum loses.
#include "kernel_table.h"

namespace {

using foredraft::kScaleGroup;
using foredraft::LinearArgs;
using foredraft::WeightFormat;

constexpr int kPanel = 16 * kVectorsPerPanel;
constexpr int64_t kChain = 128;  // even: a pair of bfloat16 weights never straddles two chains
constexpr int64_t kPrefetchBytes = 8192;
// Activations of one block of rows stay in the second-level cache while the panels pass by.
constexpr int64_t kRowBlockBytes = 384 * 1024;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <int M>
struct Accumulators {
  Vec a[M][kVectorsPerPanel];
};

// Row m of the tile without one pointer a row: three rows share one, so that they fit in the general registers.
template <int M>
struct RowPointers {
  static constexpr int kCount = (M + 2) / 3;
  const float* p[kCount];
  int64_t stride;
  RowPointers(const float* x, int64_t row_stride) : stride(row_stride) {
    for (int i = 0; i < kCount; ++i) p[i] = x + 3 * i * row_stride;
  }
  float at(int m, int64_t k) const { return p[m / 3][(m % 3) * stride + k]; }
  void advance(int64_t k) {
    for (int i = 0; i < kCount; ++i) p[i] += k;
  }
};

template <int M>
inline __attribute__((always_inline)) void accumulate(Accumulators<M>& acc, const Vec* w, const RowPointers<M>& x, int64_t k) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const Vec xm = broadcast(x.at(m, k));
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerPanel; ++v) acc.a[m][v] = fma(w[v], xm, acc.a[m][v]);
  }
}

template <int M>
inline void clear(Accumulators<M>& acc) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < kVectorsPerPanel; ++v) acc.a[m][v] = zero();
}

template <int M>
inline void fold(Accumulators<M>& total, const Accumulators<M>& chain) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < kVectorsPerPanel; ++v) total.a[m][v] = add(total.a[m][v], chain.a[m][v]);
}

template <int M>
inline void chain_float(Accumulators<M>& acc, const float* w, RowPointers<M> x, int64_t k) {
  for (int64_t i = 0; i < k; ++i) {
    Vec wide[kVectorsPerPanel];
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + 16 * v) + kPrefetchBytes);
      wide[v] = load(w + 16 * v);
    }
    accumulate<M>(acc, wide, x, 0);
    x.advance(1);
    w += kPanel;
  }
}

template <int M>
inline void chain_bf16(Accumulators<M>& acc, const uint32_t* w, RowPointers<M> x, int64_t k) {
  Vec low[kVectorsPerPanel], high[kVectorsPerPanel];
  for (int64_t i = 0; i + 1 < k; i += 2) {
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + 16 * v) + kPrefetchBytes);
      const Words words = load_words(w + 16 * v);
      low[v] = low_half(words);
      high[v] = high_half(words);
    }
    accumulate<M>(acc, low, x, 0);
    accumulate<M>(acc, high, x, 1);
    x.advance(2);
    w += kPanel;
  }
  if (k % 2 != 0) {
    for (int v = 0; v < kVectorsPerPanel; ++v) low[v] = low_half(load_words(w + 16 * v));
    accumulate<M>(acc, low, x, 0);
  }
}

template <int M>
inline void finish_tile(const LinearArgs& a, const Accumulators<M>& acc, int64_t row, int64_t panel) {
  for (int v = 0; v < kVectorsPerPanel; ++v) {
    const int64_t column = panel * kPanel + 16 * v;
    const int lanes_left = static_cast<int>(smaller(16, a.n - column));
    if (lanes_left <= 0) break;
    for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * a.n + column;
      Vec sum = acc.a[m][v];
      if (a.bias != nullptr) sum = add(sum, load_first(a.bias + column, lanes_left));
      if (a.residual != nullptr) sum = add(sum, load_first(a.residual + at, lanes_left));
      store_first(a.out + at, sum, lanes_left);
    }
  }
}

template <int M>
void tile(const LinearArgs& a, int64_t row, int64_t panel) {
  Accumulators<M> total, chain;
  clear<M>(total);
  RowPointers<M> x(a.x + row * a.k, a.k);
  const bool bf16 = a.format == WeightFormat::kBf16;
  const int64_t words = bf16 ? (a.k + 1) / 2 : a.k;  // of 32 bits, in one column of the panel
  const char* w = static_cast<const char*>(a.weights) + panel * words * kPanel * 4;
  for (int64_t k = 0; k < a.k; k += kChain) {
    const int64_t length = smaller(kChain, a.k - k);
    clear<M>(chain);
    if (bf16)
      chain_bf16<M>(chain, reinterpret_cast<const uint32_t*>(w), x, length);
    else
      chain_float<M>(chain, reinterpret_cast<const float*>(w), x, length);
    fold<M>(total, chain);
    x.advance(length);
    w += (bf16 ? length / 2 : length) * kPanel * 4;
  }
  finish_tile<M>(a, total, row, panel);
}

// 8-bit weights are widened as they are read, once for all rows: a chain of fused multiply-adds for each group of k, and one over the
// groups with their scales.
template <int M>
void tile_eight_bit(const LinearArgs& a, int64_t row, int64_t panel) {
  Accumulators<M> total, group;
  clear<M>(total);
  RowPointers<M> x(a.x + row * a.k, a.k);
  const int64_t group_bytes = kPanel * static_cast<int64_t>(sizeof(float) + kScaleGroup);
  const char* w = static_cast<const char*>(a.weights) + panel * ((a.k + kScaleGroup - 1) / kScaleGroup) * group_bytes;
  for (int64_t k = 0; k < a.k; k += kScaleGroup, w += group_bytes) {
    const int64_t length = smaller(kScaleGroup, a.k - k);
    const float* scales = reinterpret_cast<const float*>(w);
    const int8_t* values = reinterpret_cast<const int8_t*>(scales + kPanel);
    clear<M>(group);
    for (int64_t i = 0; i < length; ++i, values += kPanel) {
      __builtin_prefetch(values + kPrefetchBytes);
      Vec wide[kVectorsPerPanel];
      for (int v = 0; v < kVectorsPerPanel; ++v) wide[v] = load_bytes(values + 16 * v);
      accumulate<M>(group, wide, x, 0);
      x.advance(1);
    }
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      const Vec scale = load(scales + 16 * v);
      for (int m = 0; m < M; ++m) total.a[m][v] = fma(group.a[m][v], scale, total.a[m][v]);
    }
  }
  finish_tile<M>(a, total, row, panel);
}

using Tile = void (*)(const LinearArgs&, int64_t row, int64_t panel);

template <int M>
struct Tiles {
  static Tile of(int64_t rows, WeightFormat format) {
    if (rows != M) return Tiles<M - 1>::of(rows, format);
    return format == WeightFormat::kEightBit ? tile_eight_bit<M> : tile<M>;
  }
};
template <>
struct Tiles<0> {
  static Tile of(int64_t, WeightFormat) { return nullptr; }
};

// Rows in tiles of nearly equal height: 13 rows are 7 + 6, not 12 + 1.
void rows_of_panel(const LinearArgs& a, int64_t first, int64_t last, int64_t panel) {
  const int64_t tallest = a.format == WeightFormat::kFloat ? kMaxTileRows : kMaxTileRowsBf16;
  int64_t tiles = (last - first + tallest - 1) / tallest;
  for (int64_t row = first; tiles > 0; --tiles) {
    const int64_t height = (last - row + tiles - 1) / tiles;
    Tiles<kMaxTileRows>::of(height, a.format)(a, row, panel);
    row += height;
  }
}

void linear(const LinearArgs& a, int64_t first_panel, int64_t last_panel) {
  int64_t block = kRowBlockBytes / (a.k * 4 + 1) / kMaxTileRows * kMaxTileRows;
  if (block < kMaxTileRows) block = kMaxTileRows;
  for (int64_t row = 0; row < a.rows; row += block)
    for (int64_t panel = first_panel; panel < last_panel; ++panel)
      rows_of_panel(a, row, smaller(row + block, a.rows), panel);
}

}  // namespace
