"""Structured output under speculation: masks at every row, along every branch, and what is cut."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from foredraft import (
    LLM,
    AsyncEngine,
    InvalidRequest,
    RequestOptions,
    SamplingParams,
    StructuredOutputs,
)
from foredraft.drafters.cascade import CascadeDrafter
from foredraft.drafters.combined import CombinedDrafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.grammar import GrammarDrafter
from foredraft.drafters.interface import Drafter
from foredraft.drafters.lookahead import LookaheadDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.submission import RequestFactory
from foredraft.models.load import LoadedModel
from foredraft.testing import (
    LiarDrafter,
    OracleDrafter,
    RecordingDrafter,
    RepeatDrafter,
    SkewedDrafter,
    TreeDrafter,
)
from foredraft.testing.models import EOS_ID

from .conftest import PROMPTS
from .eagle_rig import new_head
from .test_boundaries import check_counts, same
from .test_medusa import new_heads
from .test_preemption import gib, watch_preemptions

PROMPT = PROMPTS[1]
PATTERN = r"(ab|ba)(c|d)*,[xyz]{3,6}\.(foo|bar)(q|r)?"
REGEX = StructuredOutputs(regex=PATTERN)
LARK = StructuredOutputs(grammar='start: pair ("," pair)*\npair: WORD "." WORD\nWORD: /[a-e]{2,4}/')
CHOICE = StructuredOutputs(choice=["abc", "abd", "abcde", "xyz"])
GREEDY = SamplingParams(temperature=0, max_tokens=24, structured_outputs=REGEX)
SEEDED = replace(GREEDY, temperature=0.9, seed=11)
DRAFTERS: dict[str, Callable[[LoadedModel], Drafter]] = {
    "draft model": lambda target: DraftModelDrafter(target, target),
    "drawn tree": lambda target: DraftModelDrafter(target, target, draft_tree="sampled"),
    "likeliest tree": lambda target: DraftModelDrafter(target, target, draft_tree="top_k"),
    "early exit": EarlyExitDrafter,
    "eagle": lambda target: EagleDrafter(target, new_head(target, range(1, 32))),
    "eagle tree": lambda target: EagleDrafter(
        target, new_head(target, range(1, 32)), draft_tree="top_k"
    ),
    "medusa": lambda target: MedusaDrafter(new_heads(target), target),
    "cascade": lambda target: CascadeDrafter(target, RepeatDrafter(3), target),
    "combined": CombinedDrafter,
    "merged": lambda target: CombinedDrafter(target, combine="merge"),
    "lookahead": lambda target: LookaheadDrafter(),
    "ngram": lambda target: NgramDrafter(),
}
STRUCTURES = {"regex": REGEX, "lark": LARK, "choice": CHOICE}


def known(make_llm, params: SamplingParams) -> OracleDrafter:
    outputs = [make_llm().generate([p], params)[0].token_ids for p in PROMPTS]
    return OracleDrafter({tuple(p): list(o) for p, o in zip(PROMPTS, outputs, strict=True)})


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_output_is_plain_decodings_whatever_was_drafted(make_llm, params, structure):
    """Fault 47: an oracle, a liar, and a tree of both."""
    params = replace(params, structured_outputs=STRUCTURES[structure])
    want = [make_llm().generate([p], params)[0] for p in PROMPTS]
    oracle = known(make_llm, params)
    for drafter in (oracle, LiarDrafter(oracle), TreeDrafter(RepeatDrafter(3), oracle)):
        for width in (1, 4, 7):
            got = make_llm(drafter, width).generate(PROMPTS, params)
            assert all(same(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("params", [GREEDY, SEEDED, replace(SEEDED, seed=None)])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_keep_to_the_grammar_under_every_drafter(make_llm, target, params, kind):
    got = make_llm(DRAFTERS[kind](target)).generate(PROMPTS, params)
    for output in got:
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            assert re.fullmatch(PATTERN, output.text)
        check_counts(output)
    if params.seed is not None or params.temperature == 0:
        want = make_llm().generate(PROMPTS, params)
        assert [o.text for o in got] == [o.text for o in want]


def test_a_drafter_within_the_grammar_is_always_right(make_llm, target):
    """Fault 50: masks go to the drafter too. The target drafts for itself."""
    params = replace(GREEDY, temperature=1.0)
    for output in make_llm(DraftModelDrafter(target, target)).generate(PROMPTS, params):
        metrics = output.metrics.speculative_decoding
        assert metrics.num_accepted_draft_tokens >= metrics.num_draft_tokens - 4  # cut by the end


def test_a_grammar_that_ends_inside_a_window_ends_the_answer(make_llm):
    """Fault 49: the answer is over where nothing can follow, at every offset of a window."""
    params = replace(GREEDY, structured_outputs=StructuredOutputs(regex="[a-z]{5}"))
    want = make_llm().generate([PROMPT], params)[0]
    assert (len(want.token_ids), want.finish_reason) == (5, "stop")
    for width in range(1, 9):
        drafter = OracleDrafter({tuple(PROMPT): [*want.token_ids, 5, 5, 5, 5, 5]})
        got = make_llm(drafter, width).generate([PROMPT], params)[0]
        assert same(got, want)
        check_counts(got)


def test_the_end_of_the_grammar_wins_over_the_length(make_llm):
    params = replace(GREEDY, max_tokens=5, structured_outputs=StructuredOutputs(regex="[a-z]{5}"))
    assert make_llm().generate([PROMPT], params)[0].finish_reason == "stop"
    cut = make_llm().generate([PROMPT], replace(params, max_tokens=4))[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 4)


def test_eos_comes_only_where_the_answer_may_be_over(make_llm):
    """Bias makes EOS the likeliest token: it comes at the first place that allows it."""
    params = replace(
        GREEDY,
        logit_bias={EOS_ID: 100.0},
        structured_outputs=StructuredOutputs(regex="[a-c]{3}[d-f]*"),
    )
    for drafter in (None, known(make_llm, params)):
        got = make_llm(drafter, 6).generate([PROMPT], params)[0]
        assert len(got.token_ids) == 4
        assert got.token_ids[-1] == EOS_ID
        assert got.finish_reason == "stop"


def test_without_eos_an_answer_goes_on_as_far_as_its_grammar(make_llm):
    params = replace(
        GREEDY,
        ignore_eos=True,
        logit_bias={EOS_ID: 100.0},
        structured_outputs=StructuredOutputs(regex="[a-c]{3}[d-f]{0,9}"),
    )
    got = make_llm().generate([PROMPT], params)[0]
    assert EOS_ID not in got.token_ids
    assert (len(got.token_ids), got.finish_reason) == (12, "stop")


def test_a_stop_id_comes_only_where_the_answer_may_be_over(make_llm):
    stop = 8  # an "f"
    params = replace(
        GREEDY,
        stop_token_ids=[stop],
        logit_bias={stop: 100.0},
        structured_outputs=StructuredOutputs(regex="[a-g]{4}[x-z]*"),
    )
    for drafter in (None, known(make_llm, params)):
        got = make_llm(drafter, 6).generate([PROMPT], params)[0]
        assert len(got.token_ids) == 5
        assert got.token_ids.index(stop) == 4
        assert got.outputs[0].stop_reason == stop


@pytest.mark.parametrize("width", [0, 6])
def test_no_token_left_ends_that_request_alone(make_llm, width):
    """min_tokens and banned ids combine with the mask; the neighbour goes on."""
    grammar = StructuredOutputs(regex="[a-c]{3}")
    wants = [
        replace(GREEDY, structured_outputs=grammar, min_tokens=5),
        replace(GREEDY, structured_outputs=grammar, banned_token_ids=[3, 4, 5]),
        GREEDY,
    ]
    drafter = RepeatDrafter(4) if width else None
    got = make_llm(drafter, width).generate([PROMPT] * 3, wants)
    assert [o.finish_reason for o in got] == ["error", "error", "length"]
    assert [len(o.token_ids) for o in got[:2]] == [3, 0]
    for output in got[:2]:
        assert "no token is left" in output.outputs[0].error
        assert "the grammar" in output.outputs[0].error


def test_min_tokens_hold_the_end_back(make_llm):
    params = replace(
        GREEDY,
        min_tokens=7,
        logit_bias={EOS_ID: 100.0},
        structured_outputs=StructuredOutputs(regex="[a-c]+"),
    )
    for drafter in (None, known(make_llm, params)):
        got = make_llm(drafter, 5).generate([PROMPT], params)[0]
        assert got.token_ids.index(EOS_ID) == 7


def test_penalties_and_the_mask_in_every_row(make_llm):
    params = replace(
        SEEDED,
        repetition_penalty=1.6,
        frequency_penalty=0.9,
        structured_outputs=StructuredOutputs(regex="[a-e]{12,16}"),
    )
    want = make_llm().generate(PROMPTS, params)
    got = make_llm(known(make_llm, params), 5).generate(PROMPTS, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]


def test_completions_of_one_prompt_go_their_own_ways(make_llm):
    params = replace(SEEDED, n=3)
    want = make_llm().generate([PROMPT], params)[0]
    got = make_llm(RepeatDrafter(3), 4).generate([PROMPT], params)[0]
    assert [o.text for o in got.outputs] == [o.text for o in want.outputs]
    assert len({o.text for o in got.outputs}) > 1
    assert all(re.fullmatch(PATTERN, o.text) for o in got.outputs if o.finish_reason == "stop")


def test_preempted_requests_go_on_where_their_grammar_was(make_llm, target):
    """Fault 22: pages for about one request and a half."""
    params = replace(SEEDED, structured_outputs=StructuredOutputs(regex="[a-z]{20,24}[.]"))
    want = [make_llm().generate([p], params)[0] for p in PROMPTS]
    llm = make_llm(known(make_llm, params), 4, kv_cache_gib=gib(14, target))
    preempted = watch_preemptions(llm)
    got = llm.generate(PROMPTS, params)
    assert preempted
    assert all(same(*pair) for pair in zip(got, want, strict=True))


def test_forced_tokens_are_drafted_for_nothing(make_llm, target):
    """By themselves, and before what another drafter has; never where it is not to speculate."""
    text = "abcdefghijklmnopq"
    params = replace(GREEDY, structured_outputs=StructuredOutputs(regex=f"{text}[xyz]{{2}}"))
    want = make_llm().generate([PROMPT], params)[0]
    for drafter in (
        GrammarDrafter(),
        CombinedDrafter(target, [{"method": "grammar"}]),
        RepeatDrafter(9),
        LiarDrafter(OracleDrafter({tuple(PROMPT): list(want.token_ids)})),
    ):
        got = make_llm(drafter, 8).generate([PROMPT], params)[0]
        assert same(got, want)
        metrics = got.metrics.speculative_decoding
        # 19 tokens: eight forced and one more, then the same again, then what is left.
        assert got.metrics.num_steps + 1 <= 4
        assert metrics.num_accepted_draft_tokens >= 15
    plain = RequestOptions(speculate=False)
    got = make_llm(RepeatDrafter(9), 8).generate([PROMPT], params, plain)[0]
    assert got.metrics.speculative_decoding.num_draft_tokens == 0


def test_what_the_grammar_forbids_is_not_verified(make_llm):
    """A drafter that always says "a" is asked, and nothing of it reaches the target."""
    params = replace(GREEDY, structured_outputs=StructuredOutputs(regex="[x-z]{12}"))
    got = make_llm(RepeatDrafter(3), 4).generate([PROMPT], params)[0]
    assert got.metrics.speculative_decoding.num_draft_tokens == 0


def test_drafters_are_shown_where_the_answer_stands(make_llm):
    seen = RecordingDrafter(RepeatDrafter(3))
    make_llm(seen, 3).generate([PROMPT], replace(GREEDY, structured_outputs=CHOICE))
    assert seen.requests
    for request in seen.requests:
        if request.max_nodes:
            assert request.matcher is not None
            assert request.matcher.num_tokens == len(request.tokens) - len(PROMPT)


def test_mixed_batches(make_llm):
    """Requests with and without a grammar share steps and change nothing for each other."""
    params = [GREEDY, replace(GREEDY, structured_outputs=None), SEEDED, GREEDY, SEEDED]
    want = [make_llm().generate([p], q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    got = make_llm(RepeatDrafter(3), 4).generate(PROMPTS, params)
    assert all(same(*pair) for pair in zip(got, want, strict=True))


def test_what_cannot_be_honoured_is_refused(make_llm, target):
    config = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    config = {"num_speculative_tokens": 2, **config}
    llm = LLM(target, drafter=RepeatDrafter(3), speculative_config=config)
    with pytest.raises(InvalidRequest, match="structured_outputs can't be honoured"):
        llm.generate([PROMPT], GREEDY)
    with pytest.raises(InvalidRequest, match="at character 2 of the expression: unclosed"):
        make_llm().generate(
            [PROMPT], replace(GREEDY, structured_outputs=StructuredOutputs(regex="a(b"))
        )


def test_drawn_drafts_outside_the_grammar(make_llm):
    """A drafter that knows no grammar draws from its own law: rejected, never dropped."""

    def law(context):
        weights = torch.arange(1, 33, dtype=torch.float64).roll(int(context[-1]))
        return weights / weights.sum()

    for rule in ("standard", "block", "coupled"):
        params = replace(SEEDED, seed=None)
        for output in make_llm(SkewedDrafter(law), 3, rule=rule).generate(PROMPTS, params):
            if output.finish_reason == "stop":
                assert re.fullmatch(PATTERN, output.text)


def test_an_event_loop_does_not_wait_for_a_grammar(target, monkeypatch):
    """`generate` compiles in another thread; what was prepared is there for `stream`."""
    threads: list[str] = []
    grammar = RequestFactory.grammar

    def noted(factory: RequestFactory, params: SamplingParams) -> object:
        threads.append(threading.current_thread().name)
        return grammar(factory, params)

    monkeypatch.setattr(RequestFactory, "grammar", noted)

    async def run() -> str:
        async with AsyncEngine(target, seed=5) as engine:
            bad = replace(GREEDY, structured_outputs=StructuredOutputs(regex="a(b"))
            with pytest.raises(InvalidRequest, match="unclosed group"):
                await engine.prepare(bad)
            return (await engine.generate(PROMPT, GREEDY)).text

    text = asyncio.run(run())
    assert text == LLM(target, seed=5).generate([PROMPT], GREEDY)[0].text
    assert threads[0].startswith("asyncio")
    assert threads[1].startswith("asyncio")
