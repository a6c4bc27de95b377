"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`.

Knows statuses and bodies; knows no route. A mistake of the client names its field; a fault of ours
says no more than that there was one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from foredraft.core.errors import EngineClosed, QueueFull, UserError

INVALID, SERVER = "invalid_request_error", "server_error"
LONGEST_VALUE = 60  # characters of a value that a message repeats
_FIELD = re.compile(r"[a-z][a-z_]*")
TOO_LONG = re.compile(r"the prompt has \d+ tokens, the context holds")
# Messages of the engine that do not begin with the field they are about.
_ABOUT = (
    (re.compile(r"the prompt "), "prompt"),
    (re.compile(r"request \S+ needs \d+ pages "), "max_tokens"),
    (re.compile(r"num_speculative_tokens "), "speculation.num_speculative_tokens"),
)

# How completions tell that what their request demands can't be met: no fault of the server's.
UNMET = re.compile(r"the grammar can't |no token is left ")


class APIError(HTTPException):
    """An answer that is an error. `message` is one line for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status_code, headers=dict(self.headers or {}))


def unavailable(message: str) -> APIError:
    """The server takes no requests now."""
    return APIError(503, message, kind=SERVER, code="unavailable", headers={"Retry-After": "5"})


def fault() -> APIError:
    """Something of ours broke; the log has it."""
    return APIError(500, "the server failed on this request", kind=SERVER, code="internal_error")


def too_long(what: str, most: int) -> APIError:
    """A prompt of more than `most` tokens."""
    code = "context_length_exceeded"
    return APIError(400, f"{what}, at most {most} tokens are taken", param="prompt", code=code)


def failed(message: str | None) -> APIError:
    """A completion that ended with an error."""
    if message is not None and UNMET.match(message):
        return APIError(400, message, code="unmet_demand")
    return APIError(500, message or "the answer failed", kind=SERVER, code="internal_error")


def timed_out(seconds: float) -> APIError:
    """The answer took longer than a request may."""
    return APIError(
        504,
        f"the answer took longer than the {seconds:g} seconds a request may take here",
        kind=SERVER,
        code="timeout",
    )


def queue_full(message: str, retry_after: int) -> APIError:
    """Come again."""
    return APIError(
        429,
        message,
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after)},
    )


def from_exception(error: BaseException, fields: Sequence[str], retry_after: int) -> APIError:
    """What a client is told of `error`; `fields` are names that its message may begin with."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFull):
        return queue_full(str(error), retry_after)
    if isinstance(error, EngineClosed):
        return unavailable("the server is shutting down")
    if isinstance(error, UserError):
        message = str(error)
        if TOO_LONG.match(message):
            return APIError(400, message, param="prompt", code="context_length_exceeded")
        return APIError(400, message, param=_param(message, fields))
    return fault()


def _param(message: str, fields: Sequence[str]) -> str | None:
    """The field that a message of the engine is about."""
    found = _FIELD.match(message)
    if found is not None and found.group() in fields:
        return found.group()
    return next((field for words, field in _ABOUT if words.match(message)), None)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """The first of pydantic's errors, as one line that names the field."""
    first = errors[0]
    kind = first.get("type", "")
    context = first.get("ctx") or {}
    place = [str(part) for part in first.get("loc", ()) if part != "body"]
    name = ".".join(part for part in place if part.isidentifier() or part.isdigit())
    if kind == "refused_field":
        return APIError(400, str(first["msg"]), param=context["field"], code="unsupported_field")
    if kind == "extra_forbidden":
        return APIError(
            400,
            f"unknown field {_short(name or place)}, neither honoured nor known to be harmless",
            param=name or None,
            code="unknown_field",
        )
    if not name:
        return APIError(400, "the body must be a JSON object with the fields of this request")
    message = str(first.get("msg", "is not valid"))
    if kind == "missing":
        return APIError(400, f"{name} is missing", param=name, code="missing_field")
    return APIError(400, f"{name}: {message}, got {_short(first.get('input'))}", param=name)


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"
    text = " ".join(ascii(value)[:1000].split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
