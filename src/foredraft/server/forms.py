"""What completions look like in an answer: envelopes, usage and statistics, whole or in chunks.

Knows engine outputs and OpenAI's objects; knows no route and no socket.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foredraft import __version__
from foredraft.core.sampling import SamplingParams
from foredraft.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from foredraft.models.tokenizer import Tokenizer
from foredraft.server.cutting import TokenCutter
from foredraft.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from foredraft.server.schemas import ChatRequest, CompletionRequest, SamplingFields
from foredraft.server.tools.choice import ToolUse
from foredraft.server.tools.message import MessageWriter

FINGERPRINT = f"foredraft-{__version__}"


class Form:
    """One answer's form. Subclasses say what a choice is."""

    prefix = object = chunk_object = ""
    _text_field = ""  # of a chunk's choice: where what was written stands

    def __init__(
        self, request: SamplingFields, tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._n = params.n
        self._skip = params.skip_special_tokens
        self._stops = params.stop_strings
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        options = request.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._outputs: list[RequestOutput] = []

    def opening(self, num_prompts: int) -> list[dict[str, Any]]:
        """Chunks that come before anything is generated."""
        return []

    def chunk(self, prompt: int, delta: StreamDelta) -> dict[str, Any] | None:
        """The event of a delta; None where it has nothing to tell."""
        if delta.finished is not None:
            self._outputs.append(delta.finished)
        told = self._wants_tokens and delta.token_ids
        ended, part = delta.completion, self._delta(prompt, delta)
        if not (part[self._text_field] or told or ended is not None):
            return None
        at = prompt * self._n + delta.index
        choice = {"index": at, **part}
        choice["finish_reason"] = None if ended is None else self._reason(at, ended)
        if ended is not None:
            choice["stop_reason"] = ended.stop_reason
        choice |= self._tokens(delta)
        return self._event([choice])

    def closing(self) -> list[dict[str, Any]]:
        """The chunk with the usage, where it was asked for."""
        if not self._with_usage:
            return []
        return [{**self._envelope(self.chunk_object), "choices": [], **self._sums(self._outputs)}]

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for prompt, output in enumerate(outputs):
            for each in output.outputs:
                at = prompt * self._n + each.index
                choice: dict[str, Any] = {"index": at, **self._whole(prompt, output, each)}
                choice["finish_reason"] = self._reason(at, each)
                choice["stop_reason"] = each.stop_reason
                choice |= self._tokens_of(each)
                choices.append(choice)
        answer = {**self._envelope(self.object), "choices": choices, **self._sums(outputs)}
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = [list(output.prompt_token_ids) for output in outputs]
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [
                prompt_logprobs(self._tokenizer, output.prompt_logprobs or ()) for output in outputs
            ]
        return answer

    @property
    def _wants_tokens(self) -> bool:
        request = self._request
        return bool(request.return_token_ids or request.return_token_origins)

    def _delta(self, prompt: int, delta: StreamDelta) -> dict[str, Any]:
        raise AssertionError("a form says what a choice is")

    def _whole(
        self, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        raise AssertionError("a form says what a choice is")

    def _reason(self, at: int, completion: CompletionOutput) -> str:
        return completion.finish_reason

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._envelope(self.chunk_object), "choices": choices}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _envelope(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self._created,
            "model": self._request.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _tokens(self, delta: StreamDelta) -> dict[str, Any]:
        """What was asked for of single tokens; with origins, a delta is one token."""
        found: dict[str, Any] = {}
        if self._request.return_token_ids:
            found["token_ids"] = list(delta.token_ids)
        if self._request.return_token_origins:
            texts = [delta.text, *[""] * len(delta.token_ids)]
            found["tokens"] = [
                {"id": token, "text": text, "origin": str(origin)}
                for token, text, origin in zip(delta.token_ids, texts, delta.origins, strict=False)
            ]
        return found

    def _tokens_of(self, completion: CompletionOutput) -> dict[str, Any]:
        whole = StreamDelta(completion.text, completion.token_ids, completion.origins)
        found = self._tokens(whole)
        if "tokens" in found:
            parts = TokenCutter(self._tokenizer, self._skip, self._stops).cut(whole)
            found["tokens"] = [each for part in parts for each in self._tokens(part)["tokens"]]
        return found

    def _sums(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Usage, and for a single completion how speculation went."""
        completions = [each for output in outputs for each in output.outputs]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        written = sum(len(each.token_ids) for each in completions)
        stats = [each.metrics.speculative_decoding for each in completions if each.metrics]
        accepted = sum(each.num_accepted_draft_tokens for each in stats)
        drafted = sum(each.num_draft_tokens for each in stats)
        predicted = self._request.prediction is not None
        sums: dict[str, Any] = {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": written,
                "total_tokens": prompt + written,
                "prompt_tokens_details": {
                    "cached_tokens": sum(output.num_cached_tokens for output in outputs),
                    "audio_tokens": 0,
                },
                "completion_tokens_details": {
                    "accepted_prediction_tokens": accepted if predicted else 0,
                    "rejected_prediction_tokens": drafted - accepted if predicted else 0,
                    "reasoning_tokens": 0,
                    "audio_tokens": 0,
                },
            }
        }
        if len(stats) == 1:
            sums["metrics"] = {"speculative_decoding": asdict(stats[0])}
        return sums


class ChatForm(Form):
    """`/v1/chat/completions`."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _text_field = "delta"
    _request: ChatRequest

    def __init__(
        self,
        request: ChatRequest,
        tokenizer: Tokenizer,
        params: SamplingParams,
        tools: ToolUse | None = None,
    ) -> None:
        """`tools`: what the answers may call."""
        super().__init__(request, tokenizer, params)
        self._writers = [MessageWriter(tools) for _ in range(params.n)]

    def opening(self, num_prompts: int) -> list[dict[str, Any]]:
        """The role of each choice."""
        role = {"role": "assistant", "content": ""}
        return [
            self._event([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            for index in range(num_prompts * self._n)
        ]

    @property
    def _wants_tokens(self) -> bool:
        return super()._wants_tokens or bool(self._request.logprobs)

    def _delta(self, prompt: int, delta: StreamDelta) -> dict[str, Any]:
        writer = self._writers[prompt * self._n + delta.index]
        return {
            "delta": writer.push(delta.text, ended=delta.completion is not None),
            "logprobs": self._logprobs(delta.logprobs),
        }

    def _whole(
        self, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        writer = self._writers[prompt * self._n + completion.index]
        return {
            "message": writer.message(completion.text),
            "logprobs": self._logprobs(completion.logprobs or ()),
        }

    def _reason(self, at: int, completion: CompletionOutput) -> str:
        stopped = completion.finish_reason == "stop"
        return "tool_calls" if stopped and self._writers[at].has_calls else completion.finish_reason

    def _logprobs(self, logprobs: Any) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, logprobs) if self._request.logprobs else None


class CompletionForm(Form):
    """`/v1/completions`."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    _text_field = "text"
    _request: CompletionRequest

    def __init__(
        self,
        request: CompletionRequest,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompts: Sequence[str | Sequence[int]],
    ) -> None:
        super().__init__(request, tokenizer, params)
        self._echoed = [
            "" if not request.echo
            else each if isinstance(each, str)
            else tokenizer.decode(each, self._skip)
            for each in prompts
        ]  # fmt: skip
        self._logprobs = [
            CompletionLogprobs(tokenizer, self._skip, len(self._echoed[at // params.n]))
            for at in range(params.n * len(prompts))
        ]

    def opening(self, num_prompts: int) -> list[dict[str, Any]]:
        """The prompts, where they are to be repeated."""
        return [
            self._event([{"index": at, "text": text, "logprobs": None, "finish_reason": None}])
            for at in range(num_prompts * self._n)
            if (text := self._echoed[at // self._n])
        ]

    @property
    def _wants_tokens(self) -> bool:
        return super()._wants_tokens or self._request.logprobs is not None

    def _delta(self, prompt: int, delta: StreamDelta) -> dict[str, Any]:
        form = self._logprobs[prompt * self._n + delta.index]
        wanted = self._request.logprobs is not None
        return {
            "text": delta.text,
            "logprobs": form.of(delta.token_ids, delta.logprobs) if wanted else None,
        }

    def _whole(
        self, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        logprobs = None
        ids, found = list(completion.token_ids), list(completion.logprobs or ())
        if self._request.logprobs is not None:
            form = CompletionLogprobs(self._tokenizer, self._skip)
            before = list(output.prompt_logprobs or ()) if self._request.echo else []
            ids = [*output.prompt_token_ids, *ids] if self._request.echo else ids
            logprobs = form.of(ids, [*before, *found])
        return {"text": self._echoed[prompt] + completion.text, "logprobs": logprobs}
