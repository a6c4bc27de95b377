"""What a request may hold: every field is honoured, known to change nothing, or refused by name.

Knows fields and their types; ranges that need a model are the engine's to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Label = Annotated[str, Field(max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=512)]
Metadata = Annotated[dict[str, str], Field(max_length=16)]
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_TOOLS = 128


class Strict(BaseModel):
    """Unknown fields are refused, and values are not made to fit: "true" is no truth value."""

    model_config = ConfigDict(extra="forbid", strict=True)
    # Fields of OpenAI's or vLLM's requests that are refused unless null, and why.
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not cls.refused.keys() & value.keys():
            return value
        for name, reason in cls.refused.items():
            if value.get(name) is not None:
                raise PydanticCustomError(
                    "refused_field", "{field} is not supported: {reason}",
                    {"field": name, "reason": reason},
                )  # fmt: skip
        return {key: each for key, each in value.items() if key not in cls.refused}


class TextPart(Strict):
    """A piece of text."""

    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class StreamOptions(Strict):
    """How a stream ends, and how it may be padded."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Speculation(Strict):
    """Drafting, for this request. It changes no answer."""

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None


class Prediction(Strict):
    """The text that is expected to come: it is drafted."""

    type: Literal["content"]
    content: Text


class StructuredFields(Strict):
    """What the answer must be: one of the first five."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class JsonSchema(Strict):
    """A JSON schema with a name, as OpenAI has it. It is always kept to, strict or not."""

    name: Annotated[str, Field(max_length=256)]
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Free text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


_REFUSED = {
    "best_of": "completions are not ranked; ask for n",
    "bad_words": "give banned_token_ids or logit_bias",
    "use_beam_search": "beam search is not sampling",
    "guided_decoding_backend": "there is one",
}


class SamplingFields(Strict):
    """What both kinds of completion take. Null is as if left out."""

    model: Annotated[str, Field(max_length=256)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MOST_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_BIASES)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Label | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # foredraft's.
    banned_token_ids: list[TokenId] | None = None
    speculation: Speculation | None = None
    prediction: Prediction | None = None
    request_type: Label | None = None
    return_token_origins: bool | None = None
    # Taken, and without effect on any answer.
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(SamplingFields):
    """`/v1/completions`."""

    refused: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "suffix": "the model continues text, it does not fill gaps",
        "response_format": "it belongs to chat completions",
    }

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function, with its kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """A function by its name alone."""

    name: FunctionName


class NamedTool(Strict):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class FunctionCall(Strict):
    """What was called; `arguments` is the text of a JSON object."""

    name: FunctionName
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: Label
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Strict):
    """One turn of a conversation."""

    refused: ClassVar[Mapping[str, str]] = {
        "refusal": "say it as content",
        "audio": "the model reads text",
        "annotations": "the model reads text",
        "function_call": "it was replaced by tool_calls",
        "reasoning_content": "chat templates have no place for it",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None  # null where there are tool_calls
    name: Label | None = None  # of the function, in a tool's message
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=128)] | None = None
    tool_call_id: Label | None = None


class ChatRequest(SamplingFields):
    """`/v1/chat/completions`."""

    refused: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "audio": "the model writes text",
        "function_call": "it was replaced by tool_choice",
        "functions": "they were replaced by tools",
        "moderation": "nothing is moderated",
        "reasoning_effort": "the model has no such switch",
        "verbosity": "the model has no such switch",
        "web_search_options": "the server reaches out for nothing",
        "chat_template": "templates are programs: the model's own is used",
        "chat_template_kwargs": "templates are programs: the model's own is used",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(Strict):
    """Text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
