"""The certificate's statistics against scipy, and its cells and mutants against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.bench.certificate import chi_square
from foredraft.bench.certificate.cells import LEAST_REST, SMALLEST_CELL, Ranks, pool
from foredraft.bench.certificate.check import LawTest, judge
from foredraft.bench.certificate.mutant_laws import emitted, mutant_laws

DF = (1, 2, 7, 23, 35, 200)


@pytest.mark.parametrize("df", DF)
def test_tails_are_those_of_scipy(df):
    for statistic in (0.0, 0.3, df / 2, float(df), 3.0 * df, 10.0 * df + 50):
        assert chi_square.survival(statistic, df) == pytest.approx(
            stats.chi2.sf(statistic, df), rel=1e-9, abs=1e-300
        )
        for noncentrality in (0.0, 0.5, 20.0, 400.0):
            expected = stats.ncx2.sf(statistic, df, noncentrality)
            if noncentrality == 0.0:
                expected = stats.chi2.sf(statistic, df)
            found = chi_square.noncentral_survival(statistic, df, noncentrality)
            assert found == pytest.approx(expected, rel=1e-7, abs=1e-12)
    assert chi_square.survival(math.inf, df) == 0.0


@pytest.mark.parametrize("df", DF)
@pytest.mark.parametrize("level", [0.05, 1e-3, 8e-5])
def test_power_and_the_number_of_draws_are_those_of_scipy(df, level):
    critical = stats.chi2.isf(level, df)
    assert chi_square.critical_value(df, level) == pytest.approx(critical, rel=1e-8)
    draws = chi_square.draws_for(df, level, 0.02, 0.95)
    noncentrality = draws * 0.04**2
    assert stats.ncx2.sf(critical, df, noncentrality) >= 0.95
    assert stats.ncx2.sf(critical, df, noncentrality - 0.04**2) < 0.95
    found = chi_square.power(df, noncentrality, level)
    assert found == pytest.approx(stats.ncx2.sf(critical, df, noncentrality), rel=1e-7)
    assert chi_square.smallest_variation(df, level, draws, 0.95) == pytest.approx(0.02, rel=1e-4)


def test_pearson_is_scipys_and_an_impossible_count_is_infinite():
    observed = torch.tensor([18.0, 55.0, 27.0, 0.0], dtype=torch.float64)
    probs = torch.tensor([0.2, 0.5, 0.3, 0.0], dtype=torch.float64)
    expected = stats.chisquare([18, 55, 27], [20, 50, 30])
    assert chi_square.pearson(observed, probs) == pytest.approx(
        (expected.statistic, 2, expected.pvalue)
    )
    observed[3] = 1.0
    assert chi_square.pearson(observed, probs) == (math.inf, 2, 0.0)
    assert chi_square.pearson(observed[:1], torch.ones(1, dtype=torch.float64)) == (0.0, 0, 1.0)


def test_the_number_of_draws_is_enough_for_the_law_that_is_hardest_to_see():
    """Every cell off by the same share is the worst case; unequal ones are seen better."""
    probs = torch.full((24,), 1 / 24, dtype=torch.float64)
    worst = probs * (1.0 + 0.04 * torch.tensor([1.0, -1.0] * 12, dtype=torch.float64))
    assert chi_square.divergence(worst, probs) == pytest.approx(0.04**2)
    one = probs.clone()
    one[0] += 0.02
    one[1] -= 0.02
    assert chi_square.divergence(one, probs) > 0.04**2


def test_adjusted_p_values_are_holms():
    assert chi_square.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert chi_square.holm([0.9, 0.001, 0.8]) == pytest.approx([1.0, 0.003, 1.0])
    assert chi_square.holm([]) == []


def test_true_laws_rarely_fail_and_a_wrong_one_among_them_does():
    def test(p_value):
        return LawTest("law", 1.0, 3, p_value, "detail")

    generator = np.random.default_rng(0)
    families = [judge([test(p) for p in generator.random(10)], 0.05) for _ in range(2000)]
    failed = sum(not all(check.passed for check in family) for family in families)
    assert stats.binomtest(failed, 2000, 0.05, "greater").pvalue > 1e-3
    assert failed > 0
    verdicts = judge([test(0.5), test(1e-5), test(0.01)], 1e-3)
    assert [check.passed for check in verdicts] == [True, False, True]
    assert verdicts[1].detail == "detail; 3 degrees of freedom, adjusted p 3e-05"


def laws(seed, vocab_size):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * 2.0
    p, q = torch.softmax(logits, dim=-1)
    return p, q


@pytest.mark.parametrize("seed", range(20))
def test_cells_share_the_vocabulary_out_and_none_is_tiny(seed):
    p, q = laws(seed, 500)
    if seed % 2:
        p = torch.where(p < p.median(), torch.zeros_like(p), p)
        p = p / p.sum()
    cells = pool(p, q)
    assert cells.probs.sum() == pytest.approx(1.0)
    assert cells.probs[-1] == 0.0
    assert cells.probs[:-1].min() > LEAST_REST
    assert torch.equal(cells.of_token == len(cells.probs) - 1, p == 0)
    assert torch.allclose(cells.law(p), cells.probs)
    for token in (p >= SMALLEST_CELL).nonzero().squeeze(1).tolist():
        assert cells.tokens[int(cells.of_token[token])] == token
    pooled = [cell for cell in range(cells.num_possible) if cell not in cells.tokens]
    # Ordered by q / p, so that what a rule does to a token it does to its cell.
    ratios = [(q[cells.of_token == c] / p[cells.of_token == c]) for c in pooled]
    for higher, lower in itertools.pairwise(ratios):
        assert higher.min() >= lower.max()
    drawn = {3: 2, 7: 5}
    counts = cells.counts(drawn)
    assert counts.sum() == 7.0


def test_a_little_rest_goes_to_the_rarest_cell():
    p = torch.tensor([0.7, 0.2999, 0.0001, 0.0], dtype=torch.float64)
    cells = pool(p, p)
    assert cells.probs.tolist() == pytest.approx([0.7, 0.3, 0.0])
    assert cells.of_token.tolist() == [0, 1, 1, 2]
    assert cells.tokens == {0: 0}
    one = pool(torch.tensor([0.0, 1.0], dtype=torch.float64), p[:2])
    assert (one.num_possible, one.of_token.tolist()) == (1, [1, 0])


def test_pooling_loses_little_of_what_mutants_do():
    p, q = laws(5, 5000)
    cells = pool(p, q)
    assert cells.num_possible <= 1 / SMALLEST_CELL
    law = mutant_laws(p, q, 0.8, sampled=True)["no residual"]
    whole = float((law - p).abs().sum())
    assert float((cells.law(law) - cells.probs).abs().sum()) > 0.95 * whole


def test_ranks_are_uniform_with_ties_and_a_token_beyond_the_law_has_none():
    law = torch.tensor([0.1, 0.4, 0.1, 0.0, 0.4], dtype=torch.float64)
    ranks = Ranks(law)
    assert ranks.interval(1) == ranks.interval(4) == pytest.approx((0.0, 0.8))
    assert ranks.interval(0) == ranks.interval(2) == pytest.approx((0.8, 0.2))
    assert ranks.interval(3) is None


def test_ranks_follow_the_drafts_law_where_it_is_known():
    law = torch.tensor([0.1, 0.4, 0.1, 0.0, 0.4], dtype=torch.float64)
    draft = torch.tensor([0.0, 0.0, 0.8, 0.0, 0.2])
    found = [Ranks(law, draft).interval(token) for token in (2, 4, 1, 0)]
    assert found == [pytest.approx(x) for x in ((0.0, 0.1), (0.1, 0.4), (0.5, 0.4), (0.9, 0.1))]


def simulated(p, q, draws, mutant):
    """Speculative sampling by hand, with one mistake; tokens by inverse CDF in id order."""
    generator = np.random.default_rng(1)
    draft, accept, recover = generator.random((3, draws))

    def draw(law, coins):
        running = np.cumsum(law)
        return np.minimum(np.searchsorted(running / running[-1], coins, side="right"), len(p) - 1)

    drawn = q
    if mutant == "draft drawn at another temperature":
        drawn = q**0.8 / (q**0.8).sum()
    tokens = draw(drawn, draft)
    if mutant == "draft coin reused for acceptance":
        accept = draft
    if mutant == "acceptance coin reused for the residual":
        recover = accept
    ratio = q[tokens] / p[tokens] if mutant == "inverted ratio" else p[tokens] / q[tokens]
    left_over = np.maximum(p - q, 0.0)
    if mutant == "residual swapped":
        left_over = np.maximum(q - p, 0.0)
    recovered = draw(p if mutant == "no residual" else left_over, recover)
    if mutant == "residual from p":
        for token in range(len(p)):
            here = tokens == token
            recovered[here] = draw(np.where(np.arange(len(p)) == token, 0.0, p), recover[here])
    emitted_tokens = np.where(accept < ratio, tokens, recovered)
    return np.bincount(emitted_tokens, minlength=len(p))


@pytest.mark.parametrize(
    "mutant",
    [
        None,
        "no residual",
        "residual swapped",
        "inverted ratio",
        "acceptance coin reused for the residual",
        "residual from p",
        "draft coin reused for acceptance",
        "draft drawn at another temperature",
    ],
)
def test_mutants_say_what_a_simulation_of_them_says(mutant):
    p, q = laws(11, 6)
    found = simulated(p.numpy(), q.numpy(), 200_000, mutant)
    known = mutant_laws(p, q, 0.8, sampled=True)
    expected = (p if mutant is None else known[mutant]).numpy()
    assert expected.sum() == pytest.approx(1.0)
    said = expected > 0
    assert found[~said].sum() == 0
    assert stats.chisquare(found[said], expected[said] * found.sum()).pvalue > 1e-4
    assert torch.allclose(emitted(p, q, q), p)


def test_mutants_of_a_fixed_draft():
    p, _ = laws(2, 5)
    q = torch.zeros(5, dtype=torch.float64)
    q[3] = 1.0
    known = mutant_laws(p, q, 0.8, sampled=False)
    assert not {name for name in known if "draft" in name}
    no_residual = (1.0 - p[3]) * p + p[3] * q
    assert torch.allclose(known["no residual"], no_residual)
    assert torch.allclose(known["inverted ratio"], q)
    # The coin that rejected lies above p(3), and so does what it draws.
    assert known["acceptance coin reused for the residual"].sum() == pytest.approx(1.0)
    assert known["acceptance coin reused for the residual"][0] < p[0]
