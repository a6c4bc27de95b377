// Makes and owns the plan of one pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan_view.h"

namespace foredraft {

struct SegmentInput {
  int64_t prefix, chain;
  std::vector<int32_t> parents;
  std::vector<int32_t> pages;
};

class Plan {
 public:
  explicit Plan(int64_t page_size);
  // Throws std::invalid_argument for a malformed segment.
  void add(const SegmentInput& input);
  void finish();

  const PlanView& view() const { return view_; }
  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t num_segments() const { return static_cast<int64_t>(segments_.size()); }
  const PlanSegment& segment(int64_t i) const { return segments_[static_cast<size_t>(i)]; }
  int64_t page_size() const { return view_.page_size; }
  int64_t max_page() const { return max_page_; }
  int64_t max_position() const { return max_position_; }

 private:
  void add_node(const PlanSegment& s, const SegmentInput& input, int32_t node);

  std::vector<PlanRow> rows_;
  std::vector<PlanSegment> segments_;
  std::vector<int32_t> page_table_, paths_;
  PlanView view_{};
  int64_t max_page_ = -1, max_position_ = -1;
};

}  // namespace foredraft
