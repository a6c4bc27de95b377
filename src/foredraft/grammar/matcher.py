"""Where one answer stands in its grammar: which tokens may follow, and what they lead to.

Knows a compiled grammar and token ids; knows no logits, no request and no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from foredraft.core.errors import InvalidRequest


class Matcher(Protocol):
    """One answer's place in its grammar; a function of the tokens accepted and of nothing else."""

    @property
    def num_tokens(self) -> int:
        """Tokens accepted and not taken back."""

    @property
    def can_end(self) -> bool:
        """Whether the answer may be over here."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end, or the end is there."""

    def mask(self) -> Tensor:
        """`[V]` bool on the CPU, the tokens that may follow; not to be written to.

        An id that ends the answer may follow exactly where the answer may be over.
        Raises InvalidRequest where the grammar has become too costly to follow.
        """

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing happens, where it can't follow."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens. Raises ValueError for more than there are."""

    def fork(self) -> Matcher:
        """Another one at the same place, which goes its own way."""

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens, one after the other, each the only one that may follow."""


class GrammarMatcher:
    """A `Matcher` of llguidance."""

    __slots__ = ("_end_ids", "_ended", "_mask", "_matcher", "_num_tokens", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`matcher`: this one's own, of `vocab_size` ids and the end behind them. `end_ids`: those
        that end the answer.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = tuple(token for token in end_ids if token < vocab_size)
        self._ended = False  # by an end id, the last token accepted
        self._num_tokens = 0
        self._mask: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def can_end(self) -> bool:
        return self._ended or self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> Tensor:
        if self._mask is None:
            self._mask = self._computed()
        return self._mask

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._end_ids:
            if not self._matcher.is_accepting():
                return False
            self._ended = True
        elif not 0 <= token < self._vocab_size or not self._matcher.try_consume_tokens([token]):
            return False
        self._num_tokens += 1
        self._mask = None
        return True

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"{num_tokens} tokens can't be taken back of {self._num_tokens}")
        if num_tokens == 0:
            return
        self._num_tokens -= num_tokens
        self._mask = None
        if self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> GrammarMatcher:
        copy = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._end_ids)
        copy._ended, copy._num_tokens, copy._mask = self._ended, self._num_tokens, self._mask
        return copy

    def forced(self, limit: int) -> list[int]:
        if self._ended or limit < 1:
            return []
        ahead = self.fork()
        found: list[int] = []
        while len(found) < limit:
            following = ahead._matcher.compute_ff_tokens()
            taken = [token for token in following[: limit - len(found)] if ahead.accept(token)]
            found += taken
            if not taken or len(taken) < len(following):
                break
        return found

    def _computed(self) -> Tensor:
        if self._ended:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the grammar can't be followed after {self._num_tokens} tokens of output: it has "
                "become too complex"
            )
        bits = np.unpackbits(packed, count=self._vocab_size + 1, bitorder="little")
        mask = torch.from_numpy(bits[: self._vocab_size].view(np.bool_))
        if self._end_ids:
            mask[list(self._end_ids)] = bool(bits[self._vocab_size])
        return mask
