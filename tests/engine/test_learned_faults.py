"""Faults that users of learned drafters have reported elsewhere, by kind, where no test of one
drafter holds them: heads of the target's own law, processors, memory, and what damage looks like.

Held elsewhere: a draft's law under processors (1, 2: test_eagle, test_draft_model_trees,
test_medusa), what its cache keeps of drafts and chunks (16, 17, 21: test_eagle, test_draft_cache),
names and shapes of tensors (73: unit/test_head_checkpoints), acceptance offline and served (74:
training/test_acceptance, training/test_served).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.bench.certificate.drafts import Worth
from foredraft.bench.certificate.draws import Pair
from foredraft.bench.certificate.identity import check_identity
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.engine.memory import GIB
from foredraft.models.decoder import cache_shape
from foredraft.models.heads.medusa import Medusa
from foredraft.models.load import LoadedModel
from foredraft.testing.drafters import RecordingDrafter
from foredraft.testing.models import tiny_model

from .conftest import PROMPTS, SEEDED
from .eagle_rig import eagle_llm, new_head
from .test_medusa import medusa_llm, new_heads, reference, trained

METHODS = pytest.mark.parametrize("method", ["eagle3", "medusa"])
FREE = SamplingParams(max_tokens=24, ignore_eos=True)


def uniform() -> LoadedModel:
    """A target that says any token as well as any other."""
    return tiny_model(seed=1, vocab_size=32, sharpness=0.0)


def drafter_of(method: str, target: LoadedModel) -> EagleDrafter | MedusaDrafter:
    """... with a head that knows as much."""
    if method == "eagle3":
        head = new_head(target, range(32))
        head.lm_head.weight.data.zero_()
        return EagleDrafter(target, head)
    return MedusaDrafter(new_heads(target, range(32)), target, draft_tree="none")


@METHODS
@pytest.mark.parametrize(
    "asked",
    [{}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.6}, {"allowed_token_ids": [3, 4, 9]}],
    ids=str,
)
def test_a_head_of_the_targets_own_law_is_always_right(method, asked):
    """Reported faults 1 to 3: a lost or another draft law, processed otherwise than the target's,
    or matched word for word, accepts 1 of 32, or of what is left of them.
    """
    target = uniform()
    drafter = RecordingDrafter(drafter_of(method, target))
    make = eagle_llm if method == "eagle3" else medusa_llm
    llm = make(3, drafter=drafter, pair=(target, None), rule="standard")
    outputs = llm.generate(PROMPTS, replace(FREE, **asked))
    assert {o.metrics.speculative_decoding.draft_acceptance_rate for o in outputs} == {1.0}
    assert len({tuple(o.token_ids) for o in outputs}) == len(PROMPTS)
    assert all(each.probs is not None for each in drafter.drafts if each.tokens)


def test_medusas_stated_laws_are_what_processors_leave_of_them():
    """Reported fault 2."""
    target, heads = trained()
    drafter = RecordingDrafter(MedusaDrafter(heads, target, draft_tree="none"))
    params = replace(SEEDED, temperature=0.7, top_k=5, max_tokens=12)
    medusa_llm(3, drafter, rule="standard").generate(PROMPTS, params)
    drawn = [pair for pair in zip(drafter.requests, drafter.drafts, strict=True) if pair[1].tokens]
    assert len(drawn) > 10
    for request, draft in drawn:
        for law, logits in zip(draft.probs, reference(list(request.tokens)), strict=False):
            logits = logits / 0.7
            logits[logits < logits.topk(5).values[-1]] = -torch.inf
            torch.testing.assert_close(law, logits.softmax(0), rtol=0, atol=1e-6)


@METHODS
def test_a_heads_weights_and_cache_come_out_of_the_budget_and_nothing_else_does(method):
    """Reported fault 55: what it weighs is its own tensors, and no copy of the target's."""
    target = tiny_model(seed=1, vocab_size=32, dtype="float32")
    if method == "eagle3":
        head = new_head(target, range(2, 20))
        drafter = EagleDrafter(target, head)
    else:
        head = new_heads(target)
        drafter = MedusaDrafter(head, target)
    own = sum(each.numel() for each in head.parameters() if each.dim() == 2)
    assert drafter.capabilities.weight_bytes == 4 * own
    shapes = [cache_shape(target.config, target.cache_dtype), drafter.capabilities.cache]
    page = 4 * sum(each.bytes_per_position for each in shapes if each is not None)
    engine = {"drafter": drafter, "speculative_config": {"num_speculative_tokens": 3}}
    fixed = target.weight_bytes + 4 * own + LLM(target, **engine).draft_working_bytes
    for pages in (9, 20):
        memory = (fixed + (pages + 0.5) * page) / GIB
        assert LLM(target, **engine, page_size=4, memory=memory).config.num_pages == pages


def test_a_square_tensor_transposed_shows_in_the_certificate_alone():
    """Reported fault 73, where no shape tells: every text is right, and few drafts are."""
    target, heads = trained()

    def worth(drafted: Medusa) -> Worth:
        pair = Pair(target, MedusaDrafter(drafted, target, draft_tree="none"), 2, "standard")
        found = check_identity(pair, dict(enumerate(PROMPTS)), 16, 0, lambda *_: None)
        assert all(check.passed for check in found.checks)
        return Worth.of(found.firsts)

    sound = worth(heads)
    assert sound.above_chance
    damaged = new_heads(target, range(32), num_layers=2)
    damaged.load_state_dict(heads.state_dict())
    for each in damaged.parameters():
        if each.shape == (32, 32):
            each.data = each.data.T.contiguous()
    hurt = worth(damaged.requires_grad_(False))
    assert hurt.right < sound.right / 2
