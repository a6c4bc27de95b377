"""The recycling drafter: its table against the rows it was told, its tree against a full search."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ConfigError
from foredraft.core.trees import topology
from foredraft.drafters.interface import Drafter, StepResult, StepRow
from foredraft.drafters.recycling import (
    MAX_TABLES,
    RankRates,
    RecyclingDrafter,
    SuccessorTable,
    best_tree,
)
from foredraft.testing.models import tiny_model
from foredraft.testing.requests import draft_request

V = 32


@pytest.fixture(scope="module")
def target():
    return tiny_model(seed=1, vocab_size=V)


def told(rows, next_token=None, salt=""):
    return StepResult("r", rows, 0, next_token, salt)


def row(token, top=(), committed=True):
    return StepRow(0, -1 if committed else 0, token, committed, top)


def draft(drafter, last, nodes=4, salt=""):
    request = draft_request([last], vocab_size=V, max_nodes=nodes)._replace(cache_salt=salt)
    (made,) = drafter.propose([request])
    topology(tuple(made.parents))
    assert made.probs is None
    return list(made.tokens), list(made.parents)


def test_nothing_is_drafted_before_anything_is_told(target):
    drafter = RecyclingDrafter(target)
    assert isinstance(drafter, Drafter)
    assert draft(drafter, 5) == ([], [])


def test_successors_come_from_verified_rows_and_committed_rows_go_first(target):
    drafter = RecyclingDrafter(target, recycling_top_k=2)
    assert drafter.capabilities.top_ids == 2
    # Rejected after the committed row of the same token: the committed one stays.
    drafter.observe([told([row(5, (6, 7)), row(6, (8, 9)), row(5, (1, 2), committed=False)], 8)])
    assert draft(drafter, 5, 3) == ([6, 7, 8], [-1, -1, 0])
    drafter.observe([told([row(9), row(7, (3, 4), committed=False)])])
    assert draft(drafter, 7, 2)[0] == [3, 4]


def test_prompts_are_read_by_pairs(target):
    drafter = RecyclingDrafter(target, recycling_top_k=2)
    drafter.observe([told([row(1), row(2), row(1), row(3), row(1), row(4)])])
    assert draft(drafter, 1, 2) == ([4, 3], [-1, -1])
    assert draft(drafter, 4) == ([], [])
    assert draft(drafter, 2, 1) == ([1], [-1])


def test_tables_belong_to_salts_unless_all_may_share(target):
    for scope, shared in (("salt", False), ("all", True)):
        drafter = RecyclingDrafter(target, recycling_scope=scope)
        drafter.observe([told([row(5, tuple(range(8)))], 0, "one")])
        assert draft(drafter, 5, salt="one")[0]
        assert bool(draft(drafter, 5, salt="two")[0]) is shared
        drafter.release("r")
        assert draft(drafter, 5, salt="one")[0]


def test_memory_is_bounded_whatever_is_told(target):
    drafter = RecyclingDrafter(target)
    for salt in range(3 * MAX_TABLES):
        drafter.observe([told([row(t, tuple(range(8))) for t in range(V)], 0, f"{salt}")])
    assert drafter.num_bytes == MAX_TABLES * V * 8 * 4
    assert draft(drafter, 5, salt="0")[0] == []
    assert draft(drafter, 5, salt=f"{3 * MAX_TABLES - 1}")[0]


def test_rates_are_learned_and_never_rise_with_the_rank(target):
    drafter = RecyclingDrafter(target, recycling_top_k=3)
    for _ in range(400):
        drafter.observe([told([row(5, (6, 7, 8))], 7)])
    rates = drafter.ranks.rates
    assert rates[0] == rates[1] > rates[2]
    ranks = RankRates(2)
    for _ in range(20_000):
        ranks.count(0)
    assert ranks.rates[0] > 0.99
    for _ in range(20_000):
        ranks.count(2)
    assert ranks.rates[0] < 0.2


@settings(max_examples=150, deadline=None)
@given(
    rows=st.dictionaries(
        st.integers(0, 5), st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
    ),
    falls=st.lists(st.sampled_from([1.0, 0.7, 0.5, 0.2]), min_size=3, max_size=3),
    nodes=st.integers(0, 7),
)
def test_the_tree_is_the_likeliest_of_its_size(rows, falls, nodes):
    table = SuccessorTable(6, 3)
    for token, successors in rows.items():
        table.put(token, successors)
    rates = [0.6 * falls[0], 0.6 * falls[0] * falls[1], 0.6 * falls[0] * falls[1] * falls[2]]
    tree = best_tree(table, rates, 0, nodes)
    shape = topology(tuple(tree.parents))
    found = []
    for node, token in enumerate(tree.tokens):
        parent = 0 if tree.parents[node] < 0 else tree.tokens[tree.parents[node]]
        assert token in rows[parent]
        siblings = [tree.tokens[each] for each in shape.children(tree.parents[node])]
        assert siblings == rows[parent][: len(siblings)]
        value = 1.0
        for each in shape.path(node):
            before = 0 if tree.parents[each] < 0 else tree.tokens[tree.parents[each]]
            value *= rates[rows[before].index(tree.tokens[each])]
        found.append(value)
    every = []
    for depth in range(1, nodes + 1):
        for ranks in product(range(3), repeat=depth):
            token, value = 0, 1.0
            for rank in ranks:
                if rank >= len(rows.get(token, ())):
                    break
                token, value = rows[token][rank], value * rates[rank]
            else:
                every.append(value)
    every.sort(reverse=True)
    assert sorted(found, reverse=True) == pytest.approx(every[:nodes])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recycling_top_k": 0}, "recycling_top_k must be an integer of 1 or more, got 0"),
        ({"recycling_top_k": 65}, "at most 64, got 65"),
        ({"recycling_top_k": True}, "got True"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"recycling_scope": "tenant"}, "one of salt, all, got 'tenant'"),
    ],
)
def test_options_out_of_range_are_named(target, options, message):
    with pytest.raises(ConfigError, match=message):
        RecyclingDrafter(target, **options)
