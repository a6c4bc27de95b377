"""SentencePiece's BPE, as Llama 1 and 2 use it, built from its pieces and their scores.

Knows pieces, scores and kinds; knows no file. SentencePiece joins the neighbours whose joined piece
has the best score; here every such pair is a merge, ranked by that score.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from foredraft.core.errors import ModelError

SPACE = "▁"


def scored_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    joinable: Sequence[bool],
    unknown: str | None,
    space_prefix: bool,
) -> Backend:
    """A backend without control tokens yet.

    `joinable` marks the pieces that text may become; `space_prefix` puts a space before each text.
    Raises ModelError where a byte has no token: text could be lost.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise ModelError(f"the tokenizer has no token for {len(missing)} of 256 bytes")
    best = {token: scores[index] for token, index in vocab.items() if joinable[index]}
    backend = Backend(
        models.BPE(vocab, _merges(best), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend(SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the best third first."""
    pairs = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]
