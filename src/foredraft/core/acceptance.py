"""What every acceptance rule is made of: verdicts, walks, and how many requests are walked at once.

Knows tokens, laws and coins; knows no model, request or random generator. A rule decides which
draft tokens stand, and which token follows them:

- accepted token: a draft token that is kept;
- recovered token: what the target says instead of the first draft token that is not kept;
- bonus token: what the target says after the last one, when all were kept;
- plain token: what the target says where nothing was drafted.

A rule is a walk: a generator that asks for what the target says at one node after the other (its
law there, or its own token) and returns its verdict. So a row that does not decide is never
processed, and the rows that many requests ask for next are worked out together: `decide_all`.
`decide` is the batch of one. Whatever order rows are asked in, a walk uses no other state.

The rules: `match` here (greedy, coupled), `rejection`, `block_verification`, and the lossy
`typical` and `synthetic`, each in its module. (p is the target's law, q the law a draft token was
drawn from.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.core.trees import ROOT, Topology


class Origin(StrEnum):
    """Where an emitted token came from."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step decided for one request."""

    accepted: tuple[int, ...]  # draft nodes of the accepted path, the root's child first
    next_token: int
    origin: Origin  # of next_token: plain, recovered or bonus

    @property
    def num_accepted(self) -> int:
        """Draft tokens kept, without the extra one."""
        return len(self.accepted)

    @property
    def num_emitted(self) -> int:
        """Draft tokens kept and the extra one."""
        return len(self.accepted) + 1


class BadRow(Exception):  # noqa: N818 - says what a row is, and ends no more than its request
    """No token can be had at this node: bans that leave none, logits that are no numbers."""

    def __init__(self, node: int, message: str) -> None:
        super().__init__(message)
        self.node = node


class Rows(Protocol):
    """`[n, V]`: the law that each draft node was drawn from."""

    def __getitem__(self, node: int, /) -> Tensor: ...


Answer = TypeVar("Answer")
Walk = Generator[int, Answer, Verdict]  # asks for nodes, -1 = the root; returns the verdict
Coins = Callable[[int], float]  # index -> a coin in (0, 1)


def decide(walk: Walk[Answer], answer: Callable[[int], Answer]) -> Verdict:
    """The verdict of one walk. Raises what `answer` raises; of a `BadRow` the walk is told first:
    it may end before that row.
    """

    def answers(asked: Sequence[tuple[int, int]]) -> list[Answer | BadRow]:
        try:
            return [answer(node) for _, node in asked]
        except BadRow as bad:
            return [bad]

    verdict = decide_all([walk], answers)[0]
    if isinstance(verdict, BadRow):
        raise verdict
    return verdict


def decide_all(
    walks: Sequence[Walk[Answer]],
    answer: Callable[[Sequence[tuple[int, int]]], Sequence[Answer | BadRow]],
) -> list[Verdict | BadRow]:
    """The verdicts of many walks, side by side; each is what `decide` gives for it alone.

    Args:
        walks: not started yet, one per request.
        answer: given the (walk, node) pairs that are asked for next, at most one per walk, what the
            target says at each, or why nothing can be had there. Called once per depth of the
            deepest walk or so, and so the place to work on many rows at once.

    Returns:
        a verdict per walk, or the bad row that ended it.
    """
    verdicts: dict[int, Verdict | BadRow] = {}
    asked = [(index, next(walk)) for index, walk in enumerate(walks)]
    while asked:
        following: list[tuple[int, int]] = []
        for (index, _), reply in zip(asked, answer(asked), strict=True):
            walk = walks[index]
            try:
                node = walk.throw(reply) if isinstance(reply, BadRow) else walk.send(reply)
                following.append((index, node))
            except StopIteration as end:
                verdicts[index] = end.value
            except BadRow as bad:
                verdicts[index] = bad
        asked = following
    return [verdicts[index] for index in range(len(walks))]


def match(tree: Topology, tokens: Sequence[int]) -> Walk[int]:
    """Sample and match: walk down to the child that equals the target's own token.

    Greedy decoding when that token is the argmax; coupled sampling when it is the argmax of log p +
    the noise of that position, the same for all siblings (Daliri, Musco, Suresh 2408.07978: the
    output is the seeded plain output whatever was drafted). Where each token is a fresh draw from p
    it accepts p(S), S the siblings' tokens.

    Asks for: the target's token at a node, once per node of the accepted path.

    Args:
        tree: of the draft, n nodes.
        tokens: `[n]` the nodes' token ids; among equal siblings the first counts.
    """
    node = ROOT
    path: list[int] = []
    while True:
        token = yield node
        children = tree.children(node)
        child = next((child for child in children if tokens[child] == token), None)
        if child is None:
            return Verdict(tuple(path), token, origin_of(len(tree), bool(children)))
        path.append(child)
        node = child


def draw_from(
    weights: Tensor, coin: float, row_math: RowMath, fallback: Tensor | None = None
) -> int:
    """`RowMath.draw`; from `fallback` where `weights` `[V]` are all 0.

    Raises:
        ValueError: no positive weight, and no fallback.
    """
    drawn = row_math.draw(weights, coin)
    if drawn is None and fallback is not None:
        drawn = row_math.draw(fallback, coin)
    if drawn is None:
        total = row_math.total(weights)
        raise ValueError(f"cannot draw a token: the weights add up to {total}, not to more than 0")
    return drawn


def origin_of(num_nodes: int, rejected: bool) -> Origin:
    """Of the token after the accepted path: `rejected` tells whether the path could go on."""
    if num_nodes == 0:
        return Origin.PLAIN
    return Origin.RECOVERED if rejected else Origin.BONUS
