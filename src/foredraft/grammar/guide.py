"""A grammar along the branches of a draft: what may follow each of its paths.

Knows one matcher and paths of tokens from where it stands; knows neither laws nor requests. It goes
from path to path by taking back what they don't share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.core.errors import InvalidRequest
from foredraft.grammar.matcher import Matcher


class Guide:
    """Has a fork of its own: the matcher it was made from stays where it is."""

    __slots__ = ("_matcher", "_path")

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher.fork()
        self._path: list[int] = []

    def follows(self, path: Sequence[int]) -> bool:
        """Whether the grammar can follow `path`."""
        shared = 0
        for ours, theirs in zip(self._path, path, strict=False):
            if ours != theirs:
                break
            shared += 1
        self._matcher.rollback(len(self._path) - shared)
        del self._path[shared:]
        for token in path[shared:]:
            if not self._matcher.accept(token):
                return False
            self._path.append(token)
        return True

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """`[V]` bool, what may follow `path`; None where the grammar can't follow the path itself,
        so that nobody comes by there.

        Raises InvalidRequest as `Matcher.mask`.
        """
        return self._matcher.mask() if self.follows(path) else None

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """As `Matcher.forced`, after `path`."""
        return self._matcher.forced(limit) if self.follows(path) else []


def guide_of(matcher: Matcher | None) -> Guide | None:
    """A guide from where `matcher` stands; None where there is no grammar."""
    return None if matcher is None else Guide(matcher)


def draft_mask(guide: Guide | None, path: Sequence[int], device: torch.device) -> Tensor | None:
    """The mask of a row that is drafted from; None where there is none to be had."""
    if guide is None:
        return None
    try:
        mask = guide.mask(path)
    except InvalidRequest:  # the target's row will say so, if anybody comes by there
        return None
    return None if mask is None else mask.to(device)
