"""From a request's fields to what the engine takes.

Knows both sides' names; knows no route.
"""

from __future__ import annotations

from typing import Any

from foredraft.core.sampling import SamplingParams
from foredraft.core.structured_outputs import StructuredOutputs
from foredraft.engine.submission import RequestOptions
from foredraft.server.conversation import joined
from foredraft.server.errors import APIError
from foredraft.server.schemas import (
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    SamplingFields,
)
from foredraft.server.tools.choice import ToolUse
from foredraft.server.tools.grammar import ControlId, answer_grammar

# Fields of the same name and meaning as in SamplingParams.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "allowed_token_ids", "banned_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "prompt_logprobs", "seed",
)  # fmt: skip


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Raises InvalidRequest, APIError."""
    values = _values(request)
    if request.max_tokens is not None:
        values["max_tokens"] = request.max_tokens
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            values["prompt_logprobs"] = request.logprobs
    return SamplingParams(**values)


def chat_params(
    request: ChatRequest, tools: ToolUse | None, control_id: ControlId
) -> SamplingParams:
    """`tools`: what may be called; `control_id`: of the model's control tokens.

    Raises InvalidRequest, APIError.
    """
    values = _values(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise APIError(
            400,
            f"max_tokens is {request.max_tokens} and max_completion_tokens "
            f"{request.max_completion_tokens}: give one",
            param="max_completion_tokens",
        )
    values["max_tokens"] = limits.pop() if limits else None
    if request.response_format is not None and request.response_format.type != "text":
        if "structured_outputs" in values:
            raise APIError(
                400, "response_format: structured outputs are given too", param="response_format"
            )
        values["structured_outputs"] = _by_format(request.response_format)
    if tools is not None:
        _call_tools(values, request, tools, control_id)
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    return SamplingParams(**values)


def _call_tools(
    values: dict[str, Any], request: ChatRequest, tools: ToolUse, control_id: ControlId
) -> None:
    if "structured_outputs" in values:
        field = "structured_outputs" if request.response_format is None else "response_format"
        raise APIError(
            400, f"{field}: the answer may be a call of a tool; it needs tool_choice to be 'none'",
            param=field,
        )  # fmt: skip
    if tools.is_held:
        values["structured_outputs"] = answer_grammar(tools, control_id)
    if any(control_id(opening) is not None for opening in tools.form.openings):
        # Else the text would not show where a call begins.
        values["skip_special_tokens"] = False


def request_options(request: SamplingFields) -> RequestOptions:
    """Raises InvalidRequest."""
    speculation, prediction = request.speculation, request.prediction
    return RequestOptions(
        request_type=request.request_type or "",
        cache_salt=request.cache_salt or "",
        speculate=speculation is None or speculation.enabled,
        num_speculative_tokens=None if speculation is None else speculation.num_speculative_tokens,
        prediction=None if prediction is None else joined(prediction.content),
    )


def prompts_of(request: CompletionRequest, most: int) -> list[str | list[int]]:
    """The prompts, each as text or token ids. Raises APIError."""
    given = request.prompt
    prompts: list[Any] = [given] if isinstance(given, str) else list(given)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not prompts or len(prompts) > most:
        raise APIError(
            400, f"prompt must hold 1 to {most} prompts, got {len(prompts)}", param="prompt"
        )
    return prompts


def check_stream_options(request: SamplingFields) -> None:
    """Raise APIError for options of a stream where nothing is streamed."""
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options needs stream to be true", param="stream_options")


def _values(request: SamplingFields) -> dict[str, Any]:
    check_stream_options(request)
    values = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    structured = _structured(request)
    if structured is not None:
        values["structured_outputs"] = structured
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias)
    return values


def _structured(request: SamplingFields) -> StructuredOutputs | None:
    """`structured_outputs`, or one of the older `guided_*`."""
    kinds = ("json", "regex", "choice", "grammar")
    older = {
        kind: value for kind in kinds if (value := getattr(request, f"guided_{kind}")) is not None
    }
    given = request.structured_outputs
    if given is None:
        return StructuredOutputs(**older) if older else None
    if older:
        raise APIError(
            400, f"guided_{next(iter(older))}: structured_outputs are given too",
            param=f"guided_{next(iter(older))}",
        )  # fmt: skip
    values = given.model_dump(by_alias=True, exclude_none=True)
    return StructuredOutputs(**values)


def _by_format(given: ResponseFormat) -> StructuredOutputs:
    """Of OpenAI's `response_format`. Raises APIError, InvalidRequest."""
    if given.type == "json_object":
        return StructuredOutputs(json_object=True)
    named = given.json_schema
    if named is None or named.schema_ is None:
        raise APIError(
            400, "response_format.json_schema.schema is missing",
            param="response_format.json_schema.schema",
        )  # fmt: skip
    return StructuredOutputs(json=named.schema_)


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise APIError(400, f"logit_bias: {token[:40]!a} is not a token id", param="logit_bias")
        if int(token) in biases:
            raise APIError(400, f"logit_bias names token {int(token)} twice", param="logit_bias")
        biases[int(token)] = bias
    return biases
