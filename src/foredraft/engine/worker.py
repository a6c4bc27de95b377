"""The thread that owns an engine: requests come in, it runs steps, and deltas go out.

Knows an engine and feeds; knows neither prompts nor event loops. Other threads leave their wishes
in two lists; nobody but this thread touches the engine. A step that fails ends the requests it was
for, a drafter that fails is given up, and the thread goes on.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from time import monotonic

from foredraft.core.errors import EngineClosed, InvalidRequest, QueueFull
from foredraft.engine.drafting import DrafterError
from foredraft.engine.engine import Engine
from foredraft.engine.exiting import computing
from foredraft.engine.feed import Feed
from foredraft.engine.guarded import GuardedDrafter
from foredraft.engine.request import Request

_logger = logging.getLogger("foredraft")


class Worker:
    """Runs an engine in a thread of its own, from `start` until `stop`."""

    def __init__(self, engine: Engine, max_in_flight: int | None) -> None:
        """`max_in_flight`: completions accepted and not ended, at most."""
        self._engine = engine
        self._guard = None if engine.drafter is None else GuardedDrafter(engine.drafter)
        engine.drafter = self._guard
        self._max_in_flight = max_in_flight
        self._feeds: dict[str, Feed] = {}  # by request id; changed by this thread alone
        self._beat = 0.0  # when the thread last began what may call a drafter or the target
        self._wake = threading.Condition()
        # Under the condition's lock:
        self._arrived: list[Feed] = []
        self._left: list[Feed] = []
        self._in_flight = 0
        self._stopping = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        _running.add(self)
        self._thread.start()

    def submit(self, feed: Feed) -> None:
        """Queue a feed's requests. Raises QueueFull, EngineClosed, InvalidRequest."""
        count, most = len(feed.requests), self._max_in_flight
        if not self._thread.is_alive():
            raise EngineClosed("the engine is closed, or runs in the process this was forked from")
        with self._wake:
            if self._stopping or self._draining:
                raise EngineClosed("the engine is closed")
            if most is not None and count > most:
                raise InvalidRequest(f"n = {count} completions are more than the queue's {most}")
            if most is not None and self._in_flight + count > most:
                raise QueueFull(
                    f"{self._in_flight} of at most {most} completions are running or queued, no "
                    f"room for {count} more; try again later or raise max_queued"
                )
            self._in_flight += count
            for request in feed.requests:
                request.arrived_at = time.perf_counter()
            self._arrived.append(feed)
            self._wake.notify()

    def leave(self, feed: Feed) -> None:
        """Nobody reads `feed` any more: end what has not ended and free what it holds."""
        if feed.group.finished:
            return
        with self._wake:
            self._left.append(feed)
            self._wake.notify()

    def stop(self, drain: bool = False) -> None:
        """Take no requests any more; end those in flight, or `drain`: let them finish."""
        with self._wake:
            if drain:
                self._draining = True
            else:
                self._stopping = True
            self._wake.notify()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def finish(self, patience: float | None) -> None:
        """After `stop`: wait for the thread's end. A step that does not come back for `patience`
        seconds is given up: its thread, if it ever goes on, ends then.
        """
        called = monotonic()
        if patience is None or threading.current_thread() is self._thread:
            self.join()
            return
        while self._thread.is_alive():
            left = max(self._beat, called) + patience - monotonic()
            if left <= 0:
                self._abandon(patience)
                return
            self._thread.join(left)

    def _abandon(self, patience: float) -> None:
        """Tell every reader that the thread hangs."""
        with self._wake:
            self._stopping = True
            feeds = [*self._feeds.values(), *self._arrived]
        _logger.error("the engine's thread hangs in a step and is left alone")
        for feed in feeds:
            feed.fail(
                EngineClosed(
                    f"the engine was closed while a step hung, perhaps in its drafter: it did not "
                    f"come back for {patience:g} s"
                )
            )

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._take_wishes():
                self._step()
        except BaseException as error:  # not even SystemExit may leave readers waiting
            failure = error
            _logger.exception("the engine's thread has died")
        finally:
            self._end_all(failure)
            _running.discard(self)

    def _take_wishes(self) -> bool:
        """Do what others asked for, waiting for work if there is none; False: stop."""
        with self._wake:
            while not (self._arrived or self._left or self._stopping or self._engine.has_work):
                if self._draining:
                    return False
                self._wake.wait()
            if self._stopping:
                return False
            arrived, self._arrived = self._arrived, []
            left, self._left = self._left, []
        self._beat = monotonic()
        for feed in arrived:
            for request in feed.requests:
                self._feeds[request.id] = feed
                self._add(request)
        self._end([request for feed in left for request in feed.requests])
        return True

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except Exception as error:
            self._end([request], str(error))

    def _step(self) -> None:
        if not self._engine.has_work:
            return
        self._beat = monotonic()
        changed: Iterable[Request]
        try:
            changed = self._engine.step()
        except DrafterError as error:  # nothing was committed: the next step goes on without it
            self._give_up_drafter(error)
            return
        except Exception as error:
            changed = self._after_failure(error)
        self._check_guard()
        self._deliver(changed)

    def _after_failure(self, error: Exception) -> list[Request]:
        """End the requests of a step that failed; the requests to be looked at."""
        failed = self._engine.uncommitted
        requests = [request for feed in self._feeds.values() for request in feed.requests]
        if failed is not None and not failed:
            _logger.warning("after a step was committed, a tap failed: %r", error)
            _logger.debug("where it failed", exc_info=error)
            return requests
        _logger.error("a step failed, its requests end: %r", error, exc_info=error)
        ended = requests if failed is None else failed
        self._end(ended, f"the step failed: {type(error).__name__}: {error}")
        return []

    def _end(self, requests: Sequence[Request], error: str | None = None) -> None:
        """End requests, whatever fails, and tell their readers."""
        if not requests:
            return
        try:
            self._engine.abort(requests, error)
        except Exception as failure:
            _logger.warning("while requests ended: %r", failure)
            _logger.debug("where it failed", exc_info=failure)
        self._check_guard()
        self._deliver(requests)

    def _check_guard(self) -> None:
        if self._guard is not None and self._guard.failure is not None:
            self._give_up_drafter(self._guard.failure)

    def _give_up_drafter(self, error: Exception) -> None:
        """Go on plain; the requests are as they were, and their texts the same."""
        if self._engine.drafter is None:
            return
        self._engine.disable_drafter()
        _logger.warning("the drafter failed and is not asked any more: %r", error)
        _logger.debug("where the drafter failed", exc_info=error)

    def _deliver(self, requests: Iterable[Request]) -> None:
        """Hand on what these requests have to tell; end those whose readers' loop is closed."""
        unread: list[Request] = []
        for request in requests:
            feed = self._feeds.get(request.id)
            if feed is None:
                continue
            if request.finished:
                del self._feeds[request.id]
                with self._wake:  # first: whoever reads of an end may send the next request
                    self._in_flight -= 1
            if not feed.put(request):
                unread += [each for each in feed.requests if not each.finished]
        self._end(unread)

    def _end_all(self, failure: BaseException | None) -> None:
        """End everything in flight; every reader is told, by an error if the thread has died."""
        with self._wake:
            self._stopping = True
            arrived, self._arrived = self._arrived, []
        self._beat = monotonic()
        self._feeds.update((request.id, feed) for feed in arrived for request in feed.requests)
        feeds = list(self._feeds.values())
        if failure is not None:
            for feed in feeds:
                feed.fail(EngineClosed(f"the engine's thread has died: {failure!r}"))
        self._end([request for feed in feeds for request in feed.requests])


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Streams end, before threads are let into no step any more."""
    for worker in list(_running):
        worker.stop()
    for worker in list(_running):
        worker.join(computing.seconds_left())
