"""EAGLE-3 beside its target: identity, and drafts that are those of the head's module in torch,
computed anew on the committed text, whatever happened on the way there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from foredraft import LLM, ConfigError
from foredraft.core.errors import ModelError
from foredraft.drafters.combined import CombinedDrafter
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.interface import MOST_UNREAD
from foredraft.models.decoder import cache_shape
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.eagle3_checkpoint import save_eagle3
from foredraft.models.load import load_model
from foredraft.planning.policy import StaticPolicy
from foredraft.testing.drafters import RecordingDrafter
from foredraft.testing.models import tiny_model, write_tiny_checkpoint

from .conftest import GREEDY, PROMPTS, SEEDED
from .eagle_rig import LAYERS, check_law, eagle_llm, features_of, new_head, reference_draft, trained
from .pair_rig import ids
from .test_law import VOCAB

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
TREES = {
    "chain": {},
    "the likeliest": {"draft_sample_method": "greedy"},
    "top_k": {"draft_tree": "top_k"},
    "sampled": {"draft_tree": "sampled"},
}
KIND = pytest.mark.parametrize("kind", TREES)
PAGE = 4


@pytest.fixture
def alone(plain, known_outputs):
    """Plain decoding of the rig's target, which is that of `plain` too."""
    return plain


def recorded(width=4, **options) -> tuple[LLM, RecordingDrafter]:
    target, head = trained()
    drafter = RecordingDrafter(EagleDrafter(target, head))
    return eagle_llm(width, drafter=drafter, **options), drafter


def check_drafts(drafter: RecordingDrafter, least: int = 1) -> None:
    """Every greedy chain is what the module drafts behind the text as it then was."""
    target, head = trained()
    checked = 0
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        if draft.tokens:
            want = reference_draft(target, head, list(request.tokens), len(draft.tokens))
            assert list(draft.tokens) == want
            checked += 1
    assert checked >= least


def check_empty(llm: LLM) -> None:
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    drafter = llm.drafter.inner if isinstance(llm.drafter, RecordingDrafter) else llm.drafter
    assert not drafter._told


@BOTH
@KIND
@pytest.mark.parametrize("width", [2, 6])
def test_it_changes_nothing(alone, params, kind, width):
    llm = eagle_llm(width, **TREES[kind])
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == alone(params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0
    check_empty(llm)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, None])
def test_its_drafts_are_the_modules(chunk):
    """Reported faults 16, 17 and 21: rejected drafts, chunks and long prompts leave no mark."""
    llm, drafter = recorded(prefill_chunk_size=chunk)
    llm.generate(PROMPTS, replace(GREEDY, max_tokens=16))
    check_drafts(drafter, least=15)


@pytest.mark.parametrize("prompt_length", range(1, 10))
@pytest.mark.parametrize("chunk", [1, 4])
def test_prompts_of_every_length_around_page_and_chunk_borders(alone, prompt_length, chunk):
    prompts = [[(5 * i + shift) % 31 for i in range(prompt_length)] for shift in (0, 9)]
    short = replace(GREEDY, max_tokens=8)
    llm, drafter = recorded(3, prefill_chunk_size=chunk)
    assert ids(llm.generate(prompts, short)) == alone(short, prompts)
    check_drafts(drafter, least=4)
    check_empty(llm)


@dataclass
class Widths(StaticPolicy):
    """Widths by the request's own steps; the last goes on."""

    script: Sequence[int]

    def widths(self, load, requests):
        return [self.script[min(each.counts.num_steps, len(self.script) - 1)] for each in requests]


@pytest.mark.parametrize("script", [[0, 0, 0, 4], [3, 0, 0, 5, 0, 1, 4], [0] * 9 + [2]], ids=str)
def test_it_catches_up_when_it_is_asked_again(alone, script):
    llm, drafter = recorded()
    llm.engine.scheduler.policy = Widths(script)
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone(GREEDY)
    check_drafts(drafter, least=5)
    check_empty(llm)


def test_what_it_has_not_read_stays_bounded_where_it_does_not_draft(alone):
    """With width 0 it reads what it was told once in a while, and drafts as ever after."""
    llm, drafter = recorded(prefill_chunk_size=16)
    long = replace(GREEDY, max_tokens=100)
    llm.engine.scheduler.policy = Widths([0] * 90 + [4])
    (request,) = llm._make(PROMPTS[4] * 3, long).requests
    llm.engine.add(request)
    most = 0
    while not request.finished:
        llm.engine.step()
        for told in drafter.inner._told.values():
            most = max(most, sum(map(len, told.parts)))
    assert list(request.output(4).token_ids) == alone(long, [PROMPTS[4] * 3])[0]
    assert most <= 2 * (MOST_UNREAD + 16)
    assert len(drafter.requests) < 40
    check_drafts(drafter, least=2)


@pytest.mark.parametrize("pages", [10, 16])
@BOTH
def test_it_is_preempted_with_its_target(alone, params, pages):
    target, head = trained()
    shapes = cache_shape(target.config, target.cache_dtype), EagleDrafter(target, head).head
    bytes_per_page = PAGE * sum(
        each.bytes_per_position for each in (shapes[0], shapes[1].cache_shape)
    )
    llm, drafter = recorded(kv_cache_gib=pages * bytes_per_page / 2**30, prefill_chunk_size=5)
    assert llm.config.num_pages == pages
    outputs = llm.generate([PROMPTS[i % 5] for i in range(10)], params)
    assert ids(outputs) == [alone(params)[i % 5] for i in range(10)]
    assert llm.engine.scheduler.num_preemptions > 0
    if params is GREEDY:
        check_drafts(drafter, least=30)
    check_empty(llm)


def test_a_prefix_is_as_long_as_what_the_head_has_of_it():
    llm, drafter = recorded(3, prefill_chunk_size=4)
    short = replace(GREEDY, max_tokens=6)
    prompt = PROMPTS[4]  # 13 tokens: 3 pages, and one more
    (first,) = llm.generate([prompt], short)
    (again,) = llm.generate([prompt], short)
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens == 12
    # What follows the third page is another token: its last slot was filled for the first.
    (other,) = llm.generate([[*prompt[:12], 30, 2]], short)
    assert other.num_cached_tokens == 8
    # Within a page everything before that page is shared.
    (within,) = llm.generate([[*prompt[:10], 30, 2]], short)
    assert within.num_cached_tokens == 8
    check_drafts(drafter, least=6)


def test_without_drafts_a_prefix_is_the_targets():
    from foredraft import RequestOptions

    llm, _ = recorded(3)
    short = replace(GREEDY, max_tokens=2)
    llm.generate([PROMPTS[4]], short)
    other = [*PROMPTS[4][:12], 30, 2]
    (output,) = llm.generate([other], short, [RequestOptions(speculate=False)])
    assert output.num_cached_tokens == 12


@pytest.mark.parametrize("chunk", [4, None])
def test_prompts_that_begin_alike_share_what_one_has_read(alone, chunk):
    common = [(7 * i) % 31 for i in range(21)]
    prompts = [[*common, last] for last in (3, 9, 12, 20)]
    llm, drafter = recorded(3, prefill_chunk_size=chunk)
    short = replace(GREEDY, max_tokens=8)
    outputs = llm.generate(prompts, short)
    assert ids(outputs) == alone(short, prompts)
    check_drafts(drafter, least=8)


@pytest.mark.parametrize("chunk", [3, None])
def test_completions_of_one_prompt_share_it(chunk):
    target, _ = trained()
    three = replace(SEEDED, n=3, max_tokens=10)
    llm, drafter = recorded(3, prefill_chunk_size=chunk)
    (output,) = llm.generate([PROMPTS[4]], three)
    (want,) = LLM(target, seed=5).generate([PROMPTS[4]], three)
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in want.outputs]
    started = {r.id: r.num_cached for r in reversed(drafter.requests)}
    assert sorted(started.values())[1:] == [12, 12]
    check_empty(llm)


def slots(llm, request, count):
    cache = llm.engine.draft_cache
    at = torch.arange(count)
    pages = torch.tensor(request.pages)[at // PAGE]
    return torch.stack([each[:, pages, :, at % PAGE] for each in (cache.keys.mT, cache.values)])


@pytest.mark.parametrize("kind", ["chain", "top_k"])
def test_its_cache_is_what_a_fresh_prompt_leaves(kind):
    """Reported fault 16: nothing of the head's own guesses stays behind a step."""
    llm = eagle_llm(4, prefill_chunk_size=3, **TREES[kind])
    (request,) = llm._make(PROMPTS[4], GREEDY).requests
    llm.engine.add(request)
    while request.num_output < 12:
        llm.engine.step()
    count = request.num_draft_cached
    assert count >= request.num_prompt + 6
    fresh = eagle_llm(4)
    (other,) = fresh._make(request.tokens[: count + 1], GREEDY).requests
    fresh.engine.add(other)
    while other.num_draft_cached < count:
        fresh.engine.step()
    found, want = slots(llm, request, count), slots(fresh, other, count)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10)


def test_served_acceptance_is_what_the_module_has_offline(alone):
    """Reported fault 74: position by position, on the same texts."""
    target, head = trained()
    llm, drafter = recorded(3)
    outputs = llm.generate(PROMPTS, GREEDY)
    tried, right = [0] * 3, [0] * 3
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        text = list(request.tokens)
        (whole,) = [
            [*o.prompt_token_ids, *o.token_ids]
            for o in outputs
            if [*o.prompt_token_ids, *o.token_ids][: len(text)] == text
        ]
        want = reference_draft(target, head, text, len(draft.tokens)) if draft.tokens else []
        for i, token in enumerate(want):
            tried[i] += 1
            if whole[len(text) + i] != token:
                break
            right[i] += 1
    served = [0] * 3
    for output in outputs:
        accepted = output.metrics.speculative_decoding.acceptance_histogram
        served = [served[i] + sum(accepted[i + 1 :]) for i in range(3)]
    assert served == right
    assert min(right) > 0


@pytest.mark.parametrize(
    ("kind", "rule"), [*((kind, "standard") for kind in TREES), ("sampled", "coupled")]
)
def test_sampled_sequences_follow_the_enumerated_law(kind, rule):
    small = tiny_model(seed=3, vocab_size=VOCAB)
    head = new_head(small, range(1, VOCAB), seed=8)
    llm = eagle_llm(2, (small, head), max_num_seqs=128, max_num_batched_tokens=512, page_size=8,
                    rule=rule, **TREES[kind])  # fmt: skip
    check_law(llm, small)


def test_stated_laws_are_those_that_tokens_were_drawn_from():
    """Of the reduced vocabulary alone, and of what the request's processors leave of it."""
    target, head = trained()
    drafter = RecordingDrafter(EagleDrafter(target, head))
    params = replace(SEEDED, temperature=0.7, top_k=5, max_tokens=12)
    eagle_llm(3, drafter=drafter, rule="standard").generate(PROMPTS, params)
    never = set(range(32)) - set(head.draft_ids.tolist())
    drawn = [d for d in drafter.drafts if d.probs is not None]
    assert len(drawn) > 10
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        if draft.probs is None:
            continue
        tokens = list(request.tokens)
        hidden = head.fuse(features_of(target, tokens[:-1], LAYERS))[None]
        read = head.embed(torch.tensor([tokens[1:]]))
        out = head(read, hidden, torch.arange(len(tokens) - 1))
        logits = head.logits(out[:, -1])[0] / 0.7
        logits[logits < logits.topk(5).values[-1]] = -torch.inf
        want = torch.zeros(32, dtype=torch.float64)
        want[head.draft_ids] = logits.softmax(0)
        torch.testing.assert_close(draft.probs[0], want, rtol=0, atol=1e-6)
        assert float(draft.probs[:, sorted(never)].sum()) == 0.0


def test_a_failing_pass_of_the_target_leaves_no_trace(alone, monkeypatch):
    llm, drafter = recorded()
    target, _ = trained()
    calls, run = [0], type(target.model).run

    def failing(model, batch, cache):
        calls[0] += 1
        if calls[0] in (3, 4, 9):
            raise RuntimeError("as scripted")
        return run(model, batch, cache)

    monkeypatch.setattr(type(target.model), "run", failing)
    groups = [llm._make(prompt, GREEDY) for prompt in PROMPTS]
    for group in groups:
        llm._add(group)
    failures = 0
    while not all(group.finished for group in groups):
        try:
            llm.engine.step()
        except RuntimeError:
            failures += 1
    monkeypatch.undo()
    assert failures == 3
    assert [list(g.output(4).token_ids) for g in groups] == alone(GREEDY)
    check_drafts(drafter, least=15)


def test_it_drafts_beside_others(alone):
    target, head = trained()
    for choice in ("best", "merge"):
        eagle = {"method": "eagle3", "model": head, "draft_sample_method": "greedy"}
        members = [{"method": "ngram"}, eagle]
        drafter = CombinedDrafter(target, members, combine=choice)
        llm = eagle_llm(4, drafter=drafter, prefill_chunk_size=4)
        assert ids(llm.generate(PROMPTS, GREEDY)) == alone(GREEDY)


def test_a_context_longer_than_its_positions_gets_no_drafts(alone):
    target, head = trained()
    short = Eagle3(replace(head.config, max_position_embeddings=16), head.draft_ids,
                   target.model.embed(torch.arange(32))).double()  # fmt: skip
    short.load_state_dict(head.state_dict())
    drafter = RecordingDrafter(EagleDrafter(target, short))
    outputs = eagle_llm(4, drafter=drafter).generate(PROMPTS, GREEDY)
    assert ids(outputs) == alone(GREEDY)
    drafted = [len(r.tokens) for r, d in zip(drafter.requests, drafter.drafts, strict=True)
               if d.tokens]  # fmt: skip
    assert max(drafted) <= 16


def test_a_head_is_loaded_by_its_directory_and_belongs_to_its_target(tmp_path):
    write_tiny_checkpoint(tmp_path / "target", seed=4, vocab_size=32)
    target = load_model(tmp_path / "target", kernels="reference", dtype="float64")
    own = fingerprint(tmp_path / "target")
    head = new_head(target, range(2, 32), target_sha256=own)
    save_eagle3(head, tmp_path / "head", torch.float32)
    config = {"method": "eagle3", "model": str(tmp_path / "head")}
    llm = LLM(target, speculative_config=config, page_size=PAGE)
    want = ids(LLM(target).generate(PROMPTS, GREEDY))
    assert ids(llm.generate(PROMPTS, GREEDY)) == want
    save_eagle3(new_head(target, range(2, 32), target_sha256="0" * 64), tmp_path / "other")
    for other, message in (
        (tmp_path / "other", "another target: one with the checksum 000000000000"),
        (tmp_path / "target", "architectures is"),
    ):
        with pytest.raises(ModelError, match=message):
            LLM(target, speculative_config=config | {"model": str(other)})
    wide = tiny_model(seed=1, vocab_size=32, hidden_size=64)
    with pytest.raises(ModelError, match="hidden_size is 32, this target's 64"):
        EagleDrafter(wide, head)
    with pytest.raises(ModelError, match="feature layer 9"):
        EagleDrafter(target, new_head(target, range(32), feature_layers=(0, 1, 9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_sample_method": "best"}, "draft_sample_method"),
        ({"draft_tree": "bush"}, "draft_tree"),
        ({"model": "x", "bogus": 1}, "bogus"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    target, head = trained()
    config = {"method": "eagle3", "model": head} | options
    with pytest.raises(ConfigError, match=message):
        LLM(target, speculative_config=config)
