"""What a decoder is made of, whatever file said so.

Knows sizes and options; knows no file format and no tensor. A family of models is a set of options
here, never a decoder of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.errors import ModelError
from foredraft.models.rope import Divisors, Rope

# Far above every model there is; a header that claims more would only fill the memory.
MAX_LAYERS = 4096
MAX_POSITIONS = 2**24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of `num_layers` blocks: norm, attention, norm, gated SiLU network.

    Raises ModelError for sizes that cannot belong together.
    """

    architecture: str  # as its file names it
    vocab_size: int  # rows of the embedding: padding rows included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even; not always hidden_size / num_heads
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, size, limit in (
            ("num_layers", self.num_layers, MAX_LAYERS),
            ("max_position_embeddings", self.max_position_embeddings, MAX_POSITIONS),
        ):
            if size > limit:
                raise ModelError(f"{self.architecture}: {name} is {size}, at most {limit} fit")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.architecture}: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"{self.architecture}: head_dim is {self.head_dim}; rotary positions need it even"
            )
        scaling = self.rope.scaling
        if isinstance(scaling, Divisors) and len(scaling.values) != self.head_dim // 2:
            raise ModelError(
                f"{self.architecture}: {len(scaling.values)} rope divisors, "
                f"expected {self.head_dim // 2}"
            )
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and token >= self.vocab_size:
                raise ModelError(
                    f"{self.architecture}: special token id {token} is outside the vocabulary "
                    f"of {self.vocab_size}"
                )

    @property
    def attention_scale(self) -> float:
        """What a query's product with a key is multiplied by before the softmax."""
        return float(self.head_dim**-0.5)
