"""What came before a row, as far as the sampler cares: which tokens, how often, how many.

Knows tokens; knows no logits and no request. The request owns one `History` of what is committed; a
row of the verified window sees it extended by the draft tokens on its path, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


class TokenCounts:
    """How often each token occurred.

    Tokens are indexed when somebody asks, not when they arrive: a request without penalties never
    pays for it.
    """

    __slots__ = ("_counts", "_ids", "_num_indexed", "_slots", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = list(tokens)
        self._num_indexed = 0
        self._slots: dict[int, int] = {}  # token -> its place in the arrays
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        """All tokens, repeated ones too."""
        return len(self._tokens)

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def count(self, token: int) -> int:
        """How often `token` occurred."""
        self._index()
        slot = self._slots.get(token)
        return 0 if slot is None else int(self._counts[slot])

    def table(self) -> tuple[Tensor, Tensor]:
        """The distinct tokens and how often each occurred, `[U]` int64 both, in order of first
        occurrence.

        Views: not to be written to, nor kept past `append`.
        """
        self._index()
        used = len(self._slots)
        return torch.from_numpy(self._ids[:used]), torch.from_numpy(self._counts[:used])

    def _index(self) -> None:
        for token in self._tokens[self._num_indexed :]:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._counts[slot] += 1
        self._num_indexed = len(self._tokens)


class History:
    """The tokens before one row: a prompt, the committed output, and a path of draft tokens."""

    __slots__ = ("output", "path", "prompt")

    def __init__(
        self, prompt: TokenCounts, output: TokenCounts, path: tuple[int, ...] = ()
    ) -> None:
        self.prompt = prompt
        self.output = output
        self.path = path

    @classmethod
    def start(cls, prompt: Sequence[int]) -> History:
        """Nothing but a prompt."""
        return cls(TokenCounts(prompt), TokenCounts())

    @property
    def num_output(self) -> int:
        """Output tokens before the row, those of the path included."""
        return len(self.output) + len(self.path)

    def append(self, token: int) -> None:
        """Commit one output token. Only the committed history can: one with a path raises
        ValueError.
        """
        if self.path:
            raise ValueError(f"a history with draft tokens {self.path} cannot be committed to")
        self.output.append(token)

    def extended(self, tokens: Sequence[int]) -> History:
        """This history followed by draft tokens. It shares the counts, so it is only good until the
        next `append`.
        """
        return History(self.prompt, self.output, (*self.path, *tokens)) if tokens else self
