#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace foredraft {

namespace {
[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }
}  // namespace

Plan::Plan(int64_t page_size) {
  if (page_size < 1 || page_size > (int64_t{1} << 31))
    refuse("page_size must be 1 to 2^31, got " + std::to_string(page_size));
  view_.page_size = page_size;
  view_.page_shift = (page_size & (page_size - 1)) == 0 ? __builtin_ctzll(static_cast<unsigned long long>(page_size)) : -1;
}

void Plan::add(const SegmentInput& input) {
  if (input.prefix < 0 || input.chain < 1)
    refuse("a segment needs prefix >= 0 and chain >= 1, got " + std::to_string(input.prefix) + " and " +
           std::to_string(input.chain));
  const int64_t nodes = static_cast<int64_t>(input.parents.size());
  const int64_t pages = static_cast<int64_t>(input.pages.size());
  // Both are far below 2^62, so the sums cannot overflow.
  constexpr int64_t limit = int64_t{1} << 40;
  if (input.prefix > limit || input.chain > limit || pages * view_.page_size < input.prefix + input.chain + nodes)
    refuse(std::to_string(pages) + " pages of " + std::to_string(view_.page_size) + " slots cannot hold " +
           std::to_string(input.prefix + input.chain + nodes) + " slots");
  for (const int32_t page : input.pages) {
    if (page < 0) refuse("page ids are 0 or more, got " + std::to_string(page));
    max_page_ = std::max<int64_t>(max_page_, page);
  }
  const PlanSegment s{num_rows(), input.chain + nodes, input.prefix, input.chain,
                      static_cast<int64_t>(page_table_.size())};
  page_table_.insert(page_table_.end(), input.pages.begin(), input.pages.end());
  view_.page_table = page_table_.data();
  segments_.push_back(s);
  for (int64_t i = 0; i < input.chain; ++i) {
    const int64_t position = input.prefix + i;
    rows_.push_back({position, view_.physical(s, position), position + 1, 0});
  }
  for (int32_t node = 0; node < nodes; ++node) add_node(s, input, node);
  max_position_ = std::max(max_position_, rows_.back().position);
  for (int64_t r = s.first_row; r < num_rows(); ++r)
    max_position_ = std::max(max_position_, rows_[static_cast<size_t>(r)].position);
}

void Plan::add_node(const PlanSegment& s, const SegmentInput& input, int32_t node) {
  const int32_t parent = input.parents[static_cast<size_t>(node)];
  if (parent < -1 || parent >= node)
    refuse("node " + std::to_string(node) + " has parent " + std::to_string(parent) + "; valid are -1 to " +
           std::to_string(node - 1));
  const int64_t root = s.prefix + s.chain;
  const PlanRow above = rows_[static_cast<size_t>(s.first_row + s.chain + parent)];
  const int64_t position = above.position + 1;
  PlanRow row{position, view_.physical(s, root + node), position + 1, 0};
  const bool above_straight = above.diverges > above.position;
  if (above_straight && root + node == position) {
    rows_.push_back(row);
    return;
  }
  row.diverges = std::min(above.diverges, position);
  row.path = static_cast<int32_t>(paths_.size());
  const int64_t depth = position - root + 1;
  paths_.resize(paths_.size() + static_cast<size_t>(depth));
  int32_t walker = node;
  for (int64_t d = depth - 1; d >= 0; --d) {
    paths_[static_cast<size_t>(row.path + d)] = walker;
    walker = input.parents[static_cast<size_t>(walker)];
  }
  rows_.push_back(row);
}

void Plan::finish() {
  view_.rows = rows_.data();
  view_.segments = segments_.data();
  view_.page_table = page_table_.data();
  view_.paths = paths_.data();
}

}  // namespace foredraft
