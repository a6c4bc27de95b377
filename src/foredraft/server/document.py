"""The served OpenAPI document: which answers a path really gives, and what requests may hold.

Knows statuses, media types and FastAPI's document; knows no route.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from foredraft.server.replies import ErrorReply
from foredraft.server.settings import ServerSettings

Responses = dict[int | str, dict[str, Any]]

# Every path: what is no HTTP, a head or body that does not come, a fault of ours.
OPEN = (400, 408, 500)
KEYED = (*OPEN, 401, 413, 429)  # whoever asks is known, and one of not too many
POSTED = (*KEYED, 404, 415, 503)
ANSWERED = (*POSTED, 504)
_WAIT = {
    "description": "In how many seconds to ask again.",
    "schema": {"type": "integer", "minimum": 1},
}
_BEARER = "bearer"
_MISDIRECTED = {
    "description": "Misdirected Request",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
}


def errors(*statuses: int) -> Responses:
    """The `responses` of a route that fails with these."""
    found: Responses = {}
    for status in statuses:
        found[status] = {"model": ErrorReply}
        if status in (429, 503):
            found[status]["headers"] = {"Retry-After": _WAIT}
    return found


def texts(media_type: str, *statuses: int) -> Responses:
    """`errors`, for a route whose answer may be text of that type."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}, **errors(*statuses)}


def streamed(*statuses: int) -> Responses:
    """`errors`, for a route whose answer may be a stream of events. They have no schema: some
    readers of documents take it for the whole stream's, some for each event's.
    """
    return {200: {"content": {"text/event-stream": {}}}, **errors(*statuses)}


class DocumentedApp(FastAPI):
    """An app whose document has the served names and, where keys are asked for, says so; what
    FastAPI tells of every route but never happens here, its 422, is left out.
    """

    def __init__(self, settings: ServerSettings, **more: Any) -> None:
        super().__init__(**more)
        self._settings = settings

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            found = get_openapi(title=self.title, version=self.version, routes=self.routes)
            _amend(found, self._settings)
            self.openapi_schema = found
        return self.openapi_schema


def _amend(found: dict[str, Any], settings: ServerSettings) -> None:
    parts = found["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(name, None)
    for schema in parts["schemas"].values():
        field = schema.get("properties", {}).get("model")
        if field is not None and schema.get("additionalProperties") is False:
            _name_models(field, settings.model_names)
    if settings.api_keys:
        parts["securitySchemes"] = {_BEARER: {"type": "http", "scheme": "bearer"}}
    for path in found["paths"].values():
        for operation in path.values():
            if settings.allowed_hosts:
                operation["responses"]["421"] = _MISDIRECTED
            operation["responses"].pop("422", None)
            for each in operation.get("parameters", ()):
                if each["name"] == "model":
                    _name_models(each["schema"], settings.model_names)
            if settings.api_keys and "401" in operation["responses"]:
                operation["security"] = [{_BEARER: []}]


def _name_models(field: dict[str, Any], names: tuple[str, ...]) -> None:
    for each in (field, *field.get("anyOf", ())):
        if each.get("type") == "string":
            each["enum"] = list(names)
