"""One streamed chat completion over a bare socket, and whether it kept its word.

Knows HTTP 1.0, server-sent events and the fields that count tokens; knows no crowd and no figures.
A socket and `json` take little of the machine that the server needs: HTTP 1.0 has no chunks to
unwrap, and a connection of its own is what a client that leaves drops.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.serve.traces import Emission

PATIENCE = 300.0  # seconds without a line, after which an answer is lost
LONGEST_QUOTE = 200  # characters of what a server says


class BrokenAnswerError(Exception):
    """An answer that is not what was promised; the message says how."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `leave_after`: tokens after which its client hangs up; 0 is at once."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    leave_after: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        """The fields that a seed and a prompt decide."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }


@dataclass(slots=True)
class Seen:
    """What became of a request: it `finished`, its client `left`, or there is a `fault`."""

    ask: Ask
    sent: float
    emissions: list[Emission] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    finished: bool = False
    left: bool = False
    fault: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)

    @property
    def tokens(self) -> int:
        """By the ids that came."""
        return sum(each.tokens for each in self.emissions)


async def stream(host: str, port: int, model: str, ask: Ask) -> Seen:
    """Ask, read to the end or as far as the client stays, and note what came when."""
    seen = Seen(ask, time.perf_counter())
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**ask.body(model), **fields, "return_token_ids": True}
        writer.write(_post("/v1/chat/completions", body))
        await writer.drain()
        if ask.leave_after == 0:
            seen.left = True
        else:
            await _read(reader, seen)
    except (OSError, BrokenAnswerError, ValueError, LookupError, TypeError) as error:
        seen.fault = f"{type(error).__name__}: {error}"[:LONGEST_QUOTE]
    finally:
        if writer is not None:
            writer.transport.abort()  # no farewell: a client that is gone sends none
    return seen


def _post(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def _read(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Raises BrokenAnswerError for all that a well-behaved server doesn't do."""
    status = await _line(reader)
    while (await _line(reader)).strip():
        pass  # headers
    if status.split()[1:2] != [b"200"]:
        raise BrokenAnswerError(f"{status.strip().decode()}: {(await reader.read(500)).decode()}")
    usage: Mapping[str, Any] | None = None
    while (line := (await _line(reader)).strip()) != b"data: [DONE]":
        if not line:
            continue
        data = json.loads(line.removeprefix(b"data: "))
        if "error" in data:
            raise BrokenAnswerError(f"an error in the stream: {data['error']}")
        usage = data.get("usage") or usage
        _note(seen, data["choices"])
        if seen.ask.leave_after is not None and seen.tokens >= seen.ask.leave_after:
            seen.left = True
            return
    if (await reader.read()).strip():
        raise BrokenAnswerError("something came after [DONE]")
    _check(seen, usage)
    seen.finished = True


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE):
            line = await reader.readline()
    except TimeoutError:
        raise BrokenAnswerError(f"nothing came for {PATIENCE:g} seconds") from None
    if not line:
        raise BrokenAnswerError("the answer broke off")
    return line


def _note(seen: Seen, choices: list[dict[str, Any]]) -> None:
    if not choices:
        return
    (choice,) = choices
    if seen.finish_reason is not None:
        raise BrokenAnswerError("tokens came after the finish reason")
    seen.finish_reason = choice["finish_reason"]
    ids = choice.get("token_ids")
    if ids:
        seen.emissions.append(Emission(time.perf_counter(), len(ids)))
    seen.parts.append(choice["delta"].get("content") or "")


def _check(seen: Seen, usage: Mapping[str, Any] | None) -> None:
    if seen.finish_reason not in ("stop", "length"):
        raise BrokenAnswerError(f"the finish reason is {seen.finish_reason!r}")
    if usage is None:
        raise BrokenAnswerError("no usage came")
    if usage["completion_tokens"] != seen.tokens:
        raise BrokenAnswerError(
            f"{usage['completion_tokens']} tokens were told, {seen.tokens} came"
        )
    most = seen.ask.max_tokens
    if seen.tokens > most or (seen.finish_reason == "length" and seen.tokens < most):
        raise BrokenAnswerError(
            f"{seen.tokens} tokens of at most {most}, ended by {seen.finish_reason}"
        )
