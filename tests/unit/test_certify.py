"""The certificate on tiny pairs: it passes what is right, and fails each planted fault."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.bench.certificate import remember
from foredraft.bench.certificate.certify import (
    CertifySettings,
    LawSettings,
    by_position,
    certify,
    certify_pair,
)
from foredraft.bench.certificate.check import judge
from foredraft.bench.certificate.counts import check_counts
from foredraft.bench.certificate.drafts import Worth
from foredraft.bench.certificate.draws import Pair, Setting, draw_computed, draw_remembered
from foredraft.bench.certificate.identity import check_identity
from foredraft.bench.certificate.law import SETTINGS, check_laws
from foredraft.bench.certificate.plot import certificate_png
from foredraft.bench.certificate.sites import target_law
from foredraft.bench.workload import Item
from foredraft.core import acceptance, coins, rejection
from foredraft.core.counts import AcceptanceCounts
from foredraft.core.errors import ConfigError, InvalidRequest, ModelError
from foredraft.core.sampling import Sampler
from foredraft.core.truncation import Truncation
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.engine import step
from foredraft.models.heads.config import Eagle3Config, MedusaConfig
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.medusa import Medusa
from foredraft.testing.drafters import (
    EmptyDrafter,
    RepeatDrafter,
    SkewedTreeDrafter,
    TreeDrafter,
)
from foredraft.testing.models import tiny_model
from foredraft.testing.pairs import tiny_noisy_pair

PROMPTS = {"one": [3, 4, 5, 6], "two": [6, 7, 6, 7, 6]}
DRAWS = 1000
FEW = LawSettings(draws=DRAWS)
PLAIN, NUCLEUS = (LawSettings(settings=[setting], draws=DRAWS) for setting in SETTINGS)


def silent(what, done, total):
    pass


@pytest.fixture(scope="module")
def models():
    return tiny_noisy_pair(3, noise=0.5, vocab_size=24)


@pytest.fixture
def pair(models):
    """A target and a drafter that draws from its own law, which is another."""
    target, draft = models
    return Pair(target, DraftModelDrafter(draft, target), 3, "standard")


def law_verdicts(pair, settings, prompts=PROMPTS):
    results = check_laws(pair, prompts, settings, silent)
    return [*judge(results.tests, settings.family_error), *results.checks]


def failed(checks):
    return [check.name for check in checks if not check.passed]


def test_a_true_pair_passes_every_check(pair):
    settings = CertifySettings({}, max_tokens=8, law=FEW)
    shown = []
    found = certify_pair(pair, PROMPTS, settings, {"model": "tiny"}, lambda *at: shown.append(at))
    assert failed(found.checks) == []
    assert found.passed
    names = [check.name for check in found.checks]
    assert names[:4] == [f"identity, width {width}, all at once" for width in range(4)]
    assert sum(name.startswith("law, ") for name in names) == 5
    assert sum(name.startswith("draft law, ") for name in names) == 3
    assert {"replay", "counts", "acceptance of a liar's drafts, greedy"} <= set(names)
    first = next(check for check in found.checks if check.name.startswith("law, "))
    assert f"{DRAWS} draws at position" in first.detail
    assert "for the nearest mutant (" in first.detail
    written = found.as_json()
    assert list(written)[:2] == ["passed", "checks"]
    assert {"machine", "versions", "revision", "arguments", "date", "model"} <= set(written)
    keys = {"name", "passed", "statistic", "p_value", "detail"}
    assert {frozenset(check) for check in written["checks"]} == {frozenset(keys)}
    totals = {what: (done, total) for what, done, total in shown}
    assert all(done == total for done, total in totals.values())
    (curve,) = found.acceptance.values()
    assert len(curve) == 3
    drafts = written["drafts"]
    assert drafts["accepted_by_position"] == list(curve)
    # None is made for the last place of a text.
    assert drafts["right"] == round(curve[0] * drafts["first_tokens"])
    assert drafts["first_tokens"] > 0
    png = certificate_png(found, pair.target.tokenizer.token_text)
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert min(width, height) > 500


@pytest.mark.parametrize(("rule", "kv_dtype"), [("standard", "float32"), ("coupled", "auto")])
def test_what_is_remembered_is_what_is_computed(pair, rule, kv_dtype):
    pair = replace(pair, rule=rule, engine={"kv_dtype": kv_dtype})
    base = [3, 4, 5, 6, 7]
    setting = Setting("all", 0.9, width=3, length=5)
    replay, rows = pair.remembering(base)
    remembered = draw_remembered(replay, base, setting, 120, 7, lambda *_: None)
    computed = draw_computed(pair, base, setting, 120, 7, lambda *_: None)
    assert remembered.sequences == computed.sequences
    assert remembered.accepted == computed.accepted
    assert len(set(remembered.sequences)) > 60
    row = rows.logits(remembered.sequences[0][:2])
    tap = {}
    LLM(pair.target, tap=lambda _id, at, _token, row: tap.setdefault(at, row)).generate(
        [base + list(remembered.sequences[0][:2])], SamplingParams(max_tokens=1, temperature=0)
    )
    assert torch.allclose(row, tap[7], atol=1e-4)


@pytest.mark.parametrize("rule", ["standard", "coupled"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_heads_are_told_what_is_remembered(kind, rule):
    target = tiny_model(seed=2, kernels="native", dtype="float32", vocab_size=24, num_layers=3)
    c = target.config
    if kind == "eagle3":
        sizes = (32, 48, 4, 2, 8, c.vocab_size, 20, 256, 1e-5, c.rope, 32, (0, 1, 3))
        embedding = target.model.embed(list(range(24)))
        head = Eagle3(Eagle3Config(*sizes), torch.arange(20), embedding)
        drafter = EagleDrafter(target, head)
    else:
        rows = target.model.head_rows(torch.arange(24))
        drafter = MedusaDrafter(Medusa(MedusaConfig(32, 24, 3), head=rows), target)
    pair = Pair(target, drafter, 3, rule)
    base = [3, 4, 5, 6, 7]
    setting = Setting("heads", 0.9, width=3, length=5)
    replay, _ = pair.remembering(base)
    remembered = draw_remembered(replay, base, setting, 120, 7, lambda *_: None)
    computed = draw_computed(pair, base, setting, 120, 7, lambda *_: None)
    assert remembered.sequences == computed.sequences
    assert remembered.accepted == computed.accepted
    assert remembered.accepted[1] > 5
    assert () in remembered.claims  # a first draft right behind the base
    assert failed(law_verdicts(pair, PLAIN)) == []


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_an_exit_is_remembered_beside_its_target(rule):
    """They write the same ids to the same slots."""
    target = tiny_model(seed=2, kernels="native", dtype="float32", vocab_size=24, num_layers=3)
    pair = Pair(target, EarlyExitDrafter(target, exit_layer=2), 3, rule)
    base = [3, 4, 5, 6, 7]
    setting = Setting("exit", 0.9, width=3, length=5)
    replay, _ = pair.remembering(base)
    remembered = draw_remembered(replay, base, setting, 120, 7, lambda *_: None)
    computed = draw_computed(pair, base, setting, 120, 7, lambda *_: None)
    assert remembered.sequences == computed.sequences
    assert remembered.accepted == computed.accepted
    assert remembered.accepted[1] > 5


def test_trees_move_what_is_remembered_along(models, monkeypatch):
    monkeypatch.setattr(remember, "MOST_ROWS", 5)  # most is forgotten and computed again
    drafter = TreeDrafter(*(RepeatDrafter(token) for token in range(2, 24, 3)))
    pair = Pair(models[0], drafter, 16, "standard")
    base = [5, 6, 7]
    setting = Setting("tree", 1.0, width=16, length=5)
    replay, rows = pair.remembering(base)
    remembered = draw_remembered(replay, base, setting, 200, 3, lambda *_: None)
    computed = draw_computed(pair, base, setting, 200, 3, lambda *_: None)
    assert remembered.sequences == computed.sequences
    assert remembered.accepted[1] > 20
    assert len(rows._rows) <= 6


def test_only_contexts_of_the_base_are_remembered(pair):
    replay, _ = pair.remembering([3, 4, 5])
    with pytest.raises(ValueError, match="does not start with the base"):
        replay.llm(1).generate([[3, 4, 6, 7]], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="only its last is remembered"):
        replay.llm(1).generate([[3, 4, 5]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    with pytest.raises(TypeError, match="some of its layers"):
        replay.target.model.layers(0, 1, torch.zeros(1, 32), None, None)


class HotDrafter(DraftModelDrafter):
    """Draws at the request's temperature and claims a law of twice that temperature."""

    def propose(self, requests):
        drafts = super().propose(requests)
        return [
            replace(draft, probs=draft.probs.sqrt() / draft.probs.sqrt().sum(1, keepdim=True))
            for draft in drafts
        ]


def no_residual(monkeypatch, pair):
    monkeypatch.setattr(rejection, "residual", lambda weights, *_: weights.clone())
    return pair


def other_temperature(monkeypatch, pair):
    return replace(pair, drafter=HotDrafter(pair.drafter.loaded, pair.target))


def draft_coins_accept(monkeypatch, pair):
    monkeypatch.setattr(coins, "ACCEPT", coins.DRAFT)
    return pair


def acceptance_coin_recovers(monkeypatch, pair):
    """RESIDUAL at index 0 is what ACCEPT shows at index 0."""
    monkeypatch.setattr(coins, "RESIDUAL", coins.ACCEPT)
    return pair


def ignored_top_p(monkeypatch, pair):
    ignored = property(lambda self: Truncation(temperature=0.8), lambda self, value: None)
    monkeypatch.setattr(Sampler, "truncation", ignored)
    return pair


def colder_sampler(monkeypatch, pair):
    adjusted = Sampler.adjusted

    def cold(self, row, history, mask=None):
        return adjusted(self, row * 1.3, history, mask)

    monkeypatch.setattr(Sampler, "adjusted", cold)
    return pair


@pytest.mark.parametrize(
    "plant",
    [
        no_residual,
        other_temperature,
        draft_coins_accept,
        acceptance_coin_recovers,
        ignored_top_p,
        colder_sampler,
    ],
)
def test_a_planted_fault_fails(pair, monkeypatch, plant):
    settings = NUCLEUS if plant is ignored_top_p else PLAIN
    name = settings.settings[0].name
    found = failed(law_verdicts(plant(monkeypatch, pair), settings))
    assert f"law, {name}, token 1" in found
    lies = f"draft law, {name}, draft token 1" in found
    assert lies == (plant is other_temperature)


def test_a_fixed_draft_needs_its_residual(models, monkeypatch):
    pair = Pair(models[0], RepeatDrafter(9), 2, "standard")
    checks = law_verdicts(pair, PLAIN)
    assert failed(checks) == []
    assert not any(check.name.startswith("draft law") for check in checks)
    for plant in (no_residual, acceptance_coin_recovers):
        checks = law_verdicts(plant(monkeypatch, pair), PLAIN)
        assert "law, temperature 0.8, token 1" in failed(checks)
        monkeypatch.undo()


def test_block_verification_passes_and_fails_where_acceptance_coins_belong_to_positions(
    monkeypatch,
):
    """Coins that a block looked at and rejected come up again one position later."""
    target, draft = tiny_noisy_pair(3, noise=0.5, vocab_size=8, sharpness=1.0)
    pair = Pair(target, DraftModelDrafter(draft, target), 2, "block")
    settings = LawSettings(settings=[Setting("blocks", 1.0, width=2, length=3)], draws=1536)
    prompts = {"one": [3, 4, 5, 6]}
    assert failed(law_verdicts(pair, settings, prompts)) == []
    coin = coins.coin

    def by_position(seed, position, stream, index=0):
        if stream == coins.ACCEPT:
            return coin(seed, position + index, stream)
        return coin(seed, position, stream, index)

    monkeypatch.setattr(coins, "coin", by_position)
    assert "law, blocks, tokens 1 and 2" in failed(law_verdicts(pair, settings, prompts))


class SiblingsAlike(SkewedTreeDrafter):
    """Draws siblings without replacement and claims the law of the first for all."""

    def draft(self, request):
        draft = super().draft(request)
        if draft.probs is None or len(draft.tokens) < 2:
            return draft
        return replace(draft, probs=draft.probs[:1].repeat(len(draft.tokens), 1))


def test_siblings_have_laws_of_their_own(models):
    target, _ = models

    def law(context):
        weights = torch.arange(1, 25, dtype=torch.float64).roll(7 * int(context[-1]))
        return weights**12 / (weights**12).sum()

    settings = LawSettings(settings=[Setting("trees", 1.0, width=2, length=3)], draws=DRAWS)
    for drafter, wrong in ((SkewedTreeDrafter, False), (SiblingsAlike, True)):
        pair = Pair(target, drafter(law, (-1, -1)), 2, "standard")
        found = failed(law_verdicts(pair, settings))
        assert ("draft law, trees, draft token 2" in found) == wrong
        assert bool(found) == wrong


def test_without_draws_that_many_are_made_as_the_stated_power_needs(pair):
    loose = (Setting("loose", 0.8, variation=0.2),)
    results = check_laws(pair, PROMPTS, LawSettings(settings=loose), silent)
    count = len(results.sites[0].draws.sequences)
    assert 512 <= count <= 1024
    assert "power 0.95 for a total variation of 0.1" in results.tests[0].detail


def test_a_drafter_that_never_drafts_certifies_nothing(models):
    checks = law_verdicts(Pair(models[0], EmptyDrafter(), 2, "standard"), FEW)
    assert len(failed(checks)) == len(checks) == 2
    assert "in the continuations of 2 prompts the drafter proposed nothing" in checks[0].detail


def test_a_target_without_a_choice_tests_nothing(models):
    settings = LawSettings(settings=[Setting("one", 1.0, top_k=1, length=2)], draws=DRAWS)
    checks = law_verdicts(Pair(models[0], RepeatDrafter(3), 2, "standard"), settings)
    assert failed(checks) == ["law, one"]


def test_a_model_that_is_no_model_is_a_mistake_and_not_a_failed_check(models, monkeypatch):
    target, _ = models
    run = target.model.run

    def broken(batch, cache):
        output = run(batch, cache)
        return replace(output, logits=output.logits * float("nan"))

    monkeypatch.setattr(target.model, "run", broken)
    with pytest.raises(ModelError, match="nothing can be certified"):
        check_identity(Pair(target, EmptyDrafter(), 1, "standard"), PROMPTS, 4, 0, silent)


def test_prompts_may_be_many(models):
    many = {f"prompt {number}": [3 + number % 5, 4, number % 7] for number in range(20)}
    pair = Pair(models[0], RepeatDrafter(3), 1, "standard")
    identity = check_identity(pair, many, 2, 0, silent)
    assert identity.checks[0].statistic == 80.0
    assert failed(identity.checks) == []
    assert failed(check_counts(pair, identity.outputs, identity.greedy, 0, silent)) == []


def test_a_law_is_by_definition_what_the_sampler_makes(models):
    target, _ = models
    row_math = target.model.kernels.row_math
    generator = torch.Generator().manual_seed(1)
    for temperature, top_k, top_p in ((0.8, 0, 1.0), (0.8, 0, 0.9), (1.3, 7, 0.8), (0.5, 3, 1.0)):
        setting = Setting("any", temperature, top_k, top_p)
        sampler = Sampler(setting.params(0, 1), 24, frozenset(), row_math)
        for _ in range(20):
            row = torch.randn(24, generator=generator)
            law = sampler.law(row, sampler.start([3]))
            assert torch.allclose(target_law(row, setting), law, atol=1e-6)


def test_a_text_that_differs_is_reported_with_its_place_and_margin(pair, monkeypatch):
    def wrong(tree, tokens):
        verdict = yield from acceptance.match(tree, tokens)
        if verdict.num_accepted < 2:
            return verdict
        return replace(verdict, next_token=(verdict.next_token + 1) % 24)

    monkeypatch.setattr(step, "match", wrong)
    found = check_identity(pair, PROMPTS, 12, 0, silent)
    names = failed(found.checks)
    assert "identity, width 0, all at once" not in names
    assert "identity, width 1, all at once" not in names
    assert "identity, width 2, all at once" in names
    detail = next(check.detail for check in found.checks if not check.passed)
    assert "at position" in detail
    assert "plain decoding's best two are" in detail


def test_counts_that_include_the_extra_token_fail(pair, monkeypatch):
    record = AcceptanceCounts.record

    def generous(self, drafted, accepted, emitted, depth=None):
        record(self, drafted, min(accepted + 1, drafted), max(emitted, 1), depth)

    identity = check_identity(pair, PROMPTS, 8, 0, silent)
    sound = check_counts(pair, identity.outputs, identity.greedy, 0, silent)
    assert failed(sound) == []
    monkeypatch.setattr(AcceptanceCounts, "record", generous)
    found = check_counts(pair, {}, identity.greedy, 0, silent)
    assert "counts" in failed(found)
    assert "acceptance of a liar's drafts, greedy" in failed(found)


def test_configurations_are_honoured_or_refused(models):
    target, _ = models
    items = [Item("one", "chat", ("hello",))]

    def run(**config):
        return certify(target, items, CertifySettings(config, 4, FEW), silent)

    lossy = run(method="ngram", rejection_sample_method="typical")
    assert not lossy.passed
    assert len(lossy.checks) == 1
    assert "typical acceptance changes the distribution" in lossy.checks[0].detail
    synthetic = {"num_speculative_tokens": 2, "synthetic_acceptance_length": 2.5}
    lossy = run(method="ngram", rejection_sample_method="synthetic", **synthetic)
    assert (lossy.passed, lossy.facts["rule"]) == (False, "synthetic")
    with pytest.raises(ConfigError, match=r"must be in 1\.\.3 with 2"):
        run(
            method="ngram", rejection_sample_method="synthetic",
            num_speculative_tokens=2, synthetic_acceptance_length=4.0,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="plain decoding needs no certificate"):
        run(method="ngram", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="unknown speculative method"):
        run(method="absent")
    with pytest.raises(InvalidRequest, match="'long'"):
        certify(target, [Item("long", "chat", ("x" * 300,))], CertifySettings({}), silent)


def test_a_damaged_draft_model_passes_and_is_told_from_a_sound_one(models):
    """Reported fault 73, where shapes can't tell: a square tensor transposed."""
    target, _ = models

    def worth(draft):
        pair = Pair(target, DraftModelDrafter(draft, target), 2, "standard")
        identity = check_identity(pair, PROMPTS, 12, 0, silent)
        assert all(check.passed for check in identity.checks)
        return Worth.of(identity.firsts)

    sound = worth(target)
    assert sound.right == sound.tried > 12
    assert sound.above_chance
    assert str(sound).endswith("would be by chance")
    damaged = worth(tiny_model(seed=77, vocab_size=24, num_layers=1))
    assert damaged.right < damaged.tried / 2
    assert not damaged.above_chance
    assert "damaged weights, another target's" in str(damaged)


@pytest.mark.parametrize(
    ("firsts", "right", "expected"),
    [
        ([(1, 1), (2, 2), (3, 3), (4, 4)], 4, 1.0),
        ([(5, 5)] * 10, 10, 10.0),
        ([(1, 2), (2, 1), (1, 1), (2, 2)], 2, 2.0),
        ([(1, 2)], 0, 0.0),
        ([], 0, 0.0),
    ],
    ids=str,
)
def test_chance_is_that_of_drafts_made_for_other_places(firsts, right, expected):
    found = Worth.of(firsts)
    assert (found.tried, found.right, found.expected) == (len(firsts), right, expected)
    assert found.above_chance is (right == 4)


def test_acceptance_by_position_is_of_all_drafts():
    assert by_position([(2, 1, 1), (0, 4)]) == [6 / 8, 1 / 8]
    assert by_position([()]) == by_position([]) == []
