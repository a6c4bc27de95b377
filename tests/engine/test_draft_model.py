"""A draft model beside its target: identity, acceptance that is known, and a cache in step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ConfigError
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel
from foredraft.planning.policy import StaticPolicy
from foredraft.testing import draft_request, tiny_model
from foredraft.testing.models import tiny_tokenizer
from foredraft.testing.pairs import tiny_noisy_pair, tiny_pair

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    return tiny_noisy_pair(1, noise=0.1, vocab_size=32)


@pytest.fixture
def make_pair(pair):
    def make(width: int = 4, draft: LoadedModel | None = None, **options: Any) -> LLM:
        own = {key: options.pop(key) for key in ("draft_sample_method",) if key in options}
        rule = options.pop("rule", None)
        config = {
            "method": "draft_model",
            "model": draft or pair[1],
            "num_speculative_tokens": width,
            "rejection_sample_method": rule,
            **own,
        }
        target = options.pop("target", pair[0])
        return LLM(target, speculative_config=config, **({"seed": 5, "page_size": 4} | options))

    return make


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def alone(target: LoadedModel, params: SamplingParams, prompts=PROMPTS) -> list[list[int]]:
    llm = LLM(target, seed=5)
    return [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]


def assert_empty(llm: LLM) -> None:
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.drafter._computed


@BOTH
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_it_changes_nothing(make_pair, pair, params, width, method):
    llm = make_pair(width, draft_sample_method=method)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == alone(pair[0], params)
    accepted = sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs)
    assert accepted > 0
    assert_empty(llm)


@BOTH
@pytest.mark.parametrize("prompt_length", range(1, 14))
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_prompts_of_every_length_around_page_and_chunk_borders(
    make_pair, pair, params, prompt_length, chunk
):
    prompts = [
        [(5 * i + prompt_length + shift) % 31 for i in range(prompt_length)] for shift in (0, 9)
    ]
    short = replace(params, max_tokens=11)
    llm = make_pair(3, prefill_chunk_size=chunk)
    assert ids(llm.generate(prompts, short)) == alone(pair[0], short, prompts)
    assert_empty(llm)


@dataclass
class Widths(StaticPolicy):
    """A policy that follows a script by the request's own steps: mixed widths, on and off."""

    script: Sequence[int]

    def widths(self, load, requests) -> list[int]:
        return [
            self.script[(request.counts.num_steps + load.num_requests) % len(self.script)]
            for request in requests
        ]


@BOTH
@pytest.mark.parametrize("script", [(4, 0, 0, 2), (0, 0, 0, 0, 0, 3), (1, 5, 2), (0, 6)])
@pytest.mark.parametrize("batch", [1, 8])
def test_widths_that_change_and_vanish_change_nothing(make_pair, pair, params, script, batch):
    prompts = (PROMPTS * 2)[:batch]
    lengths = [24, 9, 17, 24, 5, 1, 24, 13][:batch]
    each = [replace(params, max_tokens=n) for n in lengths]
    llm = make_pair(6, max_num_batched_tokens=24, max_num_seqs=8, prefill_chunk_size=3)
    llm.engine.scheduler.policy = Widths(script)
    plain = LLM(pair[0], seed=5)
    assert ids(llm.generate(prompts, each)) == [
        list(plain.generate([p], one)[0].token_ids) for p, one in zip(prompts, each, strict=True)
    ]
    assert_empty(llm)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=512, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=512, ignore_eos=True, seed=3),
        SamplingParams(temperature=0.9, max_tokens=512, ignore_eos=True),
        SamplingParams(
            temperature=1.1, max_tokens=512, ignore_eos=True, top_k=9, repetition_penalty=1.2,
            frequency_penalty=0.1, logit_bias={4: 1.5}, banned_token_ids=[6],
        ),
    ],
    ids=["greedy", "coupled", "rejection", "processors"],
)  # fmt: skip
def test_the_target_as_its_own_draft_model_is_always_right(params):
    """Reported fault 15: one lost position in the draft cache would show."""
    target = tiny_model(seed=4, vocab_size=32, max_positions=640)
    for width in (1, 5):
        config = {"method": "draft_model", "model": target, "num_speculative_tokens": width}
        llm = LLM(target, speculative_config=config, seed=1)
        outputs = llm.generate(PROMPTS[:3], params)
        for output in outputs:
            counts = output.metrics.speculative_decoding
            assert len(output.token_ids) == 512
            assert counts.draft_acceptance_rate == 1.0
        assert_empty(llm)


def test_acceptance_is_the_known_one_and_stays_flat():
    """512 tokens of a pair that agrees on 80% of a cycle: step by step what must be accepted."""
    pair = tiny_pair(agreement=0.8, max_positions=640)
    params = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True)
    for k in (1, 3, 6):
        config = {"method": "draft_model", "model": pair.draft, "num_speculative_tokens": k}
        llm = LLM(pair.target, speculative_config=config)
        prompt = [5, 9, 20, 3]
        output = llm.generate([prompt], params)[0]
        assert list(output.token_ids) == pair.continuation(prompt[-1], 512)
        accepted = pair.accepted_by_step(prompt[-1], k, 512)
        steps = output.metrics.num_steps + 1
        counts = output.metrics.speculative_decoding
        # The last steps may be cut by max_tokens; all before are what the walk says.
        assert abs(counts.num_accepted_draft_tokens - sum(accepted[:steps])) <= k
        assert counts.mean_acceptance_length == pytest.approx(
            pair.mean_acceptance_length(k), rel=0.02
        )


@BOTH
@pytest.mark.parametrize("positions", [8, 14, 20])
def test_a_shorter_context_ends_speculation_and_not_the_request(make_pair, pair, params, positions):
    """Reported fault 15's neighbour: the draft model's context is no limit of the target's."""
    _, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32, draft_max_positions=positions)
    llm = make_pair(4, draft=draft)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == alone(pair[0], params)
    assert_empty(llm)


@BOTH
def test_completions_of_one_prompt_share_pages_and_nothing_else(make_pair, pair, params):
    three = replace(params, n=3)
    llm = make_pair(3)
    want = LLM(pair[0], seed=5).generate([PROMPTS[3]], three)[0]
    got = llm.generate([PROMPTS[3]], three)[0]
    assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs]
    assert_empty(llm)


@dataclass
class CountingModel:
    """A model that notes the rows of each pass."""

    model: Any
    rows: list[int] = field(default_factory=list)

    def run(self, batch, cache):
        self.rows.append(len(batch.token_ids))
        return self.model.run(batch, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def counting(loaded: LoadedModel) -> tuple[LoadedModel, CountingModel]:
    model = CountingModel(loaded.model)
    return replace(loaded, model=model), model


def test_a_batch_is_drafted_with_one_pass_a_depth(make_pair, pair):
    draft, passes = counting(pair[1])
    llm = make_pair(3, draft=draft)
    same = [PROMPTS[0]] * 5
    llm.generate(same, replace(GREEDY, max_tokens=12))
    # Equal requests run in step, and all passes but the last steps' have a row for each.
    assert min(passes.rows) >= 5
    assert passes.rows[0] == 5 * len(PROMPTS[0])


def test_a_prompt_is_read_in_chunks_beside_the_target(make_pair, pair):
    draft, passes = counting(pair[1])
    llm = make_pair(2, draft=draft, prefill_chunk_size=4)
    llm.generate([PROMPTS[4]], replace(GREEDY, max_tokens=6))
    assert len(PROMPTS[4]) == 13
    assert passes.rows[:4] == [4, 4, 4, 1]
    assert max(passes.rows) == 4


def test_it_catches_up_in_one_pass(make_pair, pair):
    draft, passes = counting(pair[1])
    llm = make_pair(2, draft=draft)
    llm.engine.scheduler.policy = Widths((0,))
    stream = llm.stream(PROMPTS[0], GREEDY)
    tokens = [token for _ in range(8) for token in next(stream).token_ids]
    assert passes.rows == []  # law 8
    llm.engine.scheduler.policy = Widths((2,))
    next(stream)
    assert passes.rows == [len(PROMPTS[0]) + len(tokens), 1]
    stream.close()
    assert_empty(llm)


@BOTH
def test_the_dtype_of_keys_and_values_is_that_of_both_caches(make_pair, pair, params):
    llm = make_pair(3, kv_dtype="bfloat16")
    assert llm.engine.draft_cache.dtype == llm.engine.cache.dtype == torch.bfloat16
    plain = LLM(pair[0], seed=5, kv_dtype="bfloat16")
    assert ids(llm.generate(PROMPTS, params)) == ids(plain.generate(PROMPTS, params))


def test_both_caches_come_out_of_one_budget(make_pair, pair):
    target, draft = (cache_shape(m.config, m.cache_dtype).bytes_per_position for m in pair)
    both = target + draft
    llm = make_pair(2, kv_cache_gib=7.5 * 4 * both / 2**30)
    assert llm.config.num_pages == 7
    assert llm.engine.draft_cache.num_pages == 7
    assert llm.config_without_drafter.num_pages == 7.5 * both // target


def ask(drafter, cache, tokens, prompt, pages, width, **options):
    asked = draft_request(
        list(tokens), prompt, vocab_size=32, max_nodes=width, cache=cache, pages=pages, **options
    )
    (draft,) = drafter.propose([asked])
    return draft


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_committed_the_draft_is_that_of_a_fresh_drafter(pair, seed):
    """Rewinds to any committed length, pauses, and pages lost and given anew."""
    target, draft = pair
    shape = cache_shape(draft.config, draft.cache_dtype)
    dice = random.Random(seed)
    drafter = DraftModelDrafter(draft, target)
    cache = KVCache(shape, 120, 4, "cpu")
    options: dict[str, Any] = dice.choice(
        [
            {},
            {"sampling": SamplingParams(temperature=0.8), "seed": 7},
            {"sampling": SamplingParams(temperature=0.8), "seed": 7, "coupled": True},
        ]
    )
    tokens = [dice.randrange(32) for _ in range(dice.randrange(1, 9))]
    prompt, pages = len(tokens), list(range(40))
    for _ in range(12):
        width = dice.randrange(1, 6)
        got = ask(drafter, cache, tokens, prompt, pages, width, **options)
        fresh_cache = KVCache(shape, 40, 4, "cpu")
        want = ask(
            DraftModelDrafter(draft, target),
            fresh_cache,
            tokens,
            prompt,
            list(range(40)),
            width,
            **options,
        )
        assert got.tokens == want.tokens
        assert (got.probs is None) == (want.probs is None)
        if got.probs is not None:
            torch.testing.assert_close(got.probs, want.probs, rtol=0, atol=1e-12)
        kept = dice.randrange(len(got.tokens) + 1)
        tokens += [*got.tokens[:kept], dice.randrange(32)]
        tokens += [dice.randrange(32) for _ in range(dice.choice([0, 0, 0, 1, 4]))]
        if dice.random() < 0.2:  # preempted: the pages go, others come
            drafter.release("request")
            dice.shuffle(pages)
            pages = [page + 40 if page < 40 else page - 40 for page in pages]


def with_tokenizer(loaded: LoadedModel, vocab_size: int) -> LoadedModel:
    return replace(loaded, tokenizer=tiny_tokenizer(vocab_size))


@BOTH
@pytest.mark.parametrize("padding", [-8, 8])
def test_padding_of_the_embedding_is_no_part_of_the_vocabulary(params, padding):
    """Reported fault 67: 24 tokens, in embeddings of 32 and 32 +- 8 rows."""
    target = with_tokenizer(tiny_model(seed=2, vocab_size=32), 24)
    draft = with_tokenizer(tiny_model(seed=3, vocab_size=32 + padding), 24)
    config = {"method": "draft_model", "model": draft}
    llm = LLM(target, speculative_config=config, seed=5)
    prompts = [[t % 24 for t in prompt] for prompt in PROMPTS]
    assert ids(llm.generate(prompts, params)) == alone(target, params, prompts)


def test_another_vocabulary_is_refused_with_sizes_and_the_first_difference(pair):
    """Reported fault 67: other sizes, and the same size with two ids exchanged."""
    smaller = tiny_model(seed=3, vocab_size=30)
    with pytest.raises(
        ConfigError, match=r"30 tokens, the target 32; .* id 30: no token, .* 'b'|id 30"
    ):
        LLM(pair[0], speculative_config={"method": "draft_model", "model": smaller})
    permuted = replace(pair[1], tokenizer=exchanged(pair[1]))
    with pytest.raises(
        ConfigError, match=r"32 tokens, the target 32; the first that differs is id 5"
    ):
        LLM(pair[0], speculative_config={"model": permuted})


def exchanged(loaded: LoadedModel):
    import json

    from tokenizers import Tokenizer as Backend

    from foredraft.models.tokenizer import Tokenizer

    state = json.loads(loaded.tokenizer._backend.to_str())
    by_id = {i: token for token, i in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {by_id[5]: 9, by_id[9]: 5}
    return Tokenizer(Backend.from_str(json.dumps(state)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "draft_model"}, "'draft_model' needs the option 'model'"),
        ({"model": "no/such/place"}, "no/such/place"),
        ({"model": 7}, "must be a name, a path or a loaded model, got 7"),
        ({"draft_sample_method": "typical"}, "must be one of probabilistic, greedy, got 'typical'"),
    ],
)
def test_mistakes_are_named(pair, config, message):
    options = {"method": "draft_model", "model": pair[1]} if "draft_sample_method" in config else {}
    with pytest.raises(ValueError, match=message):
        LLM(pair[0], speculative_config=options | config)


def test_a_request_that_bans_every_token_fails_alone(make_pair, pair):
    impossible = replace(
        GREEDY, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3, max_tokens=8
    )
    llm = make_pair(3)
    outputs = llm.generate(PROMPTS[:3], [GREEDY, impossible, GREEDY])
    assert outputs[1].finish_reason == "error"
    assert [list(outputs[i].token_ids) for i in (0, 2)] == alone(pair[0], GREEDY, PROMPTS[:3:2])
    assert_empty(llm)


@pytest.mark.parametrize(("batch", "runs"), [(1, 500), (8, 2_000)])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_sampled_sequences_follow_the_enumerated_law(batch, runs, method):
    """Law 1 with real drafts, mixed widths, in a batch: the target's law and no other."""
    target, draft = tiny_noisy_pair(9, noise=0.5, vocab_size=VOCAB)
    config = {"model": draft, "draft_sample_method": method, "rejection_sample_method": "standard"}
    llm = LLM(target, speculative_config=config, max_num_seqs=batch, seed=2025)
    llm.engine.scheduler.policy = Widths((2, 1, 0, 2, 3))
    params = SamplingParams(temperature=0.8, max_tokens=LENGTH, ignore_eos=True)
    observed = [0] * VOCAB**LENGTH
    accepted = 0
    for output in llm.generate([PROMPT] * runs, params):
        accepted += output.metrics.speculative_decoding.num_accepted_draft_tokens
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert accepted > runs / 4
    assert chi_square(observed, enumerate_law(target, 0.8)) >= 1e-3
