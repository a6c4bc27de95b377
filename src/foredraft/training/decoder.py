"""A small decoder with gradients: the draft model in training.

Knows a config and the order of operations; knows no target, no loop. Parameters are called as
Hugging Face's files call them, so that `named_parameters` is a checkpoint. It computes what
`models.decoder` computes, which is what runs once it is trained.
Shapes: B sequences, T positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.heads.eagle3 import RMSNorm, rotate

_UNSUPPORTED = (
    "fused_projections",
    "post_norms",
    "norm_offset",
    "final_soft_cap",
    "attention_soft_cap",
    "windows",
)


class TrainableDecoder(nn.Module):
    """A decoder of a config without the options that only some families have.

    Raises ModelError, naming the option, for one that has them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_trainable(config)
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList([_Layer(config) for _ in range(config.num_layers)]),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        tables = config.rope.tables(
            config.head_dim, config.max_position_embeddings, torch.float32, "cpu"
        )
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `[B, T]` -> hidden states behind the final norm `[B, T, H]`; a row sees those
        before it.
        """
        hidden = self.model["embed_tokens"](tokens) * self.config.embedding_scale
        rotation = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model["layers"].children():
            hidden = layer(hidden, rotation)
        normed: Tensor = self.model["norm"](hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave `[..., H]` -> `[..., V]`."""
        head = self.model["embed_tokens"] if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.get_parameter("weight"))

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights`, of exactly the parameters' names and shapes, into them."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])


def check_trainable(config: ModelConfig) -> None:
    """Raise ModelError for options of a family that a draft model is not trained with."""
    for name in _UNSUPPORTED:
        if getattr(config, name):
            raise ModelError(
                f"a draft model with {name} (of {config.architecture}) can't be trained; heads can"
            )
    if (config.rope.rotary_dim or config.head_dim) != config.head_dim:
        raise ModelError(
            f"a draft model with heads that are rotated in part (of {config.architecture}) can't "
            "be trained; heads can"
        )


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = _GatedNetwork(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._head_dim, self._scale = config.head_dim, config.attention_scale
        hidden, bias = config.hidden_size, config.qkv_bias
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=config.output_bias)
        self._normed = config.head_norms
        if config.head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self._head_dim)

        queries, keys, values = (heads(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self._normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (rotate(each.transpose(1, 2), *rotation) for each in (queries, keys))
        groups = queries.shape[1] // keys.shape[1]
        attended = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(groups, dim=1),
            values.transpose(1, 2).repeat_interleave(groups, dim=1),
            is_causal=True,
            scale=self._scale,
        )
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return out


class _GatedNetwork(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._activation = config.activation
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self._activation == "silu" else F.gelu(gate, approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out
