"""Coupled acceptance: the output is the seeded plain output, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.acceptance import decide, match
from foredraft.core.coins import NOISE, coin, mix
from foredraft.core.row_math import TorchRowMath
from foredraft.core.sampling import Sampler, SamplingParams
from foredraft.core.trees import Topology, topology
from foredraft.testing.closed_forms import coupled_acceptance, maximal_acceptance
from foredraft.testing.tables import random_law, random_logits

V = 5
LENGTH = 4
NUM_TABLES = 10_000
PROMPT = (1, 3)
CHAIN = topology((-1, 0, 1))
TREE = topology((-1, -1, 0, 1))
Prefix = tuple[int, ...]
Say = Callable[[Prefix], int]
ROW_MATH = TorchRowMath()

PARAMS = SamplingParams(temperature=0.8, top_k=4, frequency_penalty=0.5, max_tokens=LENGTH)
SAMPLER = Sampler(PARAMS, V, frozenset(), ROW_MATH)
LOGITS = random_logits(1, V)
DRAFT_LOGITS = random_logits(2, V)


Row = Callable[[Prefix], Sequence[float]]


@cache
def processed(prefix: Prefix) -> list[float]:
    history = SAMPLER.start(PROMPT).extended(prefix)
    return SAMPLER.process(LOGITS(prefix), history).tolist()


@cache
def drafted(prefix: Prefix) -> list[float]:
    return DRAFT_LOGITS(prefix).tolist()


def noisy_argmax(row: Sequence[float], seed: int, position: int) -> int:
    """`coupled_argmax` without tensors: a small vocabulary spends its time in their overhead."""
    return best_tokens(row, seed, position)[0]


def best_tokens(row: Sequence[float], seed: int, position: int) -> list[int]:
    """All tokens, by row + noise."""
    noise = gumbels(seed, position, len(row))
    return sorted(range(len(row)), key=lambda token: -(row[token] + noise[token]))


@lru_cache(maxsize=64)
def gumbels(seed: int, position: int, size: int) -> list[float]:
    return [-log(-log(coin(seed, position, NOISE, token))) for token in range(size)]


def says(seed: int, row: Row) -> Say:
    """The token of (seed, absolute position) under the law of `row`."""
    known: dict[Prefix, int] = {}

    def say(prefix: Prefix) -> int:
        if prefix not in known:
            known[prefix] = noisy_argmax(row(prefix), seed, len(PROMPT) + len(prefix))
        return known[prefix]

    return say


def plain(target: Say) -> Prefix:
    output: Prefix = ()
    while len(output) < LENGTH:
        output = (*output, target(output))
    return output


# Drafts of one step: (target's seeded tokens, seeded tokens of another law, prefix, seed) -> nodes.
Policy = Callable[[Say, Say, Prefix, int], tuple[Topology, tuple[int, ...]]]


def oracle(target: Say, other: Say, prefix: Prefix, seed: int) -> tuple[Topology, tuple[int, ...]]:
    return CHAIN, _rollout(target, prefix, 3)


def wrong_at_two(
    target: Say, other: Say, prefix: Prefix, seed: int
) -> tuple[Topology, tuple[int, ...]]:
    first, second, third = _rollout(target, prefix, 3)
    return CHAIN, (first, (second + 1) % V, third)


def liar(target: Say, other: Say, prefix: Prefix, seed: int) -> tuple[Topology, tuple[int, ...]]:
    return CHAIN, tuple((token + 1) % V for token in _rollout(target, prefix, 3))


def skewed(target: Say, other: Say, prefix: Prefix, seed: int) -> tuple[Topology, tuple[int, ...]]:
    return CHAIN, _rollout(other, prefix, 3)


def empty(target: Say, other: Say, prefix: Prefix, seed: int) -> tuple[Topology, tuple[int, ...]]:
    return topology(()), ()


def ragged(target: Say, other: Say, prefix: Prefix, seed: int) -> tuple[Topology, tuple[int, ...]]:
    """A length that depends on anything: the seed, and what the drafter would say."""
    length = (seed + len(prefix) + other(prefix)) % 3
    return topology(tuple(range(-1, length - 1))), _rollout(other, prefix, length)


def branching(
    target: Say, other: Say, prefix: Prefix, seed: int
) -> tuple[Topology, tuple[int, ...]]:
    first = other(prefix)
    second = (first + 1 + seed % (V - 1)) % V
    return TREE, (first, second, other((*prefix, first)), other((*prefix, second)))


def sharing_noise(
    target: Say, other: Say, prefix: Prefix, seed: int
) -> tuple[Topology, tuple[int, ...]]:
    """Siblings are the best two of log q + the noise of their position; so are the nodes below."""
    tokens: list[int] = []
    for node, parent in enumerate(TREE.parents):
        path = (*prefix, *(tokens[each] for each in TREE.path(parent)))
        rank = TREE.children(parent).index(node)
        tokens.append(best_tokens(drafted(path), seed, len(PROMPT) + len(path))[rank])
    return TREE, tuple(tokens)


POLICIES: dict[str, Policy] = {
    policy.__name__: policy
    for policy in (oracle, wrong_at_two, liar, skewed, empty, ragged, branching, sharing_noise)
}


def _rollout(say: Say, prefix: Prefix, length: int) -> tuple[int, ...]:
    tokens: Prefix = ()
    for _ in range(length):
        tokens = (*tokens, say((*prefix, *tokens)))
    return tokens


def speculated(policy: Policy, target: Say, other: Say, seed: int) -> tuple[Prefix, int]:
    """The output, and in how many steps."""
    output: Prefix = ()
    steps = 0
    while len(output) < LENGTH:
        tree, tokens = policy(target, other, output, seed)

        def draw(node: int, tree: Topology = tree, tokens: Prefix = tokens) -> int:
            return target((*output, *(tokens[each] for each in tree.path(node))))  # noqa: B023

        verdict = decide(match(tree, tokens), draw)
        output = (*output, *(tokens[node] for node in verdict.accepted), verdict.next_token)
        steps += 1
    return output[:LENGTH], steps


def test_the_output_is_plains_for_ten_thousand_noise_tables_and_every_policy() -> None:
    outputs = set()
    steps = dict.fromkeys(POLICIES, 0)
    for index in range(NUM_TABLES):
        seed = mix(2026, index)
        target, other = says(seed, processed), says(seed, drafted)
        expected = plain(target)
        outputs.add(expected)
        for name, policy in POLICIES.items():
            output, taken = speculated(policy, target, other, seed)
            assert output == expected, (name, seed)
            steps[name] += taken
    assert len(outputs) > 50  # the seed matters
    assert steps["oracle"] == NUM_TABLES
    assert steps["empty"] == steps["liar"] == NUM_TABLES * LENGTH
    assert NUM_TABLES < steps["skewed"] < NUM_TABLES * LENGTH
    assert steps["branching"] < NUM_TABLES * LENGTH
    assert steps["sharing_noise"] < steps["skewed"]


Position = Callable[[int, Topology, Prefix], int]  # of a node's noise


@pytest.mark.parametrize(
    "position",
    [
        lambda node, tree, prefix: len(prefix) + node + 1,  # siblings with noises of their own
        lambda node, tree, prefix: len(prefix),  # one noise for the whole step
        lambda node, tree, prefix: len(tree.path(node)),  # counted from the step's root
    ],
    ids=["by node", "by step", "by depth"],
)
def test_noise_at_another_position_is_not_plains(position: Position) -> None:
    """Keyed by anything but the absolute position, the text depends on what was drafted."""
    differing = 0
    for index in range(200):
        seed = mix(7, index)
        target, other = says(seed, processed), says(seed, drafted)
        output: Prefix = ()
        while len(output) < LENGTH:
            tree, tokens = branching(target, other, output, seed)

            def draw(node: int, tree: Topology = tree, tokens: Prefix = tokens) -> int:
                path = (*output, *(tokens[each] for each in tree.path(node)))  # noqa: B023
                where = len(PROMPT) + position(node, tree, output)  # noqa: B023
                return noisy_argmax(processed(path), seed, where)  # noqa: B023

            verdict = decide(match(tree, tokens), draw)
            output = (*output, *(tokens[node] for node in verdict.accepted), verdict.next_token)
        differing += output[:LENGTH] != plain(target)
    assert differing > 20


def test_the_sampler_says_the_same_as_the_processed_row() -> None:
    history = SAMPLER.start(PROMPT)
    for seed in range(50):
        for prefix in ((), (2,), (2, 2), (0, 4, 4)):
            token = SAMPLER.token(
                LOGITS(prefix), history.extended(prefix), seed, len(PROMPT) + len(prefix)
            )
            assert token == says(seed, processed)(prefix)


def test_one_position_acceptance_is_the_closed_form() -> None:
    """By the rule and the engine's own coins, 10,000 tables: four standard errors are 0.02."""
    one = topology((-1,))
    for table in range(3):
        p, q = random_law(table, V)(()), random_law(table + 20, V)(())
        row, draft_row = p.log().tolist(), q.log().tolist()
        accepted = 0
        for index in range(NUM_TABLES):
            seed = mix(77 + table, index)
            draft = (noisy_argmax(draft_row, seed, 3),)

            def draw(node: int, row: list[float] = row, seed: int = seed) -> int:
                return noisy_argmax(row, seed, 4 + node)

            accepted += decide(match(one, draft), draw).num_accepted
        assert accepted / NUM_TABLES == pytest.approx(coupled_acceptance(p, q), abs=0.02)


def test_the_closed_form_over_a_million_noise_tables() -> None:
    """Four standard errors are 0.002; zeros on either side included."""
    generator = torch.Generator().manual_seed(5)
    noise = -torch.log(-torch.log(torch.rand(1_000_000, 4, generator=generator).double()))
    for seed, kind in enumerate(("mixed", "zeros", "ties")):
        p, q = random_law(seed, 4, kind)(()), random_law(seed + 9, 4)(())
        same = (p.log() + noise).argmax(1) == (q.log() + noise).argmax(1)
        expected = coupled_acceptance(p, q)
        assert float(same.double().mean()) == pytest.approx(expected, abs=0.002)


@given(st.integers(0, 10_000), st.integers(2, 8), st.sampled_from(["mixed", "zeros", "ties"]))
def test_the_closed_form_lies_between_its_bounds(seed: int, size: int, kind: str) -> None:
    """(1 - TV) / (1 + TV) <= acceptance <= 1 - TV, with equality on the right for two tokens."""
    p, q = random_law(seed, size, kind)(()), random_law(seed + 1, size)(())
    acceptance, best = coupled_acceptance(p, q), maximal_acceptance(p, q)
    assert best / (2.0 - best) - 1e-12 <= acceptance <= best + 1e-12
    if size == 2:
        assert acceptance == pytest.approx(best, abs=1e-12)
    assert coupled_acceptance(p, p) == pytest.approx(1.0, abs=1e-12)
    assert coupled_acceptance(p, q) == pytest.approx(coupled_acceptance(q, p), abs=1e-12)


def test_a_fixed_draft_costs_nothing_by_coupling() -> None:
    """A one-hot draft is accepted with p(x), as under any exact rule."""
    p = random_law(4, V)(())
    for token in range(V):
        q = torch.zeros(V, dtype=torch.float64)
        q[token] = 1.0
        assert coupled_acceptance(p, q) == pytest.approx(float(p[token]), abs=1e-12)
        assert maximal_acceptance(p, q) == pytest.approx(float(p[token]), abs=1e-12)


def test_the_same_seed_repeats_and_other_seeds_differ() -> None:
    outputs = [plain(says(seed, processed)) for seed in range(20)]
    assert outputs == [plain(says(seed, processed)) for seed in range(20)]
    assert len(set(outputs)) > 5
