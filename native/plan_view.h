// One pass as the kernels see it: where each row sits, where it writes, and which keys it sees.
#pragma once
#include <cstdint>

namespace foredraft {

struct PlanRow {
  int64_t position;
  int64_t slot;      // physical: page * page_size + offset
  int64_t diverges;  // first position whose key does not lie at the slot of the same number; position + 1 if none
  int32_t path;      // where the row's ancestors start in paths (only where diverges <= position)
};

struct PlanSegment {
  int64_t first_row, rows;
  int64_t prefix, chain;
  int64_t pages;  // where the block table starts in page_table
};

// Plain pointers, so that code compiled for one instruction set includes nothing of the standard library.
struct PlanView {
  const PlanRow* rows;
  const PlanSegment* segments;
  const int32_t* page_table;
  const int32_t* paths;  // node numbers by depth, root's child first
  int64_t page_size;
  int page_shift;  // page_size is 2^page_shift; -1: it is no power of two, and a slot's page takes a division

  int64_t page_of(int64_t slot) const { return page_shift >= 0 ? slot >> page_shift : slot / page_size; }
  int64_t physical(const PlanSegment& s, int64_t slot) const {
    const int64_t page = page_of(slot);
    return page_table[s.pages + page] * page_size + (slot - page * page_size);
  }
  // The slot (within the request) of the key that `row` of segment `s` sees at `position`.
  int64_t slot_at(const PlanSegment& s, const PlanRow& row, int64_t position) const {
    if (position < row.diverges) return position;
    const int64_t root = s.prefix + s.chain;
    return root + paths[row.path + (position - root)];
  }
};

}  // namespace foredraft
