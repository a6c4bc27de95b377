"""One configuration under load: start, crowd, watch, ask again, stop.

Knows how the parts of a measurement follow each other; the figures are made in `figures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from random import Random
from typing import IO, Any

from foredraft.bench.load import figures
from foredraft.bench.load.crowd import Crowd, Habits
from foredraft.bench.load.process import ServerProcess, Vitals
from foredraft.bench.load.stream import Seen
from foredraft.bench.serve.traces import Window
from foredraft.core.errors import UserError

WARM_SECONDS = 60.0  # and a quarter of the time at most: the crowd comes at once, prompts unread
METRICS_EVERY = 10  # seconds
SETTLED_SHARE = 0.02  # of the pages may never have been written
PATIENCE = 120.0  # seconds for one answer that is asked again, and for pages to be given back
ASKED_AGAIN = 12
Progress = Callable[[str], None]


@dataclass(slots=True)
class _Watch:
    """A server's vitals by the second."""

    server: ServerProcess
    vitals: list[Vitals]
    settled: float | None = None

    async def run(self, progress: Callable[[Vitals], None]) -> None:
        for second in range(10**9):
            now = self.server.vitals()
            self.vitals.append(now)
            progress(now)
            if self.settled is None and second % METRICS_EVERY == 0:
                pages = pages_by_state(await asyncio.to_thread(metrics, self.server))
                if pages["free"] <= SETTLED_SHARE * sum(pages.values()):
                    self.settled = now.at
            await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - now.at)))


async def measure(
    model: str,
    label: str,
    arguments: Sequence[str],
    prompts: Sequence[str],
    habits: Habits,
    progress: Progress,
) -> dict[str, Any]:
    """A configuration's block of the result. Raises UserError for a server that does not start, or
    ends by itself.
    """
    command = [model, "--max-num-seqs", str(habits.streams), *arguments]
    with tempfile.TemporaryFile() as log:
        server = await ServerProcess.start(command, log)
        try:
            found = await _loaded(server, model, label, prompts, habits, progress)
            began = time.perf_counter()
            status = await server.stop()
        except OSError as error:  # of /proc, or of a connection that nobody takes
            raise UserError(f"{label}: the server is gone: {_last_line(log) or error}") from None
        finally:
            await server.stop(0.0)
        return {
            "label": label,
            "server_arguments": list(arguments),
            **found,
            "exit_status": status,
            "exit_seconds": round(time.perf_counter() - began, 2),
            "warnings": _warnings(log),
        }


async def _loaded(
    server: ServerProcess,
    model: str,
    label: str,
    prompts: Sequence[str],
    habits: Habits,
    progress: Progress,
) -> dict[str, Any]:
    crowd, watch = Crowd(server.host, server.port, model, prompts, habits), _Watch(server, [])
    began, spent = time.perf_counter(), time.process_time()

    def tell(now: Vitals) -> None:
        progress(
            f"{label}: {now.at - began:.0f} s, {crowd.sent} sent, {len(crowd.seen)} ended, "
            f"{sum(each.fault is not None for each in crowd.seen)} lost, {now.rss_mib:.0f} MiB"
        )

    end = await watched(crowd.ask_on(), watch.run(tell))
    spent = time.process_time() - spent
    in_use = await _pages_in_use_at_rest(server)
    said = await asyncio.to_thread(metrics, server)
    progress(f"{label}: asking again, one at a time")
    again = await asyncio.to_thread(ask_again, server, model, crowd.seen, habits.seed)
    whole = Window(began, end)
    window = Window(began + min(WARM_SECONDS, habits.seconds / 4), end)
    return {
        "requests": figures.requests(crowd.seen, crowd.sent),
        "asked_again": again,
        "pages_in_use_at_end": in_use,
        **figures.latencies(crowd.seen, window),
        **speculation(said),
        # Of the client's own time: all of it, from the first request to the last answer.
        **figures.resources(watch.vitals, window, watch.settled, spent),
        "rss_mib_by_second": [round(v.rss_mib) for v in watch.vitals if whole.holds(v.at)],
    }


async def watched(asking: Coroutine[Any, Any, float], watching: Coroutine[Any, Any, None]) -> float:
    """What `asking` returns. Raises what `watching` does: a server that is gone can't be asked."""
    tasks = asyncio.create_task(asking), asyncio.create_task(watching)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            await tasks[1]
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pages_in_use_at_rest(server: ServerProcess) -> int:
    """Pages that requests hold once none runs. What an abort frees is free by the next step."""
    deadline = time.perf_counter() + PATIENCE
    while True:
        text = await asyncio.to_thread(metrics, server)
        used = int(pages_by_state(text)["used"])
        if used == 0 or time.perf_counter() > deadline:
            return used
        await asyncio.sleep(0.2)


def metrics(server: ServerProcess) -> str:
    """What `/metrics` says."""
    connection = HTTPConnection(server.host, server.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def pages_by_state(text: str) -> dict[str, float]:
    """Pages of keys and values: used, cached, free."""
    found = re.findall(r'^foredraft:kv_cache_pages\{.*state="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {state: float(number) for state, number in found}


def speculation(text: str) -> dict[str, Any]:
    """What a server's counters say of drafts and of requests thrown out of memory."""
    drafts, accepted, drafted, preemptions = (
        _total(text, name)
        for name in (
            "spec_decode_num_drafts",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_draft_tokens",
            "num_preemptions",
        )
    )
    return {
        "drafted_steps_of_requests": int(drafts),
        "mean_acceptance_length": round(1 + accepted / drafts, 3) if drafts else None,
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        "preemptions": int(preemptions),
    }


def _total(text: str, name: str) -> float:
    pattern = rf"^foredraft:{name}_total\{{.*\}} (\S+)$"
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def ask_again(server: ServerProcess, model: str, seen: Sequence[Seen], seed: int) -> dict[str, Any]:
    """Some of the finished requests once more: alone, whole and without speculation. Their texts
    must be the same.
    """
    finished = [each for each in seen if each.finished]
    chosen = Random(seed).sample(finished, min(ASKED_AGAIN, len(finished)))
    different = []
    connection = HTTPConnection(server.host, server.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        for each in chosen:
            fields = {**each.ask.body(model), "speculation": {"enabled": False}}
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(fields), headers)
            answer: Mapping[str, Any] = json.loads(connection.getresponse().read())
            text = answer["choices"][0]["message"]["content"]
            if text != each.text or answer["usage"]["completion_tokens"] != each.tokens:
                different.append({"temperature": each.ask.temperature, "seed": each.ask.seed})
    identical = len(chosen) - len(different)
    return {"asked": len(chosen), "identical": identical, "different": different}


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    return " ".join(log.read().decode("utf-8", "replace").splitlines()[-1:])


def _warnings(log: IO[bytes]) -> list[str]:
    """What the server logged beside its lines of requests, the first of it."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    found = [line for line in lines if re.search(r" (WARNING|ERROR|CRITICAL) |Traceback", line)]
    return found[: figures.FAULTS_SHOWN]
