// Python's door to the suffix index.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "suffix.h"

namespace nb = nanobind;

namespace foredraft {

void bind_suffix(nb::module_& m) {
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<int64_t, int64_t>())
      .def_prop_ro("num_tokens", &SuffixIndex::num_tokens)
      .def_prop_ro("num_bytes", &SuffixIndex::num_bytes)
      .def("add_text", &SuffixIndex::add_text)
      .def("text", &SuffixIndex::text)
      .def("extend", &SuffixIndex::extend)
      .def("remove", &SuffixIndex::remove)
      .def("is_consistent", &SuffixIndex::is_consistent)
      .def("occurrences",
           [](const SuffixIndex& index, const std::vector<int32_t>& context, int64_t excluded) {
             std::vector<std::tuple<int32_t, int64_t, int32_t>> out;
             for (const auto& place : index.occurrences(context, excluded)) out.emplace_back(place.match, place.text, place.position);
             return out;
           })
      .def("propose", [](const SuffixIndex& index, const std::vector<int32_t>& context, int64_t max_nodes, double max_spec_factor,
                         double min_token_prob, bool tree, const std::vector<double>& estimates, int64_t growing, int64_t excluded) {
        SuffixProposal made = index.propose(context, {max_nodes, max_spec_factor, min_token_prob, tree}, estimates, growing, excluded);
        return std::make_tuple(std::move(made.tokens), std::move(made.parents), std::move(made.cells), made.score, made.text);
      })
      .def(
          "draft",
          [](SuffixIndex& index, int64_t number, int64_t first, const std::vector<int32_t>& tokens, int64_t max_nodes, double max_spec_factor,
             double min_token_prob, bool tree, const std::vector<double>& estimates, const SuffixIndex* others, int64_t own,
             const std::vector<double>& other_estimates) {
            using Made = std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<int32_t>, double, int64_t, bool>;
            auto choice = index.draft(number, first, tokens, {max_nodes, max_spec_factor, min_token_prob, tree}, estimates,
                                      {others, own, &other_estimates});
            if (!choice) return std::optional<Made>();
            SuffixProposal& made = choice->made;
            return std::optional<Made>(std::in_place, std::move(made.tokens), std::move(made.parents), std::move(made.cells), made.score,
                                       made.text, choice->of_others);
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
}

}  // namespace foredraft
