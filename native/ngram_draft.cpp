// From a table and a text to a draft, as drafters/ngram_blend.py has it: the same sums in the same order, so that drafts are the same.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>

#include "ngram_table.h"

namespace foredraft {

namespace {

constexpr std::array<double, 12> kShares{1e-9, 1. / 64, 1. / 32, 1. / 16, 1. / 8, 1. / 4, 3. / 8, 1. / 2, 5. / 8, 3. / 4, 7. / 8, 0.9999};
constexpr std::array<int64_t, 10> kTotals{1, 2, 3, 5, 9, 17, 33, 65, 257, 1025};
constexpr std::array<int64_t, 8> kCounts{1, 2, 3, 5, 9, 17, 33, 65};
constexpr std::array<int64_t, 4> kDistances{8, 32, 128, 512};
constexpr int64_t kNumShares = kShares.size() + 1, kNumTotals = kTotals.size() + 1, kNumCounts = kCounts.size() + 1;
constexpr int64_t kNumDistances = kDistances.size() + 2, kNumLeads = 6;
constexpr int64_t kOfSource = kNumShares * kNumTotals, kOfEscape = kNumTotals * kNumLeads;
constexpr size_t kMaxCandidates = 32, kMaxOwn = 16, kMaxPast = 8;

template <typename T, size_t N>
int64_t bucket(const std::array<T, N>& bounds, T value) {
  return std::upper_bound(bounds.begin(), bounds.end(), value) - bounds.begin();
}

// What one source says of each candidate.
struct Evidence {
  double total = 0.0;
  std::vector<double> counts;
};

using Continuation = SuffixIndex::Continuation;

size_t place_of(const std::vector<int32_t>& tokens, int32_t token) { return std::find(tokens.begin(), tokens.end(), token) - tokens.begin(); }

void add_candidates(std::vector<int32_t>& tokens, const std::vector<Continuation>& seen, size_t most) {
  size_t added = 0;
  for (const Continuation& each : seen) {
    if (tokens.size() == kMaxCandidates || added == most) return;
    if (place_of(tokens, each.token) == tokens.size()) {
      tokens.push_back(each.token);
      ++added;
    }
  }
}

// Counts of those places that match at least `order` tokens; the list begins with the longest matches.
size_t matching(const std::vector<Continuation>& seen, int64_t order) {
  size_t end = 0;
  while (end < seen.size() && seen[end].match >= order) ++end;
  return end;
}

void count_places(Evidence& evidence, const std::vector<int32_t>& tokens, const std::vector<Continuation>& seen, size_t end) {
  for (size_t i = 0; i < end; ++i) {
    const size_t at = place_of(tokens, seen[i].token);
    if (at < tokens.size()) evidence.counts[at] += 1.0;
  }
  evidence.total += static_cast<double>(end);
}

int64_t lead(const Evidence& evidence) {
  return static_cast<int64_t>(5.0 * *std::max_element(evidence.counts.begin(), evidence.counts.end()) / evidence.total);
}

}  // namespace

int64_t num_ngram_cells(int64_t num_orders, int64_t num_own_orders) {
  const int64_t weighed = (num_orders + 2 * num_own_orders) * kOfSource + kNumCounts * kNumDistances;
  return weighed + (num_orders + num_own_orders) * kOfEscape + 1;
}

NgramText::NgramText(int64_t max_depth, int64_t max_occurrences)
    : max_depth_(max_depth), index_(max_depth, max_occurrences), text_(index_.add_text({})) {}

int64_t NgramText::num_bytes() const {
  const size_t entry = sizeof(std::pair<const int32_t, Seen>) + 2 * sizeof(void*);
  return index_.num_bytes() + static_cast<int64_t>(tokens_.capacity() * sizeof(int32_t) + seen_.size() * entry + seen_.bucket_count() * sizeof(void*));
}

void NgramText::extend(const std::vector<int32_t>& tokens) {
  index_.extend(text_, tokens);
  for (int32_t token : tokens) {
    Seen& seen = seen_[token];
    ++seen.count;
    seen.position = length_++;
    tokens_.push_back(token);
  }
}

std::vector<int32_t> NgramText::tokens(int64_t first) const {
  return {tokens_.begin() + std::clamp<int64_t>(first, 0, length_), tokens_.end()};
}

bool NgramText::is_consistent() const {
  std::unordered_map<int32_t, Seen> seen;
  for (int64_t i = 0; i < length_; ++i) {
    Seen& each = seen[tokens_[static_cast<size_t>(i)]];
    ++each.count;
    each.position = i;
  }
  const auto same = [&](const auto& entry) {
    const auto found = seen_.find(entry.first);
    return found != seen_.end() && found->second.count == entry.second.count && found->second.position == entry.second.position;
  };
  return index_.is_consistent() && index_.text(text_) == tokens_ && seen.size() == seen_.size() && std::all_of(seen.begin(), seen.end(), same);
}

std::vector<int32_t> NgramText::context(const std::vector<int32_t>& path) const {
  const int64_t before = std::max<int64_t>(0, max_depth_ - static_cast<int64_t>(path.size()));
  std::vector<int32_t> out = tokens(std::max<int64_t>(0, length_ - before));
  out.insert(out.end(), path.begin(), path.end());
  return out;
}

NgramCells NgramText::cells(const NgramTable& table, const SuffixIndex* past, int64_t own) const {
  return cells_after(table, context({}), past, own);
}

NgramCells NgramText::cells_after(const NgramTable& table, const std::vector<int32_t>& context, const SuffixIndex* past, int64_t own) const {
  const std::vector<Continuation> said = index_.continuations(context, -1);
  const std::vector<Continuation> others = past == nullptr ? std::vector<Continuation>() : past->continuations(context, own);
  std::array<NgramTable::Next, NgramTable::kMaxOrder> known;
  const int depth = table.find(context, known);

  NgramCells out;
  add_candidates(out.tokens, said, kMaxOwn);
  for (int n = depth; n-- > 0;)
    for (int i = 0; i < known[static_cast<size_t>(n)].count && out.tokens.size() < kMaxCandidates; ++i) {
      const int32_t token = known[static_cast<size_t>(n)].tokens[static_cast<size_t>(i)];
      if (place_of(out.tokens, token) == out.tokens.size()) out.tokens.push_back(token);
    }
  add_candidates(out.tokens, others, kMaxPast);
  if (out.tokens.empty()) return out;
  out.cells.resize(out.tokens.size());

  int64_t base = 0;
  const int64_t orders = table.num_orders(), own_orders = static_cast<int64_t>(table.own_orders().size());
  int64_t escape = (orders + 2 * own_orders) * kOfSource + kNumCounts * kNumDistances;
  const auto add = [&](const Evidence& evidence, const int32_t newest, bool ranks_newest) {
    const int64_t total = bucket(kTotals, static_cast<int64_t>(evidence.total));
    for (size_t i = 0; i < out.tokens.size(); ++i) {
      int64_t cell = bucket(kShares, evidence.counts[i] / evidence.total) * kNumTotals + total;
      if (ranks_newest) cell = 2 * cell + (out.tokens[i] == newest);
      out.cells[i].push_back(static_cast<int32_t>(base + cell));
    }
    out.escape.push_back(static_cast<int32_t>(escape + total * kNumLeads + lead(evidence)));
  };

  for (int64_t n = 0; n < orders; ++n, base += kOfSource, escape += kOfEscape) {
    Evidence evidence{0.0, std::vector<double>(out.tokens.size())};
    if (n < depth) {
      const NgramTable::Next& next = known[static_cast<size_t>(n)];
      evidence.total = static_cast<double>(next.total);
      for (int i = 0; i < next.count; ++i) {
        const size_t at = place_of(out.tokens, next.tokens[static_cast<size_t>(i)]);
        if (at < out.tokens.size())
          evidence.counts[at] = static_cast<double>(next.shares[static_cast<size_t>(i)]) * evidence.total / 255.0;
      }
    }
    count_places(evidence, out.tokens, others, matching(others, n + 1));
    if (evidence.total > 0.0) add(evidence, 0, false);
  }
  for (int32_t order : table.own_orders()) {
    const size_t end = matching(said, order);
    if (end > 0) {
      Evidence evidence{0.0, std::vector<double>(out.tokens.size())};
      count_places(evidence, out.tokens, said, end);
      const auto newest = std::max_element(said.begin(), said.begin() + static_cast<int64_t>(end),
                                           [](const Continuation& a, const Continuation& b) { return a.position < b.position; });
      add(evidence, newest->token, true);
    }
    base += 2 * kOfSource;
    escape += kOfEscape;
  }
  for (size_t i = 0; i < out.tokens.size(); ++i) {
    const auto found = seen_.find(out.tokens[i]);
    int64_t count = 0, distance = 0;
    if (found != seen_.end()) {
      count = bucket(kCounts, found->second.count);
      distance = 1 + bucket(kDistances, length_ - found->second.position);
    }
    out.cells[i].push_back(static_cast<int32_t>(base + count * kNumDistances + distance));
  }
  out.escape.push_back(static_cast<int32_t>(escape));
  return out;
}

std::vector<NgramText::Child> NgramText::law(const NgramTable& table, const std::vector<int32_t>& context, const SuffixIndex* past,
                                             int64_t own) const {
  const NgramCells found = cells_after(table, context, past, own);
  std::vector<Child> out;
  if (found.tokens.empty()) return out;
  const auto score = [&](const std::vector<int32_t>& cells) {
    double sum = 0.0;
    for (int32_t cell : cells) sum += static_cast<double>(table.weight(cell));
    return sum;
  };
  const double escape = score(found.escape);
  double largest = escape;
  for (size_t i = 0; i < found.tokens.size(); ++i) {
    out.push_back({found.tokens[i], score(found.cells[i])});
    largest = std::max(largest, out.back().probability);
  }
  double total = std::exp(escape - largest);
  for (Child& child : out) {
    child.probability = std::exp(child.probability - largest);
    total += child.probability;
  }
  for (Child& child : out) child.probability /= total;
  return out;
}

std::optional<NgramProposal> NgramText::draft(const NgramTable& table, int64_t first, const std::vector<int32_t>& tokens,
                                              const NgramLimits& limits, const SuffixIndex* past, int64_t own) {
  const int64_t overlap = length_ - first;
  if (first < 0 || overlap < 0 || overlap > static_cast<int64_t>(tokens.size())) return std::nullopt;
  if (!std::equal(tokens.begin(), tokens.begin() + overlap, tokens_.begin() + first)) return std::nullopt;
  extend({tokens.begin() + overlap, tokens.end()});
  return limits.tree ? tree(table, limits, past, own) : chain(table, limits, past, own);
}

NgramProposal NgramText::chain(const NgramTable& table, const NgramLimits& limits, const SuffixIndex* past, int64_t own) const {
  NgramProposal made;
  double path = 1.0;
  while (static_cast<int64_t>(made.tokens.size()) < limits.max_nodes) {
    const std::vector<Child> children = law(table, context(made.tokens), past, own);
    const auto best = std::max_element(children.begin(), children.end(), [](const Child& a, const Child& b) { return a.probability < b.probability; });
    if (best == children.end() || best->probability == 0.0 || path * best->probability < limits.min_token_prob) break;
    path *= best->probability;
    made.parents.push_back(static_cast<int32_t>(made.tokens.size()) - 1);
    made.tokens.push_back(best->token);
    made.confidence.push_back(best->probability);
  }
  return made;
}

NgramProposal NgramText::tree(const NgramTable& table, const NgramLimits& limits, const SuffixIndex* past, int64_t own) const {
  struct Entry {
    int64_t parent;
    Child child;
  };
  std::vector<Entry> entries;
  std::vector<std::vector<int32_t>> paths;
  NgramProposal made;
  // The most probable first, of equal ones the one that was entered first.
  using Key = std::tuple<double, int64_t>;
  std::priority_queue<Key, std::vector<Key>, std::greater<Key>> heap;
  const auto enter = [&](int64_t parent, const std::vector<int32_t>& path, double probability) {
    for (const Child& child : law(table, context(path), past, own)) {
      if (probability * child.probability < limits.min_token_prob) continue;
      heap.emplace(-probability * child.probability, static_cast<int64_t>(entries.size()));
      entries.push_back({parent, child});
    }
  };
  if (limits.max_nodes > 0) enter(-1, {}, 1.0);
  while (!heap.empty() && static_cast<int64_t>(made.tokens.size()) < limits.max_nodes) {
    const auto [negative, number] = heap.top();
    heap.pop();
    const Entry taken = entries[static_cast<size_t>(number)];
    const int64_t node = static_cast<int64_t>(made.tokens.size());
    made.tokens.push_back(taken.child.token);
    made.parents.push_back(static_cast<int32_t>(taken.parent));
    made.confidence.push_back(taken.child.probability);
    std::vector<int32_t> path = taken.parent >= 0 ? paths[static_cast<size_t>(taken.parent)] : std::vector<int32_t>();
    path.push_back(taken.child.token);
    paths.push_back(path);
    if (node + 1 < limits.max_nodes) enter(node, path, -negative);
  }
  return made;
}

}  // namespace foredraft
