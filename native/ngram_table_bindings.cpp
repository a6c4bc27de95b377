// Python's door to the n-gram table.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "ngram_table.h"

namespace nb = nanobind;

namespace foredraft {

namespace {

// Addresses of a level's arrays, in the order of NgramLevel, its size and that of what follows.
using LevelAddresses = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t>;

std::vector<NgramLevel> levels_at(const std::vector<LevelAddresses>& addresses) {
  std::vector<NgramLevel> levels;
  for (const auto& [tokens, totals, starts, next, shares, children, size, num_next] : addresses)
    levels.push_back({reinterpret_cast<const void*>(tokens), reinterpret_cast<const uint8_t*>(totals), reinterpret_cast<const uint32_t*>(starts),
                      reinterpret_cast<const void*>(next), reinterpret_cast<const uint8_t*>(shares),
                      reinterpret_cast<const uint32_t*>(children), size, num_next});
  return levels;
}

}  // namespace

void bind_ngram_table(nb::module_& m) {
  nb::class_<NgramTable>(m, "NgramTable")
      .def("__init__", [](NgramTable* self, bool wide, const std::vector<LevelAddresses>& levels, std::vector<int32_t> own_orders,
                          std::vector<float> weights) { new (self) NgramTable(wide, levels_at(levels), std::move(own_orders), std::move(weights)); });
  nb::class_<NgramText>(m, "NgramText")
      .def(nb::init<int64_t, int64_t>())
      .def_prop_ro("num_tokens", &NgramText::num_tokens)
      .def_prop_ro("num_bytes", &NgramText::num_bytes)
      .def("extend", &NgramText::extend)
      .def("tokens", &NgramText::tokens)
      .def("is_consistent", &NgramText::is_consistent)
      .def(
          "cells",
          [](const NgramText& text, const NgramTable& table, const SuffixIndex* past, int64_t own) {
            NgramCells found = text.cells(table, past, own);
            return std::make_tuple(std::move(found.tokens), std::move(found.cells), std::move(found.escape));
          },
          nb::arg(), nb::arg().none(), nb::arg())
      .def(
          "law",
          [](const NgramText& text, const NgramTable& table, const std::vector<int32_t>& path, const SuffixIndex* past, int64_t own) {
            std::pair<std::vector<int32_t>, std::vector<double>> out;
            for (const NgramText::Child& child : text.next(table, path, past, own)) {
              out.first.push_back(child.token);
              out.second.push_back(child.probability);
            }
            return std::make_tuple(std::move(out.first), std::move(out.second));
          },
          nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def(
          "draft",
          [](NgramText& text, const NgramTable& table, int64_t first, const std::vector<int32_t>& tokens, int64_t max_nodes, double min_token_prob,
             bool tree, const SuffixIndex* past, int64_t own) {
            using Made = std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>>;
            auto made = text.draft(table, first, tokens, {max_nodes, min_token_prob, tree}, past, own);
            if (!made) return std::optional<Made>();
            return std::optional<Made>(std::in_place, std::move(made->tokens), std::move(made->parents), std::move(made->confidence));
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
}

}  // namespace foredraft
