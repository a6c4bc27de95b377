"""Which tensors a config needs, and their strict reading from any mapping of names to tensors.

Knows names, shapes and dtypes; knows no file format and no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name; a linear weight is `[outputs, inputs]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        for part, (outputs, inputs, bias) in linears.items():
            shapes[f"{name}.{part}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.{part}.bias"] = (outputs,)
    return shapes


def check_names(config: ModelConfig, names: Sequence[str]) -> None:
    """Raises ModelError that names the first missing or unknown tensors of `names`."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - set(names))
    if missing:
        raise ModelError(f"missing {_listed(missing)}")
    unknown = sorted(set(names) - expected.keys())
    if unknown:
        raise ModelError(f"unknown {_listed(unknown)}")


class Reader:
    """Takes tensors out of `weights`, each checked against the config and cast once.

    Raises ModelError at construction for missing or unknown names.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_names(config, list(weights))
        self._shapes = expected_shapes(config)
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self.num_bytes = 0  # of what has been read, as kept

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name` in `dtype` (default: the weights'). ModelError for a wrong one."""
        tensor, expected = self._weights[name], self._shapes[name]
        if tuple(tensor.shape) != expected:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, expected {list(expected)}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"tensor {name} has dtype {_dtype(tensor.dtype)}, "
                f"expected one of {', '.join(map(_dtype, FLOAT_DTYPES))}"
            )
        tensor = tensor.to(self._device, dtype or self._dtype)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def fused(self, parts: Sequence[str], bias: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (and biases) of several linears that read the same input, as one `[sum N, K]`."""
        weight = _joined([self.tensor(f"{part}.weight") for part in parts])
        if not bias:
            return weight, None
        # A bias is added to float32 sums; rounding it to bfloat16 with the weights saves nothing.
        kept = torch.float64 if self._dtype == torch.float64 else torch.float32
        return weight, _joined([self.tensor(f"{part}.bias", kept) for part in parts])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
