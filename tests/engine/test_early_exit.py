"""The target's first layers as its drafter: the same bits, early layers once, no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.core.errors import ConfigError
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.interface import Capabilities, Draft
from foredraft.engine.drafting import DrafterError
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import cache_shape, new_cache
from foredraft.models.first_layers import FirstLayers
from foredraft.models.interface import FlatBatch, LayerResume
from foredraft.planning.policy import FixedWidth
from foredraft.testing.drafters import (
    FixedDrafter,
    RecordingDrafter,
    RepeatDrafter,
    RoutingDrafter,
    ScriptedDrafter,
    WrappingDrafter,
)
from foredraft.testing.models import assemble, random_weights, tiny_config, tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_draft_model import Widths
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law
from .test_rules import SAMPLED, speculating

LAYERS = 4
FEW_ROWS = {"max_num_seqs": 5, "max_num_batched_tokens": 12}
BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])


@pytest.fixture(scope="module")
def native():
    return tiny_model(seed=2, kernels="native", dtype="bfloat16", vocab_size=32, num_layers=LAYERS)


@pytest.fixture(scope="module")
def exact():
    return tiny_model(seed=2, vocab_size=32, num_layers=LAYERS)


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def alone(target, params, prompts=PROMPTS):
    llm = LLM(target, seed=5)
    return [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]


def early(target, layer=2, width=4, policy=None, **options):
    config = {"num_speculative_tokens": width}
    for key in ("rejection_sample_method", "draft_confidence_threshold"):
        if key in options:
            config[key] = options.pop(key)
    drafter = options.pop("drafter", None) or EarlyExitDrafter(target, exit_layer=layer)
    sizes = {"seed": 5, "page_size": 4} | options
    llm = LLM(target, drafter=drafter, speculative_config=config, **sizes)
    if policy is not None:
        llm.engine.scheduler.policy = policy
    return llm


def gib(target, pages):
    shape = cache_shape(target.config, target.cache_dtype)
    return pages * 4 * shape.bytes_per_position / 2**30


@BOTH
@pytest.mark.parametrize(
    ("kernels", "setting"),
    [
        ("native", {"layer": 1, "prefill_chunk_size": 3} | FEW_ROWS),
        ("exact", {"layer": 3, "prefill_chunk_size": 3} | FEW_ROWS),
        ("native", {"layer": 3, "page_size": 1}),
        ("native", {"pages": 12, "prefill_chunk_size": 5}),
        ("exact", {"pages": 12, "policy": Widths((4, 0, 0, 2)), "max_num_batched_tokens": 16}),
    ],
    ids=["few rows", "few rows, float64", "single slots", "few pages", "widths, few pages"],
)
def test_it_changes_nothing(request, params, kernels, setting):
    deep = request.getfixturevalue(kernels)
    setting = dict(setting)
    if "pages" in setting:
        setting["kv_cache_gib"] = gib(deep, setting.pop("pages"))
    processed = replace(params, repetition_penalty=1.2, logit_bias={4: 1.5}, top_k=12)
    llm = early(deep, **setting)
    outputs = llm.generate(PROMPTS, processed)
    assert ids(outputs) == alone(deep, processed)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0
    assert llm.engine.pool.num_used == 0
    if "kv_cache_gib" in setting:
        assert llm.engine.scheduler.num_preemptions > 0


@BOTH
def test_rows_have_the_bits_of_plain_decoding(native, params):
    """Native kernels: rows computed one by one by the drafter, then together from the exit on."""
    torch.set_num_threads(2)
    told: list[dict] = [{}, {}]
    for rows, drafter in zip(told, (None, EarlyExitDrafter(native, exit_layer=2)), strict=True):
        llm = LLM(
            native,
            drafter=drafter,
            page_size=4,
            prefill_chunk_size=4,
            tap=lambda name, at, _token, row, rows=rows: rows.setdefault((name, at), row.clone()),
        )
        llm.generate(PROMPTS, params)
    assert told[0].keys() == told[1].keys()
    assert all(torch.equal(row, told[1][key]) for key, row in told[0].items())


def test_every_row_passes_the_early_layers_once(exact, monkeypatch):
    """Drafted rows are run by the drafter, all others by the engine; above the exit all once."""
    rows = dict.fromkeys(range(LAYERS), 0)
    decoder = type(exact.model)
    layers = decoder.layers

    def counted(self, lo, hi, hidden, plan, cache):
        for layer in range(lo, hi):
            rows[layer] += hidden.shape[0]
        return layers(self, lo, hi, hidden, plan, cache)

    monkeypatch.setattr(decoder, "layers", counted)
    drafter = RecordingDrafter(EarlyExitDrafter(exact, exit_layer=2))
    outputs = early(exact, drafter=drafter, prefill_chunk_size=3).generate(PROMPTS, GREEDY)
    assert len(set(rows.values())) == 1
    assert rows[0] == sum(len(result.rows) for result in drafter.results)
    assert sum(len(draft.tokens) for draft in drafter.drafts) > 100
    covered = sum(len(draft.resume.hidden) for draft in drafter.drafts)
    assert covered > rows[0] / 2
    assert ids(outputs) == alone(exact, GREEDY)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_law_is_the_targets(rule):
    small = tiny_model(seed=3, vocab_size=VOCAB, num_layers=3)
    llm = speculating(small, EarlyExitDrafter(small, exit_layer=1), rule, width=2)
    observed = [0] * VOCAB**LENGTH
    accepted = 0
    for output in llm.generate([PROMPT] * 600, SAMPLED):
        accepted += output.metrics.speculative_decoding.num_accepted_draft_tokens
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert accepted > 150
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3


def idle_above(layer):
    """A target whose layers from `layer` on add nothing, so that the exit says what it says."""
    config = tiny_config(num_layers=LAYERS, max_positions=640)
    weights = random_weights(config, 4)
    for name, tensor in weights.items():
        above = name.startswith(tuple(f"model.layers.{i}." for i in range(layer, LAYERS)))
        if above and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()
    return assemble(config, weights, "idle", "reference", "float64", "cpu", 1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=128, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=128, ignore_eos=True, seed=3),
        SamplingParams(temperature=0.9, max_tokens=128, ignore_eos=True, frequency_penalty=0.1),
    ],
    ids=["greedy", "coupled", "rejection"],
)
@pytest.mark.parametrize("chunk", [4, None])
def test_an_exit_that_says_what_the_target_says_is_always_right(params, chunk):
    """Faults 15 to 17: one lost position, or one of an abandoned draft, would show."""
    target = idle_above(2)
    llm = early(target, width=5, page_size=16, prefill_chunk_size=chunk)
    prompt = [(3 * i + 1) % 31 for i in range(13)]
    for output in llm.generate([prompt, PROMPTS[2]], params):
        counts = output.metrics.speculative_decoding
        assert len(output.token_ids) == 128
        assert counts.draft_acceptance_rate == 1.0
        assert counts.num_draft_tokens >= 100


def exit_law(target, layer, context, temperature):
    first = FirstLayers(target.model, layer)
    cache = new_cache(target.config, 1, len(context), target.cache_dtype, "cpu")
    batch = FlatBatch(context, [Segment(0, len(context), (), [0])], [len(context) - 1])
    return torch.softmax(first.run(batch, cache).logits[0].double() / temperature, dim=-1)


def test_draft_laws_are_those_of_the_exit_from_scratch(exact):
    """Law 2: whatever was accepted, rejected and read before, in whatever company."""
    drafter = RecordingDrafter(EarlyExitDrafter(exact, exit_layer=2))
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)
    early(exact, drafter=drafter, prefill_chunk_size=4).generate(PROMPTS, params)
    compared = 0
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        context = list(request.tokens)
        for token, law in zip(draft.tokens, draft.probs if draft.tokens else (), strict=True):
            assert torch.allclose(law, exit_law(exact, 2, context, 0.8), atol=1e-9)
            context.append(token)
            compared += 1
    assert compared > 150


def test_a_second_turn_reads_what_drafts_have_left_in_pages(exact):
    """Only verified tokens are published, in all layers."""
    llm = early(exact)
    first = llm.generate(PROMPTS, GREEDY)
    turns = [[*o.prompt_token_ids, *o.token_ids, 30, 29] for o in first]
    second = llm.generate(turns, GREEDY)
    assert llm.engine.scheduler.prefix_hit_tokens > 60
    assert ids(second) == alone(exact, GREEDY, turns)


def test_completions_share_their_prompt(exact):
    params = replace(SEEDED, n=3, max_tokens=12)
    outputs = early(exact).generate(PROMPTS[:2], params)
    plain = LLM(exact, seed=5).generate(PROMPTS[:2], params)
    assert [[list(c.token_ids) for c in o.outputs] for o in outputs] == [
        [list(c.token_ids) for c in o.outputs] for o in plain
    ]


def test_a_step_that_fails_leaves_nothing(exact):
    """Fault 60: the keys and values of an abandoned draft are written over."""

    class Failing(WrappingDrafter):
        calls = 0

        def propose(self, requests):
            drafts = super().propose(requests)
            self.calls += 1
            if self.calls % 2:
                raise RuntimeError("as scripted")
            return drafts

    llm = early(exact, drafter=Failing(EarlyExitDrafter(exact, exit_layer=2)))
    groups = [llm._make(prompt, GREEDY) for prompt in PROMPTS]
    for group in groups:
        llm._add(group)
    failures = 0
    while not all(group.finished for group in groups):
        try:
            llm.engine.step()
        except RuntimeError:
            failures += 1
    assert failures > 5
    assert [list(g.output(3).token_ids) for g in groups] == alone(exact, GREEDY)


@BOTH
def test_one_batch_mixes_exits_with_other_drafts_and_prompts(exact, params):
    exits = EarlyExitDrafter(exact, exit_layer=2)
    others = [RepeatDrafter(3), exits, RepeatDrafter(5), exits, FixedDrafter(Draft())]
    by_prompt = {tuple(p): d for p, d in zip(PROMPTS, others, strict=True)}
    drafter = RoutingDrafter(
        lambda r: by_prompt[tuple(r.tokens[: r.num_prompt_tokens])],
        Capabilities(deterministic=False, target_layers=2),
    )
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 14, "prefill_chunk_size": 4}
    llm = early(exact, drafter=drafter, **sizes)
    assert ids(llm.generate(PROMPTS, params)) == alone(exact, params)


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("prompt_length", [3, 4, 5])
def test_it_drafts_to_the_last_position_and_slot(exact, width, prompt_length):
    """Faults 18 and 19."""
    prompt = [(3 * i + 1) % 31 for i in range(prompt_length)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    want = LLM(exact, max_model_len=30).generate([prompt], params)[0]
    got = early(exact, width=width, max_model_len=30).generate([prompt], params)[0]
    assert (got.token_ids, got.finish_reason) == (want.token_ids, "length")
    assert got.metrics.speculative_decoding.num_draft_tokens > 0


class KeepFew(FixedWidth):
    """Every draft loses its end before it is verified."""

    def keep(self, load, offers):
        return [range(len(offer.parents) // 2) for offer in offers]


@BOTH
def test_a_draft_that_is_cut_short_goes_on_with_what_is_left(exact, params):
    llm = early(exact, width=6, policy=KeepFew(6))
    assert ids(llm.generate(PROMPTS, params)) == alone(exact, params)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_stops_where_its_last_token_was_unlikely(exact, temperature):
    """The token that it was not sure of stays (law 2); its confidence is its law's probability."""
    drafter = RecordingDrafter(EarlyExitDrafter(exact, exit_layer=2))
    llm = early(exact, width=6, drafter=drafter, draft_confidence_threshold=0.5)
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    llm.generate(PROMPTS, params)
    lengths = set()
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        context = list(request.tokens)
        for token, sure in zip(draft.tokens, draft.confidence, strict=True):
            law = exit_law(exact, 2, context, temperature or 1.0)
            assert sure == pytest.approx(float(law[token]), abs=1e-6)
            context.append(token)
        assert all(sure >= 0.5 for sure in draft.confidence[:-1])
        if len(draft.tokens) < request.max_nodes:
            assert draft.confidence[-1] < 0.5
        lengths.add(len(draft.tokens))
    assert len(lengths) >= 3


def test_greedy_drafts_have_no_law(exact):
    drafter = EarlyExitDrafter(exact, exit_layer=3, draft_sample_method="greedy")
    assert drafter.capabilities.deterministic
    recording = RecordingDrafter(drafter)
    llm = early(exact, drafter=recording)
    assert ids(llm.generate(PROMPTS, SEEDED)) == alone(exact, SEEDED)
    assert all(draft.probs is None for draft in recording.drafts)


class Covering(ScriptedDrafter):
    """A draft that claims to go on from something."""

    capabilities = Capabilities(tree=True, target_layers=2)

    def __init__(self, resume, parents=(-1, 0), verify=None):
        self.given = Draft([1] * len(parents), parents, verify=verify, resume=resume)

    def draft(self, request):
        return self.given


def states(rows, layer=2):
    return LayerResume(layer, torch.zeros(rows, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Covering(states(2, layer=1)), "target_layers=2"),
        (Covering("a layer"), "target_layers=2"),
        (Covering(states(20)), r"must be \[1..7 rows, width\], got \(20, 32\)"),
        (Covering(states(0)), "must be .1..7 rows"),
        (Covering(LayerResume(2, [0.5])), r"must be \[1..7 rows, width\], got \[0.5\]"),
        (Covering(states(6), parents=(-1, -1)), "a tree must be gone on from with all of its 7"),
        (Covering(states(5), verify=[True, False]), "rows of the drafter's own can't go on"),
    ],
)
def test_what_cannot_be_gone_on_from_is_named(exact, drafter, message):
    llm = early(exact, drafter=drafter)
    with pytest.raises(DrafterError, match=message):
        llm.generate([PROMPTS[0]], GREEDY)
    assert llm.engine.pool.num_used == 0


def test_only_those_who_run_layers_of_the_target_are_given_its_cache(exact):
    for inner, given in ((RepeatDrafter(3), False), (EarlyExitDrafter(exact), True)):
        drafter = RecordingDrafter(inner)
        early(exact, drafter=drafter).generate(PROMPTS[:1], GREEDY)
        assert {request.target_cache is not None for request in drafter.requests} == {given}
        assert {bool(request.pages) for request in drafter.requests} == {given}


def test_options(exact):
    assert EarlyExitDrafter(exact).capabilities.target_layers == 1
    deeper = tiny_model(vocab_size=8, num_layers=12)
    assert EarlyExitDrafter(deeper).capabilities.target_layers == 3
    for value in (0, 4, 2.0, True, "two"):
        with pytest.raises(ConfigError, match=f"exit_layer must be an integer in 1..3 .*{value}"):
            EarlyExitDrafter(exact, exit_layer=value)
    with pytest.raises(ConfigError, match="exit_layer must be left out: nothing fits"):
        EarlyExitDrafter(tiny_model(vocab_size=8, num_layers=1))
    with pytest.raises(ConfigError, match="draft_sample_method must be one of"):
        EarlyExitDrafter(exact, draft_sample_method="best")


@BOTH
@pytest.mark.parametrize("combine", ["best", "merge"])
def test_it_combines_with_drafters_that_cost_nothing(exact, params, combine):
    members = [
        {"method": "ngram"},
        {"method": "lookahead"},
        {"method": "early_exit", "exit_layer": 3, "draft_sample_method": "greedy"},
    ]
    config = {"method": "combined", "drafters": members, "combine": combine}
    llm = LLM(exact, speculative_config=config, seed=5, page_size=4, prefill_chunk_size=4)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == alone(exact, params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 20


def test_what_it_cannot_be_combined_with_is_named(exact):
    exits = [{"method": "early_exit", "exit_layer": layer} for layer in (3, 1)]
    with pytest.raises(ConfigError, match="run 1 and 3 layers of the target"):
        LLM(exact, speculative_config={"method": "combined", "drafters": exits})
    inner = {"method": "early_exit", "draft_sample_method": "greedy"}
    config = {"method": "cascade", "model": exact, "drafter": inner}
    with pytest.raises(ConfigError, match="must draft without layers of its own"):
        LLM(exact, speculative_config=config)
