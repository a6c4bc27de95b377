"""What two models' vocabularies have in common: the same tokens under the same ids, the same tokens
under others, or few.

Knows two loaded models; knows no drafter. The padding of embeddings is no part of a vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.models.load import LoadedModel


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise ConfigError, with both sizes and the first differing id, unless they are the same."""
    theirs, own = target.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if theirs == own:
        return
    by_id, own_by_id = ({i: token for token, i in each.items()} for each in (theirs, own))
    first = min(i for i in by_id.keys() | own_by_id.keys() if by_id.get(i) != own_by_id.get(i))
    raise ConfigError(
        f"draft model {draft.name} has another vocabulary than {target.name}: {len(own)} tokens, "
        f"the target {len(theirs)}; the first that differs is id {first}: "
        f"{_quoted(own_by_id.get(first))}, the target's {_quoted(by_id.get(first))}"
    )


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)


class Reading(Protocol):
    """A draft model's ids beside the target's."""

    def read(self, token: int) -> int:
        """The draft model's id for a target's."""

    def fit(self, logits: Tensor) -> Tensor:
        """The draft model's logits `[R, V']` as they are drafted from."""


class SameVocabulary:
    """Equal ids; rows of an embedding beyond the vocabulary are padding."""

    def __init__(self, target: LoadedModel, draft: LoadedModel) -> None:
        """Raises ConfigError as `check_same_vocabulary`."""
        check_same_vocabulary(target, draft)
        self._size = target.config.vocab_size
        self._last = draft.config.vocab_size - 1

    def read(self, token: int) -> int:
        return min(token, self._last)

    def fit(self, logits: Tensor) -> Tensor:
        own = logits.shape[1]
        if own > self._size:
            return logits[:, : self._size].contiguous()
        return torch.nn.functional.pad(logits, (0, self._size - own), value=float("-inf"))


class SharedVocabulary:
    """Tokens that both models spell alike; the others are never drafted (TLI, 2502.05202).

    `fit` gives the logits of shared tokens under the target's ids and -inf elsewhere: its softmax
    is the draft model's law given that the token is shared, which is the law to verify by. What is
    read is one id for one, so that positions stay the target's: a token that is not shared is read
    as the last of the tokens that the draft model spells it with.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel) -> None:
        """Raises ConfigError where no token is shared."""
        self._target, self._draft = target.tokenizer, draft.tokenizer
        ids = _by_spelling(draft)
        self.own_ids = {
            token: ids[spelling]
            for spelling, token in _by_spelling(target).items()
            if spelling in ids
        }
        if not self.own_ids:
            raise ConfigError(
                f"draft model {draft.name} shares no token with {target.name}, so it can't draft"
            )
        size = target.config.vocab_size
        self._sources = torch.zeros(size, dtype=torch.int64, device=target.device)
        self._unshared = torch.ones(size, dtype=torch.bool, device=target.device)
        shared = torch.tensor(list(self.own_ids), device=target.device)
        own = torch.tensor(list(self.own_ids.values()), device=target.device)
        self._sources[shared] = own
        self._unshared[shared] = False
        self._spelled: dict[int, int] = {}  # ids that are not shared, as they are read

    def read(self, token: int) -> int:
        own = self.own_ids.get(token)
        if own is None:
            own = self._spelled.get(token)
        if own is None:
            own = self._spelled[token] = self._last_part(token)
        return own

    def fit(self, logits: Tensor) -> Tensor:
        return logits.index_select(1, self._sources).masked_fill_(self._unshared, float("-inf"))

    def _last_part(self, token: int) -> int:
        spelling = self._target.token_bytes(token, skip_special_tokens=False)
        parts = self._draft.encode(spelling.decode("utf-8", "replace"))
        return parts[-1] if parts else min(self.own_ids.values())


class OtherVocabulary(SharedVocabulary):
    """Read like `SharedVocabulary`; what is drafted are the draft model's own ids, and their text
    is read by the target's tokenizer (SLEM, 2502.05202).
    """

    def fit(self, logits: Tensor) -> Tensor:
        return logits

    def respelled(self, tail: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's ids of the text of `drafted`, the draft model's ids, behind `tail`, the last
        of the target's own; none unless the tail comes out of the tokenizer as it went in.

        The text ends before a control token and before a character that is not whole.
        """
        control = self._target.control_ids
        first = max((i + 1 for i, token in enumerate(tail) if token in control), default=0)
        known = list(tail[first:])
        raw = b"".join(self._target.token_bytes(token) for token in known)
        for token in drafted:
            if token in self._draft.control_ids:
                break
            raw += self._draft.token_bytes(token)
        try:
            text = codecs.getincrementaldecoder("utf-8")("strict").decode(raw)
        except UnicodeDecodeError:
            return []
        ids = self._target.encode(text)
        return ids[len(known) :] if ids[: len(known)] == known else []


def _by_spelling(model: LoadedModel) -> dict[tuple[bool, bytes], int]:
    """Ids by (control token or not, bytes), the lowest of equal ones; a model's own first end and
    beginning tokens are known as such, whatever they are called.
    """
    tokenizer, size = model.tokenizer, model.config.vocab_size
    found: dict[tuple[bool, bytes], int] = {}
    for token in sorted(tokenizer.vocabulary.values()):
        spelling = tokenizer.token_bytes(token, skip_special_tokens=False)
        if spelling and token < size:
            found.setdefault((token in tokenizer.control_ids, spelling), token)
    for name, ids in (("beginning", (tokenizer.bos_id,)), ("end", model.eos_ids[:1])):
        for named in ids:
            if named is not None and named < size:
                found = {key: token for key, token in found.items() if token != named}
                found[True, f"{name} of text".encode()] = named
    return found
