"""Which target a head belongs to.

Knows sizes, checksums and loaded targets; knows no head.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.errors import ModelError
from foredraft.kernels.catalog import check_head_dim
from foredraft.models.config import ModelConfig
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel


def check_target(
    hidden_size: int,
    vocab_size: int,
    target_sha256: str | None,
    target: ModelConfig,
    sha256: str | None,
) -> None:
    """Raises ModelError, in one line, unless a head of these facts belongs to `target`.

    `sha256` is the target's `models.fingerprint`, None where it isn't known: then a head's own says
    nothing.
    """
    facts: Sequence[tuple[str, object, object]] = (
        ("hidden_size", hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    )
    for name, own, wanted in facts:
        if own != wanted:
            raise ModelError(
                f"the head was trained for another target: its {name} is {own}, this target's "
                f"{wanted}"
            )
    if target_sha256 and sha256 and target_sha256 != sha256:
        raise ModelError(
            f"the head was trained for another target: one with the checksum "
            f"{target_sha256[:12]}..., this target's is {sha256[:12]}..."
        )


def check_checksum(target_sha256: str | None, target: LoadedModel) -> None:
    """Raises ModelError where a head says that it is of other files than the target's. Those are
    read for it: a second a gigabyte or so.
    """
    if target_sha256 is None or not target.path.exists():
        return
    facts = target.config.hidden_size, target.config.vocab_size, target_sha256
    check_target(*facts, target.config, fingerprint(target.path))


def check_kernels(head: str, target: LoadedModel, head_dim: int) -> None:
    """Raise ModelError where the target's kernels don't serve attention heads of this size; `head`
    is what kind of head asks.
    """
    try:
        check_head_dim(target.model.kernels.name, head_dim)
    except ValueError as error:
        raise ModelError(f"{head} head: {error}") from error
