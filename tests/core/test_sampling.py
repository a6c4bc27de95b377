"""The sampler against a plain reference in lists of Python floats, and its promises one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.coins import gumbel_noise
from foredraft.core.errors import InvalidRequest, ModelError
from foredraft.core.row_math import TorchRowMath
from foredraft.core.sampling import Sampler, SamplingParams

V = 9
END = frozenset({7, 8})
ROW_MATH = TorchRowMath()


def sampler_of(params: SamplingParams, end: frozenset[int] = END) -> Sampler:
    return Sampler(params, V, end, ROW_MATH)


def row_of(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reference_law(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The processors written out one after the other, for temperatures above 0."""
    logits = reference_logits(row, params, prompt, output)
    logits = [value / params.temperature for value in logits]
    best = max(logits)
    if params.min_p > 0:
        floor = best + math.log(params.min_p)
        logits = [value if value >= floor else -math.inf for value in logits]
    order = sorted(range(V), key=lambda token: (-logits[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(math.exp(logits[token] - best) for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += math.exp(logits[token] - best) / total
        if params.top_p < 1.0 and mass >= params.top_p:
            break
    total = sum(math.exp(logits[token] - best) for token in kept)
    return [math.exp(logits[token] - best) / total if token in kept else 0.0 for token in range(V)]


def reference_logits(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    logits = list(row)
    for token in range(V):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -math.inf
        if token in (params.banned_token_ids or ()):
            logits[token] = -math.inf
        if len(output) < params.min_tokens and token in END:
            logits[token] = -math.inf
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
    times = Counter(output)
    for token in {*prompt, *output}:
        if logits[token] > 0:
            logits[token] /= params.repetition_penalty
        else:
            logits[token] *= params.repetition_penalty
    for token, count in times.items():
        logits[token] -= params.frequency_penalty * count
        logits[token] -= params.presence_penalty
    return logits


tokens = st.integers(0, V - 1)
quarters = st.integers(-12, 12).map(lambda value: value / 4)  # ties are frequent


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    def maybe(strategy: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(strategy) if draw(st.booleans()) else default

    return SamplingParams(
        temperature=draw(st.sampled_from([0.25, 0.5, 1.0, 2.0])),
        min_tokens=draw(st.integers(0, 6)),
        top_k=maybe(st.integers(1, V + 1), 0),
        top_p=maybe(st.sampled_from([0.1, 0.37, 0.5, 0.83, 0.95, 1e-9]), 1.0),
        min_p=maybe(st.sampled_from([0.05, 0.21, 0.5, 1.0]), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.25, 2.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-0.5, 0.75]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.25, 0.5, 2.0]), 0.0),
        logit_bias=maybe(st.dictionaries(tokens, quarters, max_size=3), None),
        allowed_token_ids=maybe(st.lists(st.integers(0, 4), min_size=1), None),
        banned_token_ids=maybe(st.lists(st.integers(5, V - 3)), None),
    )


@settings(max_examples=400, deadline=None)
@given(
    st.lists(quarters, min_size=V, max_size=V),
    parameters(),
    st.lists(tokens, max_size=6),
    st.lists(tokens, max_size=4),
    st.lists(tokens, max_size=4),
)
def test_the_law_is_the_reference_law_with_drafts_counted_as_output(
    row: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    path: list[int],
) -> None:
    sampler = sampler_of(params)
    history = sampler.start(prompt)
    for token in output:
        history.append(token)
    expected = reference_law(row, params, prompt, output + path)
    law = sampler.law(row_of(row), history.extended(path))
    assert law.dtype == torch.float64
    assert law.tolist() == pytest.approx(expected, abs=1e-12)
    assert [p > 0 for p in law.tolist()] == [p > 0 for p in expected]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(quarters, min_size=V, max_size=V),
    parameters(),
    st.lists(tokens, max_size=6),
    st.lists(tokens, max_size=5),
)
def test_greedy_is_the_lowest_id_of_the_largest_processed_logit(
    row: list[float], params: SamplingParams, prompt: list[int], path: list[int]
) -> None:
    params = replace(params, temperature=0.0)
    sampler = sampler_of(params)
    history = sampler.start(prompt).extended(path)
    logits = reference_logits(row, params, prompt, path)
    best = logits.index(max(logits))
    assert sampler.token(row_of(row), history, seed=0, position=0) == best
    assert sampler.law(row_of(row), history).tolist() == [float(t == best) for t in range(V)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V),
    parameters(),
    st.lists(tokens, max_size=6),
    st.lists(tokens, max_size=6),
    st.integers(0, 6),
)
def test_a_path_is_as_good_as_committed_tokens_to_the_bit(
    row: list[float], params: SamplingParams, prompt: list[int], output: list[int], split: int
) -> None:
    sampler = sampler_of(params)
    committed, partly = sampler.start(prompt), sampler.start(prompt)
    for token in output:
        committed.append(token)
    for token in output[:split]:
        partly.append(token)
    path = output[split:]
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor(row, dtype=dtype)
        extended = partly.extended(path[:1]).extended(path[1:])
        assert torch.equal(sampler.process(logits, extended), sampler.process(logits, committed))
        assert sampler.token(logits, extended, 5, 11) == sampler.token(logits, committed, 5, 11)
    assert partly.num_output == min(split, len(output))  # extending left it alone


def test_the_token_is_the_coupled_argmax_of_the_processed_row() -> None:
    sampler = sampler_of(SamplingParams(temperature=0.7, top_k=4))
    history = sampler.start([1])
    row = row_of([0.3, 0.1, 2.0, -1.0, 0.5, 0.0, 1.0, 0.2, 0.9])
    processed = sampler.process(row, history)
    drawn = set()
    for position in range(200):
        noisy = processed + gumbel_noise(3, position, V)
        token = sampler.token(row, history, seed=3, position=position)
        assert token == int(noisy.argmax())
        drawn.add(token)
    assert drawn == {2, 4, 6, 8}


def test_a_row_nothing_applies_to_is_returned_as_it_is() -> None:
    row = torch.randn(V)
    for params in (SamplingParams(), SamplingParams(temperature=0.0, top_k=3, top_p=0.5)):
        sampler = sampler_of(params)
        assert sampler.process(row, sampler.start([1, 2])) is row


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {3: 2.0}},
        {"allowed_token_ids": [1, 2]},
        {"banned_token_ids": [1]},
        {"min_tokens": 4},
    ],
)
def test_the_input_row_is_never_written_to(fields: dict[str, Any]) -> None:
    row = torch.randn(V, generator=torch.Generator().manual_seed(1))
    before = row.clone()
    sampler = sampler_of(SamplingParams(**fields))
    history = sampler.start([1, 2]).extended([3, 3])
    processed = sampler.process(row, history, mask=torch.ones(V, dtype=torch.bool))
    sampler.law(row, history)
    sampler.token(row, history, 1, 2)
    assert torch.equal(row, before)
    assert not torch.equal(processed, before)
    assert processed.dtype == row.dtype


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.3, "min_p": 0.2}, True),
        ({"logit_bias": {}, "banned_token_ids": []}, True),
        ({"min_tokens": 2}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"banned_token_ids": [1]}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
    ],
)
def test_plain_argmax_only_where_no_processor_can_change_it(
    fields: dict[str, Any], plain: bool
) -> None:
    sampler = sampler_of(SamplingParams(temperature=0.0, **fields))
    assert sampler.greedy
    assert sampler.plain_argmax is plain
    assert not sampler_of(SamplingParams(**fields)).plain_argmax


def test_min_tokens_without_an_end_token_changes_nothing() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3)
    assert sampler_of(params, frozenset()).plain_argmax
    assert sampler_of(params, frozenset({V, V + 4})).plain_argmax  # not a token of this row


def test_top_k_keeps_exactly_k_the_lowest_ids_among_equals() -> None:
    row = row_of([1, 2, 1, 2, 1, 2, 1, 1, 0])
    for k in range(1, V + 2):
        sampler = sampler_of(SamplingParams(top_k=k))
        kept = torch.isfinite(sampler.process(row, sampler.start([]))).nonzero()[:, 0].tolist()
        assert kept == sorted([1, 3, 5, 0, 2, 4, 6, 7, 8][:k])


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    row = row_of([0.0] * 8 + [-math.inf])  # eight equal tokens: 1/8 each, exact in binary
    for p, size in [(1e-9, 1), (0.125, 1), (0.126, 2), (0.25, 2), (0.5, 4), (0.99, 8)]:
        sampler = sampler_of(SamplingParams(top_p=p))
        law = sampler.law(row, sampler.start([]))
        assert law.tolist() == [1 / size] * size + [0.0] * (V - size)


def test_top_p_is_taken_of_what_top_k_left() -> None:
    row = torch.log(row_of([0.4, 0.2, 0.2, 0.1, 0.02, 0.02, 0.02, 0.02, 0.02]))
    sampler = sampler_of(SamplingParams(top_k=3, top_p=0.7))
    # Of the three, 0.4 / 0.8 and 0.2 / 0.8 reach 0.7; of the whole row, 0.4 + 0.2 would not.
    assert (sampler.law(row, sampler.start([])) > 0).nonzero()[:, 0].tolist() == [0, 1]


def test_truncation_of_a_large_row_equals_the_full_sort() -> None:
    """The short cuts that avoid sorting a whole vocabulary do not show."""
    size = 5000
    generator = torch.Generator().manual_seed(3)
    row = (torch.randn(size, generator=generator) * 3).mul(4).round().div(4)  # many ties
    for k, p in [(0, 0.5), (0, 0.9), (0, 0.999), (40, 1.0), (40, 0.8), (4999, 1.0)]:
        sampler = Sampler(SamplingParams(top_k=k, top_p=p), size, frozenset(), ROW_MATH)
        kept = torch.isfinite(sampler.process(row, sampler.start([])))
        order = torch.sort(row, descending=True, stable=True).indices
        order = order[:k] if k else order
        mass = torch.cumsum(torch.softmax(row[order].double(), 0), 0)
        count = int((mass < p).sum()) + 1 if p < 1 else order.numel()
        assert kept.nonzero()[:, 0].tolist() == sorted(order[:count].tolist())


def test_a_grammar_mask_comes_first() -> None:
    sampler = sampler_of(SamplingParams(top_k=1))
    mask = torch.tensor([False, True, True] + [False] * 6)
    row = row_of([9, 1, 2, 9, 9, 9, 9, 9, 9])
    history = sampler.start([])
    assert sampler.law(row, history, mask).tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert sampler.token(row, history, 1, 1, mask) == 2
    greedy = sampler_of(SamplingParams(temperature=0.0))
    assert greedy.token(row, history, 1, 1, mask) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_is_the_requests_error(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[7], min_tokens=2)
    sampler = sampler_of(params)
    history = sampler.start([1])
    row = torch.zeros(V)
    with pytest.raises(InvalidRequest, match=r"output token 1: .*allowed_token_ids"):
        sampler.token(row, history, 1, 2)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sampler.law(row, history)
    assert sampler.token(row, history.extended([3, 3]), 1, 2) == 7


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_the_models_error(value: float, temperature: float) -> None:
    row = torch.zeros(V)
    row[4] = value
    sampler = sampler_of(SamplingParams(temperature=temperature))
    with pytest.raises(ModelError, match="token 4"):
        sampler.token(row, sampler.start([]), 1, 2)
    with pytest.raises(ModelError, match="finite"):
        sampler.law(row, sampler.start([]))


def test_the_lowest_temperature_keeps_the_row_a_law() -> None:
    row = torch.tensor([30.0, 29.999, -40.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    sampler = sampler_of(SamplingParams(temperature=1e-5))
    law = sampler.law(row, sampler.start([]))
    assert float(law.sum()) == pytest.approx(1.0)
    assert int(law.argmax()) == 0


@pytest.mark.parametrize("value", [1e35, -1e35])
@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.9, "min_p": 0.1}])
def test_logits_that_the_temperature_takes_out_of_range_are_the_models_error(
    value: float, fields: dict[str, Any]
) -> None:
    row = torch.full((V,), value)
    sampler = sampler_of(SamplingParams(temperature=1e-5, **fields))
    for refused in (
        lambda row: sampler.token(row, sampler.start([]), 1, 2),
        lambda row: sampler.law(row, sampler.start([])),
    ):
        with pytest.raises(ModelError, match=r"token 0 .* temperature 1e-05 it leaves float32"):
            refused(row)
    assert 0 <= sampler.token(row.double(), sampler.start([]), 1, 2) < V
    assert float(sampler.law(row.double(), sampler.start([])).sum()) == pytest.approx(1.0)


def test_a_history_with_drafts_cannot_be_committed_to() -> None:
    sampler = sampler_of(SamplingParams())
    history = sampler.start([1, 2])
    with pytest.raises(ValueError, match="draft tokens"):
        history.extended([3]).append(4)
    assert history.extended([]) is history


def test_counts_grow_past_their_first_size() -> None:
    size = 500
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=2.0)
    sampler = Sampler(params, size, frozenset(), ROW_MATH)
    history = sampler.start(list(range(0, size, 2)))
    for token in list(range(300)) + list(range(100)):
        history.append(token)
    processed = sampler.process(torch.ones(size, dtype=torch.float64), history)
    for token in range(size):
        times = (token < 300) + (token < 100)
        seen = times > 0 or token % 2 == 0
        assert float(processed[token]) == (0.5 if seen else 1.0) - times
