"""The n-gram table in the engine: it changes nothing, and forgets what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import RequestOptions, SamplingParams
from foredraft.drafters.ngram_table import NgramTableDrafter
from foredraft.testing.models import tiny_model
from foredraft.testing.ngram_tables import small_table

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_law import PROMPT, VOCAB, chi_square, enumerate_law, sampled
from .test_preemption import gib, watch_preemptions
from .test_rules import SAMPLED, speculating

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
SHAPES = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


class CheckedTable(NgramTableDrafter):
    """Checks itself after every step."""

    def observe(self, results) -> None:
        super().observe(results)
        self.check_integrity()

    def release(self, request_id) -> None:
        super().release(request_id)
        self.check_integrity()


@pytest.fixture
def make_drafter(target, plain, tmp_path: Path):
    """A table of some of what the target says, so that drafts are right now and then."""
    texts = [[*p, *out] for p, out in zip(PROMPTS, plain(GREEDY), strict=True)]
    small_table(tmp_path / "t.ngrams", texts[::2], target.config.vocab_size, plain=True)
    return lambda **options: CheckedTable(
        target, str(tmp_path / "t.ngrams"), **{"ngram_table_min_token_prob": 0.0} | options
    )


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


@BOTH
@SHAPES
@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_table_changes_nothing(make_llm, make_drafter, plain, params, tree, width):
    drafter = make_drafter(ngram_table_tree=tree)
    llm = make_llm(drafter, width)
    for _ in range(2):  # the second time with what was learned
        assert ids(llm.generate(PROMPTS, params)) == plain(params)
    assert not drafter._states


def test_what_the_target_tends_to_say_is_accepted(make_llm, make_drafter, plain):
    llm = make_llm(make_drafter(ngram_table_learn=False), 4)
    first = llm.generate([PROMPTS[0]], GREEDY)[0]
    assert list(first.token_ids) == plain(GREEDY)[0]
    assert first.metrics.speculative_decoding.mean_acceptance_length > 2.0


@BOTH
@SHAPES
def test_a_small_pool_and_mixed_steps_change_nothing(
    make_llm, make_drafter, plain, target, params, tree
):
    drafter = make_drafter(ngram_table_tree=tree, ngram_table_max_learned_tokens=70)
    llm = make_llm(drafter, 6, kv_cache_gib=gib(14, target), prefill_chunk_size=3)
    preempted = watch_preemptions(llm)
    assert ids(llm.generate(PROMPTS * 3, params)) == plain(params) * 3
    assert preempted
    assert not drafter._states
    assert drafter.learned.num_tokens <= 70


@SHAPES
def test_penalties_and_stops_change_nothing(make_llm, make_drafter, plain, tree):
    params = SamplingParams(
        temperature=0.8, seed=4, max_tokens=24, min_tokens=6, ignore_eos=False,
        presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2, stop_token_ids=[5, 9],
        logit_bias={3: 2.0}, top_p=0.9,
    )  # fmt: skip
    llm = make_llm(make_drafter(ngram_table_tree=tree), 5)
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, params)) == plain(params)


@pytest.mark.parametrize(
    ("rule", "tree"), [("standard", False), ("standard", True), ("block", False)]
)
def test_sampled_sequences_follow_the_enumerated_law(tmp_path, rule, tree):
    small = tiny_model(seed=3, vocab_size=VOCAB)
    texts = [[*PROMPT, *[(7 * i + i * i) % VOCAB for i in range(20)]]]
    small_table(tmp_path / "t.ngrams", texts, VOCAB)
    options = {"ngram_table_tree": tree, "ngram_table_min_token_prob": 0.0}
    drafter = NgramTableDrafter(small, str(tmp_path / "t.ngrams"), **options)
    observed, drafted = sampled(speculating(small, drafter, rule, 2), 2500, SAMPLED)
    assert drafted > 2500
    assert chi_square(observed, enumerate_law(small, SAMPLED.temperature)) >= 1e-3


def test_tenants_are_not_mixed(make_llm, make_drafter):
    """A salt's request never sees what another salt's was told."""
    llm = make_llm(make_drafter(), 8)

    def steps(salt: str) -> int:
        options = RequestOptions(cache_salt=salt)
        return llm.generate([PROMPTS[3]], SEEDED, options=options)[0].metrics.num_steps

    alone = steps("a")
    assert steps("b") == alone
    assert steps("") == alone
    assert steps("a") < alone
    assert steps("b") < alone


def test_an_aborted_request_leaves_no_state(make_llm, make_drafter):
    drafter = make_drafter()
    llm = make_llm(drafter, 3)
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(4):
        next(stream)
    stream.close()
    assert not drafter._states
    assert drafter.learned.num_responses == 1
