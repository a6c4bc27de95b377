"""One request's draft while a model computes it, pass by pass: what it computes next, and what of
its cache then holds what.

Knows positions, rows and logits; knows no model and no engine. What a request's cache lacks of the
committed tokens is computed first, in chunks; then a draft grows by what a `Grower` says: a chain
here, a tree in `tree_growth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.drafters.drawing import DrawnChain, draw
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.kernels.interface import Segment

MAX_ROWS = 1024  # of one request in a pass, when there is much to catch up on


@dataclass(frozen=True, slots=True)
class Computed:
    """What the cache holds of a request: committed tokens, then draft tokens behind them."""

    num_committed: int = 0
    drafted: tuple[int, ...] = ()

    def confirmed(self, tokens: Sequence[int]) -> int:
        """How many positions hold what `tokens` now say."""
        count = min(self.num_committed, len(tokens))
        for token in self.drafted:
            if count == len(tokens) or tokens[count] != token:
                break
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's part of a pass."""

    token_ids: Sequence[int]
    segment: Segment
    wanted: Sequence[int] = ()  # of the part's rows, those whose logits the draft grows from
    own_ids: bool = False  # `token_ids` are the model's own, not the target's
    # Of the rows behind the committed ones: the node of the draft that each is, and its parent, -1
    # the pending token.
    drafted: Sequence[tuple[int, int]] = ()


class Growth:
    """The base: catching up with the committed tokens. Its draft is the empty one."""

    def __init__(self, request: DraftRequest, start: int, room: int, max_depth: int) -> None:
        """`start` positions hold what is committed; at most `room` nodes are wanted, and none
        deeper than `max_depth` (a child of the pending token has depth 1).
        """
        self.request = request
        self.start = start
        self.room = room if max_depth > 0 else 0
        self.max_depth = max_depth
        self.pending = list(request.tokens[start:])  # tokens to compute next, as a chain

    @property
    def done(self) -> bool:
        return not self.pending

    def rows(self) -> Rows:
        """What the next pass computes."""
        part = self.pending[:MAX_ROWS]
        asks = self.room > 0 and len(part) == len(self.pending)
        segment = Segment(self.start, len(part), (), self.request.pages)
        first = len(self.request.tokens)
        nodes = range(max(0, self.start - first), max(0, self.start + len(part) - first))
        drafted = [(node, node - 1) for node in nodes]
        return Rows(part, segment, (len(part) - 1,) if asks else (), drafted=drafted)

    def passed(self) -> None:
        """The pass has computed `rows`."""
        self.start += len(self.pending[:MAX_ROWS])
        self.pending = self.pending[MAX_ROWS:]

    @property
    def computed(self) -> Computed:
        return Computed(min(self.start, len(self.request.tokens)))

    def draft(self) -> Draft:
        return Draft(num_cached=self.computed.num_committed)


class NoGrowth(Growth):
    """Of a context that the model can't hold: nothing is computed, and nothing of it is cached."""

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(request, 0, 0, 0)
        self.pending = []


G = TypeVar("G", bound=Growth)


class Grower(Protocol[G]):
    """How drafts grow."""

    def open(self, request: DraftRequest, start: int, room: int, max_depth: int) -> G:
        """A draft that nothing is computed of yet."""

    def grow(self, growths: Sequence[G], logits: Tensor, row_math: RowMath) -> None:
        """Go on from the logits `[R, V]` that these asked for in the pass just computed, laid end
        to end in their order.
        """


class ChainGrowth(Growth):
    """A chain: one more token from each pass."""

    def __init__(self, request: DraftRequest, start: int, room: int, max_depth: int) -> None:
        super().__init__(request, start, min(room, max_depth), max_depth)
        self.drawn = DrawnChain(request)

    @property
    def computed(self) -> Computed:
        committed = min(self.start, len(self.request.tokens))
        return Computed(committed, tuple(self.drawn.tokens[: self.start - committed]))

    def took(self, token: int | None) -> None:
        """A token was drawn, or none could be."""
        if token is not None:
            left = self.room - 1
            self.room = left if self.drawn.goes_on else 0
            self.pending = [token] if self.room else []

    def draft(self) -> Draft:
        drawn = self.drawn
        confidence = drawn.confidence if drawn.rates_tokens else None
        return Draft.chain(drawn.tokens, drawn.probs, self.computed.num_committed, confidence)


class ChainGrower:
    """Chains of one token a pass for all requests together."""

    def __init__(self, sampled: bool) -> None:
        self.sampled = sampled

    def open(self, request: DraftRequest, start: int, room: int, max_depth: int) -> ChainGrowth:
        return ChainGrowth(request, start, room, max_depth)

    def grow(self, growths: Sequence[ChainGrowth], logits: Tensor, row_math: RowMath) -> None:
        chains = [each.drawn for each in growths]
        tokens = draw(chains, logits, row_math, sampled=self.sampled)
        for growth, token in zip(growths, tokens, strict=True):
            growth.took(token)
