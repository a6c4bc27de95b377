"""What a server is told when it starts, checked.

Knows numbers and their ranges; knows no engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foredraft.core.errors import ConfigError
from foredraft.server.hosts import is_name

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits, keys and names. Raises ConfigError for values out of range.

    Seconds may be `math.inf`: no limit.
    """

    model_names: tuple[str, ...]  # what requests may call the model; the first is told to clients
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    cors_origins: tuple[str, ...] = ()  # web pages that may ask from a browser; none: no page
    allowed_hosts: tuple[str, ...] = ()  # names that requests may be addressed to; none: any
    max_body_bytes: int = 4 * MEBIBYTE
    max_prompt_tokens: int | None = None  # below the context's length, which is always a limit
    max_prompts: int = 64  # in one request for completions
    max_http_requests: int = 1024  # being read, queued, running or written
    head_seconds: float = 30.0  # for a request's head to arrive, and for an answer's rest to leave
    body_seconds: float = 30.0  # for a request's body to arrive
    request_seconds: float = 600.0  # for an answer, queue included
    drain_seconds: float = 300.0  # that answers may go on after the first signal
    pace: bool = False  # one event a token, at a steady rate
    log_prompts: bool = False
    page: bool = True  # at /, and what it shows at /live

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("the served model needs a name that is not empty")
        for name in ("max_body_bytes", "max_prompts", "max_http_requests", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        for name in ("head_seconds", "body_seconds", "request_seconds", "drain_seconds"):
            value = getattr(self, name)
            number = type(value) in (int, float)
            if not number or math.isnan(value) or value <= 0:
                raise ConfigError(f"{name} must be a number above 0, got {value!r}")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key must be printable ASCII without spaces")
        for host in self.allowed_hosts:
            if not is_name(host):
                raise ConfigError(
                    f"an allowed host is a name or an address without a port, such as example.org; "
                    f"got {host!r}"
                )
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ConfigError(
                    f"a CORS origin is a scheme and a host, such as https://example.org, or *; got "
                    f"{origin!r}"
                )
