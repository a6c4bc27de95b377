// From places to a draft, as drafters/suffix_draft.py has it: the same sums in the same order, so that drafts are the same.
#include <algorithm>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>

#include "suffix.h"

namespace foredraft {

namespace {

constexpr std::array<int, 8> kContextLengths{1, 2, 3, 4, 5, 7, 10, 16};
constexpr int kAgreements = 7;
constexpr size_t kCells = kContextLengths.size() * kAgreements;

int cell(int64_t match, int64_t count, int64_t total) {
  int agreement = 6;
  if (count == total)
    agreement = total == 1 ? 0 : total <= 3 ? 1 : 2;
  else if (4 * count >= 3 * total)
    agreement = 3;
  else if (2 * count >= total)
    agreement = 4;
  else if (4 * count >= total)
    agreement = 5;
  const auto row = std::upper_bound(kContextLengths.begin(), kContextLengths.end(), match) - kContextLengths.begin() - 1;
  return static_cast<int>(row) * kAgreements + agreement;
}

struct Count {
  int32_t token;
  int64_t count;
};

// The token's entry, made if need be; contexts have few distinct successors.
size_t counted(std::vector<Count>& counts, int32_t token) {
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i].token == token) {
      ++counts[i].count;
      return i;
    }
  counts.push_back({token, 1});
  return counts.size() - 1;
}

int64_t longest_path(double factor, int64_t match) { return static_cast<int64_t>(factor * static_cast<double>(match)); }

}  // namespace

SuffixProposal SuffixIndex::propose(const std::vector<int32_t>& context, const DraftLimits& limits, const std::vector<double>& estimates,
                                    int64_t growing, int64_t excluded) const {
  if (estimates.size() != kCells) throw std::invalid_argument("a suffix draft needs the estimates of " + std::to_string(kCells) + " cells");
  if (limits.max_nodes < 1) return {};
  std::vector<Place> found = places(context, excluded);
  return limits.tree ? tree(found, limits, estimates, growing) : chain(std::move(found), limits, estimates, growing);
}

std::optional<SuffixChoice> SuffixIndex::draft(int64_t number, int64_t first, const std::vector<int32_t>& tokens, const DraftLimits& limits,
                                               const std::vector<double>& estimates, const SuffixOthers& others) {
  const Text& known = *texts_.at(number);
  const int64_t overlap = known.length - first;
  if (first < 0 || overlap < 0 || overlap > static_cast<int64_t>(tokens.size())) return std::nullopt;
  for (int64_t i = 0; i < overlap; ++i)
    if (token(known, first + i) != tokens[static_cast<size_t>(i)]) return std::nullopt;
  extend(number, {tokens.begin() + overlap, tokens.end()});
  std::vector<int32_t> context;
  for (int64_t at = std::max<int64_t>(0, known.length - max_depth_); at < known.length; ++at) context.push_back(token(known, at));
  SuffixChoice choice{propose(context, limits, estimates, number, -1)};
  if (others.index != nullptr) {
    SuffixProposal made = others.index->propose(context, limits, *others.estimates, -1, others.own);
    if (made.score > choice.made.score) choice = {std::move(made), true};
  }
  return choice;
}

std::vector<SuffixIndex::Following> SuffixIndex::following(const std::vector<Place>& places, const std::vector<int32_t>& path,
                                                           int64_t growing) const {
  std::vector<Following> out;
  out.reserve(places.size());
  const int64_t ahead = static_cast<int64_t>(path.size());
  for (const Place& place : places) {
    const int64_t at = place.position + ahead;
    if (at < place.text->length)
      out.push_back({place, token(*place.text, at)});
    else if (place.text->number == growing)
      out.push_back({place, path[static_cast<size_t>(at - place.text->length)]});
  }
  return out;
}

bool SuffixIndex::leader(const std::vector<Following>& following, size_t depth, const std::vector<double>& estimates, Child& best) {
  std::vector<Count> counts;
  size_t first = 0;
  bool any = false;
  for (size_t i = 0; i < following.size(); ++i) {
    const size_t entry = counted(counts, following[i].token);
    if (counts[entry].count > counts[first].count) first = entry;
    const int64_t match = following[i].place.match;
    if (i + 1 < following.size() && following[i + 1].place.match == match) continue;
    const int where = cell(match + static_cast<int64_t>(depth), counts[first].count, static_cast<int64_t>(i + 1));
    if (!any || estimates[where] > best.estimate) best = {counts[first].token, estimates[where], where, match};
    any = true;
  }
  return any;
}

std::vector<SuffixIndex::Child> SuffixIndex::children(const std::vector<Following>& following, size_t depth,
                                                      const std::vector<double>& estimates) {
  std::vector<Count> counts;
  std::vector<Child> best;
  for (size_t i = 0; i < following.size(); ++i) {
    counted(counts, following[i].token);
    const int64_t match = following[i].place.match;
    if (i + 1 < following.size() && following[i + 1].place.match == match) continue;
    for (size_t k = 0; k < counts.size(); ++k) {
      const int where = cell(match + static_cast<int64_t>(depth), counts[k].count, static_cast<int64_t>(i + 1));
      const Child child{counts[k].token, estimates[where], where, match};
      if (k == best.size())
        best.push_back(child);
      else if (child.estimate > best[k].estimate)
        best[k] = child;
    }
  }
  double total = 0.0;
  for (const Child& child : best) total += child.estimate;
  const double scale = std::max(1.0, total);
  for (Child& child : best) child.estimate /= scale;
  return best;
}

SuffixProposal SuffixIndex::chain(std::vector<Place> places, const DraftLimits& limits, const std::vector<double>& estimates,
                                  int64_t growing) const {
  SuffixProposal made;
  double path = 1.0;
  int64_t room = limits.max_nodes;
  while (static_cast<int64_t>(made.tokens.size()) < room) {
    const std::vector<Following> next = following(places, made.tokens, growing);
    Child best{};
    if (!leader(next, made.tokens.size(), estimates, best) || path * best.estimate < limits.min_token_prob) break;
    if (made.tokens.empty()) room = std::min(room, longest_path(limits.max_spec_factor, best.match));
    if (room < 1) break;
    path *= best.estimate;
    made.score += path;
    places.clear();
    for (const Following& one : next)
      if (one.token == best.token) places.push_back(one.place);
    if (made.tokens.empty()) made.text = places.front().text->number;
    made.parents.push_back(static_cast<int32_t>(made.tokens.size()) - 1);
    made.tokens.push_back(best.token);
    made.cells.push_back(best.cell);
  }
  return made;
}

SuffixProposal SuffixIndex::tree(const std::vector<Place>& places, const DraftLimits& limits, const std::vector<double>& estimates,
                                 int64_t growing) const {
  struct Entry {
    double probability;
    int64_t order, parent, room;
    Child child;
    std::vector<Place> places;
  };
  std::vector<Entry> entries;
  // The most probable first, of equal ones the one that was entered first.
  using Key = std::tuple<double, int64_t>;
  std::priority_queue<Key, std::vector<Key>, std::greater<Key>> heap;
  std::vector<std::vector<int32_t>> paths;
  SuffixProposal made;

  const auto enter = [&](int64_t parent, const std::vector<Place>& from, double path, int64_t room) {
    static const std::vector<int32_t> kRoot;
    const std::vector<int32_t>& so_far = parent >= 0 ? paths[static_cast<size_t>(parent)] : kRoot;
    const std::vector<Following> next = following(from, so_far, growing);
    for (const Child& child : children(next, so_far.size(), estimates)) {
      const int64_t under = parent >= 0 ? room : longest_path(limits.max_spec_factor, child.match);
      const double probability = path * child.estimate;
      if (under <= 0 || probability < limits.min_token_prob) continue;
      Entry entry{probability, static_cast<int64_t>(entries.size()), parent, under, child, {}};
      for (const Following& one : next)
        if (one.token == child.token) entry.places.push_back(one.place);
      heap.emplace(-probability, entry.order);
      entries.push_back(std::move(entry));
    }
  };

  enter(-1, places, 1.0, limits.max_nodes);
  while (!heap.empty() && static_cast<int64_t>(made.tokens.size()) < limits.max_nodes) {
    const Entry taken = std::move(entries[static_cast<size_t>(std::get<1>(heap.top()))]);
    heap.pop();
    const int64_t node = static_cast<int64_t>(made.tokens.size());
    made.tokens.push_back(taken.child.token);
    made.parents.push_back(static_cast<int32_t>(taken.parent));
    made.cells.push_back(taken.child.cell);
    std::vector<int32_t> path;
    if (taken.parent >= 0) path = paths[static_cast<size_t>(taken.parent)];
    path.push_back(taken.child.token);
    paths.push_back(std::move(path));
    made.score += taken.probability;
    if (node == 0) made.text = taken.places.front().text->number;
    enter(node, taken.places, taken.probability, taken.room - 1);
  }
  return made;
}

}  // namespace foredraft
