"""Serves the page, and what it shows. Knows paths and headers; knows no figure.

The page itself tells nothing and needs no key; what it asks for does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from foredraft.server.page.live import Live, Watch
from foredraft.server.replies import ErrorReply
from foredraft.server.state import ServerState

FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/plots.js": ("plots.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Nothing inline, nothing from elsewhere, and no other page may frame it.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, state: ServerState) -> None:
    """The page at `/`, its files, and `/live`."""
    router, watch = APIRouter(), Watch(state.engine)
    for path, (name, kind) in FILES.items():
        data = (Path(__file__).parent / name).read_bytes()
        router.add_api_route(path, _file(data, kind), include_in_schema=False)

    async def live() -> Live:
        """What the engine does now."""
        return watch.live(state.settings.model_names)

    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply} for status in (401, 429, 500)
    }
    router.add_api_route("/live", live, response_model=Live, responses=errors)
    app.include_router(router)


def _file(data: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(data, media_type=kind, headers=HEADERS)

    return send
