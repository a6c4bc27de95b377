"""What an engine does, as Prometheus metrics: every name, and what it counts, is in this file.

Knows names, labels and formats; the numbers are a `Tally`'s. Stems are vLLM's where vLLM has the
metric. All are labelled by target and drafter, those about requests by request type too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from foredraft.core.errors import ConfigError
from foredraft.engine.engine import Engine
from foredraft.engine.observing import Commit
from foredraft.engine.request import Request
from foredraft.engine.tally import Distribution, Tally, TypeTally
from foredraft.planning.policy import StepRecord

PREFIX = "foredraft:"
COMMON = ("target", "drafter")
OF_REQUESTS = (*COMMON, "request_type")

# Of requests: name -> (what it is, the number).
TypeNumber = Callable[[TypeTally], float]
COUNTERS: dict[str, tuple[str, TypeNumber]] = {
    "spec_decode_num_drafts": (
        "Steps of a request that verified a draft.",
        lambda tally: tally.counts.num_drafts,
    ),
    "spec_decode_num_draft_tokens": (
        "Draft tokens that were verified.",
        lambda tally: tally.counts.num_draft_tokens,
    ),
    "spec_decode_num_accepted_tokens": (
        "Draft tokens that were accepted, without the extra token of each step.",
        lambda tally: tally.counts.num_accepted_tokens,
    ),
    "prompt_tokens": (
        "Tokens of the prompts that were read to their end.",
        lambda tally: tally.prompt_tokens,
    ),
    "generation_tokens": (
        "Tokens that were generated.",
        lambda tally: tally.counts.num_emitted_tokens,
    ),
    "lossy_generation_tokens": (
        "Of generation_tokens, those under a rule that changes what the target says.",
        lambda tally: tally.lossy_tokens,
    ),
    "request_steps": (
        "Passes of the target that gave a request tokens, counted for each request.",
        lambda tally: tally.counts.num_steps,
    ),
}
GAUGES: dict[str, tuple[str, TypeNumber]] = {
    "spec_decode_mean_acceptance_length": (
        "Tokens a step over the steps that verified a draft, the extra token included; 1 without.",
        lambda tally: tally.counts.mean_acceptance_length,
    ),
    "target_passes_per_token": (
        "Passes of the target for a token of a request; plain decoding has 1.",
        lambda tally: _ratio(tally.counts.num_steps, tally.counts.num_emitted_tokens),
    ),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[TypeTally], Distribution]]] = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        lambda tally: tally.first_token,
    ),
    "inter_token_latency_seconds": (
        "Between tokens as they are emitted: those of one step come together, 0 seconds apart.",
        lambda tally: tally.inter_token,
    ),
    "tokens_per_burst": (
        "Tokens that a step gave a request at once.",
        lambda tally: tally.burst,
    ),
    "request_queue_time_seconds": (
        "From a request's arrival to its first step.",
        lambda tally: tally.queue,
    ),
    "e2e_request_latency_seconds": (
        "From a request's arrival to its end, however it ended.",
        lambda tally: tally.end_to_end,
    ),
}


class EngineMetrics:
    """Watches one engine, and is read through `registry`."""

    def __init__(
        self,
        engine: Engine,
        *,
        target: str,
        drafter: str,
        num_speculative_tokens: int,
        price_per_hour: float | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`price_per_hour`: of the machine, in any currency; for the cost of a token.

        Raises ConfigError for a price that is none.
        """
        number = type(price_per_hour) in (int, float)
        if price_per_hour is not None and not (number and 0 <= price_per_hour < math.inf):
            raise ConfigError(f"price_per_hour must be 0 or more, got {price_per_hour!r}")
        self.tally = Tally(num_speculative_tokens)
        self.registry = CollectorRegistry() if registry is None else registry
        self._engine = engine
        self.labels = (target, drafter)
        self._price_per_hour = price_per_hour
        self.registry.register(self)

    def committed(self, commits: Sequence[Commit]) -> None:
        """Count what a step committed."""
        self.tally.committed(commits)

    def stepped(self, record: StepRecord) -> None:
        """Count what a step cost, and why it drafted so much."""
        self.tally.stepped(record, self._engine.scheduler.policy)

    def ended(self, requests: Sequence[Request]) -> None:
        """Count requests that have ended."""
        self.tally.ended(requests)

    def collect(self) -> Iterator[Metric]:
        """All metrics at one moment between two steps' commits (prometheus_client's protocol)."""
        with self.tally.lock:
            metrics = [*self._of_requests(), *self._of_widths(), *self._of_steps()]
        yield from metrics
        yield from self._of_engine()

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: names are unique in a registry of one engine."""
        return ()

    def _of_requests(self) -> Iterator[Metric]:
        for name, (words, number) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, words, labels=OF_REQUESTS)
            yield self._filled(counter, number)
        for name, (words, number) in GAUGES.items():
            yield self._filled(GaugeMetricFamily(PREFIX + name, words, labels=OF_REQUESTS), number)
        yield from self._by_position()
        ended = CounterMetricFamily(
            f"{PREFIX}requests",
            "Requests that have ended, by the reason.",
            labels=(*OF_REQUESTS, "finish_reason"),
        )
        for kind, tally in self.tally.types.items():
            for reason, number_ended in tally.ended.items():
                ended.add_metric((*self.labels, kind, reason), number_ended)
        yield ended
        for name, (words, distribution) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, words, labels=OF_REQUESTS)
            for kind, tally in self.tally.types.items():
                _fill(histogram, (*self.labels, kind), distribution(tally))
            yield histogram

    def _filled(self, family: Any, number: TypeNumber) -> Metric:
        for kind, tally in self.tally.types.items():
            family.add_metric((*self.labels, kind), number(tally))
        filled: Metric = family
        return filled

    def _by_position(self) -> Iterator[Metric]:
        labels = (*OF_REQUESTS, "position")
        accepted = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Drafts whose token at this position (0 = the first) was accepted.",
            labels=labels,
        )
        conditional = GaugeMetricFamily(
            f"{PREFIX}spec_decode_conditional_acceptance_rate",
            "P(accepted at this position | it was drafted and all before it were accepted).",
            labels=labels,
        )
        for kind, tally in self.tally.types.items():
            for position, number in enumerate(tally.counts.accepted_per_position):
                accepted.add_metric((*self.labels, kind, str(position)), number)
            for position, rate in enumerate(tally.counts.conditional_acceptance_by_position):
                conditional.add_metric((*self.labels, kind, str(position)), rate)
        yield accepted
        yield conditional

    def _of_widths(self) -> Iterator[Metric]:
        widths = HistogramMetricFamily(
            f"{PREFIX}draft_width_tokens",
            "Draft tokens asked of the drafter for a request in a step, and why so many: what the "
            "policy chose by (fixed, batch size, pays, loses, probe, sample, disabled), or what "
            "left it less (max_tokens, request, budget, pages).",
            labels=(*OF_REQUESTS, "reason"),
        )
        for kind, tally in self.tally.types.items():
            for reason, distribution in tally.widths.items():
                _fill(widths, (*self.labels, kind, reason), distribution)
        yield widths

    def _of_steps(self) -> Iterator[Metric]:
        steps = self.tally.steps
        yield self._counter("steps", "Steps of the engine.", steps.num_steps)
        seconds = CounterMetricFamily(
            f"{PREFIX}step_seconds",
            "Seconds of the steps: the drafter's, and all others.",
            labels=(*COMMON, "part"),
        )
        seconds.add_metric((*self.labels, "drafter"), steps.drafter_seconds)
        seconds.add_metric((*self.labels, "rest"), steps.other_seconds)
        yield seconds
        if steps.mean_step_cost is not None:
            yield self._gauge(
                "mean_step_cost",
                "Cost of a step that decodes, in plain passes of the target. Speed-up is tokens a "
                "step over this.",
                steps.mean_step_cost,
            )
        tokens = sum(tally.counts.num_emitted_tokens for tally in self.tally.types.values())
        if self._price_per_hour is not None and tokens:
            yield self._gauge(
                "cost_per_token",
                "Price of the seconds in steps, prompts included, for a generated token.",
                self._price_per_hour / 3600.0 * steps.busy_seconds / tokens,
            )

    def _of_engine(self) -> Iterator[Metric]:
        scheduler, pool = self._engine.scheduler, self._engine.pool
        yield self._gauge("num_requests_running", "Requests that run.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests that wait.", len(scheduler.waiting))
        yield self._gauge(
            "drafter_enabled",
            "1 while drafts may be made, 0 without a drafter or after it failed.",
            self._engine.drafter is not None,
        )
        pages = GaugeMetricFamily(
            f"{PREFIX}kv_cache_pages",
            "Pages of the cache: held by requests, cached for later ones, or free.",
            labels=(*COMMON, "state"),
        )
        pages.add_metric((*self.labels, "used"), scheduler.pages_in_use)
        pages.add_metric((*self.labels, "cached"), pool.num_idle)
        pages.add_metric((*self.labels, "free"), pool.num_free)
        yield pages
        yield self._counter(
            "num_preemptions",
            "Times that a request gave up its pages to older ones.",
            scheduler.num_preemptions,
        )
        yield self._counter(
            "prefix_cache_queries",
            "Tokens of the requests that looked for cached pages.",
            scheduler.prefix_query_tokens,
        )
        yield self._counter(
            "prefix_cache_hits",
            "Of prefix_cache_queries, those that were cached.",
            scheduler.prefix_hit_tokens,
        )

    def _counter(self, name: str, words: str, number: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, words, labels=COMMON)
        family.add_metric(self.labels, number)
        return family

    def _gauge(self, name: str, words: str, number: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, words, labels=COMMON)
        family.add_metric(self.labels, number)
        return family


def _fill(family: HistogramMetricFamily, labels: Sequence[str], values: Distribution) -> None:
    buckets, seen = [], 0
    for bound, count in zip((*values.bounds, math.inf), values.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == math.inf else str(float(bound)), float(seen)))
    family.add_metric(labels, buckets, values.total)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
