// Texts of token ids, the places of their n-grams, and drafts from them: drafters/suffix_index.py and suffix_draft.py in C++,
// with the same answers. Knows no tensors and no kernels.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace foredraft {

struct DraftLimits {
  int64_t max_nodes;
  double max_spec_factor;
  double min_token_prob;
  bool tree;
};

struct SuffixProposal {
  std::vector<int32_t> tokens, parents, cells;
  double score = 0.0;
  int64_t text = -1;
};

class SuffixIndex;

// Texts of others to copy from, but not their text `own`.
struct SuffixOthers {
  const SuffixIndex* index = nullptr;
  int64_t own = -1;
  const std::vector<double>* estimates = nullptr;
};

struct SuffixChoice {
  SuffixProposal made;
  bool of_others = false;
};

class SuffixIndex {
 public:
  SuffixIndex(int64_t max_depth, int64_t max_occurrences);
  SuffixIndex(const SuffixIndex&) = delete;
  SuffixIndex& operator=(const SuffixIndex&) = delete;

  int64_t add_text(const std::vector<int32_t>& context);
  void extend(int64_t number, const std::vector<int32_t>& tokens);
  void remove(int64_t number);
  std::vector<int32_t> text(int64_t number) const;
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_bytes() const;
  bool is_consistent() const;

  struct Occurrence {
    int32_t match;
    int32_t position;
    int64_t text;
  };
  std::vector<Occurrence> occurrences(const std::vector<int32_t>& context, int64_t excluded) const;
  struct Continuation {
    int32_t match;
    int32_t token;
    int64_t position;
  };
  // Of `occurrences`, in their order, the tokens that follow them.
  std::vector<Continuation> continuations(const std::vector<int32_t>& context, int64_t excluded) const;
  SuffixProposal propose(const std::vector<int32_t>& context, const DraftLimits& limits, const std::vector<double>& estimates,
                         int64_t growing, int64_t excluded) const;
  // One step of a text that grows: `tokens` stand in it from position `first` on, as far as it goes, and what they have more is appended.
  // Then the draft with the larger score, from the text itself or from others. Nothing, and no change, where a known token is another.
  std::optional<SuffixChoice> draft(int64_t number, int64_t first, const std::vector<int32_t>& tokens, const DraftLimits& limits,
                                    const std::vector<double>& estimates, const SuffixOthers& others);

 private:
  static constexpr int kLevels = 4;
  static constexpr std::array<int, kLevels> kGramLengths{1, 2, 4, 8};
  static constexpr int kMaxGram = 8;
  static constexpr size_t kLeastSlots = 16;
  static constexpr int kPageBits = 6, kPageSize = 1 << kPageBits;
  using Address = uint32_t;  // page and offset of a place, from 1; 0 is none
  using Gram = std::array<int32_t, kMaxGram>;  // ends at the last element

  struct Text {
    int64_t number = 0, length = 0, skipped = 0;
    std::vector<uint32_t> pages;
  };

  // Places of one text. The lists of equal n-grams run from the newest to the oldest.
  struct Page {
    const Text* text = nullptr;
    int64_t first = 0;  // position of tokens[0]
    std::array<int32_t, kPageSize> tokens;
    std::array<std::array<Address, kPageSize>, kLevels> older, newer;
  };

  struct Place {
    const Text* text;
    int64_t position;
    int32_t match;
  };

  struct Child {
    int32_t token;
    double estimate;
    int32_t cell;
    int64_t match;
  };
  struct Following {
    Place place;
    int32_t token;
  };

  Page& page_of(Address at) const { return *pages_[(at - 1) >> kPageBits]; }
  static int offset_of(Address at) { return static_cast<int>((at - 1) & (kPageSize - 1)); }
  Address address(const Text& text, int64_t position) const;
  int32_t token(const Text& text, int64_t position) const;
  int32_t token_near(const Page& page, int64_t position) const;  // in the page, if it is there
  Gram gram_before(const Text& text, int64_t position) const;
  bool holds_gram(Address at, int n, const Gram& gram) const;
  uint64_t hash_at(Address at, int n) const;
  static uint64_t hash(const Gram& gram, int n);

  // Slot of a gram's newest place, or of the empty slot where it would be.
  size_t find(int level, const Gram& gram, uint64_t hashed) const;
  void prefetch(const Gram& gram) const;
  void enter(int level, const Gram& gram, Address at);
  void leave(int level, const Gram& gram, Address at);
  void resize(int level, size_t slots);
  void erase(int level, size_t slot);
  Address append(Text& text, int32_t token);

  std::vector<Place> places(const std::vector<int32_t>& context, int64_t excluded) const;
  std::vector<Following> following(const std::vector<Place>& places, const std::vector<int32_t>& path, int64_t growing) const;
  static bool leader(const std::vector<Following>& following, size_t depth, const std::vector<double>& estimates, Child& best);
  static std::vector<Child> children(const std::vector<Following>& following, size_t depth, const std::vector<double>& estimates);
  SuffixProposal chain(std::vector<Place> places, const DraftLimits& limits, const std::vector<double>& estimates, int64_t growing) const;
  SuffixProposal tree(const std::vector<Place>& places, const DraftLimits& limits, const std::vector<double>& estimates,
                      int64_t growing) const;

  // Newest places of each gram: a tag of the gram's hash above, the address below; 0 is empty.
  struct Table {
    std::vector<uint64_t> slots = std::vector<uint64_t>(kLeastSlots);
    size_t used = 0;
  };

  int64_t max_depth_, max_occurrences_;
  int levels_ = 0;
  int64_t next_text_ = 0, num_tokens_ = 0;
  std::unordered_map<int64_t, std::unique_ptr<Text>> texts_;
  std::vector<std::unique_ptr<Page>> pages_;
  std::vector<uint32_t> free_pages_;
  std::array<Table, kLevels> tables_;
};

}  // namespace foredraft
