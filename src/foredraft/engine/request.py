"""One sequence being generated: its tokens, a few stored lengths, and what it has been given so
far.

Knows its own state and how it grows by one token; knows neither the scheduler, nor the model, nor
any drafter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum

from foredraft.cache.prefix import PrefixNode
from foredraft.core.acceptance import Origin
from foredraft.core.counts import AcceptanceCounts
from foredraft.core.errors import IntegrityError
from foredraft.core.sampling import History, Sampler, SamplingParams
from foredraft.engine.config import Rule, Verification
from foredraft.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    SpeculativeDecodingMetrics,
    TokenLogprobs,
)
from foredraft.engine.stops import Stop, StopRules, check_stop, safe_text_length
from foredraft.grammar.matcher import Matcher
from foredraft.models.tokenizer import Detokenizer


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A sequence. `num_computed` chases `num_tokens`; every other length derives from the two."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        group: str,
        index: int,
        sampler: Sampler,
        rules: StopRules,
        seed: int,
        verification: Verification,
        detokenizer: Detokenizer,
        request_type: str = "",
        max_width: int | None = None,
        cache_salt: str = "",
        prediction: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """`request_type` "": labelled by its sampling. `max_width`: most draft tokens a step.
        `cache_salt`: computed pages are shared with requests of the same one alone. `prediction`:
        the output that is expected, for drafters. `matcher`: of the output's grammar, at its start.
        """
        self.id = request_id
        self.group = group  # shared by the completions of one prompt
        self.index = index  # which of the n completions of its prompt
        self.params = params
        self.request_type = request_type or _type_by_sampling(params, sampler)
        self.max_width = max_width
        self.cache_salt = cache_salt
        self.prediction = tuple(prediction)
        self.matcher = matcher  # behind the committed output
        self.sampler = sampler
        self.rules = rules
        self.seed = seed
        self.verification = verification
        self.tokens = list(prompt)  # prompt and output; the last one may be pending
        self.num_prompt = len(prompt)
        self.num_computed = 0  # positions whose keys and values are in the cache
        self.num_draft_cached = 0  # positions that the drafter's own cache is known to hold
        self.num_drafted_pages = 0  # of its pages, those it has told the prefix tree of as such
        self.num_cached_tokens = 0  # found computed when it first started
        self.pages: list[int] = []
        self.prefix_node: PrefixNode | None = None  # of the last page it has made known, or found
        self.history: History = sampler.start(prompt)
        self.status = Status.WAITING
        self.queued = False  # an engine knows it
        self.released = False  # the drafter was told that it has ended
        self.num_preemptions = 0
        self.stop: Stop | None = None
        self.error: str | None = None
        self.origins: list[Origin] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.counts = AcceptanceCounts()
        self.text = ""
        self._detokenizer = detokenizer
        self._num_shown = 0
        self._num_drained = 0
        self._num_first_step_tokens = 0
        self.arrived_at = time.perf_counter()
        # Likewise; 0 until then.
        self.admitted_at = self.first_token_at = self.last_token_at = 0.0

    @property
    def coupled(self) -> bool:
        """Verified by the target's own noise, which the drafter may use too."""
        return self.verification.rule is Rule.COUPLED

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Committed tokens that are not computed yet: 1 while decoding, more while the prompt is
        read.
        """
        return len(self.tokens) - self.num_computed

    @property
    def max_draft_nodes(self) -> int:
        """Draft tokens that could still be emitted beside the extra token of a step, and that the
        request allows.
        """
        nodes = self.rules.max_tokens - self.num_output - 1
        return nodes if self.max_width is None else min(nodes, self.max_width)

    @property
    def worst_case_slots(self) -> int:
        """Positions this request can ever write, draft nodes included.

        A step with `n` nodes writes `num_tokens + n` slots and `n <= max_draft_nodes`, so the sum
        never passes this.
        """
        return self.num_prompt + self.rules.max_tokens - 1

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def admit(self, pages: list[int], num_computed: int) -> None:
        """Start running on `pages`, whose first `num_computed` positions are filled already."""
        self.pages = pages
        self.num_computed = num_computed
        self.status = Status.RUNNING
        if not self.num_preemptions:
            self.admitted_at = time.perf_counter()

    def wait(self) -> None:
        """Run no more until it is admitted again; its pages were taken, its tokens stay."""
        self.status = Status.WAITING
        self.num_computed = self.num_draft_cached = 0
        self.prefix_node = None
        self.num_preemptions += 1

    def append(self, token: int, origin: Origin) -> bool:
        """Commit one token; True if it ended the request."""
        self.tokens.append(token)
        self.history.append(token)
        self.origins.append(origin)
        piece = self._detokenizer.push([token])
        self.text += piece
        complete = False
        if self.matcher is not None:
            self.matcher.accept(token)
            complete = self.matcher.is_complete
        self.stop = check_stop(self.rules, token, self.num_output, self.text, len(piece), complete)
        return self.stop is not None

    def end_step(self, num_appended: int) -> None:
        """Note the time of a step that committed `num_appended` tokens."""
        self.last_token_at = time.perf_counter()
        if self.num_output == num_appended:
            self.first_token_at = self.last_token_at
            self._num_first_step_tokens = num_appended

    def finish(self, stop: Stop, error: str | None = None) -> None:
        """End for good: settle the text and the reason. The caller takes the pages back."""
        self.stop, self.error = stop, error
        self.status = Status.FINISHED
        self.matcher = None
        if stop.text_end is None:
            self.text += self._detokenizer.finish()
        else:
            self.text = self.text[: stop.text_end]

    def drain(self) -> tuple[str, list[int], list[Origin], list[TokenLogprobs]]:
        """Text, tokens, their origins and log-probabilities not handed out yet; never text that
        could still become a stop string.
        """
        end = len(self.text)
        if not self.finished and self.rules.stop_strings:
            end = safe_text_length(self.rules.stop_strings, self.text)
        text, drained = self.text[self._num_shown : end], self._num_drained
        tokens, origins = self.tokens[self.num_prompt + drained :], self.origins[drained:]
        logprobs = self.logprobs[drained:]
        self._num_shown, self._num_drained = max(end, self._num_shown), self.num_output
        return text, tokens, origins, logprobs

    def output(self, num_spec_tokens: int) -> CompletionOutput:
        """The completion of a finished request."""
        stop = self.stop or Stop("abort")
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.tokens[self.num_prompt :],
            origins=list(self.origins),
            finish_reason=stop.finish_reason,
            stop_reason=stop.stop_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            error=self.error,
            metrics=self._metrics(num_spec_tokens),
        )

    def _metrics(self, num_spec_tokens: int) -> RequestMetrics:
        return RequestMetrics(
            speculative_decoding=SpeculativeDecodingMetrics.from_counts(
                self.counts,
                num_spec_tokens,
                lossy=self.verification.changes_law(self.sampler.greedy),
            ),
            num_steps=max(0, self.counts.num_steps - 1),
            num_generated_tokens=self.num_output,
            num_first_step_tokens=self._num_first_step_tokens,
            prefill_seconds=max(0.0, self.first_token_at - self.admitted_at),
            decode_seconds=max(0.0, self.last_token_at - self.first_token_at),
        )

    def check_integrity(self, page_size: int) -> None:
        """Raise IntegrityError if the stored lengths contradict each other."""
        running = self.status is Status.RUNNING
        facts = {
            "computed positions within the tokens": 0 <= self.num_computed <= self.num_tokens,
            "an origin for every output token": len(self.origins) == self.num_output,
            "log-probabilities for every output token": self.params.logprobs is None
            or len(self.logprobs) == self.num_output,
            "counts of the emitted tokens": self.counts.num_emitted_tokens == self.num_output,
            "the grammar followed up to the last token": self.matcher is None
            or self.matcher.num_tokens == self.num_output,
            "no page twice": len(set(self.pages)) == len(self.pages),
            "drafter's positions within the computed ones": 0
            <= self.num_draft_cached
            <= self.num_computed,
            "pages only while running": running or not self.pages,
            "a pending token while running": not running or self.num_computed < self.num_tokens,
            "pages for what is computed": len(self.pages) * page_size >= self.num_computed,
            "no stop while running": not running or self.stop is None,
            "room for another token while running": not running
            or self.num_output < self.rules.max_tokens,
        }
        broken = [fact for fact, holds in facts.items() if not holds]
        if broken:
            raise IntegrityError(f"{self.status} request {self.id} lacks: {'; '.join(broken)}")


def _type_by_sampling(params: SamplingParams, sampler: Sampler) -> str:
    """Requests of one type are expected to be accepted alike: greedy, or at one temperature."""
    return "greedy" if sampler.greedy else f"temperature {params.temperature:.1f}"
