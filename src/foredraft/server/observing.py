"""What the server itself counts, beside the engine's metrics and in the same registry.

Knows names and labels; knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from foredraft.engine.metrics import COMMON, PREFIX

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str]) -> None:
        """`labels`: values for target and drafter, which all metrics of a registry share."""
        self._requests = Counter(
            f"{PREFIX}http_requests",
            "Requests over HTTP, by path and status of the answer.",
            (*COMMON, "path", "status"),
            registry=registry,
        )
        self._labels = tuple(labels)
        self._gaps = Histogram(
            f"{PREFIX}sent_inter_token_latency_seconds",
            "Between the events of a streamed completion as they are sent, by the number of tokens "
            "in them; with --pace that is what a reader sees.",
            COMMON,
            buckets=LATENCIES,
            registry=registry,
        ).labels(*self._labels)
        self._disconnects = Counter(
            f"{PREFIX}client_disconnects",
            "Answers that ended because their client had left.",
            COMMON,
            registry=registry,
        ).labels(*self._labels)

    def answered(self, path: str, status: int) -> None:
        """Count an answer; `path` is a route's, so there are few."""
        self._requests.labels(*self._labels, path, str(status)).inc()

    def sent(self, seconds: float, num_tokens: int) -> None:
        """An event with so many tokens was sent so long after the one before."""
        for _ in range(num_tokens):
            self._gaps.observe(seconds / num_tokens)

    def disconnected(self) -> None:
        """Count a client that left."""
        self._disconnects.inc()
