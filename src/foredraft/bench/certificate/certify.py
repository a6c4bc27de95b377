"""A certificate: every check of one pair of target and drafter, with its provenance.

Knows which checks there are and in which order; each lives in its own module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.bench.certificate.check import Check, judge
from foredraft.bench.certificate.counts import check_counts
from foredraft.bench.certificate.drafts import Worth
from foredraft.bench.certificate.draws import Pair
from foredraft.bench.certificate.identity import check_identity
from foredraft.bench.certificate.law import LawSettings, SiteResult, check_laws
from foredraft.bench.decode import prompt_ids
from foredraft.bench.provenance import provenance
from foredraft.bench.workload import Item
from foredraft.core.errors import ConfigError
from foredraft.drafters.catalog import build_drafter, resolve_method
from foredraft.engine.config import Rule, SpeculativeConfig
from foredraft.models.load import LoadedModel

Progress = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True, slots=True)
class CertifySettings:
    """What `certify` runs."""

    speculative_config: Mapping[str, Any]
    max_tokens: int = 32  # of each text that is compared
    law: LawSettings = field(default_factory=LawSettings)
    engine: Mapping[str, Any] = field(default_factory=dict)  # kv_dtype, max_model_len


@dataclass(frozen=True, slots=True)
class Certificate:
    """All checks, and the draws behind them for plots."""

    checks: Sequence[Check]
    facts: Mapping[str, Any]  # what was certified, and how
    sites: Sequence[SiteResult] = ()
    acceptance: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by position
    worth: Worth | None = None  # of the drafts; None: nothing was run

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The documented form, then the facts and the provenance."""
        return {
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "kind": "certificate",
            **self.facts,
            **({} if self.worth is None else {"drafts": self._drafts(self.worth)}),
            **provenance(),
        }

    def _drafts(self, worth: Worth) -> dict[str, Any]:
        (by_position,) = self.acceptance.values()
        return {**worth.as_json(), "accepted_by_position": list(by_position)}


def certify(
    loaded: LoadedModel, items: Sequence[Item], settings: CertifySettings, progress: Progress
) -> Certificate:
    """Check identity, laws and counts of a target with the drafter that a configuration names.

    A rule that changes the law of the output fails without being run.

    Raises ConfigError for a configuration that drafts nothing, InvalidRequest for a prompt that
    does not fit, naming its line and id.
    """
    config = SpeculativeConfig.from_mapping(settings.speculative_config)
    method = resolve_method(config.method, config.options, loaded)
    prompts = prompt_ids(loaded, items, settings.engine.get("max_model_len"))
    built = build_drafter(method, config.options, loaded)
    asked = config.num_speculative_tokens
    width = built.num_speculative_tokens if asked is None else asked
    if width == 0:
        raise ConfigError("num_speculative_tokens is 0: plain decoding needs no certificate")
    config.check_drafter(width, built.drafter.capabilities.tree)
    verification = config.verification(seeded=False, num_speculative_tokens=width)
    facts = _facts(loaded, settings, method, verification.rule, len(items))
    if verification.changes_law(greedy=False):
        return Certificate([_lossy(verification.rule)], facts)
    pair = Pair(loaded, built.drafter, width, verification.rule, settings.engine)
    return certify_pair(pair, prompts, settings, facts, progress)


def certify_pair(
    pair: Pair,
    prompts: Mapping[str, Sequence[int]],
    settings: CertifySettings,
    facts: Mapping[str, Any],
    progress: Progress,
) -> Certificate:
    """The certificate of a pair whose drafter is at hand; see `certify`."""
    begin = time.perf_counter()
    seed = settings.law.seed
    identity = check_identity(pair, prompts, settings.max_tokens, seed, progress)
    counts = check_counts(pair, identity.outputs, identity.greedy, seed, progress)
    laws = check_laws(pair, prompts, settings.law, progress)
    checks = [
        *identity.checks,
        *judge(laws.tests, settings.law.family_error),
        *laws.checks,
        *counts,
    ]
    acceptance = {
        "all texts, greedy and coupled": by_position(
            [output.metrics.speculative_decoding.acceptance_histogram for output in identity.widest]
        )
    }
    seconds = round(time.perf_counter() - begin, 1)
    worth = Worth.of(identity.firsts)
    return Certificate(checks, {**facts, "seconds": seconds}, laws.sites, acceptance, worth)


def by_position(histograms: Sequence[Sequence[int]]) -> list[float]:
    """P(the first i + 1 draft tokens are accepted), of counts of drafts with exactly j accepted."""
    depth = max(map(len, histograms), default=0)
    total = [sum(each[j] for each in histograms if j < len(each)) for j in range(depth)]
    drafts = sum(total)
    return [sum(total[j:]) / drafts for j in range(1, depth)] if drafts else []


def _facts(
    loaded: LoadedModel, settings: CertifySettings, method: str, rule: Rule, num_prompts: int
) -> dict[str, Any]:
    return {
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.model.kernels.name,
        "method": method,
        "rule": rule.value,
        "speculative_config": dict(settings.speculative_config),
        "prompts": num_prompts,
        "family_error": settings.law.family_error,
        "seed": settings.law.seed,
    }


def _lossy(rule: Rule) -> Check:
    detail = (
        f"{rule} acceptance changes the distribution of the output on purpose: it is lossy and "
        "is not certified; the exact rules are standard, block and coupled"
    )
    return Check("exact rule", False, None, None, detail)
