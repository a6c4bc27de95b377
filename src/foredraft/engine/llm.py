"""The offline interface: prompts in, finished outputs or a stream out.

Knows prompts as text or ids and how to wait for them; knows nothing of what happens in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from foredraft.core.errors import InvalidRequest
from foredraft.core.sampling import SamplingParams
from foredraft.engine.build import EngineFront
from foredraft.engine.outputs import RequestOutput, StreamDelta
from foredraft.engine.progress import Progress, reporting
from foredraft.engine.submission import (
    Group,
    Prompt,
    RequestOptions,
    as_conversations,
    as_prompts,
    check_params,
)
from foredraft.models.chat_messages import Message

_Each = TypeVar("_Each")


class LLM(EngineFront):
    """A model ready to generate, with or without speculation; the output is the same.

    Several LLMs may share one loaded model, each with its own cache, drafter and requests.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        progress: Progress = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        Args:
            prompts: text, token ids, or a sequence of either.
            params: for all prompts, or one each; None: the defaults.
            options: what is not sampling, likewise.
            progress: True shows a bar where stderr is a terminal; a function is called with the
                prompts that are done and all of them, at the start and whenever that changes.

        Raises:
            InvalidRequest: a prompt or its parameters can't be honoured; nothing was generated.
        """
        many = as_prompts(prompts)
        each = _one_each(SamplingParams() if params is None else params, many, "sampling params")
        ways = _one_each(RequestOptions() if options is None else options, many, "request options")
        groups = [self._make(*one) for one in zip(many, each, ways, strict=True)]
        try:
            try:
                for group in groups:
                    self._add(group)
                with reporting(progress, len(groups)) as report:
                    self._run(groups, report)
            finally:
                self._abort(groups)
        finally:
            self._abort(groups)  # again: an interrupt may have cut the first short
        return [group.output(self.num_speculative_tokens) for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        progress: Progress = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        prompts = [self._template(one) for one in as_conversations(messages)]
        return self.generate(prompts, params, options, progress=progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Iterator[StreamDelta]:
        """Generate one completion, yielding what each step adds. Leaving early frees everything.

        Raises:
            InvalidRequest: also for `n > 1`: a stream carries one completion.
        """
        params = check_params(SamplingParams() if params is None else params)
        if params.n != 1:
            raise InvalidRequest(f"a stream carries one completion, got n = {params.n}")
        return self._stream(self._make(prompt, params, options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Iterator[StreamDelta]:
        """`stream` for a conversation, through the model's chat template."""
        return self.stream(self._template(messages), params, options)

    def _run(self, groups: Sequence[Group], report: Callable[[int], None]) -> None:
        unfinished = list(groups)
        report(0)
        while unfinished:
            self.engine.step()
            left = [group for group in unfinished if not group.finished]
            if len(left) < len(unfinished):
                report(len(groups) - len(left))
            unfinished = left

    def _stream(self, group: Group) -> Iterator[StreamDelta]:
        try:
            try:
                # Only now: closing a generator that was never started runs no `finally`.
                self._add(group)
                yield from self._deltas(group)
            finally:
                self._abort([group])
        finally:
            self._abort([group])  # again: an interrupt may have cut the first short

    def _deltas(self, group: Group) -> Iterator[StreamDelta]:
        request = group.requests[0]
        finished = None
        while finished is None:
            if not request.finished:
                self.engine.step()
            if request.finished:
                finished = group.output(self.num_speculative_tokens)
            text, tokens, origins, logprobs = request.drain()
            if text or tokens or finished is not None:
                yield StreamDelta(
                    text,
                    tokens,
                    origins,
                    finished,
                    emitted_at=request.last_token_at,
                    completion=None if finished is None else finished.outputs[0],
                    logprobs=logprobs,
                )

    def _add(self, group: Group) -> None:
        for request in group.requests:
            self.engine.add(request)

    def _abort(self, groups: Sequence[Group]) -> None:
        self.engine.abort([request for group in groups for request in group.requests])


def _one_each(given: _Each | Sequence[_Each], prompts: Sequence[Prompt], name: str) -> list[_Each]:
    """One for all prompts, or one each. Raises InvalidRequest where their numbers differ."""
    each = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidRequest(f"{len(prompts)} prompts with {len(each)} {name}")
    return each
