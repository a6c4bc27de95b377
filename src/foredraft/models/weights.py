"""Which tensors a config needs, and their strict reading from any mapping of names to tensors.

Knows names, shapes and dtypes; knows no file format and no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name; a linear weight is `[outputs, inputs]`."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        for part, size in _norms(config).items():
            shapes[f"{name}.{part}.weight"] = (size,)
        for part, (outputs, inputs, bias) in _linears(config).items():
            shapes[f"{name}.{part}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.{part}.bias"] = (outputs,)
    return shapes


def qkv_parts(config: ModelConfig) -> list[str]:
    """The linears that make queries, keys and values, in this order."""
    if config.fused_projections:
        return ["self_attn.qkv_proj"]
    return [f"self_attn.{part}_proj" for part in "qkv"]


def gate_up_parts(config: ModelConfig) -> list[str]:
    """The linears that make gate and up, in this order."""
    return ["mlp.gate_up_proj"] if config.fused_projections else ["mlp.gate_proj", "mlp.up_proj"]


def mlp_norm_part(config: ModelConfig) -> str:
    """The norm before the gated network."""
    return "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"


def _norms(config: ModelConfig) -> dict[str, int]:
    """A layer's norms and their sizes."""
    names = ["input_layernorm", mlp_norm_part(config)]
    if config.post_norms:
        names += ["post_attention_layernorm", "post_feedforward_layernorm"]
    norms = dict.fromkeys(names, config.hidden_size)
    if config.head_norms:
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config.head_dim)
    return norms


def _linears(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """A layer's linears: outputs, inputs, whether there is a bias."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    rows = [queries, keys, keys]
    inners = [inner, inner]
    if config.fused_projections:
        rows, inners = [sum(rows)], [sum(inners)]
    return {
        **{
            part: (count, hidden, config.qkv_bias)
            for part, count in zip(qkv_parts(config), rows, strict=True)
        },
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        **{
            part: (count, hidden, config.mlp_bias)
            for part, count in zip(gate_up_parts(config), inners, strict=True)
        },
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }


def check_names(config: ModelConfig, names: Sequence[str]) -> None:
    """Raises ModelError that names the first missing or unknown tensors of `names`."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - set(names))
    if missing:
        raise ModelError(f"missing {_listed(missing)}")
    unknown = sorted(set(names) - expected.keys())
    if unknown:
        raise ModelError(f"unknown {_listed(unknown)}")


class TextPart(Mapping[str, Tensor]):
    """The text model's tensors out of `weights` of a model that reads images too, renamed."""

    # As transformers writes them now, and as it did before version 4.52.
    _PREFIXES: ClassVar[dict[str, str]] = {
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "lm_head.": "lm_head.",
    }

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._names: dict[str, str] = {}
        for stored in weights:
            for prefix, instead in self._PREFIXES.items():
                if stored.startswith(prefix):
                    self._names[instead + stored.removeprefix(prefix)] = stored

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
        self._config = config
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

    def norm(self, name: str) -> Tensor:
        """What the norm `name` multiplies by; kept wide, as activations are."""
        weight = self.tensor(f"{name}.weight", self._wide)
        return weight + self._config.norm_offset if self._config.norm_offset else weight

    def fused(self, parts: Sequence[str], bias: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (and biases) of several linears that read the same input, as one `[sum N, K]`."""
        weight = _joined([self.tensor(f"{part}.weight") for part in parts])
        if not bias:
            return weight, None
        # A bias is added to float32 sums; rounding it to bfloat16 with the weights saves nothing.
        return weight, _joined([self.tensor(f"{part}.bias", self._wide) for part in parts])

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self._dtype == torch.float64 else torch.float32


def rotated_in_pairs(
    config: ModelConfig, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Queries' and keys' rows so ordered that row i of a head is rotated with row i + D / 2.

    That is how they are stored, unless a head is rotated in part. The same order in queries and
    keys leaves their products as they are.
    """
    rotary, head_dim = config.rope.rotary_dim or config.head_dim, config.head_dim
    if rotary == head_dim:
        return weight, bias
    still = list(range(rotary, head_dim))
    half, still_half = rotary // 2, len(still) // 2
    head = torch.tensor(
        [*range(half), *still[:still_half], *range(half, rotary), *still[still_half:]],
        device=weight.device,
    )
    rows = torch.arange(weight.shape[0], device=weight.device).reshape(-1, head_dim)
    turned = config.num_heads + config.num_kv_heads
    rows[:turned] = rows[:turned, head]
    index = rows.flatten()
    return weight[index], None if bias is None else bias[index]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
