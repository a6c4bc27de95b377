"""The engine: five calls a step, and the only place where requests change.

Knows how the rooms below fit together; knows neither prompts as text, nor how many callers there
are. Plain decoding is a step without draft nodes: there is no second path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foredraft.cache.pool import PagePool
from foredraft.cache.tensors import KVCache
from foredraft.core.acceptance import Origin, Verdict
from foredraft.drafters.interface import Draft, Drafter, DraftRequest, StepResult, StepRow
from foredraft.engine.config import EngineConfig
from foredraft.engine.logprobs import token_logprobs
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Plan, Scheduler
from foredraft.engine.step import DrafterError, Outcome, Window, build_windows, verify
from foredraft.engine.stops import Stop
from foredraft.models.interface import Model
from foredraft.planning.policy import Policy

Tap = Callable[
    [str, int, int, Tensor], None
]  # request id, position, token, the row of logits it came from


class Engine:
    """A target, a drafter (or none), a cache, and the requests in flight."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None,
        policy: Policy,
        config: EngineConfig,
        cache: KVCache,
        tap: Tap | None = None,
    ) -> None:
        self.model = model
        self.drafter = drafter
        self.config = config
        self.cache = cache
        self.pool = PagePool(cache.num_pages)
        self.scheduler = Scheduler(config, self.pool, policy)
        self._tap = tap

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it can never fit."""
        self.scheduler.check_fits(request)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is; no-op if it has ended."""
        if not request.finished:
            self._finish(request, Stop("abort"))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one step; the requests it changed. After an exception no request has a new token."""
        plan = self.scheduler.schedule()
        drafts = self._propose(plan)
        windows, batch = build_windows(plan.rows, drafts, self.model.config.vocab_size)
        if not windows:
            return []
        if plan.page_copies:
            sources, destinations = zip(*plan.page_copies, strict=True)
            self.cache.copy_pages(sources, destinations)
        logits = self.model.run(batch, self.cache).logits
        outcomes = verify(windows, logits, self.model.kernels.row_math)
        return self._commit(windows, outcomes, logits)

    def _propose(self, plan: Plan) -> dict[str, Draft]:
        wanted = [row for row in plan.rows if row.max_nodes]
        if not wanted or self.drafter is None:
            return {}
        views = [
            DraftRequest(
                id=row.request.id,
                tokens=row.request.tokens,
                num_prompt_tokens=row.request.num_prompt,
                max_nodes=row.max_nodes,
                sampling=row.request.params,
                seed=row.request.seed,
                coupled=row.request.coupled,
            )
            for row in wanted
        ]
        drafts = self.drafter.propose(views)
        if len(drafts) != len(views):
            raise DrafterError(f"{len(drafts)} drafts for {len(views)} requests")
        return {view.id: draft for view, draft in zip(views, drafts, strict=True)}

    def _commit(
        self, windows: Sequence[Window], outcomes: Sequence[Outcome], logits: Tensor
    ) -> list[Request]:
        """The only mutation: tokens, keys and values, stops, counts, then the drafter is told."""
        results = []
        for window, outcome in zip(windows, outcomes, strict=True):
            request = window.request
            if outcome.error is not None:
                self._finish(request, Stop("error"), outcome.error)
                continue
            if window.wants_prompt_logprobs:
                self._add_prompt_logprobs(window, logits)
            num_kept = 0
            if outcome.verdict is not None:
                num_kept = self._commit_tokens(window, outcome.verdict, logits)
            request.num_computed += window.scheduled.chain + num_kept
            results.append(_step_result(window, outcome.verdict, num_kept))
        if self.drafter is not None:
            self.drafter.observe(results)
        for window in windows:
            request = window.request
            if request.stop is not None and not request.finished:
                self._finish(request, request.stop)
        return [window.request for window in windows]

    def _commit_tokens(self, window: Window, verdict: Verdict, logits: Tensor) -> int:
        """Append the verdict's tokens up to the first stop; how many draft tokens were kept."""
        request, draft = window.request, window.draft
        emitted = [(draft.tokens[node], Origin.ACCEPTED) for node in verdict.accepted]
        emitted.append((verdict.next_token, verdict.origin))
        parents = (-1, *verdict.accepted)  # the node whose row gave each token
        num_emitted = 0
        for parent, (token, origin) in zip(parents, emitted, strict=True):
            row = logits[window.root_logits + 1 + parent]
            num_emitted += 1
            if self._tap is not None:
                self._tap(request.id, request.num_tokens, token, row)
            if request.params.logprobs is not None:
                row_math = self.model.kernels.row_math
                request.logprobs.append(
                    token_logprobs(row, token, request.params.logprobs, row_math)
                )
            if request.append(token, origin):
                break
        num_kept = min(num_emitted, verdict.num_accepted)
        self._gather(window, verdict.accepted[:num_kept])
        request.counts.record(window.num_nodes, num_kept, num_emitted, depth=window.tree.max_depth)
        request.end_step(num_emitted)
        return num_kept

    def _gather(self, window: Window, accepted: Sequence[int]) -> None:
        """Move accepted nodes' keys and values to the positions that follow the chain; a chain's
        are there already.
        """
        if accepted == tuple(range(len(accepted))):
            return
        request, page_size = window.request, self.config.page_size
        first = request.num_computed + window.scheduled.chain

        def slot(index: int) -> int:
            return request.pages[index // page_size] * page_size + index % page_size

        sources = [slot(first + node) for node in accepted]
        destinations = [slot(first + i) for i in range(len(accepted))]
        for keys, values in zip(self.cache.keys, self.cache.values, strict=True):
            self.model.kernels.move_slots(keys, values, sources, destinations)

    def _add_prompt_logprobs(self, window: Window, logits: Tensor) -> None:
        request = window.request
        num_top = request.params.prompt_logprobs or 0
        start = request.num_computed
        for i in range(window.scheduled.chain):
            position = start + i + 1
            if position < request.num_prompt:
                row = logits[window.first_logits + i]
                row_math = self.model.kernels.row_math
                request.prompt_logprobs.append(
                    token_logprobs(row, request.tokens[position], num_top, row_math)
                )

    def _finish(self, request: Request, stop: Stop, error: str | None = None) -> None:
        self.scheduler.remove(request)
        request.finish(stop, error)
        if self.drafter is not None:
            self.drafter.release(request.id)

    def check_integrity(self) -> None:
        """Raise RuntimeError or AssertionError if any state contradicts another."""
        self.scheduler.check_integrity()


def _step_result(window: Window, verdict: Verdict | None, num_kept: int) -> StepResult:
    request, chain = window.request, window.scheduled.chain
    # num_computed and the tokens have moved on: the step's first position lies that much before.
    start = request.num_computed - chain - num_kept
    rows = [StepRow(start + i, -1, request.tokens[start + i], True) for i in range(chain)]
    kept = set(verdict.accepted[:num_kept]) if verdict is not None else set()
    root = start + chain - 1
    rows += [
        StepRow(root + window.tree.depths[node], node, token, node in kept)
        for node, token in enumerate(window.draft.tokens)
    ]
    return StepResult(
        id=request.id,
        rows=rows,
        num_accepted=num_kept,
        next_token=None if verdict is None else request.tokens[-1],
    )
