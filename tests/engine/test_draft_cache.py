"""What a draft model keeps of each position is what a fresh one computes for the committed tokens,
however they came there; and its drafts obey what the request asks of the target.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from foredraft.testing.models import tiny_model
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS, SEEDED

PROMPT = PROMPTS[4]  # 13 tokens
TARGET, DRAFT = tiny_noisy_pair(1, noise=0.1, vocab_size=32)


def llm_of(target=TARGET, draft=DRAFT, width=3, **options):
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": width}
    return LLM(target, speculative_config=config, **({"seed": 5, "page_size": 4} | options))


def after(llm, prompt, params, num_output):
    """A request that goes on, when it has said so much at least."""
    (request,) = llm._make(prompt, params).requests
    llm.engine.add(request)
    while request.num_output < num_output:
        llm.engine.step()
    assert not request.finished
    return request


def drafter_rows(llm, request, count):
    """The drafter's keys and values of the first `count` positions."""
    assert request.num_draft_cached >= count
    cache = llm.engine.draft_cache
    positions = torch.arange(count)
    pages = torch.tensor(request.pages)[positions // cache.page_size]
    return torch.stack(
        [each[:, pages, :, positions % cache.page_size] for each in (cache.keys.mT, cache.values)]
    )


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_output", [1, 9], ids=["prompt", "answer"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_chunks_and_rejections_leave_what_a_fresh_drafter_computes(params, num_output, chunk):
    """Reported faults 16 and 17: at a chunk's border, and behind a draft that was rejected."""
    llm = llm_of(prefill_chunk_size=chunk)
    request = after(llm, PROMPT, params, num_output)
    count = request.num_draft_cached
    assert count >= len(PROMPT) - 1
    whole = llm_of()
    fresh = after(whole, request.tokens[: count + 1], params, 1)
    torch.testing.assert_close(
        drafter_rows(llm, request, count), drafter_rows(whole, fresh, count), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"banned_token_ids": list(range(0, 32, 2))},
        {"allowed_token_ids": [3, 5, 9, 21]},
        {"logit_bias": {7: 8.0, 11: -8.0}},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
        {"top_k": 3, "min_p": 0.1},
        {"min_tokens": 30, "ignore_eos": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafts_obey_what_the_request_asks_of_the_target(params, asked):
    """Reported fault 50, by kind: a draft that ignores a mask is refused wherever it bites."""
    target = tiny_model(seed=4, vocab_size=32)
    params = replace(params, max_tokens=40, **asked)
    (output,) = llm_of(target, target).generate([PROMPT], params)
    assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0
    assert list(output.token_ids) == list(
        LLM(target, seed=5).generate([PROMPT], params)[0].token_ids
    )
