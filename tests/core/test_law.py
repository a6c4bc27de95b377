"""The output law of the exact rules equals the target's, by exact enumeration.

`make soak` draws 2,000 tables for each rule and shape here, `make test` a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.acceptance import BadRow
from foredraft.core.trees import chain
from foredraft.testing.closed_forms import maximal_acceptance
from foredraft.testing.draft_sources import (
    DraftSource,
    WeightedDraft,
    drawn_chain,
    drawn_tree,
    fixed_draft,
    one_of,
    regular_tree,
    sampled_chains,
)
from foredraft.testing.law import (
    FAILED,
    Rule,
    emitted_law,
    exact_block,
    exact_rejection,
    largest_error,
    regions,
    sample_and_match,
    sequence_law,
    target_sequence_law,
)
from foredraft.testing.siblings import (
    SIBLING_LAWS,
    SiblingLaw,
    top_and_one,
    with_replacement,
    without_replacement,
)
from foredraft.testing.tables import KINDS, Kind, random_law

from .drawn import cases, laws, pairs

EXACT = 1e-12
Law = Callable[[tuple[int, ...]], Tensor]
BOTH = pytest.mark.parametrize("rule", [exact_rejection, exact_block], ids=["rejection", "block"])
UNEVEN = (-1, 0, 0, -1, 3)


def assert_exact(rule: Rule, target: Law, source: DraftSource, length: int) -> None:
    law = sequence_law(rule, target, source, length)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert largest_error(law, target_sequence_law(target, length)) < EXACT


def one_and_top(q: Tensor, earlier: Sequence[int], count: int) -> Tensor:
    """The siblings of `top_and_one`, the deterministic ones first: exact in this order too."""
    if len(earlier) < count - 1:
        return top_and_one(q, [0, *earlier], count)
    return top_and_one(q, [], count)


# Chains: vocabulary and depth.


@pytest.mark.parametrize(("vocab_size", "depth"), [(3, 2), (5, 2), (2, 3), (3, 3)])
@BOTH
@cases(30)
@given(st.data())
def test_drawn_chains(rule: Rule, vocab_size: int, depth: int, data: st.DataObject) -> None:
    target, draft = data.draw(pairs(vocab_size, depth))
    assert_exact(rule, target, drawn_chain(draft, depth), depth + 1)


@BOTH
@cases(30)
@given(laws(4, 2), st.lists(st.integers(0, 3), max_size=2))
def test_fixed_chains(rule: Rule, target: Law, tokens: list[int]) -> None:
    assert_exact(rule, target, fixed_draft(tokens), 3)


# Trees: shape and how siblings are drawn.


@pytest.mark.parametrize("name", SIBLING_LAWS)
@pytest.mark.parametrize(
    ("vocab_size", "branching"), [(3, (2, 2)), (4, (3, 2)), (5, (4,)), (3, (2, 1, 2))], ids=str
)
@cases(20)
@given(st.data())
def test_drawn_trees(
    name: str, vocab_size: int, branching: tuple[int, ...], data: st.DataObject
) -> None:
    depth = len(branching)
    target, draft = data.draw(pairs(vocab_size, depth))
    source = drawn_tree(regular_tree(*branching), draft, SIBLING_LAWS[name])
    assert_exact(exact_rejection, target, source, depth + 1)


@pytest.mark.parametrize("siblings", [one_and_top, without_replacement])
@cases(30)
@given(pairs(4, 2))
def test_drawn_trees_of_uneven_shape(siblings: SiblingLaw, pair: tuple[Law, Law]) -> None:
    target, draft = pair
    assert_exact(exact_rejection, target, drawn_tree(UNEVEN, draft, siblings), 3)


@pytest.mark.parametrize("rule", [exact_rejection, sample_and_match], ids=["rejection", "match"])
@cases(60)
@given(
    laws(4, 2),
    st.sampled_from([regular_tree(2, 2), regular_tree(3, 2), UNEVEN]),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_fixed_trees(rule: Rule, target: Law, parents: tuple[int, ...], tokens: list[int]) -> None:
    """Any tokens, equal siblings too."""
    assert_exact(rule, target, fixed_draft(tokens[: len(parents)], parents), 3)


@cases(40)
@given(
    laws(4, 2),
    st.sampled_from([chain(2).parents, regular_tree(2, 2), UNEVEN]),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_at_temperature_zero_one_path_is_left(
    table: Law, parents: tuple[int, ...], tokens: list[int]
) -> None:
    """The argmax after each prefix, ties to the lowest id, whatever is drafted."""

    def target(prefix: tuple[int, ...]) -> Tensor:
        row = table(prefix)
        return torch.zeros_like(row).index_fill(0, row.argmax(), 1.0)

    plain: tuple[int, ...] = ()
    while len(plain) < 3:
        plain = (*plain, int(table(plain).argmax()))
    source = fixed_draft(tokens[: len(parents)], parents)
    for rule in (sample_and_match, exact_rejection):
        assert sequence_law(rule, target, source, 3) == {plain: 1.0}


# Tables by kind, so that each pair of kinds is met whatever hypothesis draws.


@pytest.mark.parametrize("draft_kind", KINDS)
@pytest.mark.parametrize("target_kind", KINDS)
def test_drafts_of_every_kind(target_kind: Kind, draft_kind: Kind) -> None:
    for seed in range(2):
        target, draft = random_law(seed, 4, target_kind), random_law(seed + 100, 4, draft_kind)
        assert_exact(exact_rejection, target, drawn_chain(draft, 2), 3)
        assert_exact(exact_block, target, drawn_chain(draft, 2), 3)
        for siblings in SIBLING_LAWS.values():
            source = drawn_tree(regular_tree(2, 1), draft, siblings)
            assert_exact(exact_rejection, target, source, 3)


@BOTH
def test_long_windows_over_five_tokens(rule: Rule) -> None:
    assert_exact(rule, random_law(1, 5), drawn_chain(random_law(2, 5), 3), 4)


@BOTH
def test_the_draft_may_be_the_target_itself(rule: Rule) -> None:
    target = random_law(5, 4)
    assert_exact(rule, target, drawn_chain(target, 3), 4)
    emitted = emitted_law(rule, target, drawn_chain(target, 3))
    assert all(len(tokens) == 4 for tokens in emitted)


@pytest.mark.parametrize("rule", [exact_rejection, exact_block, sample_and_match])
def test_the_empty_draft_is_plain_sampling(rule: Rule) -> None:
    assert_exact(rule, random_law(3, 5), fixed_draft(()), 2)


# Degenerate drafts.


def law_of(row: list[float]) -> Law:
    return lambda prefix: torch.tensor(row, dtype=torch.float64)


def test_disjoint_supports_accept_nothing() -> None:
    target, draft = law_of([0.5, 0.5, 0.0, 0.0]), law_of([0.0, 0.0, 0.3, 0.7])
    for rule, source in (
        (exact_rejection, drawn_chain(draft, 2)),
        (exact_block, drawn_chain(draft, 2)),
        (exact_rejection, drawn_tree(regular_tree(2, 2), draft, without_replacement)),
    ):
        assert_exact(rule, target, source, 3)
        assert all(len(tokens) == 1 for tokens in emitted_law(rule, target, source))


def test_siblings_that_cover_the_support_always_leave_one_standing() -> None:
    """Sequoia's cover property: without replacement, q over p's support, as many draws as ids."""
    target, draft = law_of([0.7, 0.3, 0.0]), law_of([0.1, 0.9, 0.0])
    source = drawn_tree(regular_tree(2), draft, without_replacement)
    assert_exact(exact_rejection, target, source, 2)
    assert all(len(tokens) == 2 for tokens in emitted_law(exact_rejection, target, source))
    repeating = drawn_tree(regular_tree(2), draft, with_replacement)
    assert any(len(tokens) == 1 for tokens in emitted_law(exact_rejection, target, repeating))


def test_a_second_copy_of_a_token_is_useless_and_harmless() -> None:
    """Equal siblings, drawn or not (EAGLE#183 and its kind)."""
    target, q = random_law(2, 3), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    drafts = [WeightedDraft(float(q[x]), (x, x), torch.stack([q, q]), (-1, -1)) for x in range(3)]
    emitted = emitted_law(exact_rejection, target, one_of(drafts))
    single = [WeightedDraft(float(q[x]), (x,), q[None]) for x in range(3)]
    alone = emitted_law(exact_rejection, target, one_of(single))
    assert sum(p for tokens, p in emitted.items() if len(tokens) == 2) == pytest.approx(
        sum(p for tokens, p in alone.items() if len(tokens) == 2), abs=EXACT
    )
    assert_exact(exact_rejection, target, fixed_draft((1, 1), (-1, -1)), 2)


def test_a_drafter_whose_support_is_exhausted_may_stop() -> None:
    """Three siblings wished for, two ids to draw: the third is not there."""
    target, q = random_law(7, 4), [0.7, 0.3, 0.0, 0.0]
    drafts = []
    for first, second in ((0, 1), (1, 0)):
        rows = torch.zeros(2, 4, dtype=torch.float64)
        rows[0] = torch.tensor(q, dtype=torch.float64)
        rows[1, second] = 1.0
        drafts.append(WeightedDraft(q[first], (first, second), rows, (-1, -1)))
    assert_exact(exact_rejection, target, one_of(drafts), 2)


@BOTH
def test_a_draft_that_may_stop_before_drawing(rule: Rule) -> None:
    """The length may depend on the tokens kept so far: a chain ends after a drawn 0."""
    target, draft = random_law(3, 3), random_law(4, 3)
    drafts = [each for each in sampled_chains(draft, 1) if each.tokens == (0,)]
    drafts += [each for each in sampled_chains(draft, 2) if each.tokens[0] != 0]
    assert_exact(rule, target, one_of(drafts), 3)


@pytest.mark.parametrize("rule", [exact_rejection, exact_block, sample_and_match])
@pytest.mark.parametrize("bad_prefix", [(), (1,), (1, 1), (0, 2)], ids=str)
def test_a_row_without_a_token_fails_as_often_as_it_is_reached(
    rule: Rule, bad_prefix: tuple[int, ...]
) -> None:
    """Bans that leave nothing, logits that are no numbers: no sooner and no later than plain."""
    table, draft = random_law(8, 3), random_law(9, 3)

    def target(prefix: tuple[int, ...]) -> Tensor:
        if prefix == bad_prefix:
            raise BadRow(-1, "nothing left")
        return table(prefix)

    reference = target_sequence_law(target, 4)
    assert reference[(*bad_prefix, FAILED)] > 0.0
    sources = [fixed_draft((1, 1, 0)), fixed_draft((0, 2, 2))]
    if rule is not sample_and_match:
        sources.append(drawn_chain(draft, 3))
    for source in sources:
        law = sequence_law(rule, target, source, 4)
        assert largest_error(law, reference) < EXACT


# What the enumeration itself does.


@BOTH
def test_points_of_the_regions_give_what_the_regions_emit(rule: Rule) -> None:
    """The coins that stand for all coins decide as numbers do."""
    target, draft = random_law(1, 3), random_law(2, 3)
    count = 0
    for region in regions(rule, target, drawn_chain(draft, 2)):
        tokens = [region.drafted.get(node, 0) for node in range(2)]
        rows = torch.stack([draft(()), draft(tuple(tokens[:1]))])
        replayed = emitted_at(rule, target, WeightedDraft(1.0, tokens, rows), region.coins)
        assert replayed == region.emitted
        count += 1
    assert count > 20


@pytest.mark.parametrize("name", SIBLING_LAWS)
def test_points_of_the_regions_of_trees(name: str) -> None:
    target, draft = random_law(1, 3), random_law(2, 3)
    parents, siblings = regular_tree(2, 2), SIBLING_LAWS[name]
    for region in regions(exact_rejection, target, drawn_tree(parents, draft, siblings)):
        tokens = [region.drafted.get(node, -1) for node in range(6)]
        rows = torch.ones(6, 3, dtype=torch.float64)
        for node, parent in enumerate(parents):
            before = [tokens[each] for each in range(node) if parents[each] == parent]
            prefix = () if parent < 0 else (tokens[parent],)
            if -1 not in (*before, *prefix):
                rows[node] = siblings(draft(prefix), before, 2)
        scripted = WeightedDraft(1.0, tokens, rows, parents)
        assert emitted_at(exact_rejection, target, scripted, region.coins) == region.emitted


def emitted_at(
    rule: Rule, target: Law, draft: WeightedDraft, points: dict[int | None, float]
) -> tuple[int, ...]:
    """What a rule emits at given numbers for coins."""

    def at_points(
        tree: object, tokens: object, probs: object, accept_coin: object, residual_coin: object
    ) -> object:
        return rule(draft.tree, tokens, probs, points.__getitem__, points[None])  # type: ignore[arg-type]

    emitted = emitted_law(at_points, target, one_of([draft]))  # type: ignore[arg-type]
    (only,) = emitted
    return only


@cases(40)
@given(pairs(3, 1))
def test_what_a_step_emits_given_how_much_it_accepts(pair: tuple[Law, Law]) -> None:
    """P(accept x, then y) = min(p, q)(x) p(y | x); P(accept nothing, then y) = (p - q)+(y)."""
    target, draft = pair
    p, q = target(()), draft(())
    emitted = emitted_law(exact_rejection, target, drawn_chain(draft, 1))
    for x in range(3):
        assert emitted.get((x,), 0.0) == pytest.approx(max(float(p[x] - q[x]), 0.0), abs=EXACT)
        for y in range(3):
            expected = min(float(p[x]), float(q[x])) * float(target((x,))[y])
            assert emitted.get((x, y), 0.0) == pytest.approx(expected, abs=EXACT)
    accepted = sum(share for tokens, share in emitted.items() if len(tokens) == 2)
    assert accepted == pytest.approx(maximal_acceptance(p, q), abs=EXACT)
    assert accepted == pytest.approx(1.0 - float((p - q).abs().sum()) / 2.0, abs=EXACT)
