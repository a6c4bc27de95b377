"""A table's belief and a model's in one tree: it changes nothing, whoever is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters.blended import BlendedDrafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.ngram_table import NgramTableDrafter
from foredraft.models.decoder import cache_shape
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.medusa import Medusa
from foredraft.testing.drafters import LiarDrafter, RecordingDrafter, RoutingDrafter
from foredraft.testing.models import tiny_model
from foredraft.testing.ngram_tables import small_table

from .conftest import GREEDY, PROMPTS, SEEDED
from .eagle_rig import check_law, eagle_llm, new_head, trained
from .pair_rig import ids
from .test_eagle import PAGE
from .test_law import VOCAB

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
KINDS = ("eagle3", "medusa", "draft_model")


@pytest.fixture
def source(plain, tmp_path):
    """A table of some of what the target says, so that it is right now and then."""
    target, _ = trained()
    texts = [[*p, *out] for p, out in zip(PROMPTS, plain(GREEDY), strict=True)]
    small_table(tmp_path / "t.ngrams", texts[::2], target.config.vocab_size, plain=True)
    return NgramTableDrafter(target, str(tmp_path / "t.ngrams"), ngram_table_min_token_prob=0.0)


def model_of(kind):
    target, head = trained()
    if kind == "eagle3":
        return EagleDrafter(target, head)
    if kind == "draft_model":
        return DraftModelDrafter(tiny_model(seed=3, vocab_size=32), target)
    size = target.config.hidden_size
    return MedusaDrafter(Medusa(MedusaConfig(size, 32, num_heads=3)), target)


def blended(source, kind="eagle3", **options):
    return BlendedDrafter(trained()[0], [source, model_of(kind)], **options)


def check_empty(llm, drafter):
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not drafter._places
    assert not drafter.source._states
    for kept in ("_told", "_computed", "_last"):
        assert not getattr(drafter.model, kept, None)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", [0, None, 5])
def test_it_changes_nothing(plain, source, params, kind, gain):
    drafter = blended(source, kind, blended_min_gain=gain)
    llm = eagle_llm(5, drafter=drafter, prefill_chunk_size=4)
    for _ in range(2):  # the second time with what was learned
        outputs = llm.generate(PROMPTS, params)
        assert ids(outputs) == plain(params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0
    check_empty(llm, drafter)


@BOTH
def test_few_pages_change_nothing(plain, source, params):
    drafter = blended(source, blended_min_gain=0)
    target, _ = trained()
    own = cache_shape(target.config, target.cache_dtype)
    shapes = [drafter.model.head.cache_shape, own]
    bytes_per_page = PAGE * sum(each.bytes_per_position for each in shapes)
    llm = eagle_llm(
        4, drafter=drafter, kv_cache_gib=10 * bytes_per_page / 2**30, prefill_chunk_size=5
    )
    outputs = llm.generate([PROMPTS[i % 5] for i in range(10)], params)
    assert ids(outputs) == [plain(params)[i % 5] for i in range(10)]
    assert llm.engine.scheduler.num_preemptions > 0
    check_empty(llm, drafter)


@BOTH
def test_beside_other_drafters_in_one_batch(plain, oracle, source, params):
    drafter = blended(source)
    liar = LiarDrafter(oracle(params))
    routed = RoutingDrafter(
        lambda request: drafter if len(request.tokens) % 2 else liar, drafter.capabilities
    )
    assert ids(eagle_llm(6, drafter=routed).generate(PROMPTS, params)) == plain(params)


def test_trees_hold_what_either_believes_in(plain, source):
    """Asked always, its drafts are trees within their width that state what they believe."""
    drafter = RecordingDrafter(blended(source, blended_min_gain=0))
    eagle_llm(5, drafter=drafter).generate(PROMPTS, GREEDY)
    drafted = [draft for draft in drafter.drafts if draft.tokens]
    assert any(len(set(draft.parents)) < len(draft.parents) for draft in drafted)
    for draft in drafted:
        assert len(draft.tokens) <= 5
        for parent in {*draft.parents}:
            children = [
                (token, confidence)
                for token, above, confidence in zip(
                    draft.tokens, draft.parents, draft.confidence, strict=True
                )
                if above == parent
            ]
            assert len({token for token, _ in children}) == len(children)
            assert sum(confidence for _, confidence in children) <= 1.0 + 1e-9


def test_a_sure_source_spares_the_models_passes(source, monkeypatch):
    asked = []
    grown = EagleDrafter.grown

    def counted(drafter, requests, grower):
        asked[-1] += sum(request.max_nodes > 0 for request in requests)
        return grown(drafter, requests, grower)

    monkeypatch.setattr(EagleDrafter, "grown", counted)
    for gain in (0, 0.1, 1):
        asked.append(0)
        drafter = blended(source, blended_min_gain=gain)
        eagle_llm(5, drafter=drafter).generate(PROMPTS, replace(GREEDY, max_tokens=40))
    assert asked[0] > asked[1] > asked[2]


def test_the_law_is_the_targets(tmp_path):
    small = tiny_model(seed=3, vocab_size=VOCAB)
    small_table(tmp_path / "t.ngrams", [[0, 1, 2, 1, 0, 2]], VOCAB, plain=True)
    table = NgramTableDrafter(small, str(tmp_path / "t.ngrams"), ngram_table_min_token_prob=0.0)
    head = new_head(small, range(1, VOCAB), seed=8)
    drafter = BlendedDrafter(small, [EagleDrafter(small, head), table], blended_min_gain=0)
    llm = eagle_llm(2, (small, head), drafter=drafter, max_num_seqs=128,
                    max_num_batched_tokens=512, page_size=8, rule="standard")  # fmt: skip
    check_law(llm, small)


def test_mistakes_are_named(source):
    target, _ = trained()
    for members in ([source], [source, source], [model_of("eagle3"), NgramDrafter()]):
        with pytest.raises(ConfigError, match=r"one that states its law .* and one with a model"):
            BlendedDrafter(target, members)
    for options, message in (
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of 1 or more"),
        ({"blended_min_gain": -1}, "blended_min_gain must be a number of 0 or more, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            blended(source, **options)
    with pytest.raises(ConfigError, match="drafters must be a list"):
        BlendedDrafter(target, "ngram_table")
