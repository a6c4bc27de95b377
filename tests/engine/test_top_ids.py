"""The top ids of verified rows: what they are, to whom they are told, and that they cost nothing
where nobody asks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import RequestOptions
from foredraft.drafters.interface import Capabilities
from foredraft.testing import target_logits
from foredraft.testing.drafters import LiarDrafter, RecordingDrafter, TreeDrafter

from .conftest import GREEDY, PROMPTS


def asking(inner, count):
    drafter = RecordingDrafter(inner)
    drafter.capabilities = Capabilities(tree=True, top_ids=count)
    return drafter


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_they_are_the_targets_own_of_every_row_that_has_logits(
    make_llm, oracle, target, count, prompt_logprobs
):
    known = oracle(GREEDY)
    drafter = asking(TreeDrafter(LiarDrafter(known), known), count)
    llm = make_llm(drafter, 6, prefill_chunk_size=4)
    params = replace(GREEDY, max_tokens=8, prompt_logprobs=prompt_logprobs)
    (output,) = llm.generate([PROMPTS[4]], params)
    tokens = [*output.prompt_token_ids, *output.token_ids]
    logits = target_logits(target)
    num_prompt, told = len(PROMPTS[4]), 0
    for result in drafter.results:
        if result.next_token is not None and len(result.rows) == 1:
            continue  # no room for a draft before the last token
        nodes = [row for row in result.rows if row.node >= 0]
        for row in result.rows:
            if row.node < 0 and row.position < num_prompt - 1 and prompt_logprobs is None:
                assert row.top_ids == ()
                continue
            if row.node >= 0 and not row.committed and row.position > nodes[0].position:
                assert len(row.top_ids) == min(count, 32)  # its context is a branch
                continue
            context = (*tokens[: row.position], row.token)
            best = logits(context).sort(descending=True, stable=True).indices[:count]
            assert list(row.top_ids) == best.tolist()
            told += 1
    assert told >= 8


def test_requests_that_are_not_drafted_for_teach_nothing(make_llm, oracle):
    drafter = asking(oracle(GREEDY), 4)
    llm = make_llm(drafter, 4)
    each = [RequestOptions(speculate=False, cache_salt="a"), RequestOptions(cache_salt="b")]
    llm.generate(PROMPTS[:2], GREEDY, each)
    taught = {
        result.cache_salt for result in drafter.results if any(row.top_ids for row in result.rows)
    }
    assert taught == {"b"}


def test_nothing_is_worked_out_where_nobody_asks(make_llm, oracle, monkeypatch):
    asked = []

    def run(drafter, width):
        llm = make_llm(drafter, width)
        row_math = llm.loaded.model.kernels.row_math
        whole = type(row_math).top_ids
        monkeypatch.setattr(
            type(row_math), "top_ids", lambda *args: asked.append(1) or whole(*args)
        )
        llm.generate(PROMPTS, GREEDY)
        monkeypatch.undo()
        return len(asked)

    assert run(oracle(GREEDY), 4) == 0
    assert run(asking(oracle(GREEDY), 4), 0) == 0
    assert run(asking(oracle(GREEDY), 4), 4) > 0
