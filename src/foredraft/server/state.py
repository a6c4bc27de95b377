"""What the routes of one server share: its engine, settings, counts, and whether it still takes
requests.

Knows an engine from outside; knows no route and no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from foredraft.engine.async_engine import AsyncEngine
from foredraft.grammar.compiler import compiler_of
from foredraft.server.auth import KeyRing
from foredraft.server.errors import APIError, queue_full, too_long
from foredraft.server.hosts import AllowedHosts
from foredraft.server.observing import ServerMetrics
from foredraft.server.settings import ServerSettings
from foredraft.server.tools.formats import format_of

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("foredraft.server")
WORKERS = 8  # threads for templates, tokenizers and grammars
LONGEST_WAIT = 60  # seconds that a client is told to wait at most


class ServerState:
    """One for an app."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = KeyRing(settings.api_keys)
        self.hosts = AllowedHosts(settings.allowed_hosts)
        self.metrics = ServerMetrics(engine.metrics.registry, engine.metrics.labels)
        loaded = engine.loaded
        self.grammars = compiler_of(loaded.tokenizer, loaded.config.vocab_size)  # the engine's own
        self.tool_format = format_of(loaded.tokenizer.chat_template)
        self.started_at = int(time.time())
        self.drain_deadline: float | None = None  # on the monotonic clock, once it drains
        self.num_http = 0  # requests whose answer is not written yet
        self._answer_seconds = 1.0  # of late, smoothed
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="foredraft-server")

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work` off the event loop: templates, tokenizers and grammars take their time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *args, **kwargs))

    @property
    def draining(self) -> bool:
        """Whether no more requests are taken."""
        return self.drain_deadline is not None

    def drain(self) -> None:
        """Take no more requests; those that are here have the settings' time to end."""
        self.drain_deadline = time.monotonic() + self.settings.drain_seconds

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that is taken."""
        context = self.engine.config.max_model_len - 1
        wish = self.settings.max_prompt_tokens
        return context if wish is None else min(context, wish)

    @functools.cached_property
    def max_prompt_characters(self) -> int:
        """A text of more has too many tokens whatever they are, which is known without reading it:
        megabytes of text take seconds, and hundreds of megabytes.
        """
        spelled, size = self.engine.tokenizer.token_bytes, self.engine.loaded.config.vocab_size
        longest = max(len(spelled(token, skip_special_tokens=False)) for token in range(size))
        return self.max_prompt_tokens * max(1, longest)

    def check_characters(self, number: int) -> None:
        """Raise APIError (400) for a text that is too long whatever its tokens are."""
        if number > self.max_prompt_characters:
            raise too_long(f"the prompt has {number} characters", self.max_prompt_tokens)

    @property
    def retry_after(self) -> int:
        """Seconds after which there may be room, from how long answers took of late."""
        return max(1, min(LONGEST_WAIT, math.ceil(self._answer_seconds)))

    def answered(self, seconds: float) -> None:
        """Note how long an answer took."""
        self._answer_seconds += 0.2 * (seconds - self._answer_seconds)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request while it is here. Raises APIError (429) where there are too many."""
        if self.num_http >= self.settings.max_http_requests:
            raise queue_full(
                f"{self.num_http} requests are open, no more are read; try again later",
                self.retry_after,
            )
        self.num_http += 1
        try:
            yield
        finally:
            self.num_http -= 1

    def log_fault(self, error: BaseException, where: str = "") -> None:
        """Log a request's failure. Messages repeat what they are about, a prompt maybe, so without
        leave to log prompts only the error's kind and place are told.
        """
        kind = f"a request failed: {where or 'in its answer'}: {type(error).__name__}"
        if self.settings.log_prompts:
            logger.error("%s", kind, exc_info=error)
        else:
            place = "".join(traceback.format_tb(error.__traceback__))
            logger.error("%s, its message is with --log-prompts\n%s", kind, place)

    def check_model(self, name: str) -> None:
        """Raise APIError (404) for a model that is not served here."""
        if name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise APIError(
                404,
                f"the model {name[:100]!a} is not served here; served is {served}",
                param="model",
                code="model_not_found",
            )

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
