"""Lookahead in the engine: the target's own output, in fewer steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, ConfigError, SamplingParams
from foredraft.drafters.lookahead import LookaheadDrafter
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import RecordingDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_draft_model import Widths
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law
from .test_rules import SAMPLED, small, speculating
from .test_trees import PROCESSORS

__all__ = ["small"]  # a fixture

BOTH = pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "coupled"])
LONG = replace(GREEDY, max_tokens=100)


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


@BOTH
@pytest.mark.parametrize("named", ["penalties", "truncated"])
@pytest.mark.parametrize(
    "setting",
    [
        {"max_num_seqs": 5, "max_num_batched_tokens": 14, "prefill_chunk_size": 3},
        {"page_size": 1},
        {"pages": 14},
    ],
    ids=["few rows", "single slots", "few pages"],
)
def test_it_changes_nothing(make_llm, plain, target, base, named, setting):
    params = replace(base, **PROCESSORS[named])
    setting = dict(setting)
    if "pages" in setting:
        shape = cache_shape(target.config, target.cache_dtype)
        setting["kv_cache_gib"] = setting.pop("pages") * 4 * shape.bytes_per_position / 2**30
    drafter = LookaheadDrafter(lookahead_window=3, lookahead_ngram=3, lookahead_guesses=2)
    llm = make_llm(drafter, 10, **setting)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    assert llm.engine.pool.num_used == 0
    assert not drafter._states
    if "kv_cache_gib" in setting:
        assert llm.engine.scheduler.num_preemptions > 0


def test_a_text_that_goes_round_takes_half_the_steps(make_llm, plain):
    """Greedy text of a small model repeats itself, and the window sees it coming."""
    outputs = make_llm(LookaheadDrafter(), None).generate(PROMPTS, LONG)
    assert ids(outputs) == plain(LONG)
    for output in outputs:
        counts = output.metrics.speculative_decoding
        assert counts.mean_acceptance_length > 1.5
        assert counts.num_draft_tokens <= 9 * output.metrics.num_steps + 9  # of the guesses alone


@BOTH
@pytest.mark.parametrize("script", [(24, 0, 0, 9), (0, 0, 0, 24), (3, 24, 1, 6)])
def test_widths_that_change_and_vanish_change_nothing(make_llm, plain, base, script):
    llm = make_llm(LookaheadDrafter(), 24)
    llm.engine.scheduler.policy = Widths(script)
    params = replace(base, max_tokens=40)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0


@pytest.mark.parametrize(("guesses", "rule"), [(3, "standard"), (1, "block")])
def test_the_law_is_the_targets(small, guesses, rule):
    drafter = LookaheadDrafter(lookahead_window=2, lookahead_ngram=3, lookahead_guesses=guesses)
    llm: LLM = speculating(small, drafter, rule, width=8)
    prompt = [*PROMPT, 4, 2, *PROMPT]
    params = replace(SAMPLED, max_tokens=9)  # room for a window, and time for it to become guesses
    observed = [0] * VOCAB**LENGTH
    accepted = 0
    for output in llm.generate([prompt] * 400, params):
        accepted += output.metrics.speculative_decoding.num_accepted_draft_tokens
        tail = output.token_ids[:LENGTH]
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(tail)))] += 1
    assert accepted > 50
    assert chi_square(observed, enumerate_law(small, 0.8, prompt=prompt)) >= 1e-3


@pytest.mark.parametrize("prompt_length", [3, 4, 5])
def test_it_runs_to_the_last_position_and_slot(make_llm, prompt_length):
    """Faults 18 and 19: the window takes no slot that was not reserved."""
    prompt = [(3 * i + 1) % 31 for i in range(prompt_length)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    want = make_llm(max_model_len=30).generate([prompt], params)[0]
    for width in (1, 5, 12, 40):
        drafter = LookaheadDrafter(lookahead_window=9)
        got = make_llm(drafter, width, max_model_len=30).generate([prompt], params)[0]
        assert (got.token_ids, got.finish_reason) == (want.token_ids, "length")


def test_several_guesses_are_a_tree_which_block_verification_refuses(small):
    with pytest.raises(ConfigError, match="block"):
        speculating(small, LookaheadDrafter(), "block")


def test_native_rows_beside_the_window_have_the_bits_of_plain_decoding():
    torch.set_num_threads(2)
    model = tiny_model(seed=2, kernels="native", dtype="bfloat16", vocab_size=64)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    rows: dict[str, list[torch.Tensor]] = {}
    for name, drafter in (("plain", None), ("lookahead", LookaheadDrafter())):
        kept = rows.setdefault(name, [])
        LLM(
            model, drafter=drafter, tap=lambda *told, kept=kept: kept.append(told[3].clone())
        ).generate([PROMPTS[1]], params)
    assert len(rows["plain"]) == 40
    assert torch.equal(torch.stack(rows["plain"]), torch.stack(rows["lookahead"]))


def test_rows_of_the_window_are_told_with_the_targets_best_token(make_llm):
    drafter = RecordingDrafter(LookaheadDrafter())
    make_llm(drafter, None).generate(PROMPTS[:2], GREEDY)
    own = [
        row
        for result, draft in zip(
            (r for r in drafter.results if any(row.node >= 0 for row in r.rows)),
            (d for d in drafter.drafts if d.tokens),
            strict=True,
        )
        for row in result.rows
        if row.node >= 0 and draft.verify is not None and not draft.verify[row.node]
    ]
    assert len(own) > 100
    assert all(len(row.top_ids) == 1 and not row.committed for row in own)
