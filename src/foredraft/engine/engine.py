"""The engine: five calls a step, and the only place where requests change.

Knows how the rooms below fit together; knows neither prompts as text, nor how many callers there
are. Plain decoding is a step without draft nodes: there is no second path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from foredraft.cache.pool import PagePool
from foredraft.cache.tensors import KVCache
from foredraft.core.acceptance import Origin
from foredraft.drafters.interface import Drafter, StepResult
from foredraft.engine.config import EngineConfig
from foredraft.engine.drafting import ask
from foredraft.engine.exiting import computing
from foredraft.engine.fitting import fitted
from foredraft.engine.logprobs import token_logprobs
from foredraft.engine.observing import Commit, Observer, step_record
from foredraft.engine.outputs import TokenLogprobs
from foredraft.engine.request import Request
from foredraft.engine.results import (
    Features,
    TopIds,
    step_result,
    wanted_features,
    wanted_top_ids,
)
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.step import Outcome, Window, build_windows, verify
from foredraft.engine.stops import Stop
from foredraft.engine.trimming import offers_of, trimmed
from foredraft.models.interface import Model
from foredraft.planning.policy import NEVER, NoDrafts, Policy

# Request id, position, token, and the row of logits `[V]` it came from (not to be written to).
Tap = Callable[[str, int, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class _Emission:
    """One token that a step may commit, with all that is needed from its row."""

    token: int
    origin: Origin
    row: int  # of the logits that the token came from
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class StepSeconds:
    """Where the time of the decoding steps went: committed ones that read no prompt."""

    drafter: float = 0.0
    target: float = 0.0  # its pass
    rest: float = 0.0  # scheduling, verification, commit

    def add(self, drafter: float, target: float, rest: float) -> None:
        self.drafter += drafter
        self.target += target
        self.rest += rest


class Engine:
    """A target, a drafter (or none), a cache, and the requests in flight."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None,
        policy: Policy,
        config: EngineConfig,
        cache: KVCache,
        draft_cache: KVCache | None = None,
        *,
        tap: Tap | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`draft_cache` is the drafter's own, with the pages of `cache`: one table serves both."""
        self.model = model
        self.drafter = drafter
        self.config = config
        self.cache = cache
        self.draft_cache = draft_cache
        self.seconds = StepSeconds()
        self.pool = PagePool(cache.num_pages)
        self.scheduler = Scheduler(config, self.pool, policy, reads_features=_reads(drafter))
        self.observers = list(observers)
        # Those whose step has begun, and did not reach its commit. None: not even settled who runs.
        self.uncommitted: Sequence[Request] | None = ()
        self._tap = tap
        self._in_use = threading.RLock()
        self._torn = False  # an interrupt may have left pages with nobody

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequest if it can never fit, RuntimeError while another thread is in a step.
        """
        self.scheduler.check_fits(request)
        self._enter()
        try:
            self.scheduler.add(request)
        finally:
            self._in_use.release()

    def abort(self, requests: Iterable[Request], error: str | None = None) -> None:
        """End requests now, wherever they are; those that have ended stay as they are.

        With an `error` they end by it ("error" instead of "abort").
        Every one is ended, whatever fails; the first failure is raised at the end. What an
        interrupt has cut short is finished by calling this again.
        """
        stop = Stop("abort" if error is None else "error")
        pending = [request for request in requests if not (request.finished and request.released)]
        if not any(request.queued for request in pending):
            for request in pending:
                request.finish(stop, error)
                request.released = True
            return
        with computing, self._in_use:
            torn, self._torn = self._torn, True  # until this is through
            failures: list[Exception] = []
            for request in pending:
                try:
                    if not request.finished:
                        request.finish(stop, error)
                except Exception as failure:
                    failures.append(failure)
                pages = self.scheduler.take_out(request)
                if not torn:  # else they may be counted or not: all are counted anew below
                    self.pool.release(pages)
            if torn:
                self.scheduler.reclaim()
            self._torn = False
            untold = [request for request in pending if not request.released]
            _call_all(self._foreign_calls([], [], [], untold))
            if failures:
                raise failures[0]

    def disable_drafter(self) -> None:
        """Go on without drafts, for good: the drafter is neither asked nor told anything more."""
        self.drafter, self.scheduler.policy = None, NoDrafts()

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests have computed; running ones keep their pages.

        Raises RuntimeError while another thread is in a step.
        """
        self._enter()
        try:
            self.scheduler.pages.clear()
        except BaseException:
            self.scheduler.reclaim()
            raise
        finally:
            self._in_use.release()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Run one step; the requests it changed.

        A drafter or a target that fails leaves every request as it was before the step. A failure
        of `observe`, `release` or the tap is raised after the step is committed as a whole. An
        interrupt (what is no `Exception`) ends every request: it may have cut a commit in two.

        Raises RuntimeError while another thread is in a step.
        """
        self._enter()
        try:
            self._torn = True
            with computing:
                changed = self._step()
            self._torn = False
            return changed
        except Exception:
            self._torn = False
            raise
        except BaseException:
            self._torn = True
            self.abort(dict.fromkeys((*self.scheduler.waiting, *self.scheduler.running)))
            self.scheduler.reclaim()
            raise
        finally:
            self._in_use.release()

    def _enter(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "one LLM serves one thread at a time, and another thread is using this one; make "
                "an LLM for each thread (they may share a loaded model)"
            )

    @torch.inference_mode()
    def _step(self) -> list[Request]:
        begin = time.perf_counter()
        self.uncommitted = None
        plan = self.scheduler.schedule()
        self.uncommitted = tuple(row.request for row in plan.rows)
        if self.drafter is not None:
            _call_all([partial(self.drafter.release, request.id) for request in plan.preempted])
        if plan.page_copies:
            sources, destinations = zip(*plan.page_copies, strict=True)
            for cache in filter(None, (self.cache, self.draft_cache)):
                cache.copy_pages(sources, destinations)
        if not plan.rows:
            return []
        scheduled = time.perf_counter()
        policy, vocab_size = self.scheduler.policy, self.model.config.vocab_size
        wanted = any(row.max_nodes for row in plan.rows)
        stopping = policy.stopping(plan.load) if wanted else NEVER
        drafts = ask(self.drafter, plan.rows, vocab_size, self.draft_cache, stopping, self.cache)
        drafts = fitted(plan.rows, drafts)
        offers = offers_of(plan, drafts)
        drafts = trimmed(policy, plan, drafts, offers)
        drafted = time.perf_counter()
        asked = wanted_features(self.drafter, plan.rows)
        windows, batch = build_windows(plan.rows, drafts, asked)
        output = self.model.run(batch, self.cache)
        logits = output.logits
        computed = time.perf_counter()
        row_math = self.model.kernels.row_math
        outcomes = verify(windows, logits, row_math)
        tops = wanted_top_ids(self.drafter, windows, logits, row_math)
        changed, calls = self._commit(windows, outcomes, logits, tops, output.features)

        def learn() -> None:
            rest = scheduled - begin + time.perf_counter() - computed
            if all(row.chain == 1 for row in plan.rows):
                self.seconds.add(drafted - scheduled, computed - drafted, rest)
            record = step_record(
                plan,
                windows,
                outcomes,
                offers,
                drafter_seconds=drafted - scheduled,
                seconds=computed - drafted + rest,
            )
            # Observers before the policy learns from it.
            told = [partial(each.stepped, record) for each in self.observers]
            _call_all([*told, partial(policy.observe, record)])

        _call_all([*calls, learn])  # of every step that was committed, whatever fails in a tap
        return changed

    def _commit(
        self,
        windows: Sequence[Window],
        outcomes: Sequence[Outcome],
        logits: Tensor,
        tops: TopIds,
        features: Features,
    ) -> tuple[list[Request], list[Callable[[], None]]]:
        """The only mutation; the requests it changed, and the calls of what is foreign, to be made
        after it. All that can fail of ours comes before it.
        """
        emissions = [self._emissions(*one, logits) for one in zip(windows, outcomes, strict=True)]
        prompt_logprobs = [self._prompt_logprobs(window, logits) for window in windows]
        commits: list[Commit] = []
        results: list[StepResult] = []
        taps: list[Callable[[], None]] = []
        ended: list[Request] = []
        observes = self.drafter is not None and self.drafter.capabilities.observes
        for window, outcome, emitted, of_prompt in zip(
            windows, outcomes, emissions, prompt_logprobs, strict=True
        ):
            request = window.request
            request.prompt_logprobs += of_prompt
            first = request.num_tokens
            count = self._commit_tokens(window, outcome, emitted)
            if outcome.error is None:
                self.scheduler.pages.publish(request)
            commits.append(Commit.of(window, outcome, count))
            if observes:
                kept = [emission.token for emission in emitted[:count]]
                results.append(step_result(window, outcome, kept, tops, features))
            if self._tap is not None:
                taps += [
                    partial(self._tap, request.id, first + i, emission.token, logits[emission.row])
                    for i, emission in enumerate(emitted[:count])
                ]
            if request.stop is not None or outcome.error is not None:
                error = outcome.error if request.stop is None else None
                self._finish(request, request.stop or Stop("error"), error)
                ended.append(request)
        self.uncommitted = ()
        calls = self._foreign_calls(commits, taps, results, ended)
        return [window.request for window in windows], calls

    def _emissions(self, window: Window, outcome: Outcome, logits: Tensor) -> list[_Emission]:
        """The tokens of an outcome in order: accepted draft tokens, then the target's own."""
        tokens = [(window.draft.tokens[node], Origin.ACCEPTED) for node in outcome.accepted]
        if outcome.next_token is not None:
            tokens.append((outcome.next_token, outcome.origin))
        num_top = window.request.params.logprobs
        emissions = []
        # The row of a token is that of the node before it.
        for node, (token, origin) in zip((-1, *outcome.accepted), tokens, strict=False):
            row, logprobs = window.root_logits + 1 + node, None
            if num_top is not None:
                row_math = self.model.kernels.row_math
                logprobs = token_logprobs(logits[row], token, num_top, row_math)
            emissions.append(_Emission(token, origin, row, logprobs))
        return emissions

    def _prompt_logprobs(self, window: Window, logits: Tensor) -> list[TokenLogprobs]:
        request, num_top = window.request, window.request.params.prompt_logprobs
        if window.prompt_logits is None or num_top is None:
            return []
        # A preempted request computes its prompt again: what it has is not taken twice.
        first = window.start + 1
        positions = range(
            max(first, len(request.prompt_logprobs)),
            min(window.start + window.chain + 1, request.num_prompt),
        )
        return [
            token_logprobs(
                logits[window.prompt_logits + position - first],
                request.tokens[position],
                num_top,
                self.model.kernels.row_math,
            )
            for position in positions
        ]

    def _commit_tokens(self, window: Window, outcome: Outcome, emitted: Sequence[_Emission]) -> int:
        """Append tokens up to the first stop, settle cache and counts; how many were kept."""
        request = window.request
        count = 0
        for emission in emitted:
            count += 1
            if emission.logprobs is not None:
                request.logprobs.append(emission.logprobs)
            if request.append(emission.token, emission.origin):
                break
        num_accepted = min(count, len(outcome.accepted))
        self._gather(window, outcome.accepted[:num_accepted])
        request.num_computed += window.chain + num_accepted
        request.num_draft_cached = max(request.num_draft_cached, window.draft.num_cached)
        if count:
            depth = window.draft.tree.max_depth
            request.counts.record(window.num_nodes, num_accepted, count, depth=depth)
            request.end_step(count)
        return count

    def _gather(self, window: Window, accepted: tuple[int, ...]) -> None:
        """Move accepted nodes' keys and values to the positions that follow the chain; those of a
        draft that is a chain are there already.
        """
        moved = [(node, place) for place, node in enumerate(accepted) if node != place]
        if not moved:
            return
        pages, page_size = window.request.pages, self.config.page_size
        first = window.start + window.chain

        def slot(index: int) -> int:
            return pages[index // page_size] * page_size + index % page_size

        sources = [slot(first + node) for node, _ in moved]
        destinations = [slot(first + place) for _, place in moved]
        # A node comes after its ancestors, so nothing is written over before it is read.
        kernels, cache = self.model.kernels, self.cache
        kernels.move_slots(cache.keys, cache.values, sources, destinations)

    def _finish(self, request: Request, stop: Stop, error: str | None = None) -> None:
        # In this order a request that an interrupt leaves unfinished is still the scheduler's.
        request.finish(stop, error)
        self.scheduler.remove(request)

    def _foreign_calls(
        self,
        commits: Sequence[Commit],
        taps: list[Callable[[], None]],
        results: list[StepResult],
        ended: Sequence[Request],
    ) -> list[Callable[[], None]]:
        """Of what is not ours: all of it is to be called, whatever fails."""
        calls: list[Callable[[], None]] = []
        if commits:
            calls += [partial(each.committed, commits) for each in self.observers]
        calls += taps
        if self.drafter is not None and results:
            calls.append(partial(self.drafter.observe, results))
        calls += [partial(self._release, request) for request in ended]
        if ended:
            calls += [partial(each.ended, ended) for each in self.observers]
        return calls

    def _release(self, request: Request) -> None:
        try:
            if self.drafter is not None:
                self.drafter.release(request.id)
        except Exception:
            request.released = True
            raise
        request.released = True  # an interrupt leaves it False: `abort` will tell again

    def check_integrity(self) -> None:
        """Raise IntegrityError if any state contradicts another."""
        self.scheduler.check_integrity()


def _reads(drafter: Drafter | None) -> bool:
    """Whether the drafter fills a cache of its own from the target's features."""
    if drafter is None:
        return False
    capabilities = drafter.capabilities
    return capabilities.cache is not None and bool(capabilities.feature_layers)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call every one, whatever fails; the first failure is raised at the end."""
    failures: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
