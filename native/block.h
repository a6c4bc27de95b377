// A decoder's block as the native kernels run it: packed weights, addresses and options (kernels/block.py says what they mean).
#pragma once
#include <cstdint>

#include "kernel_table.h"
#include "packed.h"

namespace foredraft {

// Owns nothing. foredraft/kernels/native.py has checked that the shapes fit each other, and keeps the memory alive.
struct Block {
  const float* attention_norm;  // [width]
  const PackedWeight* qkv;
  const PackedWeight* output;
  const float* mlp_norm;  // [width]
  const PackedWeight* gate_up;
  const PackedWeight* down;
  const float* cos;  // [positions, dim / 2]
  const float* sin;
  int64_t positions, dim;
  float eps, scale;
  int64_t window;  // kNoWindow: none
  float soft_cap;  // 0: none
  Activation activation;
  const float* query_norm;  // [dim] or null, as the next
  const float* key_norm;
  float head_eps;
  const float* attention_post_norm;  // [width] or null, as the next
  const float* mlp_post_norm;
  const float* beside_norm;  // [width] or null: the qkv weight reads [2 width], what stands beside first
  bool norm_residual;

  int64_t width() const { return output->n(); }
  int64_t heads() const { return output->k() / dim; }
  int64_t kv_heads() const { return (qkv->n() / dim - heads()) / 2; }
  int64_t inner() const { return down->k(); }
};

}  // namespace foredraft
