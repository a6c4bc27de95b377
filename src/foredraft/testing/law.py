"""The exact law of what an acceptance rule emits, by enumeration; no sampling, no tolerance for
noise.

Knows rules, target laws and drafts as functions of the tokens before them; knows no model and no
engine. The rule itself is run, with coins that stand for all coins (`branches`) and drafts that are
drawn when it looks at them: nothing of it is written down here a second time, so a wrong rule
shows.

A prefix is the tuple of tokens since the start; a law is a function of the prefix. The law of a
rule is compared over sequences of a fixed length: what one step emits, then the target's own tokens
(for exact rules that is no restriction: each step starts where the last one ended). Drafts are at
most one shorter than the sequences. A target that can't say anything after a prefix raises
`BadRow`; the sequence then ends with `FAILED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foredraft.core.acceptance import BadRow, Coins, Rows, Verdict, Walk, decide, draw_from, match
from foredraft.core.block_verification import block
from foredraft.core.rejection import rejection
from foredraft.core.row_math import TorchRowMath
from foredraft.core.trees import Topology
from foredraft.testing.branches import Choices, Coin, outcomes
from foredraft.testing.draft_sources import DraftSource

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Tensor]  # prefix -> [V] float64
SequenceLaw = Mapping[Prefix, float]  # sequences of one length -> probability

FAILED = -1
ROW_MATH = TorchRowMath()


class Rule(Protocol):
    """An acceptance rule with its row mathematics, or a wrong version of it.

    Chain rules are given chains. `accept_coin` gives a coin of its own for each index, whatever the
    rule takes for one; the residual coin is another.
    """

    def __call__(
        self,
        tree: Topology,
        tokens: Sequence[int],
        draft_probs: Rows | None,
        accept_coin: Coins,
        residual_coin: float,
    ) -> Walk[Tensor]: ...


def exact_rejection(
    tree: Topology,
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
) -> Walk[Tensor]:
    """`rejection.rejection`, as a `Rule`."""
    return rejection(tree, tokens, draft_probs, accept_coin, residual_coin, ROW_MATH)


def exact_block(
    tree: Topology,
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
) -> Walk[Tensor]:
    """`block_verification.block`, as a `Rule`."""
    return block(tokens, draft_probs, accept_coin, residual_coin, ROW_MATH)


def sample_and_match(
    tree: Topology,
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
) -> Walk[Tensor]:
    """`acceptance.match` where the target's token is a fresh draw at each node, as a `Rule`.

    That is the law of the coupled rule for drafts that do not depend on its noise.
    """
    return drawing(match(tree, tokens), accept_coin)


def drawing(walk: Walk[int], coin: Coins) -> Walk[Tensor]:
    """A walk that asks for tokens as one that asks for laws and draws from them."""
    node = next(walk)
    while True:
        target_probs = yield node
        try:
            node = walk.send(draw_from(target_probs, coin(node), ROW_MATH))
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict


@dataclass(frozen=True, slots=True)
class Region:
    """A set of drafts and coins for which one step emits the same tokens."""

    probability: float
    emitted: Prefix  # accepted tokens, then the next one or FAILED
    drafted: Mapping[int, int]  # the nodes that were looked at, and their tokens
    coins: Mapping[int | None, float]  # a point of the region; None is the residual coin

    @property
    def num_accepted(self) -> int:
        return len(self.emitted) - 1


CoinFactory = Callable[[Choices], Any]  # what stands for one coin


def regions(
    rule: Rule, target: Law, source: DraftSource, coin: CoinFactory = Coin
) -> Iterator[Region]:
    """The regions of one step; their probabilities add up to 1."""

    def run(choices: Choices) -> tuple[Prefix, Mapping[int, int], dict[int | None, Any]]:
        draft = source(choices)
        coins: dict[int | None, Any] = {None: Coin(choices)}

        def accept_coin(index: int) -> Any:
            if index not in coins:
                coins[index] = coin(choices)
            return coins[index]

        walk = rule(draft.tree, draft.tokens, draft.probs, accept_coin, coins[None])
        return _emitted(walk, draft.tree, draft.tokens, target), draft.looked_at, coins

    for (emitted, drafted, coins), probability in outcomes(run):
        points = {key: getattr(coin, "middle", coin) for key, coin in coins.items()}
        yield Region(probability, emitted, dict(drafted), points)


def _emitted(walk: Walk[Tensor], tree: Topology, tokens: Sequence[int], target: Law) -> Prefix:
    def answer(node: int) -> Tensor:
        try:
            return target(tuple(tokens[each] for each in tree.path(node)))
        except BadRow as bad:
            raise BadRow(node, str(bad)) from bad

    try:
        verdict = decide(walk, answer)
    except BadRow as bad:
        return (*(tokens[node] for node in tree.path(bad.node)), FAILED)
    return (*(tokens[node] for node in verdict.accepted), verdict.next_token)


def emitted_law(
    rule: Rule, target: Law, source: DraftSource, coin: CoinFactory = Coin
) -> dict[Prefix, float]:
    """The law of the tokens one step emits: those accepted and the next one."""
    result: dict[Prefix, float] = defaultdict(float)
    for region in regions(rule, target, source, coin):
        result[region.emitted] += region.probability
    return dict(result)


def sequence_law(
    rule: Rule, target: Law, source: DraftSource, length: int, coin: CoinFactory = Coin
) -> SequenceLaw:
    """The law of sequences of `length` tokens when a draft of `source` is verified by `rule`."""
    return continued(emitted_law(rule, target, source, coin), target, length)


def target_sequence_law(target: Law, length: int) -> SequenceLaw:
    """The target's own law of sequences of `length` tokens."""
    return continued({(): 1.0}, target, length)


def continued(emitted: Mapping[Prefix, float], target: Law, length: int) -> SequenceLaw:
    """Sequences cut or continued by the target to `length` tokens."""
    result: dict[Prefix, float] = defaultdict(float)
    pending = list(emitted.items())
    while pending:
        prefix, probability = pending.pop()
        if len(prefix) >= length or prefix[-1:] == (FAILED,):
            result[prefix[:length]] += probability
            continue
        try:
            row = target(prefix).tolist()
        except BadRow:
            pending.append(((*prefix, FAILED), probability))
            continue
        pending += [((*prefix, token), probability * p) for token, p in enumerate(row) if p > 0.0]
    return dict(result)


def expected_tokens(emitted: Mapping[Prefix, float]) -> float:
    """Mean number of tokens of a step, the extra one included, by its `emitted_law`."""
    return sum(len(tokens) * probability for tokens, probability in emitted.items())


def largest_error(law: SequenceLaw, reference: SequenceLaw) -> float:
    """The largest difference of a sequence's probability."""
    return max(abs(law.get(key, 0.0) - reference.get(key, 0.0)) for key in {*law, *reference})


def total_variation(law: SequenceLaw, reference: SequenceLaw) -> float:
    """Half the sum of the differences."""
    keys = {*law, *reference}
    return sum(abs(law.get(key, 0.0) - reference.get(key, 0.0)) for key in keys) / 2.0
