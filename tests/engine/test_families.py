"""Law 3 for every family: windows, soft caps, norms and fused weights change nothing of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.kernels.catalog import native_available
from foredraft.models.config import ModelConfig
from foredraft.models.load import LoadedModel
from foredraft.models.rope import Rope, Yarn
from foredraft.testing.drafters import LiarDrafter, OracleDrafter, TreeDrafter, WrongAtDrafter
from foredraft.testing.models import assemble, random_weights, tiny_config

from .conftest import GREEDY, PROMPTS, SEEDED
from .eagle_rig import new_head
from .test_medusa import new_heads

# Windows shorter than prompts and outputs, so that keys fall out of sight within a draft.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"windows": (5, 5, 5)},
    "qwen2": {"qkv_bias": True, "windows": (0, 6, 6), "rope": Rope(1e4, Yarn(4.0, 8), 1.1)},
    "qwen3": {"head_norms": True},
    "phi3": {"fused_projections": True, "windows": (9, 9, 9), "rope": Rope(1e4, rotary_dim=4)},
    "gemma2": {
        "windows": (3, 0, 3), "attention_soft_cap": 2.0, "final_soft_cap": 3.0,
        "activation": "gelu_tanh", "post_norms": True, "embedding_scale": 5.5,
        "attention_divisor": 5.0,
    },
    "gemma3": {
        "windows": (4, 4, 0), "window_rope": Rope(100.0), "head_norms": True, "post_norms": True,
        "activation": "gelu_tanh", "embedding_scale": 5.5, "tie_word_embeddings": True,
    },
}  # fmt: skip
KERNELS = [("reference", "float64")]
if native_available():
    KERNELS.append(("native", "float32"))


def model_of(family: str, kernels: str, dtype: str) -> LoadedModel:
    config: ModelConfig = replace(tiny_config(num_layers=3), **FAMILIES[family])
    return assemble(config, random_weights(config, 7), family, kernels, dtype, "cpu", 1)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_in_batches_and_chunks_changes_nothing(make_llm, family, kernels, dtype, params):
    model = model_of(family, kernels, dtype)
    plain = [list(make_llm(model=model).generate([p], params)[0].token_ids) for p in PROMPTS]
    known = OracleDrafter(dict(zip(map(tuple, PROMPTS), plain, strict=True)))
    trees = TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known)
    for drafter, width, chunk in ((known, 7, 64), (trees, 9, 5)):
        llm = make_llm(drafter, width, model, prefill_chunk_size=chunk)
        outputs = llm.generate(PROMPTS, params)
        assert [list(output.token_ids) for output in outputs] == plain
        counts = [output.metrics.speculative_decoding for output in outputs]
        assert all(count.num_accepted_draft_tokens > 0 for count in counts)


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS[-1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_goes_on_from_an_early_exit_changes_nothing(make_llm, family, kernels, dtype):
    """A layer with a window may lie on either side of the exit."""
    model = model_of(family, kernels, dtype)
    plain = [list(make_llm(model=model).generate([p], SEEDED)[0].token_ids) for p in PROMPTS]
    for layer in (1, 2):
        drafter = EarlyExitDrafter(model, exit_layer=layer)
        outputs = make_llm(drafter, 3, model, prefill_chunk_size=5).generate(PROMPTS, SEEDED)
        assert [list(output.token_ids) for output in outputs] == plain


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS[-1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_read_the_hidden_states_of_every_family(make_llm, family, kernels, dtype):
    model = model_of(family, kernels, dtype)
    plain = [list(make_llm(model=model).generate([p], SEEDED)[0].token_ids) for p in PROMPTS]
    for drafter in (
        EagleDrafter(model, new_head(model, range(2, 32)), draft_tree="top_k"),
        MedusaDrafter(new_heads(model), model),
    ):
        outputs = make_llm(drafter, 3, model, prefill_chunk_size=5).generate(PROMPTS, SEEDED)
        assert [list(output.token_ids) for output in outputs] == plain
        assert sum(o.metrics.speculative_decoding.num_draft_tokens for o in outputs) > 0
