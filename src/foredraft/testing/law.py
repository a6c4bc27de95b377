"""The exact law of what an acceptance rule emits, by enumeration; no sampling, no tolerance for
noise.

Knows rules, target laws and drafts as functions of the tokens before them; knows no model and no
engine. A rule is a black
box: it is called at points of its coins, the regions where its verdict stays the same are found by
    bisection, and their lengths are the probabilities. Nothing of the rule is written down here a
    second time, so a wrong rule shows.

A prefix is the tuple of tokens since the start; a law is a function of the prefix. The law of a
rule is compared over
sequences of a fixed length: what one step emits, then the target's own tokens (for exact rules that
    is no restriction: each step starts where the last one ended). Drafts are at most one shorter
    than the sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from foredraft.core.acceptance import Verdict, match, rejection
from foredraft.core.coins import coins
from foredraft.core.row_math import TorchRowMath
from foredraft.core.trees import Topology, topology

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Tensor]  # prefix -> [V] float64
SequenceLaw = Mapping[Prefix, float]  # sequences of one length -> probability

BISECTIONS = 52  # regions are measured to 2^-52 of the unit interval
LOWEST = 2.0**-60
HIGHEST = 1.0 - 2.0**-53


class ChainRule(Protocol):
    """`acceptance.rejection` without its row mathematics, or a wrong version of it."""

    def __call__(
        self,
        tokens: Sequence[int],
        law: Callable[[int], Tensor],
        draft_probs: Tensor | None,
        accept_coins: Sequence[float],
        residual_coin: float,
    ) -> Verdict: ...


class TreeRule(Protocol):
    """`acceptance.match` with `draw` = a fresh draw from the target's law at a node, or a wrong
    version of it.
    """

    def __call__(
        self, tree: Topology, tokens: Sequence[int], draw: Callable[[int], int]
    ) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class WeightedDraft:
    """One chain a drafter may propose, the probability that it does, and the laws it was drawn
    from.
    """

    weight: float
    tokens: Prefix
    probs: Tensor | None  # [n, V]; None = deterministic


def exact_rejection(
    tokens: Sequence[int],
    law: Callable[[int], Tensor],
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """The rule of the engine, as a `ChainRule`."""
    return rejection(tokens, law, draft_probs, accept_coins, residual_coin, TorchRowMath())


def sampled_drafts(law: Law, depth: int) -> Iterator[WeightedDraft]:
    """Every chain of `depth` tokens drawn from `law`, with its probability."""
    vocab_size = law(()).numel()
    for tokens in product(range(vocab_size), repeat=depth):
        rows = [law(tokens[:offset]) for offset in range(depth)]
        weight = 1.0
        for row, token in zip(rows, tokens, strict=True):
            weight *= float(row[token])
        if weight > 0.0:
            yield WeightedDraft(weight, tokens, torch.stack(rows))


def fixed_draft(tokens: Sequence[int]) -> list[WeightedDraft]:
    """The deterministic draft `tokens`."""
    return [WeightedDraft(1.0, tuple(tokens), None)]


def target_sequence_law(target: Law, length: int) -> SequenceLaw:
    """The target's own law of sequences of `length` tokens."""
    return _continued({(): 1.0}, target, length)


def chain_sequence_law(
    rule: ChainRule, target: Law, drafts: Iterable[WeightedDraft], length: int
) -> SequenceLaw:
    """The law of sequences of `length` tokens when one of `drafts` is verified by `rule`.

    The rule must be sequential, as chain rules are: coin i decides whether token i stands once the
    tokens before it do, and the residual coin picks the next token in id order. A verdict that
    contradicts this raises ValueError.
    """
    emitted: dict[Prefix, float] = defaultdict(float)
    for draft in drafts:
        for tokens, probability in emitted_law(rule, target, draft).items():
            emitted[tokens] += draft.weight * probability
    return _continued(emitted, target, length)


def emitted_law(rule: ChainRule, target: Law, draft: WeightedDraft) -> dict[Prefix, float]:
    """The law of the tokens one step emits for one draft: those accepted and the next one."""
    rows = [target(draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]

    def run(accept_coins: Sequence[float], residual_coin: float) -> Verdict:
        return rule(
            draft.tokens, lambda node: rows[node + 1], draft.probs, accept_coins, residual_coin
        )

    thresholds = _accept_thresholds(run, len(draft.tokens))
    result: dict[Prefix, float] = defaultdict(float)
    reached = 1.0
    for accepted in range(len(draft.tokens) + 1):
        stays = thresholds[accepted] if accepted < len(draft.tokens) else 0.0
        probability = reached * (1.0 - stays)
        if probability > 0.0:
            coins_of_it = _coins_at(len(draft.tokens), accepted, HIGHEST)
            for token, share in _residual_regions(run, coins_of_it, accepted):
                result[(*draft.tokens[:accepted], token)] += probability * share
        reached *= stays
    _check_regions(run, draft.tokens, thresholds)
    return result


def tree_sequence_law(
    rule: TreeRule, target: Law, parents: Sequence[int], tokens: Sequence[int], length: int
) -> SequenceLaw:
    """The law of sequences of `length` tokens when the deterministic tree is verified by `rule`."""
    tree = topology(tuple(parents))
    emitted: dict[Prefix, float] = defaultdict(float)
    pending: list[tuple[tuple[tuple[int, int], ...], float]] = [((), 1.0)]
    while pending:
        drawn, probability = pending.pop()
        script = _Script(drawn)
        try:
            verdict = rule(tree, tokens, script)
        except _Unscripted as asked:
            prefix = tuple(tokens[node] for node in tree.path(asked.node))
            for token, p in enumerate(target(prefix).tolist()):
                if p > 0.0:
                    pending.append(((*drawn, (asked.node, token)), probability * p))
            continue
        emitted[_emitted(verdict, tokens)] += probability
    return _continued(emitted, target, length)


def independent_match(tree: Topology, tokens: Sequence[int], draw: Callable[[int], int]) -> Verdict:
    """The rule of the engine for deterministic trees, as a `TreeRule`."""
    return match(tree, tokens, draw)


def largest_error(law: SequenceLaw, reference: SequenceLaw) -> float:
    """The largest difference of a sequence's probability."""
    return max(abs(law.get(key, 0.0) - reference.get(key, 0.0)) for key in {*law, *reference})


def total_variation(law: SequenceLaw, reference: SequenceLaw) -> float:
    """Half the sum of the differences."""
    keys = {*law, *reference}
    return sum(abs(law.get(key, 0.0) - reference.get(key, 0.0)) for key in keys) / 2.0


def _continued(emitted: Mapping[Prefix, float], target: Law, length: int) -> SequenceLaw:
    """Sequences cut or continued by the target to `length` tokens."""
    result: dict[Prefix, float] = defaultdict(float)
    pending = list(emitted.items())
    while pending:
        prefix, probability = pending.pop()
        if len(prefix) >= length:
            result[prefix[:length]] += probability
            continue
        for token, p in enumerate(target(prefix).tolist()):
            if p > 0.0:
                pending.append(((*prefix, token), probability * p))
    return dict(result)


def _emitted(verdict: Verdict, tokens: Sequence[int]) -> Prefix:
    return (*(tokens[node] for node in verdict.accepted), verdict.next_token)


class _Unscripted(Exception):  # noqa: N818 - a question, not an error
    def __init__(self, node: int) -> None:
        self.node = node


class _Script:
    """Answers draws in the order they were asked, and asks for the first one it does not know."""

    def __init__(self, drawn: tuple[tuple[int, int], ...]) -> None:
        self._drawn = list(drawn)

    def __call__(self, node: int) -> int:
        if not self._drawn:
            raise _Unscripted(node)
        _, token = self._drawn.pop(0)
        return token


Run = Callable[[Sequence[float], float], Verdict]


def _coins_at(num_coins: int, offset: int, value: float) -> list[float]:
    """Coins that accept whatever can be accepted before `offset` and reject whatever can be after
    it.
    """
    return [LOWEST if i < offset else value if i == offset else HIGHEST for i in range(num_coins)]


def _accept_thresholds(run: Run, num_coins: int) -> list[float]:
    """`[K]` P(token i is accepted | those before it were); 0 from the first that never is."""
    thresholds = [0.0] * num_coins
    for offset in range(num_coins):

        def accepts(coin: float, offset: int = offset) -> bool:
            return run(_coins_at(num_coins, offset, coin), 0.5).num_accepted > offset

        thresholds[offset] = _last(accepts)
        if thresholds[offset] == 0.0:
            break
    return thresholds


def _residual_regions(
    run: Run, accept_coins: Sequence[float], accepted: int
) -> Iterator[tuple[int, float]]:
    """The next tokens, and the share of the residual coin that gives each."""
    low, start = LOWEST, 0.0
    while True:
        verdict = run(accept_coins, low)
        if verdict.num_accepted != accepted:
            raise ValueError(f"coins {accept_coins} accept {verdict.num_accepted}, not {accepted}")
        token = verdict.next_token

        def draws_token(coin: float, token: int = token) -> bool:
            return run(accept_coins, coin).next_token == token

        end = _last(draws_token, low)
        yield token, end - start
        low, start = end + 2.0 ** (1 - BISECTIONS), end
        if low >= HIGHEST:
            return


def _last(holds: Callable[[float], bool], low: float = LOWEST) -> float:
    """Where `holds` ends, given that it holds up to one point of (0, 1) and not beyond: 0 if it
    never does, 1 if it always does.
    """
    if not holds(low):
        return 0.0
    if holds(HIGHEST):
        return 1.0
    high = 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2.0


def _check_regions(run: Run, tokens: Sequence[int], thresholds: Sequence[float]) -> None:
    """Hold the measured thresholds against the rule at coins drawn anywhere."""
    for point in range(4):
        drawn = coins(0, point, 0, len(tokens) + 1).tolist()
        expected = 0
        while expected < len(tokens) and drawn[expected] < thresholds[expected]:
            expected += 1
        verdict = run(drawn[:-1], drawn[-1])
        if verdict.num_accepted != expected:
            raise ValueError(
                f"coins {drawn} accept {verdict.num_accepted} tokens, {expected} by the thresholds"
                f" {list(thresholds)}: the rule is not sequential"
            )
