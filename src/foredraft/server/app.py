"""The application: routes, and how their mistakes are told.

Knows paths; what they do lies in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute, APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from foredraft import __version__
from foredraft.engine.async_engine import AsyncEngine
from foredraft.server import replies
from foredraft.server.completing import complete, describe
from foredraft.server.conversation import conversation
from foredraft.server.document import (
    ANSWERED,
    KEYED,
    OPEN,
    POSTED,
    DocumentedApp,
    errors,
    streamed,
    texts,
)
from foredraft.server.errors import APIError, from_validation, unavailable
from foredraft.server.forms import ChatForm, CompletionForm
from foredraft.server.gate import Gate
from foredraft.server.generation import Work
from foredraft.server.json_body import parse_body
from foredraft.server.page.routes import add_page
from foredraft.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from foredraft.server.settings import ServerSettings
from foredraft.server.state import ServerState
from foredraft.server.tools.choice import tool_use
from foredraft.server.tools.grammar import check_grammar
from foredraft.server.tools.prompt import prompt_ids
from foredraft.server.translation import (
    chat_params,
    completion_params,
    prompts_of,
    request_options,
)

LARGE_BODY = 1 << 16  # bytes; parsed off the event loop


class StrictRequest(Request):
    """A request whose body is read as JSON by the server's own rules."""

    async def json(self) -> Any:
        """Raises APIError (400)."""
        data = await self.body()
        if len(data) < LARGE_BODY:
            return parse_body(data)
        state: ServerState = self.app.state.server
        return await state.in_thread(parse_body, data)


class StrictRoute(APIRoute):
    """A route of strict requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As the base class, with another kind of request."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


router = APIRouter(route_class=StrictRoute)


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


@router.post(
    "/v1/chat/completions", response_model=replies.ChatReply, responses=streamed(*ANSWERED)
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """The assistant's next message, whole or as server-sent events."""
    state = _state(request)
    state.check_model(body.model)
    tokenizer, form = state.engine.tokenizer, state.tool_format
    tools = tool_use(body, form)
    params, options = chat_params(body, tools, tokenizer.control_id), request_options(body)
    _check_stream(body.stream, prompt_logprobs=body.prompt_logprobs is not None)
    if tools is not None and params.structured_outputs is not None:
        await state.in_thread(check_grammar, tools, params.structured_outputs, state.grammars)
    messages = conversation(body.messages)
    state.check_characters(sum(len(each["content"]) for each in messages))
    prompt = await state.in_thread(
        prompt_ids,
        tokenizer,
        messages,
        form,
        () if tools is None else tools.functions,
        body.add_generation_prompt is not False,
    )
    work = Work([prompt], params, options, bool(body.return_token_origins))
    return await complete(state, request, body, work, ChatForm(body, tokenizer, params, tools))


@router.post(
    "/v1/completions", response_model=replies.CompletionReply, responses=streamed(*ANSWERED)
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """What follows one or several prompts, whole or as server-sent events."""
    state = _state(request)
    state.check_model(body.model)
    params, options = completion_params(body), request_options(body)
    _check_stream(
        body.stream,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo=bool(body.echo) and body.logprobs is not None,
    )
    prompts = prompts_of(body, state.settings.max_prompts)
    tokenizer = state.engine.tokenizer
    form = await state.in_thread(CompletionForm, body, tokenizer, params, prompts)
    work = Work(prompts, params, options, bool(body.return_token_origins))
    return await complete(state, request, body, work, form)


def _check_stream(stream: bool | None, **known_at_the_end: bool) -> None:
    for name, wanted in known_at_the_end.items():
        if stream and wanted:
            raise APIError(
                400,
                f"{name}: log-probabilities of a prompt can't be streamed; leave stream out",
                param=name,
            )


@router.post(
    "/v1/embeddings",
    status_code=501,
    response_model=replies.ErrorReply,
    responses=errors(*KEYED, 503),
)
async def embeddings() -> Response:
    """Always refused: the model writes text."""
    return APIError(
        501,
        "embeddings are not served: the model writes text",
        code="unsupported_endpoint",
    ).response()


@router.get("/v1/models", response_model=replies.ModelList, responses=errors(*KEYED))
async def models(request: Request) -> Response:
    """The served names, all of one model."""
    state = _state(request)
    return JSONResponse({"object": "list", "data": [_card(state, n) for n in _names(state)]})


@router.get(
    "/v1/models/{model:path}", response_model=replies.ModelCard, responses=errors(*KEYED, 404)
)
async def model_card(request: Request, model: str) -> Response:
    """One of them."""
    state = _state(request)
    state.check_model(model)
    return JSONResponse(_card(state, model))


def _names(state: ServerState) -> tuple[str, ...]:
    return state.settings.model_names


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "foredraft",
        "max_model_len": state.engine.config.max_model_len,
        "speculation": speculation(state),
    }


def speculation(state: ServerState) -> dict[str, Any]:
    """What is in force, and why not where nothing is."""
    engine = state.engine
    reason = None
    if engine.drafter is None:
        reason = "plain decoding was configured"
    elif engine.engine.drafter is None:
        reason = "the drafter failed and is not asked any more; the log says how"
    return {
        "enabled": reason is None,
        "method": engine.method,
        "num_speculative_tokens": engine.num_speculative_tokens,
        "reason": reason,
    }


@router.post("/tokenize", response_model=replies.Tokenized, responses=errors(*POSTED))
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation."""
    state = _state(request)
    if body.model is not None:
        state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give one of prompt and messages", param="prompt")
    return JSONResponse(await state.in_thread(_tokenized, state, body))


def _tokenized(state: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = state.engine.tokenizer
    if body.messages is not None:
        messages, form = conversation(body.messages), state.tool_format
        ids = prompt_ids(tokenizer, messages, form, (), body.add_generation_prompt)
    else:
        encode = tokenizer.encode_prompt if body.add_special_tokens else tokenizer.encode
        ids = encode(body.prompt or "")
    return {
        "count": len(ids),
        "max_model_len": state.engine.config.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(id_) for id_ in ids]
        if body.return_token_strs
        else None,
    }


@router.post("/detokenize", response_model=replies.Detokenized, responses=errors(*POSTED))
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    state = _state(request)
    if body.model is not None:
        state.check_model(body.model)
    size = state.engine.loaded.config.vocab_size
    wrong = next((id_ for id_ in body.tokens if id_ >= size), None)
    if wrong is not None:
        raise APIError(400, f"tokens: {wrong} is not an id in 0..{size - 1}", param="tokens")
    decode = state.engine.tokenizer.decode
    return JSONResponse({"prompt": await state.in_thread(decode, body.tokens, False)})


@router.get("/health", response_model=replies.Health, responses=errors(*OPEN, 503))
async def health(request: Request) -> Response:
    """Whether the process is worth keeping."""
    if not _state(request).engine.alive:
        raise unavailable("the engine's thread has ended")
    return JSONResponse({"status": "ok"})


@router.get("/ready", response_model=replies.Ready, responses=errors(*OPEN, 503))
async def ready(request: Request) -> Response:
    """Whether requests are taken, and what is in force."""
    state = _state(request)
    if state.draining or not state.engine.alive:
        raise unavailable("the server is shutting down")
    return JSONResponse(
        {"status": "ready", "models": list(_names(state)), "speculation": speculation(state)}
    )


@router.get("/version", response_model=replies.Version, responses=errors(*OPEN))
async def version() -> Response:
    """Of foredraft."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=Response, responses=texts("text/plain", *KEYED))
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    text = generate_latest(_state(request).engine.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application over an engine, which stays the caller's to close."""
    app = DocumentedApp(
        settings,
        title="foredraft",
        version=__version__,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    state = app.state.server = ServerState(engine, settings)
    app.include_router(router)
    if settings.page:
        add_page(app, state)

    async def told(_: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            return from_validation(error.errors()).response()
        if isinstance(error, HTTPException) and not isinstance(error, APIError):
            message = {404: "there is no such path here", 405: "the path has other methods"}
            text = message.get(error.status_code, str(error.detail))
            return APIError(error.status_code, text, headers=error.headers).response()
        return describe(error, state).response()

    for kind in (RequestValidationError, HTTPException, ValueError, RuntimeError):
        app.add_exception_handler(kind, told)
    app.add_middleware(Gate, state=state)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app
