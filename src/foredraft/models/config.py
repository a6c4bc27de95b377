"""What a decoder is made of, whatever file said so.

Knows sizes and options; knows no file format and no tensor. A family of models is a set of options
here, never a decoder of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.errors import ModelError
from foredraft.kernels.block import Activation
from foredraft.models.rope import Divisors, Rope

# Far above every model there is; a header that claims more would only fill the memory.
MAX_LAYERS = 4096
MAX_HEAD_DIM = 2**12
MAX_TABLE_BYTES = 2**30  # of cosines and sines: 2 million positions with heads of 128


def check_num_layers(num_layers: int, source: str) -> None:
    """Raise ModelError, begun with `source`, for more layers than any model has."""
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{source}: num_layers is {num_layers}, at most {MAX_LAYERS} fit")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of `num_layers` blocks: norm, attention, norm, gated network.

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
    activation: Activation = "silu"
    windows: tuple[int, ...] = ()  # positions a row sees, by layer; 0 = all; () = all in each layer
    window_rope: Rope | None = None  # of the layers with a window; None = `rope`
    attention_soft_cap: float = 0.0  # of scores; 0 = none
    final_soft_cap: float = 0.0  # of logits; 0 = none
    attention_divisor: float | None = None  # in head_dim's place in the attention's scale
    embedding_scale: float = 1.0  # of the embedding's rows, not of the head's
    norm_offset: float = 0.0  # added to every norm's stored weight
    head_norms: bool = False  # of queries and keys, before they are rotated
    post_norms: bool = False  # of what attention and network add, beside the norms before them
    fused_projections: bool = False  # stored as one tensor: queries, keys, values; gate and up

    def __post_init__(self) -> None:
        check_num_layers(self.num_layers, self.architecture)
        if self.num_heads % self.num_kv_heads:
            raise self._fail(
                f"{self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2 or self.head_dim > MAX_HEAD_DIM:
            raise self._fail(
                f"head_dim is {self.head_dim}; rotary positions need it even, "
                f"at most {MAX_HEAD_DIM} fit"
            )
        table_bytes = 4 * self.max_position_embeddings * self.head_dim
        if table_bytes > MAX_TABLE_BYTES:
            raise self._fail(
                f"max_position_embeddings is {self.max_position_embeddings}, at most "
                f"{MAX_TABLE_BYTES // (4 * self.head_dim)} fit with head_dim {self.head_dim}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise self._fail(f"{len(self.windows)} windows for {self.num_layers} layers")
        for rope in (self.rope, self.window_rope or self.rope):
            self._check_rope(rope)
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and token >= self.vocab_size:
                raise self._fail(
                    f"special token id {token} is outside the vocabulary of {self.vocab_size}"
                )

    def _check_rope(self, rope: Rope) -> None:
        rotary_dim = rope.rotary_dim or self.head_dim
        if rotary_dim % 2 or rotary_dim > self.head_dim:
            raise self._fail(
                f"{rotary_dim} dimensions of a head are rotated; expected an even number up to "
                f"head_dim {self.head_dim}"
            )
        if rotary_dim < self.head_dim and self.head_norms:
            raise self._fail("norms of heads that are rotated in part are not supported")
        scaling = rope.scaling
        if isinstance(scaling, Divisors) and len(scaling.values) != rotary_dim // 2:
            raise self._fail(f"{len(scaling.values)} rope divisors, expected {rotary_dim // 2}")

    def _fail(self, what: str) -> ModelError:
        return ModelError(f"{self.architecture}: {what}")

    @property
    def attention_scale(self) -> float:
        """What a query's product with a key is multiplied by before the softmax."""
        return float((self.attention_divisor or self.head_dim) ** -0.5)

    def window(self, layer: int) -> int:
        """Positions that a row of `layer` sees, its own included; 0 = all before it."""
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> Rope:
        """The rotary positions of `layer`."""
        return self.window_rope or self.rope if self.window(layer) else self.rope
