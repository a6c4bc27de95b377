"""The configurations that are compared, each an engine of this process over one loaded model.

Knows the async engine and what its observers see; knows no prompt and no figure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.bench.pace import Interludes, Reading, Reference
from foredraft.bench.serve.arrivals import Job
from foredraft.bench.serve.steps import Counters, LoggedStep, StepLog
from foredraft.bench.serve.traces import Window
from foredraft.bench.serve.traffic import Chunk
from foredraft.bench.serve.turns import Clock, Turns
from foredraft.core.sampling_params import SamplingParams
from foredraft.engine.async_engine import AsyncEngine
from foredraft.models.load import LoadedModel
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Objective
from foredraft.planning.confident import learning

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration. `width`: None where a policy chooses."""

    label: str
    config: Mapping[str, Any] | None
    width: int | None = None
    objective: Objective | None = None


def variants(
    base: Mapping[str, Any], widths: Sequence[int], objectives: Sequence[Objective]
) -> list[Variant]:
    """Plain decoding, each fixed width, and the adaptive policy with each objective, which may
    draft as much as the widest. Only the first of those measures costs anew.
    """
    method = {key: value for key, value in base.items() if key not in ("policy", "objective")}
    most = method.pop("num_speculative_tokens", None) or max(widths, default=0) or None
    fixed = sorted({width for width in widths if width})
    found = [
        Variant(PLAIN, None, 0),
        *(Variant(f"K={k}", {**method, "num_speculative_tokens": k}, k) for k in fixed),
    ]
    for number, objective in enumerate(objectives):
        config = {**method, "policy": "adaptive", "objective": objective.value}
        if most is not None:
            config["num_speculative_tokens"] = most
        if number == 0:
            config["recalibrate"] = True
        found.append(Variant(f"adaptive, {objective.value}", config, None, objective))
    return found


class EngineServer:
    """An engine that serves this process, in turns with others, and the log of its steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        variant: Variant,
        temperature: float,
        settings: Mapping[str, Any],
        reference: Reference,
        turns: Turns,
    ) -> None:
        """`settings`: of the engine. Prompts share no pages: each round asks the same again."""
        self.variant = variant
        self._temperature = temperature
        self.engine = AsyncEngine(
            loaded,
            speculative_config=variant.config,
            enable_prefix_caching=False,
            **settings,
        )
        self._turns, self._interludes = turns, Interludes(reference)
        self._clock = Clock()
        self._log = StepLog(self._clock, self._between_steps)
        self.engine.engine.observers.append(self._log)

    @property
    def label(self) -> str:
        return self.variant.label

    @property
    def learns(self) -> bool:
        return self.policy is not None

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        """The answer to one request; the seed is the request's own, at temperatures above 0."""
        params = SamplingParams(
            max_tokens=job.max_tokens,
            temperature=self._temperature,
            seed=job.seed if self._temperature else None,
        )
        async with aclosing(self.engine.stream(list(job.prompt.token_ids), params)) as deltas:
            async for delta in deltas:
                yield Chunk(self._clock.of(delta.emitted_at), len(delta.token_ids), delta.token_ids)

    def counters(self) -> Counters:
        engine = self.engine.engine
        return Counters(asdict(engine.seconds), engine.scheduler.num_preemptions)

    def take_steps(self, window: Window) -> Sequence[LoggedStep]:
        return self._log.take(window)

    def now(self) -> float:
        return self._clock.now()

    def enter(self) -> None:
        self._turns.enter(self)

    def leave(self) -> None:
        self._turns.leave(self)

    @property
    def is_on(self) -> bool:
        return self._turns.is_on(self)

    def _between_steps(self) -> None:
        self._turns.between_steps(self)
        if self.is_on:
            self._interludes.once()

    def take_readings(self) -> Sequence[Reading]:
        return self._interludes.take()

    @property
    def policy(self) -> AdaptivePolicy | None:
        """The policy that learns, if there is one."""
        return learning(self.engine.engine.scheduler.policy)

    def check_drafter(self) -> None:
        """Raise RuntimeError if the drafter was given up: what was measured since is plain."""
        if self.variant.config is not None and self.engine.engine.drafter is None:
            raise RuntimeError(f"{self.label}: the drafter failed while it served (see the log)")

    async def close(self) -> None:
        await self.engine.close()
