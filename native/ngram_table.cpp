#include "ngram_table.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace foredraft {

namespace {

// drafters/ngram_blend.py: `total_of`.
int64_t total_of(uint8_t code) { return code < 16 ? code : static_cast<int64_t>(8 + (code & 7)) << ((code >> 3) - 1); }

}  // namespace

NgramTable::NgramTable(bool wide, std::vector<NgramLevel> levels, std::vector<int32_t> own_orders, std::vector<float> weights)
    : wide_(wide), levels_(std::move(levels)), own_orders_(std::move(own_orders)), weights_(std::move(weights)) {
  if (levels_.empty() || levels_.size() > kMaxOrder) throw std::invalid_argument("an n-gram table has 1 to 8 orders");
  const int64_t cells = num_ngram_cells(num_orders(), static_cast<int64_t>(own_orders_.size()));
  if (static_cast<int64_t>(weights_.size()) != cells)
    throw std::invalid_argument("an n-gram table needs " + std::to_string(cells) + " weights, got " + std::to_string(weights_.size()));
}

int NgramTable::find(const std::vector<int32_t>& context, std::array<Next, kMaxOrder>& found) const {
  const int orders = static_cast<int>(std::min(levels_.size(), context.size()));
  int64_t low = 0, high = levels_[0].size;
  for (int n = 0; n < orders; ++n) {
    const NgramLevel& level = levels_[static_cast<size_t>(n)];
    const int32_t wanted = context[context.size() - 1 - static_cast<size_t>(n)];
    const int64_t end = high;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (token(level.tokens, middle) < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == end || token(level.tokens, low) != wanted) return n;
    const int64_t node = low;
    Next& next = found[static_cast<size_t>(n)];
    const int64_t first = level.next_starts[node], last = level.next_starts[node + 1];
    next.total = total_of(level.totals[node]);
    next.count = 0;
    for (int64_t i = first; i < std::min({last, level.num_next, first + kMaxNext}); ++i) {
      next.tokens[static_cast<size_t>(next.count)] = token(level.next_tokens, i);
      next.shares[static_cast<size_t>(next.count++)] = level.next_shares[i];
    }
    if (n + 1 == orders) return orders;
    low = level.child_starts[node];
    high = std::min<int64_t>(level.child_starts[node + 1], levels_[static_cast<size_t>(n) + 1].size);
    if (low >= high) return n + 1;
  }
  return orders;
}

}  // namespace foredraft
