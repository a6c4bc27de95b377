"""Drafts that are cut before they are verified: what is left out changes no token and no law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.core.trees import topology
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.engine.drafting import CheckedDraft
from foredraft.engine.trimming import cut_draft
from foredraft.planning.policy import Load, Offer, StaticPolicy
from foredraft.testing.drafters import (
    LiarDrafter,
    RecordingDrafter,
    SkewedDrafter,
    TreeDrafter,
    WrappingDrafter,
)

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_trees import mixed

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])


class EveryOther(StaticPolicy):
    """Leaves nodes out in all sorts of ways: those that a hash of the place says, and theirs."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []

    def widths(self, load: Load, requests: Sequence[object]) -> Sequence[int]:
        return [5] * len(requests)

    def keep(self, load: Load, offers: Sequence[Offer]) -> Sequence[Sequence[int]]:
        self.offers += offers
        return [self._some(offer) for offer in offers]

    def _some(self, offer: Offer) -> list[int]:
        if not offer.may_cut:
            return list(range(len(offer.parents)))
        kept: list[int] = []
        for node, parent in enumerate(offer.parents):
            if (parent < 0 or parent in kept) and (offer.num_positions * 7 + node) % 3:
                kept.append(node)
        return kept


class Confident(WrappingDrafter):
    """Says of every node how sure it is."""

    def __init__(self, inner, sure) -> None:
        super().__init__(inner)
        self.sure = sure

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = self.inner.propose(requests)
        return [replace(d, confidence=[self.sure(i) for i in range(len(d.tokens))]) for d in drafts]


@BOTH
def test_what_is_left_out_changes_no_token(target, plain, oracle, params) -> None:
    drafter = RecordingDrafter(mixed(oracle(params), target))
    llm = LLM(target, drafter=drafter, seed=5, page_size=4)
    llm.engine.scheduler.policy = policy = EveryOther()
    outputs = llm.generate(PROMPTS, params)
    assert [list(output.token_ids) for output in outputs] == plain(params)
    assert sum(len(offer.parents) for offer in policy.offers) > 50
    counts = [output.metrics.speculative_decoding for output in outputs]
    drafted = sum(each.num_draft_tokens for each in counts)
    assert 0 < sum(each.num_accepted_draft_tokens for each in counts) < drafted
    assert drafted < sum(len(offer.parents) for offer in policy.offers)
    for result in drafter.results:  # told of the nodes that were verified, by their new numbers
        nodes = [row.node for row in result.rows if row.node >= 0]
        assert nodes == list(range(len(nodes)))


@BOTH
def test_a_threshold_leaves_out_what_the_drafter_does_not_believe(target, oracle, params) -> None:
    drafter = Confident(oracle(params), lambda node: 0.9 if node < 2 else 0.3)
    config = {"num_speculative_tokens": 5, "draft_confidence_threshold": 0.5}
    llm = LLM(target, drafter=drafter, speculative_config=config, seed=5)
    counts = llm.generate(PROMPTS[0], params)[0].metrics.speculative_decoding
    assert counts.num_draft_tokens == counts.num_accepted_draft_tokens > 0
    assert counts.mean_acceptance_length <= 3.0


def test_a_token_drawn_at_random_is_not_left_out_for_what_it_is(target, oracle) -> None:
    """Without a seed and above temperature 0 the rule reads the law that a token was drawn from."""
    law = torch.full((target.config.vocab_size,), 1.0 / target.config.vocab_size)
    drafter = Confident(SkewedDrafter(lambda _: law), lambda _: 0.1)
    config = {"num_speculative_tokens": 3, "draft_confidence_threshold": 0.5}
    llm = LLM(target, drafter=drafter, speculative_config=config, seed=5)
    sampled = SamplingParams(temperature=1.0, max_tokens=8)
    kept = llm.generate(PROMPTS[0], sampled)[0].metrics.speculative_decoding.num_draft_tokens
    coupled = replace(sampled, seed=3)
    cut = llm.generate(PROMPTS[0], coupled)[0].metrics.speculative_decoding.num_draft_tokens
    assert kept > 0 == cut


def test_a_cut_draft_is_the_tree_of_its_nodes() -> None:
    draft = CheckedDraft((5, 6, 7, 8), topology((-1, -1, 1, 2)), None, 3, (0.1, 0.2, 0.3, 0.4))
    cut = cut_draft(draft, [1, 2])
    assert (cut.tokens, cut.tree.parents, cut.confidence) == ((6, 7), (-1, 0), (0.2, 0.3))
    assert cut.num_cached == 3
    assert cut_draft(draft, []).tokens == ()


def test_trees_are_cut_to_the_nodes_that_pay(target, plain, oracle) -> None:
    """Of two branches, the one that is believed in is verified."""
    known = oracle(GREEDY)
    branches = TreeDrafter(LiarDrafter(known), known)
    drafter = Confident(branches, lambda node: 0.05 if node == 0 else 0.95)
    config = {"num_speculative_tokens": 4, "draft_confidence_threshold": 0.5}
    llm = LLM(target, drafter=drafter, speculative_config=config, seed=5)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == plain(GREEDY)
