"""Do sampled tokens follow the target's law, and drafted ones the law the drafter claims?

Knows sites, draws and chi-square tests; knows neither prompts as text nor checks of identity. The
expected law comes from the target's logits by definition, what is observed from the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foredraft.bench.certificate.cells import RANK_CELLS, Ranks
from foredraft.bench.certificate.check import Check, LawTest
from foredraft.bench.certificate.chi_square import (
    draws_for,
    pearson,
    power,
    smallest_variation,
)
from foredraft.bench.certificate.draws import (
    GROUP,
    Draws,
    Pair,
    Setting,
    draw_computed,
    draw_remembered,
    rank_cell,
)
from foredraft.bench.certificate.remember import RememberedModel, Suffix
from foredraft.bench.certificate.sites import Site, best_site, target_law
from foredraft.core.coins import mix

Progress = Callable[[str, int, int], None]  # what, done, of
POWER = 0.95  # with which a law that is off by a setting's `variation` is caught
GRID = 6  # ranks of two successive tokens fall into GRID x GRID cells
IMPOSSIBLE = 2.0  # the rank of a token that its law gives probability 0
TYPICAL_DF = 23  # before a site is chosen: that of a law which pools into single cells

SETTINGS = (
    Setting("temperature 0.8", 0.8, width=1, length=2),
    Setting("temperature 0.8, top-p 0.9", 0.8, top_p=0.9, width=2, length=3),
)


@dataclass(frozen=True, slots=True)
class LawSettings:
    """How much is drawn, and how sure the verdict is."""

    settings: Sequence[Setting] = SETTINGS
    draws: int | None = None  # at each site; None: as many as `POWER` needs
    family_error: float = 1e-3  # P(any test fails) where all laws are right
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where to draw under a setting, how often, and with which seed."""

    setting: Setting
    site: Site
    num_draws: int
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is fixed before anything is drawn for a test."""

    places: Sequence[Place]
    level: float  # of each test, so that all of them together keep the family's error
    without: Sequence[Setting]  # settings under which there is nothing to test


@dataclass(frozen=True, slots=True)
class SiteResult:
    """A place with what was drawn there."""

    place: Place
    draws: Draws


@dataclass(frozen=True, slots=True)
class LawResults:
    """Tests still to be judged together, exact checks beside them, and the draws for plots."""

    tests: Sequence[LawTest]
    checks: Sequence[Check]
    sites: Sequence[SiteResult]


def check_laws(
    pair: Pair, prompts: Mapping[str, Sequence[int]], settings: LawSettings, progress: Progress
) -> LawResults:
    """Choose a site for each setting, draw there, and test.

    At the last site the first draws are made again end to end, with every pass computed.
    """
    plan = plan_laws(pair, prompts, settings, progress)
    checks = [_nothing_drafted(setting, len(prompts)) for setting in plan.without]
    tests: list[LawTest] = []
    results: list[SiteResult] = []
    for place in plan.places:
        replay, rows = pair.remembering(place.site.base)
        result = draw_at(replay, place, progress)
        tests.append(first_token(result, plan.level))
        tests += _successive_tokens(result, rows)
        tests += _draft_laws(result)
        results.append(result)
    if results:
        end_checks, end_test = _end_to_end(pair, results[-1], progress)
        checks += end_checks
        tests.append(end_test)
    return LawResults(tests, checks, results)


def plan_laws(
    pair: Pair, prompts: Mapping[str, Sequence[int]], settings: LawSettings, progress: Progress
) -> Plan:
    """A site for each setting, within the pair's draft length, and the draws its power needs."""
    found: list[tuple[Setting, Site]] = []
    without = []
    for each in settings.settings:
        setting = replace(each, width=min(each.width, pair.num_speculative_tokens))
        draws = settings.draws or _enough(setting, TYPICAL_DF, settings.family_error / 10)
        show = partial(progress, f"choosing a place, {setting.name}")
        site = best_site(pair, prompts, setting, draws, settings.seed, show)
        if site is None:
            without.append(setting)
        else:
            found.append((setting, site))
    level = settings.family_error / (1 + sum(_num_tests(*each) for each in found))
    places = [
        Place(
            setting,
            site,
            settings.draws or _enough(setting, site.cells.num_possible - 1, level),
            mix(settings.seed, number + 1),
        )
        for number, (setting, site) in enumerate(found)
    ]
    return Plan(places, level, without)


def draw_at(replay: Pair, place: Place, progress: Progress) -> SiteResult:
    """The draws of a place, with a pair that remembers its base."""
    show = partial(progress, f"draws, {place.setting.name}")
    draws = draw_remembered(
        replay, place.site.base, place.setting, place.num_draws, place.seed, show
    )
    return SiteResult(place, draws)


def _nothing_drafted(setting: Setting, num_prompts: int) -> Check:
    detail = (
        f"in the continuations of {num_prompts} prompts the drafter proposed nothing where the "
        "target had a choice, so that nothing could be tested; give other --prompts"
    )
    return Check(f"law, {setting.name}", False, None, None, detail)


def _num_tests(setting: Setting, site: Site) -> int:
    """The first token, pairs of successive ones, and draft tokens."""
    return setting.length + (setting.width if site.sampled else 0)


def _enough(setting: Setting, df: int, level: float) -> int:
    """Draws, in whole groups, that show a law which is off by the setting's variation."""
    needed = draws_for(max(df, 1), level, setting.variation, POWER)
    return GROUP * -(-needed // GROUP)


def first_token(result: SiteResult, level: float) -> LawTest:
    """Token by token, rare ones pooled, with what the test can see."""
    site, draws = result.place.site, result.draws
    statistic, df, p_value = pearson(site.cells.counts(draws.tokens), site.cells.probs)
    count = len(draws.sequences)
    detail = (
        f"{count} draws at position {len(site.base)} of {site.prompt_id!r}, "
        f"{site.cells.num_possible} cells; {_power(site, df, count, level)}"
    )
    return LawTest(f"law, {result.place.setting.name}, token 1", statistic, df, p_value, detail)


def _power(site: Site, df: int, count: int, level: float) -> str:
    variation = smallest_variation(df, level, count, POWER)
    words = f"power {POWER} for a total variation of {variation:.3f}"
    if not site.mutants:
        return f"{words}; no mutant would differ here: target and draft have the same law"
    nearest = site.mutants[0]
    seen = power(df, count * nearest.divergence, level)
    return (
        f"{words}, {seen:.3f} for the nearest mutant ({nearest.name}, "
        f"{nearest.total_variation:.3f})"
    )


def _successive_tokens(result: SiteResult, rows: RememberedModel) -> list[LawTest]:
    """Ranks of two tokens in a row, each under the law given those before, are independent."""
    setting = result.place.setting
    ranks = _ranks(result, rows)
    expected = torch.full((GRID * GRID + 1,), 1.0 / (GRID * GRID), dtype=torch.float64)
    expected[-1] = 0.0  # what the target never says
    tests = []
    for first in range(setting.length - 1):
        counts = torch.zeros_like(expected)
        for row in ranks:
            counts[_grid_cell(row[first], row[first + 1])] += 1
        name = f"law, {setting.name}, tokens {first + 1} and {first + 2}"
        detail = f"{len(ranks)} draws, ranks under the law given those before, two by two"
        tests.append(LawTest(name, *pearson(counts, expected), detail))
    return tests


def _grid_cell(first: float, second: float) -> int:
    if IMPOSSIBLE in (first, second):
        return GRID * GRID
    return GRID * rank_cell(first, GRID) + rank_cell(second, GRID)


def _ranks(result: SiteResult, rows: RememberedModel) -> list[list[float]]:
    """`[N][L]` uniform ranks of the tokens under a true law; `IMPOSSIBLE` where it gives 0."""
    place, draws = result.place, result.draws
    sequences = draws.sequences
    following: dict[Suffix, set[int]] = defaultdict(set)
    for sequence in sequences:
        for length, token in enumerate(sequence):
            following[sequence[:length]].add(token)
    intervals: dict[Suffix, tuple[float, float]] = {}
    for prefix in sorted(following):
        law = target_law(rows.logits(prefix).cpu(), place.setting)
        draft_law = _claimed(draws, prefix, law)
        ranked = Ranks(law, draft_law)
        for token in following[prefix]:
            intervals[(*prefix, token)] = ranked.interval(token) or (IMPOSSIBLE, 0.0)
    generator = torch.Generator().manual_seed(place.seed >> 1)
    shares = torch.rand(len(sequences), place.setting.length, generator=generator).tolist()
    return [
        [
            above + share * mass
            for share, (above, mass) in zip(
                row, (intervals[sequence[: i + 1]] for i in range(len(sequence))), strict=True
            )
        ]
        for row, sequence in zip(shares, sequences, strict=True)
    ]


def _claimed(draws: Draws, prefix: Suffix, law: Tensor) -> Tensor | None:
    """The draft's law after `prefix`, if it was kept; one-hot for a deterministic draft."""
    claim = draws.claims.get(prefix)
    if isinstance(claim, int):
        return torch.zeros_like(law).index_fill_(0, torch.tensor(claim), 1.0)
    return claim


def _draft_laws(result: SiteResult) -> list[LawTest]:
    """Draft tokens by rank in the law that the drafter claims."""
    expected = torch.full((RANK_CELLS,), 1.0 / RANK_CELLS, dtype=torch.float64)
    tests = []
    for index, ranks in enumerate(result.draws.draft_ranks):
        statistic, df, p_value = pearson(torch.tensor(ranks, dtype=torch.float64), expected)
        name = f"draft law, {result.place.setting.name}, draft token {index + 1}"
        detail = f"{sum(ranks)} drafted tokens, ranks under the law that the drafter claims"
        tests.append(LawTest(name, statistic, df, p_value, detail))
    return tests


def _end_to_end(pair: Pair, result: SiteResult, progress: Progress) -> tuple[list[Check], LawTest]:
    """The first draws again, with every pass computed: the same tokens, and the target's law."""
    site, setting = result.place.site, result.place.setting
    remembered = result.draws.sequences[:GROUP]
    count = len(remembered)
    show = partial(progress, "draws end to end")
    draws = draw_computed(pair, site.base, setting, count, result.place.seed, show)
    statistic, df, p_value = pearson(site.cells.counts(draws.tokens), site.cells.probs)
    detail = f"{count} draws through the engine, every pass computed"
    test = LawTest(f"law end to end, {setting.name}", statistic, df, p_value, detail)
    if not pair.same_tokens:
        return [], test
    same = sum(a == b for a, b in zip(draws.sequences, remembered, strict=True))
    words = f"{same} of {count} draws have the same tokens with passes computed and remembered"
    return [Check("replay", same == count, float(same), None, words)], test
