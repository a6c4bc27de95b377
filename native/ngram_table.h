// A table of n-grams in mapped memory, one request's text, and drafts from both: drafters/ngram_blend.py in C++, with the same answers.
// Knows no tensors and no kernels. The memory is a file's, which may change under it: whatever is read there is checked before it is used.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "suffix.h"

namespace foredraft {

// Contexts of one length, as nodes of a trie that is read backwards: a node's token stands before those of its ancestors.
struct NgramLevel {
  const void* tokens;             // [size] of the table's token type, rising among siblings
  const uint8_t* totals;          // [size] codes of how often the context was seen
  const uint32_t* next_starts;    // [size + 1] into the next two
  const void* next_tokens;        // [num_next] what followed, the most frequent first
  const uint8_t* next_shares;     // [num_next] 255ths of the total
  const uint32_t* child_starts;   // [size + 1] into the next level; null in the last one
  int64_t size, num_next;
};

class NgramTable {
 public:
  static constexpr int kMaxOrder = 8, kMaxNext = 16;

  struct Next {
    int64_t total = 0;
    int count = 0;
    std::array<int32_t, kMaxNext> tokens;
    std::array<uint8_t, kMaxNext> shares;
  };

  // `weights` are those of drafters/ngram_blend.py, in its layout. Throws std::invalid_argument for sizes that don't belong together.
  // The memory of the levels is the caller's to keep.
  NgramTable(bool wide, std::vector<NgramLevel> levels, std::vector<int32_t> own_orders, std::vector<float> weights);

  int num_orders() const { return static_cast<int>(levels_.size()); }
  const std::vector<int32_t>& own_orders() const { return own_orders_; }
  float weight(int64_t cell) const { return weights_[static_cast<size_t>(cell)]; }
  // What the table has for the endings of a context, from one token up to as many as it knows.
  int find(const std::vector<int32_t>& context, std::array<Next, kMaxOrder>& found) const;

 private:
  int32_t token(const void* tokens, int64_t i) const {
    return wide_ ? static_cast<int32_t>(static_cast<const uint32_t*>(tokens)[i]) : static_cast<const uint16_t*>(tokens)[i];
  }

  bool wide_;
  std::vector<NgramLevel> levels_;
  std::vector<int32_t> own_orders_;
  std::vector<float> weights_;
};

struct NgramLimits {
  int64_t max_nodes;
  double min_token_prob;  // of a path
  bool tree;
};

struct NgramProposal {
  std::vector<int32_t> tokens, parents;
  std::vector<double> confidence;
};

// What may follow a context: candidates, the cells whose weights make each one's score, and those that speak for none of them.
struct NgramCells {
  std::vector<int32_t> tokens;
  std::vector<std::vector<int32_t>> cells;
  std::vector<int32_t> escape;
};

// Weights of a layout.
int64_t num_ngram_cells(int64_t num_orders, int64_t num_own_orders);

// One request's tokens, with what of them a draft reads.
class NgramText {
 public:
  NgramText(int64_t max_depth, int64_t max_occurrences);

  int64_t num_tokens() const { return length_; }
  int64_t num_bytes() const;
  void extend(const std::vector<int32_t>& tokens);
  std::vector<int32_t> tokens(int64_t first) const;
  bool is_consistent() const;

  // The end of the text; `past` are other texts, of which one may be `own`.
  NgramCells cells(const NgramTable& table, const SuffixIndex* past, int64_t own) const;

  struct Child {
    int32_t token;
    double probability;
  };
  // What may follow the text and a path behind it.
  std::vector<Child> next(const NgramTable& table, const std::vector<int32_t>& path, const SuffixIndex* past, int64_t own) const {
    return law(table, context(path), past, own);
  }

  // As SuffixIndex::draft: nothing, and no change, where a token that is known from position `first` on is another.
  std::optional<NgramProposal> draft(const NgramTable& table, int64_t first, const std::vector<int32_t>& tokens, const NgramLimits& limits,
                                     const SuffixIndex* past, int64_t own);

 private:
  struct Seen {
    int64_t count = 0, position = 0;
  };
  std::vector<int32_t> context(const std::vector<int32_t>& path) const;
  NgramCells cells_after(const NgramTable& table, const std::vector<int32_t>& context, const SuffixIndex* past, int64_t own) const;
  std::vector<Child> law(const NgramTable& table, const std::vector<int32_t>& context, const SuffixIndex* past, int64_t own) const;
  NgramProposal chain(const NgramTable& table, const NgramLimits& limits, const SuffixIndex* past, int64_t own) const;
  NgramProposal tree(const NgramTable& table, const NgramLimits& limits, const SuffixIndex* past, int64_t own) const;

  int64_t max_depth_;
  SuffixIndex index_;
  int64_t text_ = 0, length_ = 0;
  std::vector<int32_t> tokens_;
  std::unordered_map<int32_t, Seen> seen_;
};

}  // namespace foredraft
