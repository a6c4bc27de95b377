#include "suffix.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace foredraft {

namespace {

uint64_t tagged(uint64_t hashed, uint32_t at) { return (hashed & 0xffffffff00000000u) | at; }
uint32_t address_in(uint64_t slot) { return static_cast<uint32_t>(slot); }
bool same_tag(uint64_t slot, uint64_t hashed) { return (slot >> 32) == (hashed >> 32); }

}  // namespace

SuffixIndex::SuffixIndex(int64_t max_depth, int64_t max_occurrences) : max_depth_(max_depth), max_occurrences_(max_occurrences) {
  if (max_depth < 1 || max_occurrences < 1) throw std::invalid_argument("a suffix index needs a depth and a number of places of 1 or more");
  while (levels_ < kLevels && kGramLengths[levels_] <= max_depth) ++levels_;
}

// ---- Texts ----

int64_t SuffixIndex::add_text(const std::vector<int32_t>& context) {
  auto text = std::make_unique<Text>();
  text->number = next_text_++;
  text->skipped = static_cast<int64_t>(context.size());
  for (int32_t token : context) append(*text, token);
  const int64_t number = text->number;
  texts_[number] = std::move(text);
  return number;
}

void SuffixIndex::extend(int64_t number, const std::vector<int32_t>& tokens) {
  Text& text = *texts_.at(number);
  for (int32_t token : tokens) {
    const Gram gram = gram_before(text, text.length);
    const int64_t position = text.length;
    const Address at = append(text, token);
    for (int level = 0; level < levels_; ++level)
      if (kGramLengths[level] <= position) enter(level, gram, at);
  }
}

void SuffixIndex::remove(int64_t number) {
  const auto found = texts_.find(number);
  if (found == texts_.end()) throw std::out_of_range("no text " + std::to_string(number));
  Text& text = *found->second;
  for (int64_t position = text.skipped; position < text.length; ++position) {
    const Gram gram = gram_before(text, position);
    for (int level = 0; level < levels_; ++level)
      if (kGramLengths[level] <= position) leave(level, gram, address(text, position));
  }
  for (uint32_t page : text.pages) {
    pages_[page].reset();
    free_pages_.push_back(page);
  }
  num_tokens_ -= text.length;
  texts_.erase(found);
}

std::vector<int32_t> SuffixIndex::text(int64_t number) const {
  const Text& text = *texts_.at(number);
  std::vector<int32_t> tokens;
  for (int64_t position = 0; position < text.length; ++position) tokens.push_back(token(text, position));
  return tokens;
}

SuffixIndex::Address SuffixIndex::append(Text& text, int32_t token) {
  const int64_t position = text.length;
  if ((position & (kPageSize - 1)) == 0) {
    uint32_t page = static_cast<uint32_t>(pages_.size());
    if (free_pages_.empty()) {
      if (pages_.size() >= (size_t{1} << (32 - kPageBits)) - 1) throw std::length_error("a suffix index holds at most 2^32 tokens");
      pages_.emplace_back();
    } else {
      page = free_pages_.back();
      free_pages_.pop_back();
    }
    pages_[page] = std::make_unique<Page>();
    pages_[page]->text = &text;
    pages_[page]->first = position;
    text.pages.push_back(page);
  }
  pages_[text.pages.back()]->tokens[position & (kPageSize - 1)] = token;
  ++text.length;
  ++num_tokens_;
  return address(text, position);
}

SuffixIndex::Address SuffixIndex::address(const Text& text, int64_t position) const {
  return (text.pages[position >> kPageBits] << kPageBits) + static_cast<Address>(position & (kPageSize - 1)) + 1;
}

int32_t SuffixIndex::token(const Text& text, int64_t position) const {
  return pages_[text.pages[position >> kPageBits]]->tokens[position & (kPageSize - 1)];
}

int32_t SuffixIndex::token_near(const Page& page, int64_t position) const {
  return position >= page.first ? page.tokens[position - page.first] : token(*page.text, position);
}

SuffixIndex::Gram SuffixIndex::gram_before(const Text& text, int64_t position) const {
  Gram gram{};
  for (int64_t i = 1; i <= std::min<int64_t>(kMaxGram, position); ++i) gram[kMaxGram - i] = token(text, position - i);
  return gram;
}

int64_t SuffixIndex::num_bytes() const {
  size_t bytes = sizeof(*this) + pages_.capacity() * sizeof(pages_[0]) + free_pages_.capacity() * sizeof(free_pages_[0]);
  bytes += (pages_.size() - free_pages_.size()) * sizeof(Page);
  for (const Table& table : tables_) bytes += table.slots.capacity() * sizeof(table.slots[0]);
  for (const auto& [number, text] : texts_) bytes += sizeof(*text) + sizeof(number) + text->pages.capacity() * sizeof(text->pages[0]);
  return static_cast<int64_t>(bytes);
}

// ---- Places ----

uint64_t SuffixIndex::hash(const Gram& gram, int n) {
  uint64_t h = 0;
  for (int i = kMaxGram - n; i < kMaxGram; ++i) {
    h = (h ^ static_cast<uint32_t>(gram[i])) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

uint64_t SuffixIndex::hash_at(Address at, int n) const {
  const Page& page = page_of(at);
  return hash(gram_before(*page.text, page.first + offset_of(at)), n);
}

bool SuffixIndex::holds_gram(Address at, int n, const Gram& gram) const {
  const Page& page = page_of(at);
  const int64_t position = page.first + offset_of(at);
  for (int i = 1; i <= n; ++i)
    if (token_near(page, position - i) != gram[kMaxGram - i]) return false;
  return true;
}

size_t SuffixIndex::find(int level, const Gram& gram, uint64_t hashed) const {
  const std::vector<uint64_t>& slots = tables_[level].slots;
  size_t slot = hashed & (slots.size() - 1);
  while (slots[slot] != 0 && !(same_tag(slots[slot], hashed) && holds_gram(address_in(slots[slot]), kGramLengths[level], gram)))
    slot = (slot + 1) & (slots.size() - 1);
  return slot;
}

// What is looked up between two passes of a model is in no cache: all levels' slots are fetched at once, then their pages.
void SuffixIndex::prefetch(const Gram& gram) const {
  std::array<const uint64_t*, kLevels> slots{};
  for (int level = 0; level < levels_; ++level) {
    const std::vector<uint64_t>& table = tables_[level].slots;
    slots[level] = &table[hash(gram, kGramLengths[level]) & (table.size() - 1)];
    __builtin_prefetch(slots[level]);
  }
  for (int level = 0; level < levels_; ++level) {
    const Address at = address_in(*slots[level]);
    if (at == 0) continue;
    const Page& page = page_of(at);
    __builtin_prefetch(&page);
    __builtin_prefetch(&page.tokens[offset_of(at)]);
    __builtin_prefetch(&page.older[level][offset_of(at)]);
  }
}

void SuffixIndex::enter(int level, const Gram& gram, Address at) {
  Table& table = tables_[level];
  if (4 * (table.used + 1) > 3 * table.slots.size()) resize(level, 2 * table.slots.size());
  const uint64_t hashed = hash(gram, kGramLengths[level]);
  uint64_t& slot = table.slots[find(level, gram, hashed)];
  const Address newest = slot == 0 ? 0 : address_in(slot);
  page_of(at).older[level][offset_of(at)] = newest;
  page_of(at).newer[level][offset_of(at)] = 0;
  if (newest != 0)
    page_of(newest).newer[level][offset_of(newest)] = at;
  else
    ++table.used;
  slot = tagged(hashed, at);
}

void SuffixIndex::leave(int level, const Gram& gram, Address at) {
  const Address older = page_of(at).older[level][offset_of(at)], newer = page_of(at).newer[level][offset_of(at)];
  if (older != 0) page_of(older).newer[level][offset_of(older)] = newer;
  if (newer != 0) {
    page_of(newer).older[level][offset_of(newer)] = older;
    return;
  }
  const uint64_t hashed = hash(gram, kGramLengths[level]);
  const size_t slot = find(level, gram, hashed);
  if (older != 0)
    tables_[level].slots[slot] = tagged(hashed, older);
  else
    erase(level, slot);
}

void SuffixIndex::resize(int level, size_t size) {
  std::vector<uint64_t> slots(size);
  for (uint64_t entry : tables_[level].slots) {
    if (entry == 0) continue;
    size_t slot = hash_at(address_in(entry), kGramLengths[level]) & (slots.size() - 1);
    while (slots[slot] != 0) slot = (slot + 1) & (slots.size() - 1);
    slots[slot] = entry;
  }
  tables_[level].slots = std::move(slots);
}

// Closes the gap: an entry behind it moves up unless its own place lies between.
void SuffixIndex::erase(int level, size_t slot) {
  Table& table = tables_[level];
  const size_t mask = table.slots.size() - 1;
  size_t gap = slot;
  for (size_t next = (gap + 1) & mask; table.slots[next] != 0; next = (next + 1) & mask) {
    const size_t home = hash_at(address_in(table.slots[next]), kGramLengths[level]) & mask;
    if (((next - home) & mask) >= ((next - gap) & mask)) {
      table.slots[gap] = table.slots[next];
      gap = next;
    }
  }
  table.slots[gap] = 0;
  --table.used;
  // So that memory follows the tokens down too: a salt may keep one short text of many.
  if (table.slots.size() > kLeastSlots && 10 * table.used < 3 * table.slots.size()) resize(level, table.slots.size() / 2);
}

std::vector<SuffixIndex::Place> SuffixIndex::places(const std::vector<int32_t>& context, int64_t excluded) const {
  std::vector<Place> found;
  const int64_t size = static_cast<int64_t>(context.size());
  Gram gram{};
  for (int64_t i = 1; i <= std::min<int64_t>(kMaxGram, size); ++i) gram[kMaxGram - i] = context[size - i];
  prefetch(gram);
  int64_t longer = max_depth_ + 1;
  for (int level = levels_ - 1; level >= 0; --level) {
    const int n = kGramLengths[level];
    if (n > size) continue;
    const uint64_t entry = tables_[level].slots[find(level, gram, hash(gram, n))];
    const size_t first = found.size();
    int64_t visited = 0;
    for (Address at = entry == 0 ? 0 : address_in(entry); at != 0 && visited < max_occurrences_; ++visited) {
      const Page& page = page_of(at);
      const int64_t position = page.first + offset_of(at), most = std::min({max_depth_, position, size});
      const Address next = page.older[level][offset_of(at)];
      if (next != 0) __builtin_prefetch(&page_of(next).older[level][offset_of(next)]);
      int64_t match = n;
      while (match < most && token_near(page, position - 1 - match) == context[size - 1 - match]) ++match;
      if (match < longer && page.text->number != excluded) found.push_back({page.text, position, static_cast<int32_t>(match)});
      at = next;
    }
    std::stable_sort(found.begin() + static_cast<int64_t>(first), found.end(), [](const Place& a, const Place& b) { return a.match > b.match; });
    longer = n;
  }
  return found;
}

std::vector<SuffixIndex::Occurrence> SuffixIndex::occurrences(const std::vector<int32_t>& context, int64_t excluded) const {
  std::vector<Occurrence> out;
  for (const Place& place : places(context, excluded)) out.push_back({place.match, static_cast<int32_t>(place.position), place.text->number});
  return out;
}

std::vector<SuffixIndex::Continuation> SuffixIndex::continuations(const std::vector<int32_t>& context, int64_t excluded) const {
  std::vector<Continuation> out;
  for (const Place& place : places(context, excluded)) out.push_back({place.match, token(*place.text, place.position), place.position});
  return out;
}

bool SuffixIndex::is_consistent() const {
  int64_t tokens = 0;
  std::array<int64_t, kLevels> expected{}, held{};
  for (const auto& [number, text] : texts_) {
    tokens += text->length;
    for (int level = 0; level < levels_; ++level)
      expected[level] += std::max<int64_t>(0, text->length - std::max<int64_t>(text->skipped, kGramLengths[level]));
  }
  for (int level = 0; level < levels_; ++level) {
    const int n = kGramLengths[level];
    size_t used = 0;
    for (uint64_t entry : tables_[level].slots) {
      if (entry == 0) continue;
      ++used;
      const Page& newest = page_of(address_in(entry));
      const Gram gram = gram_before(*newest.text, newest.first + offset_of(address_in(entry)));
      const size_t slot = find(level, gram, hash(gram, n));
      if (tables_[level].slots[slot] != entry) return false;
      Address newer = 0;
      for (Address at = address_in(entry); at != 0; at = page_of(at).older[level][offset_of(at)]) {
        if (page_of(at).newer[level][offset_of(at)] != newer || !holds_gram(at, n, gram)) return false;
        newer = at;
        if (++held[level] > expected[level]) return false;
      }
    }
    if (used != tables_[level].used || held[level] != expected[level]) return false;
  }
  return tokens == num_tokens_;
}

}  // namespace foredraft
