"""A tiny target with a draft model that often agrees, and what every drafter made of them is held
to.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import LLM
from foredraft.models.decoder import cache_shape
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS, SEEDED

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
TARGET, DRAFT = tiny_noisy_pair(1, noise=0.1, vocab_size=32)


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def alone(params, prompts=PROMPTS):
    """Plain decoding, one prompt at a time."""
    llm = LLM(TARGET, seed=5)
    return [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]


def speculating_pair(config, target=TARGET, **options):
    return LLM(target, speculative_config=config, **({"seed": 5, "page_size": 4} | options))


def few_pages(num_pages, models=(TARGET, DRAFT)):
    """Settings that leave `num_pages` pages for these models, and read prompts in chunks."""
    shapes = [cache_shape(model.config, model.cache_dtype) for model in models]
    room = num_pages * 4 * sum(shape.bytes_per_position for shape in shapes)
    return {"kv_cache_gib": room / 2**30, "prefill_chunk_size": 3}


def check_nothing_changes(llm, params):
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == alone(params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0


def check_nothing_changes_where_pages_run_short(llm, params, **processors):
    params = replace(params, **processors)
    assert ids(llm.generate(PROMPTS, params)) == alone(params)
    assert llm.engine.scheduler.num_preemptions > 0


def check_empty(llm):
    """... of a drafter with a model."""
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.drafter._computed
