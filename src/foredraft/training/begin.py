"""How heads begin: sized like their target, and with as much of it as fits.

Knows the target's stored weights and the heads' names for them; knows no loop. A head that begins
as a copy of what it imitates has less to learn from few answers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.models.heads.config import Eagle3Config, MedusaConfig
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.reduced import most_frequent
from foredraft.models.load import LoadedModel, open_files
from foredraft.models.weights import Reader
from foredraft.training.answers import Answers

_AS_THE_TARGET = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope",
)
_NOISE = 0.02  # standard deviation of what has nothing to begin from


class StoredWeights:
    """A target's weights as its files have them, in float32."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Raises ModelError where the files can't be used."""
        self.config, weights, _ = open_files(loaded.path)
        self._reader = Reader(self.config, weights, torch.float32, torch.device("cpu"))

    def tensor(self, name: str) -> Tensor:
        """By its Hugging Face name, such as "model.layers.0.mlp.up_proj.weight"."""
        return self._reader.tensor(name)

    def norm(self, name: str) -> Tensor:
        """What the norm `name` multiplies by."""
        return self._reader.norm(name)

    def head(self) -> Tensor:
        """The vocabulary head, `[V, H]`."""
        tied = self.config.tie_word_embeddings
        return self.tensor("model.embed_tokens.weight" if tied else "lm_head.weight")


def token_counts(answers: Answers, vocab_size: int) -> Tensor:
    """`[V]` how often each id is said in the answers."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for each in answers:
        tokens = torch.from_numpy(each.answer.astype("int64"))
        counts += torch.bincount(tokens, minlength=vocab_size)
    return counts


def choose_ids(
    answers: Answers, size: int | None, vocab_size: int, always: Iterable[int]
) -> Tensor | None:
    """The ids that a student drafts, `[size]`, ascending: those said most. None: all of them."""
    if size is not None and size > vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {size} tokens was asked for; the target has {vocab_size}"
        )
    if size is None or size == vocab_size:
        return None
    if size < 2:
        raise ConfigError(f"a draft vocabulary of {size} tokens was asked for; at least 2 make one")
    return most_frequent(token_counts(answers, vocab_size), size, always)


def new_eagle3(
    loaded: LoadedModel, sha256: str | None, ids: Tensor | None, *, seed: int, copied: bool
) -> Eagle3:
    """A head that reads EAGLE's three depths.

    Args:
        ids: what it drafts, see `choose_ids`.
        copied: its layer begins as the target's last, over the highest of the three depths; else
            at random. The vocabulary head and its norm always begin as the target's.
    """
    target, weights = loaded.config, StoredWeights(loaded)
    config = Eagle3Config(
        **{name: getattr(target, name) for name in _AS_THE_TARGET},
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        target_hidden_size=target.hidden_size,
        target_sha256=sha256,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = Eagle3(config, ids)
        rows = weights.head()
        head.lm_head.weight.copy_(rows if ids is None else rows[ids])
        head.norm.weight.copy_(weights.norm("model.norm"))
        if copied:
            _copy_last_layer(head, weights)
    return head


def _copy_last_layer(head: Eagle3, weights: StoredWeights) -> None:
    """The target's last layer; where it is built otherwise, what of it there is."""
    hidden, layer = head.config.hidden_size, f"model.layers.{weights.config.num_layers - 1}"
    mine = head.midlayer
    head.fc.weight.normal_(std=_NOISE)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    mine.hidden_norm.weight.copy_(weights.norm(f"{layer}.input_layernorm"))
    if weights.config.fused_projections or weights.config.post_norms:
        return
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(mine.self_attn, part).weight
        weight.normal_(std=_NOISE)
        weight[:, hidden:] = weights.tensor(f"{layer}.self_attn.{part}.weight")
    mine.self_attn.o_proj.weight.copy_(weights.tensor(f"{layer}.self_attn.o_proj.weight"))
    mine.post_attention_layernorm.weight.copy_(weights.norm(f"{layer}.post_attention_layernorm"))
    for part in ("gate_proj", "up_proj", "down_proj"):
        getattr(mine.mlp, part).weight.copy_(weights.tensor(f"{layer}.mlp.{part}.weight"))


def new_medusa(
    loaded: LoadedModel,
    sha256: str | None,
    ids: Tensor | None,
    *,
    num_heads: int,
    num_layers: int,
    shared_head: bool,
) -> Medusa:
    """Heads that begin as the target's own: identity, and its vocabulary head.

    `shared_head`: all read the target's vocabulary head, which isn't trained; else each has one of
    its own.
    """
    target = loaded.config
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        draft_vocab_size=None if ids is None else len(ids),
        shared_head=shared_head,
        own_head=not shared_head,
        target_sha256=sha256,
    )
    return Medusa(config, ids, StoredWeights(loaded).head())
