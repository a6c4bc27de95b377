"""What an engine does, as Prometheus metrics; every name is in this file.

Knows steps that are committed and requests that have ended; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from foredraft.engine.engine import Engine
from foredraft.engine.observing import Commit
from foredraft.engine.request import Request
from foredraft.planning.policy import StepRecord


class EngineMetrics:
    """Watches one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        target: str,
        drafter: str,
        price_per_hour: float | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry

    def committed(self, commits: Sequence[Commit]) -> None:
        """Count what a step committed."""

    def stepped(self, record: StepRecord) -> None:
        """Count what a step cost."""

    def ended(self, requests: Sequence[Request]) -> None:
        """Count requests that have ended."""
