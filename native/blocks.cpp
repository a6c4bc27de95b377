// Whole blocks in one call: the operations of kernels/block.py's apply_block, in its order.
#include <cstring>
#include <stdexcept>

#include "aligned.h"
#include "runtime.h"

namespace foredraft {

namespace {

// What lies between the operations of a block, [rows, ...] each. One for each calling thread, so that calls cannot meet.
struct Between {
  AlignedFloats normed, both, qkv, queries, attended, gate_up, inner;
};

void check_block(const Block& b, const Plan& plan, const CacheView& c, bool beside, int64_t width) {
  const auto refuse = [](const std::string& message) { throw std::invalid_argument(message); };
  if (b.width() != width)
    refuse("a block compiled for a width of " + std::to_string(b.width()) + " cannot take rows of " + std::to_string(width));
  if ((b.beside_norm != nullptr) != beside)
    refuse(beside ? "a block with one input cannot take rows beside" : "a block with two inputs needs rows beside");
  if (b.kv_heads() != c.heads || b.dim != c.dim)
    refuse("a block with " + std::to_string(b.kv_heads()) + " key heads of size " + std::to_string(b.dim) + " cannot use a cache of " +
           std::to_string(c.heads) + " of size " + std::to_string(c.dim));
  if (plan.max_position() >= b.positions)
    refuse("position " + std::to_string(plan.max_position()) + " is outside the rope table's " + std::to_string(b.positions));
}

// The cache of the next layer.
CacheView next_layer(CacheView c) {
  const int64_t bytes = c.pages * c.heads * c.page_size * c.dim * (c.bf16 ? 2 : 4);
  c.keys = static_cast<char*>(c.keys) + bytes;
  c.values = static_cast<char*>(c.values) + bytes;
  return c;
}

}  // namespace

void Runtime::run_block(const Block& b, const Plan& plan, const CacheView& cache, const float* hidden, const float* beside, int64_t rows,
                        float* out) const {
  thread_local Between between;
  const int64_t width = b.width(), attention_width = b.output->k(), inner_width = b.inner();
  float* normed = between.normed.room(rows * width);
  float* qkv = between.qkv.room(rows * b.qkv->n());
  float* queries = between.queries.room(rows * attention_width);
  float* attended = between.attended.room(rows * attention_width);
  float* gate_up = between.gate_up.room(rows * b.gate_up->n());
  float* inner = between.inner.room(rows * inner_width);

  // What a part adds to the residual stream, normed before where the family says so.
  const auto add = [&](const PackedWeight& weight, const float* x, const float* post_norm, const float* residual) {
    linear(weight, x, rows, weight.k(), post_norm == nullptr ? residual : nullptr, post_norm == nullptr ? out : normed);
    if (post_norm != nullptr) rms_norm(normed, post_norm, b.eps, residual, out, rows, width);
  };
  rms_norm(hidden, b.attention_norm, b.eps, nullptr, normed, rows, width);
  if (b.norm_residual) {
    // Of a later part `normed` is scratch, and `out` may be `hidden`: the residual stream moves to `out`.
    std::memcpy(out, normed, static_cast<size_t>(rows * width) * sizeof(float));
    hidden = out;
  }
  const float* read = normed;
  if (beside != nullptr) {
    float* both = between.both.room(rows * 2 * width);
    for (int64_t row = 0; row < rows; ++row) {
      rms_norm(beside + row * width, b.beside_norm, b.eps, nullptr, both + row * 2 * width, 1, width);
      std::memcpy(both + (2 * row + 1) * width, normed + row * width, static_cast<size_t>(width) * sizeof(float));
    }
    read = both;
  }
  linear(*b.qkv, read, rows, b.qkv->k(), nullptr, qkv);
  rope_and_store(plan, {nullptr, cache, qkv, b.cos, b.sin, queries, b.heads(), b.query_norm, b.key_norm, b.head_eps}, rows,
                 b.positions);
  attention(plan, {nullptr, cache, queries, attended, b.heads(), b.scale, b.window, b.soft_cap}, rows);
  add(*b.output, attended, b.attention_post_norm, hidden);
  rms_norm(out, b.mlp_norm, b.eps, nullptr, normed, rows, width);
  linear(*b.gate_up, normed, rows, width, nullptr, gate_up);
  gate_multiply(gate_up, b.activation, inner, rows, inner_width);
  add(*b.down, inner, b.mlp_post_norm, out);
}

void Runtime::run_blocks(const std::vector<const Block*>& blocks, const Plan& plan, CacheView cache, const float* hidden,
                         const float* beside, int64_t rows, int64_t width, float* out) const {
  for (const Block* block : blocks) check_block(*block, plan, cache, beside != nullptr, width);
  if (blocks.empty()) std::memcpy(out, hidden, static_cast<size_t>(rows * width) * sizeof(float));
  for (const Block* block : blocks) {
    run_block(*block, plan, cache, hidden, beside, rows, out);
    hidden = out;
    cache = next_layer(cache);
  }
}

}  // namespace foredraft
