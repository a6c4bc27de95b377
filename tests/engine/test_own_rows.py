"""Rows of the drafter's own beside its drafts: computed and told of, never accepted or counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from foredraft.drafters.interface import Draft
from foredraft.engine.drafting import DrafterError
from foredraft.testing.drafters import (
    EmptyDrafter,
    LiarDrafter,
    RecordingDrafter,
    ScriptedDrafter,
    SkewedDrafter,
    TreeDrafter,
    WrongAtDrafter,
)
from foredraft.testing.sampled_trees import SkewedTreeDrafter

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_contract import fixed
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law, skewed_law
from .test_rules import SAMPLED, TREE, small, speculating

__all__ = ["small"]  # a fixture

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
TOPS = 3
KINDS = ("commit", "judged")


class OwnRows(ScriptedDrafter):
    """Another's draft, with a row of its own before each node, at that node's place and with its
    token, and a chain of such rows at the end.
    """

    def __init__(self, inner, below=2, **capabilities):
        self.inner = inner
        self.below = below
        own = inner.capabilities
        self.capabilities = replace(own, **({"top_ids": TOPS} | capabilities))

    def draft(self, request):
        nodes = (request.max_nodes - self.below) // 2
        if nodes < 1:
            rows = range(request.max_nodes)
            return Draft([1] * len(rows), [*range(-1, len(rows) - 1)], verify=[False] * len(rows))
        (draft,) = self.inner.propose([request._replace(max_nodes=nodes)])
        tokens, parents, verify, places = [], [], [], {-1: -1}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            places[node] = len(tokens) + 1
            tokens += [token, token]
            parents += [places[parent], places[parent]]
            verify += [False, True]
        last = places[len(draft.tokens) - 1]
        for _ in range(self.below):
            parents.append(last)
            last = len(tokens)
            tokens.append(2)
            verify.append(False)
        probs = None
        if draft.probs is not None:
            probs = torch.full((len(tokens), draft.probs.shape[1]), -1.0, dtype=torch.float64)
            probs[[i for i, each in enumerate(verify) if each]] = draft.probs
        return Draft(tokens, parents, probs, verify=verify)


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def inner_drafters(known):
    tree = TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known)
    return [known, WrongAtDrafter(known, 1), LiarDrafter(known), tree, EmptyDrafter()]


@BOTH
@pytest.mark.parametrize(
    "setting",
    [{}, {"max_num_batched_tokens": 12, "prefill_chunk_size": 3, "max_num_seqs": 5}, {"pages": 14}],
    ids=["roomy", "few rows", "few pages"],
)
def test_output_and_counts_are_those_of_the_drafts_alone(
    make_llm, plain, oracle, target, params, setting
):
    setting = dict(setting)
    if "pages" in setting:
        per_page = 4 * 2 * target.config.num_layers * target.config.num_kv_heads
        per_page *= target.config.head_dim * target.cache_dtype.itemsize
        setting["kv_cache_gib"] = setting.pop("pages") * per_page / 2**30
    want = plain(params)
    for inner in inner_drafters(oracle(params)):
        llm = make_llm(OwnRows(inner), 12, **setting)
        outputs = llm.generate(PROMPTS, params)
        assert ids(outputs) == want
        assert llm.engine.pool.num_used == 0
        if isinstance(inner, EmptyDrafter):
            for output in outputs:
                assert output.metrics.speculative_decoding.num_draft_tokens == 0
        elif isinstance(inner, type(oracle(params))):
            for output in outputs:
                assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0


@BOTH
def test_what_is_counted_as_drafted_was_verified(make_llm, oracle, params):
    records = []

    class Watch:
        def committed(self, commits):
            records.extend(("commit", c.num_draft_tokens, c.depth) for c in commits)

        def stepped(self, record):
            records.extend(("judged", j.drafted, record.num_draft_rows) for j in record.requests)

        def ended(self, requests):
            return None

    drafter = RecordingDrafter(OwnRows(oracle(params)))
    llm = make_llm(drafter, 10)
    llm.engine.observers.append(Watch())
    (output,) = llm.generate([PROMPTS[0]], params)
    nodes = [sum(draft.verify or ()) for draft in drafter.drafts]
    rows = [len(draft.tokens) for draft in drafter.drafts]
    assert (max(nodes), max(rows)) == (4, 10)
    counts = output.metrics.speculative_decoding
    assert counts.num_draft_tokens == sum(nodes)
    assert counts.num_accepted_draft_tokens == sum(r.num_accepted for r in drafter.results)
    # The last step was not asked for any.
    told = {kind: [(n, m) for what, n, m in records if what == kind] for kind in KINDS}
    assert told["commit"] == [*zip(nodes, nodes, strict=True), (0, 0)]  # deep as a chain
    assert told["judged"] == [*zip(nodes, rows, strict=True), (0, 0)]


@BOTH
@pytest.mark.parametrize("chunk", [None, 3])
def test_each_row_is_told_by_the_drafters_own_number(make_llm, oracle, params, chunk):
    """With its place, its top ids, and those that the target has after its own ancestors."""
    known = oracle(params)
    tree = TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known)
    for inner in (known, tree):
        drafter = RecordingDrafter(OwnRows(inner))
        outputs = make_llm(drafter, 14, prefill_chunk_size=chunk).generate(PROMPTS, params)
        whole = {o.request_id: [*o.prompt_token_ids, *o.token_ids] for o in outputs}
        asked = zip(drafter.requests, drafter.drafts, strict=True)
        drafts = {(request.id, len(request.tokens)): draft for request, draft in asked}
        seen = 0
        for result in drafter.results:
            root = max(row.position for row in result.rows if row.node < 0)
            draft = drafts.get((result.id, root + 1), Draft())
            rows = [row for row in result.rows if row.node >= 0]
            assert [row.node for row in rows] == list(range(len(draft.tokens)))
            depths: list[int] = []
            for row, token, parent in zip(rows, draft.tokens, draft.parents, strict=True):
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
                assert (row.token, row.position) == (token, root + depths[-1])
                assert len(row.top_ids) == TOPS
                assert not row.committed or draft.verify[row.node]
                if (
                    row.node + 1 < len(rows)
                    and draft.verify[row.node + 1]
                    and not (draft.verify[row.node])
                ):  # the row before a node is its twin: it saw the same
                    assert list(row.top_ids) == list(rows[row.node + 1].top_ids)
                    seen += 1
            for row in rows:
                if row.committed:
                    assert whole[result.id][row.position] == row.token
        assert seen > 10


@pytest.mark.parametrize(
    ("inner", "rule"),
    [
        (SkewedDrafter(skewed_law), "standard"),
        (SkewedDrafter(skewed_law), "block"),
        (SkewedTreeDrafter(skewed_law, TREE), "standard"),
    ],
    ids=["chain", "block", "tree"],
)
def test_the_law_is_the_targets(small, inner, rule):
    llm = speculating(small, OwnRows(inner, below=1), rule, width=7)
    long = replace(SAMPLED, max_tokens=8)  # so that there is room for rows
    observed = [0] * VOCAB**LENGTH
    drafted = 0
    for output in llm.generate([PROMPT] * 600, long):
        drafted += output.metrics.speculative_decoding.num_draft_tokens
        tokens = output.token_ids[:LENGTH]
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(tokens)))] += 1
    assert drafted > 500
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3


def test_a_lossy_rule_takes_no_own_row(make_llm):
    """`synthetic` accepts anything: of a draft without drafts, nothing."""
    config = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4}
    llm = LLM(
        make_llm().loaded,
        drafter=OwnRows(EmptyDrafter()),
        speculative_config={"num_speculative_tokens": 6, **config},
    )
    for output in llm.generate(PROMPTS, GREEDY):
        assert set(output.origins) <= {"plain", "bonus"}


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        ([True], "verify must be 2 times True or False"),
        ([1, 0], "verify must be 2 times True or False, one a node, got .1, 0."),
        ([False, True], "node 1 is to be verified, but its parent 0 is not"),
        ([None, None], "verify must be 2 times"),
        (5, "can't be read: TypeError"),
    ],
)
def test_what_is_no_choice_of_rows_is_named(make_llm, verify, message):
    llm = make_llm(fixed(Draft((1, 2), (-1, 0), verify=verify)), 3)
    with pytest.raises(DrafterError, match=message):
        llm.generate([PROMPTS[0]], GREEDY)
    assert llm.engine.pool.num_used == 0


def test_own_rows_are_no_siblings_and_need_no_law(make_llm, plain):
    """A chain between own rows needs no capability for trees; two drafts of one parent do."""
    rows = Draft((1, 2, 3), (-1, -1, -1), verify=[False, True, False])

    class Rows(EmptyDrafter):
        def draft(self, request):
            return rows if request.max_nodes >= 3 else Draft()

    (output,) = make_llm(Rows(), 3).generate([PROMPTS[0]], GREEDY)
    assert list(output.token_ids) == plain(GREEDY)[0]
    assert output.metrics.speculative_decoding.num_draft_tokens > 10
    twins = Draft((1, 2, 3), (-1, -1, -1), verify=[True, True, False])
    with pytest.raises(DrafterError, match="tree=False"):
        make_llm(fixed(twins, tree=False), 3).generate([PROMPTS[0]], GREEDY)
