"""`foredraft serve`: a model over OpenAI's HTTP protocol.

Knows options and what is said at the start; `foredraft.server` serves.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foredraft.cli.console import message_console, one_line
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, ModelArgument, RuntimeOptions, SpeculationOptions
from foredraft.cli.serve_options import (
    AnswerOptions,
    ConfigOption,
    LimitOptions,
    ListenOptions,
    server_settings,
)

if TYPE_CHECKING:
    from foredraft import AsyncEngine
    from foredraft.server.settings import ServerSettings


@option_groups
def serve(
    model: ModelArgument,
    config: ConfigOption = None,
    json_output: JsonFlag = False,
    *,
    listen: ListenOptions,
    limits: LimitOptions,
    answers: AnswerOptions,
    speculation: SpeculationOptions,
    runtime: RuntimeOptions,
) -> None:
    """Serve a model over HTTP as OpenAI's API does."""
    listen.check()
    settings = server_settings(model, listen, limits, answers)
    how = under_policy(speculation.config())
    loaded = runtime.load(model)
    from foredraft import AsyncEngine
    from foredraft.cli.download import fetch_draft
    from foredraft.server.app import create_app
    from foredraft.server.running import DrainingServer, open_socket, serve_until_signal

    fetch_draft(how)
    sock = open_socket(listen.host, listen.port)  # before the minutes that a policy may measure
    with sock:
        engine = AsyncEngine(
            loaded,
            speculative_config=how,
            price_per_hour=answers.price_per_hour,
            enable_prefix_caching=not answers.no_prefix_caching,
            **runtime.engine_settings(),
            **limits.engine_settings(),
        )
        server = DrainingServer(
            create_app(engine, settings), certfile=listen.ssl_certfile, keyfile=listen.ssl_keyfile
        )
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        url = f"{listen.scheme}://{host}:{sock.getsockname()[1]}"
        gc.collect()
        gc.freeze()  # looking through what is loaded would halt all streams for a tenth of a second
        _log_to_stderr()
        _tell_start(url, engine, settings, listen, json_output)
        serve_until_signal(server, sock)


def under_policy(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Where the method is left to us and nothing is said of lengths, what is drafted is what pays:
    a server meets one request now and thirty then.
    """
    said = ("policy", "num_speculative_tokens_per_batch_size")
    if config is None or config.get("method") != "auto" or any(key in config for key in said):
        return config
    return {**config, "policy": "adaptive"}


def _log_to_stderr() -> None:
    """Times and levels; the web server's own lines only where something is wrong."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("foredraft.server").setLevel(logging.INFO)
    # It warns of writes to clients that have just left, which are counted and logged anyway.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def _tell_start(
    url: str,
    engine: AsyncEngine,
    settings: ServerSettings,
    listen: ListenOptions,
    json_output: bool,
) -> None:
    for line in start_lines(url, engine, settings, listen):
        message_console().print(one_line(line), soft_wrap=True)
    if json_output:
        values: dict[str, Any] = {
            "url": url,
            "models": list(settings.model_names),
            "speculative_method": engine.method,
            "num_speculative_tokens": engine.num_speculative_tokens,
            "max_model_len": engine.config.max_model_len,
        }
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


def start_lines(
    url: str, engine: AsyncEngine, settings: ServerSettings, listen: ListenOptions
) -> Iterator[str]:
    """What is in force, and what speculation costs in memory."""
    loaded, config = engine.loaded, engine.config
    dtype = str(loaded.dtype).removeprefix("torch.")
    yield (
        f"serving {', '.join(settings.model_names)} ({dtype}, {loaded.model.kernels.name} kernels, "
        f"context {config.max_model_len:,}) at {url}/v1"
    )
    if engine.method is None:
        yield "speculation: none, plain decoding"
    else:
        policy = "" if engine.speculative is None else f", {engine.speculative.policy} policy"
        yield (
            f"speculation: {engine.method}, at most {engine.num_speculative_tokens} draft tokens a "
            f"step{policy}"
        )
    yield engine.capacity_line()
    if settings.page:
        yield f"page: {url}/ shows a chat and what the engine does"
    if not loaded.tokenizer.has_chat_template:
        yield "chat: the model has no chat template, so only /v1/completions works"
    if not settings.api_keys and not listen.is_local:
        yield f"access: no API key, so whoever reaches {listen.host} may ask"
