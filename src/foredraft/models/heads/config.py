"""What learned heads are made of, whatever file said so.

Knows sizes, options and which target they belong to; knows no file and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.errors import ModelError
from foredraft.models.config import MAX_HEAD_DIM, MAX_TABLE_BYTES, ModelConfig
from foredraft.models.rope import Rope

MAX_HEADS = 16  # of Medusa, and layers of one of them
NUM_FEATURES = 3  # depths of the target that an EAGLE-3 head reads


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One decoder layer over the target's features and embeddings (EAGLE-3, 2503.01840).

    Raises ModelError for sizes that cannot belong together.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's, padding rows included
    draft_vocab_size: int  # rows of the head's own vocabulary
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    target_hidden_size: int  # of each of the three features
    # Depth k: the residual stream that enters the target's layer k, so that its number of layers is
    # what leaves the last. None: 2, the middle, 3 before the end (EAGLE's choice).
    feature_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False  # the residual is the features behind their norm
    norm_output: bool = False  # what the next step reads is behind the last norm (EAGLE-3.1)
    own_embedding: bool = False  # in place of the target's
    target_sha256: str | None = None  # `models.fingerprint` of the target it was trained for

    def __post_init__(self) -> None:
        _check_attention(self)
        if self.draft_vocab_size > self.vocab_size:
            raise ModelError(
                f"draft_vocab_size {self.draft_vocab_size} is more than the vocab_size "
                f"{self.vocab_size}"
            )
        if not self.own_embedding and self.hidden_size != self.target_hidden_size:
            raise ModelError(
                f"hidden_size {self.hidden_size} needs embed_tokens of its own beside a target of "
                f"hidden_size {self.target_hidden_size}"
            )
        if self.feature_layers is not None and len(self.feature_layers) != NUM_FEATURES:
            raise ModelError(
                f"{len(self.feature_layers)} feature layers given, expected {NUM_FEATURES}"
            )

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """The depths of `target` that are read, lowest first where the head has no choice of its
        own. Raises ModelError for a depth that the target hasn't.
        """
        count = target.num_layers
        layers = self.feature_layers
        if layers is None:
            layers = default_feature_layers(count)
        for layer in layers:
            if not 0 <= layer <= count:
                raise ModelError(f"feature layer {layer} is outside the target's 0..{count}")
        return layers


def default_feature_layers(count: int) -> tuple[int, int, int]:
    """EAGLE-3's three depths in a target of `count` layers (2503.01840's code)."""
    return min(2, count), count // 2, max(0, count - 3)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """One decoder layer over the target's last hidden states and embeddings (EAGLE-1, 2401.15077).

    Raises ModelError for sizes that cannot belong together.
    """

    hidden_size: int  # the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's, padding rows included
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    fc_bias: bool = True
    qkv_bias: bool = False
    own_embedding: bool = False  # in place of the target's
    own_head: bool = False  # likewise

    def __post_init__(self) -> None:
        _check_attention(self)


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Heads that each guess one position ahead from the target's last hidden state (2401.10774).

    Raises ModelError for sizes that cannot belong together.
    """

    hidden_size: int  # the target's
    vocab_size: int  # the target's, padding rows included
    num_heads: int
    num_layers: int = 1  # residual blocks of a head
    bias: bool = True  # of the blocks
    draft_vocab_size: int | None = None  # rows of a reduced vocabulary; None: the target's
    # All heads read one vocabulary head in place of one each; `own_head` False: the target's.
    shared_head: bool = False
    own_head: bool = True
    # accuracies[h][r]: how often the token of rank r of head h is right (all before it being so).
    accuracies: tuple[tuple[float, ...], ...] = ()
    target_sha256: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("num_heads", self.num_heads), ("num_hidden_layers", self.num_layers)):
            if not 1 <= value <= MAX_HEADS:
                raise ModelError(f"{name} is {value}, expected 1 to {MAX_HEADS}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ModelError(
                f"truncated_vocab_size {self.draft_vocab_size} is more than the vocab_size "
                f"{self.vocab_size}"
            )
        if not (self.own_head or self.shared_head):
            raise ModelError("heads that read the target's vocabulary head share it")
        if self.accuracies and len(self.accuracies) != self.num_heads:
            raise ModelError(
                f"accuracies of {len(self.accuracies)} heads given, expected {self.num_heads}"
            )
        if not all(0.0 <= each <= 1.0 for ranks in self.accuracies for each in ranks):
            raise ModelError("accuracies must be numbers in 0..1")

    @property
    def num_outputs(self) -> int:
        """Rows of a vocabulary head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def _check_attention(config: Eagle3Config | EagleConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key/value "
            "heads evenly"
        )
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"head_dim is {config.head_dim}; expected even, at most {MAX_HEAD_DIM}")
    if 4 * config.max_position_embeddings * config.head_dim > MAX_TABLE_BYTES:
        raise ModelError(
            f"max_position_embeddings is {config.max_position_embeddings}, at most "
            f"{MAX_TABLE_BYTES // (4 * config.head_dim)} fit with head_dim {config.head_dim}"
        )
