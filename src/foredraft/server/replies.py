"""What answers hold, as the served OpenAPI document tells it. Knows fields; fills none."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """An answer has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorDetail


class PromptDetails(Reply):
    cached_tokens: int
    audio_tokens: int


class CompletionDetails(Reply):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int
    audio_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculativeDecoding(Reply):
    """Acceptance statistics; the names are vLLM's."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_by_position: list[float]
    lossy: bool


class Metrics(Reply):
    speculative_decoding: SpeculativeDecoding


class TokenLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Reply):
    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Token(Reply):
    id: int
    text: str
    origin: Literal["plain", "accepted", "recovered", "bonus"]


class FunctionCall(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class Choice(Reply):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    tokens: list[Token] | None = None


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Envelope(Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Metrics | None = None
    prompt_token_ids: list[list[int]] | None = None
    prompt_logprobs: list[list[dict[str, Any] | None]] | None = None


class ChatReply(Envelope):
    """Streams hold `chat.completion.chunk` objects as OpenAI's do, and end with `[DONE]`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionReply(Envelope):
    """Streams hold the same object with parts of the text, and end with `[DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Speculation(Reply):
    enabled: bool
    method: str | None
    num_speculative_tokens: int
    reason: str | None


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    speculation: Speculation


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Reply):
    prompt: str


class Health(Reply):
    status: Literal["ok"]


class Ready(Reply):
    status: Literal["ready"]
    models: list[str]
    speculation: Speculation


class Version(Reply):
    version: str
