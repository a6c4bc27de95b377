"""Medusa beside its target: identity, drafts that are those of the heads' module in torch, and the
tree of measured ranks.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from foredraft import LLM, ConfigError
from foredraft.core.errors import ModelError
from foredraft.drafters.combined import CombinedDrafter
from foredraft.drafters.medusa import MedusaDrafter, ranked_tree
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.medusa_checkpoint import save_medusa
from foredraft.models.interface import HEAD_INPUT
from foredraft.models.load import load_model
from foredraft.testing import draft_request
from foredraft.testing.drafters import RecordingDrafter
from foredraft.testing.models import tiny_model, write_tiny_checkpoint

from .conftest import GREEDY, PROMPTS, SEEDED
from .eagle_rig import check_law, features_of
from .pair_rig import ids
from .test_law import VOCAB

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
KINDS = {
    "chain": {"draft_tree": "none"},
    "the likeliest": {"draft_tree": "none", "draft_sample_method": "greedy"},
    "top_k": {"draft_tree": "top_k"},
    "sampled": {"draft_tree": "sampled"},
    "measured": {},
}
KIND = pytest.mark.parametrize("kind", KINDS)
ACCURACIES = ((0.6, 0.2, 0.1), (0.4, 0.2), (0.3, 0.1))


def target_head(target):
    return target.model.head_rows(torch.arange(target.config.vocab_size))


def new_heads(target, draft_ids=None, seed=0, **options):
    torch.manual_seed(seed)
    c = target.config
    options = {"num_heads": 3, "accuracies": ACCURACIES} | options
    if draft_ids is not None:
        options["draft_vocab_size"] = len(draft_ids)
    config = MedusaConfig(c.hidden_size, c.vocab_size, **options)
    ids_ = None if draft_ids is None else torch.tensor(list(draft_ids))
    return Medusa(config, ids_, target_head(target)).to(target.dtype)


@lru_cache
def trained():
    """A target, and heads over its own vocabulary head that were shown what it says, some rounds
    of whole texts."""
    target = tiny_model(seed=1, vocab_size=32)
    llm = LLM(target, seed=5)
    texts = [[*prompt, *llm.generate([prompt], GREEDY)[0].token_ids] for prompt in PROMPTS]
    heads = new_heads(target, range(32), num_layers=2)
    shown = [(torch.tensor(text), features_of(target, text, (HEAD_INPUT,))) for text in texts]
    optimiser = torch.optim.AdamW(heads.parameters(), lr=2e-2)
    for _ in range(30):
        loss = torch.zeros((), dtype=torch.float64)
        for text, hidden in shown:
            for h, logits in enumerate(heads(hidden)):
                loss = loss + F.cross_entropy(logits[: -2 - h], text[2 + h :])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return target, heads.requires_grad_(False)


def medusa_llm(width=3, drafter=None, pair=None, rule=None, **options):
    target, heads = pair or trained()
    own = {key: options.pop(key) for key in list(options) if key.startswith("draft_")}
    drafter = drafter or MedusaDrafter(heads, target, **own)
    config = {"num_speculative_tokens": width, "rejection_sample_method": rule}
    return LLM(
        target,
        drafter=drafter,
        speculative_config=config,
        **({"seed": 5, "page_size": 4} | options),
    )


def reference(tokens):
    """Each head's logits `[D]` behind a text, all of it computed anew."""
    target, heads = trained()
    return [each[-1] for each in heads(features_of(target, tokens[:-1], (HEAD_INPUT,)))]


@BOTH
@KIND
@pytest.mark.parametrize("width", [2, 6])
def test_it_changes_nothing(plain, params, kind, width):
    llm = medusa_llm(width, prefill_chunk_size=4, **KINDS[kind])
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.drafter._last


@pytest.mark.parametrize("kind", ["the likeliest", "measured"])
def test_its_drafts_are_the_modules(kind):
    target, heads = trained()
    drafter = RecordingDrafter(MedusaDrafter(heads, target, **KINDS[kind]))
    medusa_llm(5, drafter, prefill_chunk_size=3).generate(PROMPTS, GREEDY)
    checked = 0
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        if not draft.tokens:
            continue
        best = [row.sort(descending=True, stable=True).indices for row in
                reference(list(request.tokens))]  # fmt: skip
        depths: list[int] = []
        ranks: dict[int, int] = {}
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            rank = ranks.get(parent, 0)
            ranks[parent] = rank + 1
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            assert token == int(heads.draft_ids[best[depths[-1]][rank]])
        checked += 1
    assert checked > 30


def test_prefix_hits_and_requests_that_are_preempted_draft_on(plain):
    target, heads = trained()
    drafter = RecordingDrafter(MedusaDrafter(heads, target))
    shape = 4 * 2 * 2 * 2 * 8 * 8  # bytes of a page
    llm = medusa_llm(4, drafter, kv_cache_gib=12 * shape / 2**30)
    assert ids(llm.generate(PROMPTS * 2, SEEDED)) == plain(SEEDED) * 2
    assert llm.engine.scheduler.num_preemptions > 0
    (again,) = medusa_llm(4, drafter).generate([PROMPTS[4]], SEEDED)
    assert list(again.token_ids) == plain(SEEDED)[4]
    assert sum(bool(draft.tokens) for draft in drafter.drafts) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_sequences_follow_the_enumerated_law(kind):
    small = tiny_model(seed=3, vocab_size=VOCAB)
    heads = new_heads(small, range(1, VOCAB), seed=8, own_head=False, shared_head=True)
    for each in heads.parameters():
        each.data.normal_(std=0.3)
    llm = medusa_llm(2, pair=(small, heads), max_num_seqs=128, max_num_batched_tokens=512,
                     page_size=8, rule="standard", **KINDS[kind])  # fmt: skip
    check_law(llm, small)


def test_stated_laws_are_those_of_the_heads():
    target, heads = trained()
    drafter = RecordingDrafter(MedusaDrafter(heads, target, draft_tree="none"))
    medusa_llm(3, drafter, rule="standard").generate(PROMPTS, SEEDED)
    checked = 0
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        if draft.probs is None:
            continue
        for law, logits in zip(draft.probs, reference(list(request.tokens)), strict=False):
            torch.testing.assert_close(law, (logits / SEEDED.temperature).softmax(0))
            checked += 1
    assert checked > 50


def test_a_measured_tree_is_the_best_of_its_size():
    """Of all trees with so many nodes none expects more accepted tokens."""

    def value(path):
        product = 1.0
        for depth, rank in enumerate(path):
            product *= ACCURACIES[depth][rank]
        return product

    every = [p for n in (1, 2, 3) for p in itertools.product(*(range(len(a)) for a in
             ACCURACIES[:n]))]  # fmt: skip
    for count in range(1, len(every) + 3):
        tree = ranked_tree(ACCURACIES, draft_request([1], vocab_size=32, max_nodes=count))
        assert len(tree) == len(set(tree)) == min(count, len(every))
        best = sorted(map(value, every), reverse=True)[:count]
        assert sum(map(value, tree)) == pytest.approx(sum(best))
        for i, path in enumerate(tree):  # parents first, siblings in their order
            assert not path[:-1] or path[:-1] in tree[:i]
            assert not path[-1] or (*path[:-1], path[-1] - 1) in tree[:i]


def test_a_measured_tree_keeps_to_what_pays():
    tree = ranked_tree(
        ACCURACIES,
        draft_request([1], vocab_size=32, max_nodes=8)._replace(least_path=(0.5, 0.22, 0.21)),
    )
    assert tree == [(0,), (0, 0)]
    sure = draft_request([1], vocab_size=32, max_nodes=8)._replace(confidence_threshold=0.4)
    assert ranked_tree(ACCURACIES, sure) == [(0,), (0, 0)]


def test_it_drafts_beside_others(plain):
    target, heads = trained()
    for combine in ("best", "merge"):
        drafter = CombinedDrafter(
            target, [{"method": "suffix"}, MedusaDrafter(heads, target)], combine
        )
        assert ids(medusa_llm(4, drafter).generate(PROMPTS, GREEDY)) == plain(GREEDY)


def test_heads_are_loaded_by_their_directory_and_belong_to_their_target(tmp_path):
    write_tiny_checkpoint(tmp_path / "target", seed=4, vocab_size=32)
    target = load_model(tmp_path / "target", kernels="reference", dtype="float64")
    own = fingerprint(tmp_path / "target")
    save_medusa(new_heads(target, target_sha256=own), tmp_path / "heads", torch.float32)
    config = {"method": "medusa", "model": str(tmp_path / "heads")}
    llm = LLM(target, speculative_config=config)
    assert llm.num_speculative_tokens == 8
    assert ids(llm.generate(PROMPTS, GREEDY)) == ids(LLM(target).generate(PROMPTS, GREEDY))
    save_medusa(new_heads(target, target_sha256="0" * 64), tmp_path / "other")
    with pytest.raises(ModelError, match="another target: one with the checksum 000000000000"):
        LLM(target, speculative_config=config | {"model": str(tmp_path / "other")})
    with pytest.raises(ModelError, match="hidden_size is 32, this target's 64"):
        MedusaDrafter(new_heads(target), tiny_model(vocab_size=32, hidden_size=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tree": "bush"}, "none, top_k, sampled, measured, got 'bush'"),
        ({"draft_tree_branching": [2]}, "draft_tree_branching needs"),
        ({"draft_sample_method": "best"}, "draft_sample_method"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    target, heads = trained()
    with pytest.raises(ConfigError, match=message):
        LLM(target, speculative_config={"method": "medusa", "model": heads} | options)


def test_a_measured_tree_needs_measurements():
    target, _ = trained()
    heads = new_heads(target, accuracies=())
    assert not MedusaDrafter(heads, target).capabilities.tree
    with pytest.raises(ConfigError, match="needs heads whose config"):
        MedusaDrafter(heads, target, draft_tree="measured")
