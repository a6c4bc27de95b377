"""Exactness after processors: every row of a window has its own history, whatever was drafted.

The oracle commits tokens one by one; the rules see the same tokens as a path of drafts. The inputs
are those that broke engines elsewhere (penalties ignored inside a window, masks applied to the
bonus token only, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.core.acceptance import decide, match
from foredraft.core.rejection import rejection
from foredraft.core.row_math import TorchRowMath
from foredraft.core.sampling import Sampler, SamplingParams
from foredraft.core.trees import chain, topology
from foredraft.testing.draft_sources import drawn_chain, drawn_tree, fixed_draft, regular_tree
from foredraft.testing.law import (
    SequenceLaw,
    exact_block,
    exact_rejection,
    largest_error,
    sample_and_match,
    sequence_law,
    target_sequence_law,
    total_variation,
)
from foredraft.testing.siblings import without_replacement
from foredraft.testing.tables import random_law, random_logits

Prefix = tuple[int, ...]
ROW_MATH = TorchRowMath()
PROMPT = (0, 1, 1)
END = frozenset({3})

FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.5},
    "repetition": {"repetition_penalty": 2.5},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "negative frequency": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {2: -100.0, 0: 1.5}},
    "allowed": {"allowed_token_ids": [0, 2]},
    "banned": {"banned_token_ids": [2]},
    "min_tokens": {"min_tokens": 2},
    "together": {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 1,
    },
}


class Window:
    """A target with processors, seen as an oracle sees it and as a step sees it."""

    def __init__(self, fields: dict[str, Any], seed: int, vocab_size: int = 4) -> None:
        params = SamplingParams(**fields)
        self.sampler = Sampler(params, vocab_size, END, ROW_MATH)
        self.logits = random_logits(seed, vocab_size)

    def committed(self, prefix: Prefix) -> Tensor:
        history = self.sampler.start(PROMPT)
        for token in prefix:
            history.append(token)
        return self.sampler.law(self.logits(prefix), history)

    def drafted(self, prefix: Prefix) -> Tensor:
        history = self.sampler.start(PROMPT)
        return self.sampler.law(self.logits(prefix), history.extended(prefix))


@pytest.mark.parametrize("name", FIELDS)
def test_chains_and_trees_have_the_processed_law(name: str) -> None:
    for seed in range(3):
        window = Window(FIELDS[name], seed)
        reference = target_sequence_law(window.committed, 3)
        draft = random_law(seed + 50, 4)
        chain_of_two, tree = drawn_chain(draft, 2), fixed_draft((1, 2, 1, 3), (-1, -1, 0, 0))
        for rule, source in (
            (exact_rejection, chain_of_two),
            (exact_block, chain_of_two),
            (exact_rejection, fixed_draft((1, 1))),
            (exact_rejection, tree),
            (sample_and_match, tree),
            (exact_rejection, drawn_tree(regular_tree(2, 1), draft, without_replacement)),
        ):
            law = sequence_law(rule, window.drafted, source, 3)
            assert largest_error(law, reference) < 1e-12


def misses(name: str, wrong: Callable[[Window], Callable[[Prefix], Tensor]]) -> float:
    """How far the law is off, at worst over a few tables, when rows see a wrong history."""
    worst = 0.0
    for seed in range(6):
        window = Window(FIELDS[name], seed)
        reference = target_sequence_law(window.committed, 3)
        law = _one_step_then(window, wrong(window))
        worst = max(worst, total_variation(law, reference))
    return worst


def _one_step_then(window: Window, rows: Callable[[Prefix], Tensor]) -> SequenceLaw:
    """The window's rows come from `rows`; what follows the step is right."""
    drafted = (1, 1)

    def law(prefix: Prefix) -> Tensor:
        return rows(prefix) if drafted[: len(prefix)] == prefix else window.committed(prefix)

    return sequence_law(exact_rejection, law, fixed_draft(drafted), 3)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "negative frequency"])
def test_a_penalty_that_does_not_count_the_drafts_before_it_is_caught(name: str) -> None:
    def stale(window: Window) -> Callable[[Prefix], Tensor]:
        history = window.sampler.start((0, 3) if name == "repetition" else PROMPT)
        return lambda prefix: window.sampler.law(window.logits(prefix), history)

    assert misses(name, stale) > 0.02


@pytest.mark.parametrize("name", ["bias", "allowed", "banned", "min_p", "top_k", "temperature"])
def test_a_processor_applied_to_the_bonus_row_only_is_caught(name: str) -> None:
    def bonus_only(window: Window) -> Callable[[Prefix], Tensor]:
        return lambda prefix: (
            window.committed(prefix)
            if len(prefix) == 2
            else torch.softmax(window.logits(prefix).double(), 0)
        )

    assert misses(name, bonus_only) > 0.02


def greedy_window(
    params: SamplingParams,
    row: Sequence[float],
    draft: Sequence[int],
    prompt: Sequence[int] = (0,),
) -> list[int]:
    """What one greedy step over a chain emits when the target's raw row is always `row`."""
    logits = torch.tensor(row)
    sampler = Sampler(params, len(row), END, ROW_MATH)
    history = sampler.start(prompt)
    tree = topology(tuple(range(-1, len(draft) - 1)))

    def draw(node: int) -> int:
        path = [draft[each] for each in tree.path(node)]
        return sampler.token(logits, history.extended(path), 0, 0)

    verdict = decide(match(tree, draft), draw)
    return [*(draft[node] for node in verdict.accepted), verdict.next_token]


def greedy_plain(
    params: SamplingParams, row: Sequence[float], length: int, prompt: Sequence[int] = (0,)
) -> list[int]:
    sampler = Sampler(params, len(row), END, ROW_MATH)
    history = sampler.start(prompt)
    output: list[int] = []
    for _ in range(length):
        output.append(sampler.token(torch.tensor(row), history, 0, 0))
        history.append(output[-1])
    return output


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.5},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.05},
    ],
)
def test_a_repeated_draft_meets_the_penalty_inside_the_window(fields: dict[str, float]) -> None:
    """One token five times in one window: the penalty bites where plain's does (vllm#18902)."""
    row = [0.2, 2.0, 1.4, 0.1, 0.9]
    params = SamplingParams(temperature=0.0, **fields)
    plain = greedy_plain(params, row, 6)
    for draft in ([1] * 5, plain[:5], [2] * 5, [*plain[:2], 4, 4, 4]):
        emitted = greedy_window(params, row, draft)
        assert emitted == plain[: len(emitted)]
    assert greedy_window(params, row, plain[:5]) == plain


def test_presence_and_frequency_ignore_the_prompt_and_repetition_counts_it() -> None:
    row = [2.0, 1.5, 0.0]
    ignored = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert greedy_window(ignored, row, [], prompt=(0, 0, 0)) == [0]
    counted = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert greedy_window(counted, row, [], prompt=(0, 0, 0)) == [1]
    assert greedy_window(counted, row, [], prompt=(2,)) == [0]


def test_a_drafted_end_token_is_refused_until_min_tokens_are_out() -> None:
    """min_tokens 3: the end token drafted at output 2 is refused, at output 4 it stands."""
    row = [0.0, 1.0, 0.0, 5.0]
    params = SamplingParams(temperature=0.0, min_tokens=3)
    assert greedy_window(params, row, [1, 3, 1]) == [1, 1]
    assert greedy_window(params, row, [1, 1, 1, 3]) == [1, 1, 1, 3, 3]
    assert greedy_plain(params, row, 5) == [1, 1, 1, 3, 3]


def test_a_biased_away_token_is_not_accepted_from_a_draft() -> None:
    row = [0.0, 5.0, 1.0]
    params = SamplingParams(temperature=0.0, logit_bias={1: -100.0})
    assert greedy_window(params, row, [1, 1]) == [2]
    assert greedy_window(params, row, [2, 1]) == [2, 2]


@pytest.mark.parametrize(
    "fields",
    [{"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.6}, {"logit_bias": {0: -100.0, 1: -100.0}}],
)
def test_no_emitted_token_leaves_the_support(fields: dict[str, Any]) -> None:
    """Temperature 1, every token of many steps, drafts that try them all (vllm#42744)."""
    logits = random_logits(9, 6)
    sampler = Sampler(SamplingParams(**fields), 6, END, ROW_MATH)
    for seed in range(300):
        history = sampler.start(PROMPT)
        draft = [(seed + offset) % 6 for offset in range(3)]
        rows = [logits(tuple(draft[:n])) for n in range(4)]
        laws = [sampler.law(rows[n], history.extended(draft[:n])) for n in range(4)]
        generator = torch.Generator().manual_seed(seed)
        coins = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        walk = rejection(chain(3), draft, None, coins.__getitem__, coins[3], ROW_MATH)
        verdict = decide(walk, lambda node, laws=laws: laws[node + 1])
        emitted = [*draft[: verdict.num_accepted], verdict.next_token]
        for position, token in enumerate(emitted):
            assert float(laws[position][token]) > 0.0


def test_a_peaked_law_is_not_flattened_by_a_second_softmax() -> None:
    sampler = Sampler(SamplingParams(temperature=0.5), 3, END, ROW_MATH)
    law = sampler.law(torch.tensor([4.0, 1.0, 0.0]), sampler.start([]))
    expected = torch.softmax(torch.tensor([8.0, 2.0, 0.0], dtype=torch.float64), 0)
    assert torch.allclose(law, expected, atol=1e-15)
    assert float(law[0]) > 0.99
