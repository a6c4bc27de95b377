"""A server that speaks OpenAI's protocol, seen from outside: streamed chat completions.

Knows HTTP, server-sent events and the fields that count tokens; knows no engine. One thread a
request: a blocking socket needs no library.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from foredraft.bench.pace import Reading
from foredraft.bench.serve.arrivals import Job
from foredraft.bench.serve.steps import LoggedStep
from foredraft.bench.serve.traces import Window
from foredraft.bench.serve.traffic import Chunk
from foredraft.core.errors import UserError

TIMEOUT = 600.0  # seconds without a byte
LONGEST_QUOTE = 300  # characters of a server's complaint
# Beyond OpenAI's protocol; a server that refuses one is asked without it.
EXTENSIONS = frozenset({"return_token_ids", "continuous_usage_stats"})


class RemoteServer:
    """`POST {url}/v1/chat/completions`.

    Tokens are counted by their ids where chunks carry `token_ids`, else by the usage of each chunk,
    else a chunk is one token, and the last one brings what the usage has beyond that. Raises
    UserError for an URL that is none.
    """

    def __init__(
        self, url: str, model: str, temperature: float = 0.0, api_key: str | None = None
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError(f"--url must be like http://localhost:8000, got {url!r}")
        self._url, self._host, self._port = url, parts.hostname, port
        self._secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._path = f"{path}/v1/chat/completions"
        self._model, self._temperature = model, temperature
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._extensions = EXTENSIONS

    label = "server"
    learns = False

    def counters(self) -> None:
        """A server seen from outside states none."""

    def take_steps(self, window: Window) -> Sequence[LoggedStep]:
        """Nor its steps."""
        return ()

    is_on = True

    def now(self) -> float:
        return time.perf_counter()

    def enter(self) -> None:
        """It takes no turns."""

    def leave(self) -> None:
        """So it gives none up."""

    def take_readings(self) -> Sequence[Reading]:
        """So nothing is read."""
        return ()

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        """The answer, as it comes. Leaving early closes the connection.

        Raises UserError for a server that can't be reached, refuses, or breaks off.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        connection = self._connection()

        def put(value: Chunk | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(arrived.put_nowait, value)

        def read() -> None:
            try:
                for chunk in self._chunks(connection, job):
                    put(chunk)
                put(None)
            except Exception as error:  # whatever it is, the client's task raises it
                put(error)

        threading.Thread(target=read, daemon=True).start()
        try:
            while (value := await arrived.get()) is not None:
                if isinstance(value, UserError):
                    raise value
                if isinstance(value, Exception):
                    raise UserError(f"{self._url}: {type(value).__name__}: {value}")
                yield value
        finally:
            _hang_up(connection)

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=TIMEOUT)

    def _chunks(self, connection: http.client.HTTPConnection, job: Job) -> Iterator[Chunk]:
        counter = TokenCounter()
        for line in self._answer(connection, job):
            data = line.decode("utf-8").strip()
            if not data.startswith("data:"):
                continue
            data = data.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield counter.chunk(time.perf_counter(), json.loads(data))

    def _answer(self, connection: http.client.HTTPConnection, job: Job) -> http.client.HTTPResponse:
        """The answer whose lines follow. Raises UserError for a refusal that is not about
        extensions.
        """
        while True:
            extensions = self._extensions
            body = json.dumps(self._request(job, extensions))
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read(4096).decode("utf-8", "replace")[:LONGEST_QUOTE]
            connection.close()  # the next request opens it anew
            if response.status not in (400, 422) or not extensions:
                raise UserError(f"{self._url}{self._path} answered {response.status}: {text}")
            named = {name for name in extensions if name in text}
            self._extensions -= named or extensions

    def _request(self, job: Job, extensions: frozenset[str]) -> dict[str, Any]:
        options = {"include_usage": True}
        fields = {
            "model": self._model,
            "messages": [{"role": "user", "content": job.prompt.text}],
            "max_tokens": job.max_tokens,
            "temperature": self._temperature,
            "seed": job.seed,
            "stream": True,
            "stream_options": options,
        }
        if "continuous_usage_stats" in extensions:
            options["continuous_usage_stats"] = True
        if "return_token_ids" in extensions:
            fields["return_token_ids"] = True
        return fields


class TokenCounter:
    """Counts the tokens of one stream, by whatever its chunks say of them."""

    def __init__(self) -> None:
        self._counted = 0
        self._mean_acceptance_length: float | None = None

    def chunk(self, at: float, data: Mapping[str, Any]) -> Chunk:
        """What one event brought. Raises UserError for an error in the stream."""
        if "error" in data:
            raise UserError(f"the server broke off: {str(data['error'])[:LONGEST_QUOTE]}")
        choices = data.get("choices") or [{}]
        ids = choices[0].get("token_ids") or []
        usage = (data.get("usage") or {}).get("completion_tokens")
        if ids:
            tokens = len(ids)
        elif usage is not None:
            tokens = max(0, usage - self._counted)
        else:
            delta = choices[0].get("delta") or {}
            tokens = int(bool(delta.get("content") or choices[0].get("text")))
        self._counted += tokens
        metrics = (data.get("metrics") or {}).get("speculative_decoding") or {}
        length = metrics.get("mean_acceptance_length")
        return Chunk(at, tokens, ids, None if length is None else float(length))


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Close it under its reader, who may be waiting for a byte."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(2)
    connection.close()
