"""A drafter that may fail without harm: what it raises is kept, and it is left alone from then on.

Knows the contract of `Drafter`; knows no engine and no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.drafters.interface import Capabilities, Draft, Drafter, DraftRequest, StepResult


class GuardedDrafter:
    """Stands before a drafter. After the first failure it proposes nothing and tells nothing."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.capabilities: Capabilities = inner.capabilities
        self.failure: Exception | None = None

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        if self.failure is None:
            try:
                return self.inner.propose(requests)
            except Exception as error:
                self.failure = error
        return [Draft()] * len(requests)

    def observe(self, results: Sequence[StepResult]) -> None:
        if self.failure is None:
            try:
                self.inner.observe(results)
            except Exception as error:
                self.failure = error

    def release(self, request_id: str) -> None:
        if self.failure is None:
            try:
                self.inner.release(request_id)
            except Exception as error:
                self.failure = error
