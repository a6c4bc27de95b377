// Python's door to the kernels. Tensors come as addresses and sizes; foredraft/kernels/native.py has checked that they match.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "row_math.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace foredraft;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::vector<int32_t> integers(nb::handle sequence, const char* what) {
  nb::object fast = nb::steal(PySequence_Fast(sequence.ptr(), "a segment's parents and pages must be sequences"));
  if (!fast.is_valid()) throw nb::python_error();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast.ptr());
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  std::vector<int32_t> out(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    const long value = PyLong_AsLong(items[i]);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    if (value < INT32_MIN || value > INT32_MAX)
      throw std::invalid_argument(std::string(what) + " must be 32-bit numbers, got " + std::to_string(value));
    out[static_cast<size_t>(i)] = static_cast<int32_t>(value);
  }
  return out;
}

Plan make_plan(nb::sequence segments, int64_t page_size) {
  Plan plan(page_size);
  for (nb::handle segment : segments)
    plan.add({nb::cast<int64_t>(segment.attr("prefix")), nb::cast<int64_t>(segment.attr("chain")),
              integers(segment.attr("parents"), "parents"), integers(segment.attr("pages"), "pages")});
  plan.finish();
  return plan;
}

// [keys address, values address, pages, heads, page_size, dim, bf16]
CacheView cache_view(Address keys, Address values, int64_t pages, int64_t heads, int64_t page_size, int64_t dim, bool bf16) {
  return {at<void>(keys), at<void>(values), pages, heads, page_size, dim, bf16};
}

// [address, temperature, min_p, top_k, top_p, seed, position]
using Sampled = std::tuple<Address, double, double, int64_t, double, uint64_t, uint64_t>;

std::vector<SampledRow> sampled_rows(const std::vector<Sampled>& rows) {
  std::vector<SampledRow> out;
  out.reserve(rows.size());
  for (const auto& [row, temperature, min_p, top_k, top_p, seed, position] : rows)
    out.push_back({at<void>(row), {temperature, min_p, top_k, top_p}, seed, position});
  return out;
}

int64_t window_of(int64_t window) { return window == 0 ? kNoWindow : window; }

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan")
      .def_prop_ro("num_rows", &Plan::num_rows)
      .def_prop_ro("positions",
                   [](const Plan& p) {
                     std::vector<int64_t> out;
                     for (int64_t i = 0; i < p.num_rows(); ++i) out.push_back(p.view().rows[i].position);
                     return out;
                   })
      .def_prop_ro("slots", [](const Plan& p) {
        std::vector<int64_t> out;
        for (int64_t i = 0; i < p.num_rows(); ++i) out.push_back(p.view().rows[i].slot);
        return out;
      });
  m.def("plan", &make_plan);
}

void bind_weight(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight").def_prop_ro("bytes", &PackedWeight::bytes);
}

void bind_block(nb::module_& m) {
  nb::class_<Block>(m, "Block")
      .def("__init__", [](Block* self, Address attention_norm, const PackedWeight& qkv, const PackedWeight& output, Address mlp_norm,
                          const PackedWeight& gate_up, const PackedWeight& down, Address cos, Address sin, int64_t positions, int64_t half_dim,
                          float eps, float scale, int64_t window, float soft_cap, int activation, Address query_norm, Address key_norm,
                          float head_eps, Address attention_post_norm, Address mlp_post_norm, Address beside_norm, bool norm_residual) {
        new (self) Block{at<float>(attention_norm), &qkv, &output, at<float>(mlp_norm), &gate_up, &down, at<float>(cos), at<float>(sin),
                         positions, 2 * half_dim, eps, scale, window_of(window), soft_cap, static_cast<Activation>(activation),
                         at<float>(query_norm), at<float>(key_norm), head_eps, at<float>(attention_post_norm), at<float>(mlp_post_norm),
                         at<float>(beside_norm), norm_residual};
      });
}

void bind_runtime(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<int, const std::string&>())
      .def_prop_ro("instruction_set", [](const Runtime& r) { return std::string(r.table().name); })
      .def_prop_ro("num_threads", &Runtime::threads)
      .def("pack", [](const Runtime& r, Address w, Address bias, int64_t n, int64_t k, bool bf16) {
        return PackedWeight(at<void>(w), nullptr, at<float>(bias), n, k, bf16 ? WeightFormat::kBf16 : WeightFormat::kFloat, r.table().panel);
      }, no_gil)
      .def("pack_eight_bit", [](const Runtime& r, Address w, Address scales, Address bias, int64_t n, int64_t k) {
        return PackedWeight(at<void>(w), at<float>(scales), at<float>(bias), n, k, WeightFormat::kEightBit, r.table().panel);
      }, no_gil)
      .def("linear", [](const Runtime& r, const PackedWeight& w, Address x, int64_t rows, int64_t k, Address residual, Address out) {
        r.linear(w, at<float>(x), rows, k, at<float>(residual), at<float>(out));
      }, no_gil)
      .def("embedding", [](const Runtime& r, const PackedWeight& w, Address ids, int64_t rows, Address out) {
        r.embedding(w, at<int64_t>(ids), rows, at<float>(out));
      }, no_gil)
      .def("rms_norm", [](const Runtime& r, Address x, Address weight, float eps, Address residual, Address out, int64_t rows, int64_t width) {
        r.rms_norm(at<float>(x), at<float>(weight), eps, at<float>(residual), at<float>(out), rows, width);
      }, no_gil)
      .def("gate_multiply", [](const Runtime& r, Address gate_up, int activation, Address out, int64_t rows, int64_t width) {
        r.gate_multiply(at<float>(gate_up), static_cast<Activation>(activation), at<float>(out), rows, width);
      }, no_gil)
      .def("soft_cap", [](const Runtime& r, Address x, float cap, Address out, int64_t n) {
        r.soft_cap(at<float>(x), cap, at<float>(out), n);
      }, no_gil)
      .def("rope_and_store", [](const Runtime& r, const Plan& plan, Address qkv, int64_t rows, int64_t heads, Address cos, Address sin,
                                int64_t positions, Address keys, Address values, int64_t pages, int64_t kv_heads, int64_t page_size,
                                int64_t dim, bool bf16, Address query_norm, Address key_norm, float norm_eps, Address queries) {
        r.rope_and_store(plan, {nullptr, cache_view(keys, values, pages, kv_heads, page_size, dim, bf16), at<float>(qkv), at<float>(cos),
                                at<float>(sin), at<float>(queries), heads, at<float>(query_norm), at<float>(key_norm), norm_eps}, rows, positions);
      }, no_gil)
      .def("attention", [](const Runtime& r, const Plan& plan, Address queries, int64_t rows, int64_t heads, Address keys, Address values,
                           int64_t pages, int64_t kv_heads, int64_t page_size, int64_t dim, bool bf16, float scale, int64_t window, float soft_cap,
                           Address out) {
        r.attention(plan, {nullptr, cache_view(keys, values, pages, kv_heads, page_size, dim, bf16), at<float>(queries), at<float>(out),
                           heads, scale, window_of(window), soft_cap}, rows);
      }, no_gil)
      .def("run_blocks", [](const Runtime& r, const std::vector<const Block*>& blocks, const Plan& plan, Address keys, Address values,
                            int64_t pages, int64_t kv_heads, int64_t page_size, int64_t dim, bool bf16, Address hidden, Address beside,
                            int64_t rows, int64_t width, Address out) {
        r.run_blocks(blocks, plan, cache_view(keys, values, pages, kv_heads, page_size, dim, bf16), at<float>(hidden), at<float>(beside),
                     rows, width, at<float>(out));
      }, no_gil)
      .def("move_slots", [](const Runtime& r, Address keys, Address values, int64_t pages, int64_t kv_heads, int64_t page_size, int64_t dim,
                            bool bf16, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations) {
        r.move_slots(cache_view(keys, values, pages, kv_heads, page_size, dim, bf16), sources, destinations);
      })
      .def("read_memory", [](const Runtime& r, const PackedWeight& w) {
        return r.read_memory(static_cast<const float*>(w.data()), static_cast<int64_t>(w.bytes()) / 4);
      }, no_gil);
}

void bind_row_math(nb::class_<Runtime> r) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  r.def("argmax_rows", [](const Runtime& run, Address rows, int64_t count, int64_t n, bool wide) {
     std::vector<int64_t> ids(static_cast<size_t>(count));
     run.argmax_rows(at<void>(rows), count, n, wide, ids.data());
     return ids;
   }, no_gil)
      .def("top_ids", [](const Runtime& run, Address rows, int64_t count, int64_t n, bool wide, int64_t k) {
        std::vector<std::vector<int64_t>> ids;
        std::vector<int64_t> flat(static_cast<size_t>(count * k));
        run.top_ids(at<void>(rows), count, n, wide, k, flat.data());
        for (int64_t i = 0; i < count; ++i) ids.emplace_back(flat.begin() + i * k, flat.begin() + (i + 1) * k);
        return ids;
      }, no_gil)
      .def("log_softmax", [](const Runtime&, Address row, int64_t n, bool wide, Address out) {
        wide ? log_softmax(at<double>(row), at<double>(out), n) : log_softmax(at<float>(row), at<double>(out), n);
      }, no_gil)
      .def("total", [](const Runtime&, Address weights, int64_t n) { return total(at<double>(weights), n); }, no_gil)
      .def("draw", [](const Runtime&, Address weights, int64_t n, double coin) { return draw(at<double>(weights), n, coin); }, no_gil)
      .def("laws", [](const Runtime& run, const std::vector<Sampled>& rows, int64_t n, bool wide, Address out) {
        std::vector<int64_t> ids(rows.size());
        run.laws(sampled_rows(rows), n, wide, at<double>(out), ids.data());
        return ids;
      }, no_gil)
      .def("draws", [](const Runtime& run, const std::vector<Sampled>& rows, int64_t n, bool wide) {
        std::vector<int64_t> ids(rows.size());
        run.draws(sampled_rows(rows), n, wide, ids.data());
        return ids;
      }, no_gil)
      .def("random_words", [](const Runtime& run, uint64_t seed, uint64_t position, uint32_t stream, int64_t blocks) {
        std::vector<uint32_t> words(static_cast<size_t>(4 * blocks));
        run.table().philox(seed, position, stream, 0, blocks, words.data());
        return words;
      });
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "foredraft's native kernels";
  bind_plan(m);
  bind_weight(m);
  bind_block(m);
  bind_runtime(m);
  bind_row_math(nb::borrow<nb::class_<Runtime>>(m.attr("Runtime")));
  bind_suffix(m);
  bind_ngram_table(m);
  m.def("best_instruction_set", [] { return std::string(runnable_tables().front()->name); });
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : runnable_tables()) names.push_back(table->name);
    return names;
  });
  m.def("available_cores", &ThreadPool::available_cores);
}
