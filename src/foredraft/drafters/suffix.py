"""Suffix decoding: what followed the last tokens before, weighed by how often it did.

Knows token ids, in the request and in past responses of the same salt; knows no model and no text.
The draft is deterministic, so that it is exact under every acceptance rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.suffix_draft import DraftLimits, Proposal
from foredraft.drafters.suffix_estimates import PRIOR_PAST, Estimates
from foredraft.drafters.suffix_responses import Key, ResponseCache
from foredraft.drafters.suffix_source import SuffixSource, index_maker, most_bytes
from foredraft.drafters.track_record import emitted, judged

# LOG.md, "Suffix decoding".
DEFAULT_DRAFT_LENGTH = 8
MAX_OCCURRENCES = 64  # places counted for each n-gram length: the work of a draft is bounded
MAX_DEPTH = 256
SHARED_TOKENS = 16  # an index that other requests wrote to is not in cache: fewer, longer visits
TAIL = 8  # known tokens compared with a request's, to see that its history is the same


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """What a `SuffixDrafter` was told; raises ConfigError for a value out of range."""

    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_cached_tokens: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
    suffix_decoding_tree: bool

    def __post_init__(self) -> None:
        _integer("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1)
        if self.suffix_decoding_max_tree_depth > MAX_DEPTH:
            raise ConfigError(
                f"suffix_decoding_max_tree_depth must be at most {MAX_DEPTH}, "
                f"got {self.suffix_decoding_max_tree_depth}"
            )
        _integer("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        _integer("suffix_decoding_max_cached_tokens", self.suffix_decoding_max_cached_tokens, 1)
        _number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0, 1e6)
        _number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)
        if not isinstance(self.suffix_decoding_tree, bool):
            raise ConfigError(
                f"suffix_decoding_tree must be true or false, got {self.suffix_decoding_tree!r}"
            )


@dataclass(slots=True)
class _State:
    """What is kept for a running request."""

    index: SuffixSource  # of one text: the request's tokens
    text: int
    known: int = 0  # tokens of that text
    response: Key | None = None
    drafted: Proposal | None = None  # not judged yet
    from_responses: bool = False
    unshared: list[int] = field(default_factory=list)  # known, not in the past responses yet
    unread: list[int] = field(default_factory=list)  # committed since it was last asked

    def note(self, result: StepResult, accepted: Sequence[int]) -> None:
        """Keep what a step committed, so that a response is whole even if nothing more is asked."""
        root = max((row for row in result.rows if row.node < 0), key=lambda row: row.position)
        end = self.known + len(self.unread)
        if root.position == end:
            self.unread.append(root.token)
        elif root.position != end - 1:
            return
        self.unread.extend(accepted)
        # After a stop at a draft token `next_token` is that token once more; where it is another
        # one of the same, the next step's root tells.
        if not accepted or accepted[-1] != result.next_token:
            self.unread.append(cast(int, result.next_token))


class SuffixDrafter:
    """Drafts along the most frequent continuations of the last tokens, as far as they are likely.

    A draft's length follows from how long the match is, how many places agree, and how often drafts
    like it were accepted; the request's own tokens and past responses each make one, and the one
    with the larger expected number of accepted tokens is taken.
    """

    def __init__(
        self,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        suffix_decoding_max_tree_depth: int = 24,
        suffix_decoding_max_cached_requests: int = 10_000,
        suffix_decoding_max_cached_tokens: int = 250_000,
        suffix_decoding_max_spec_factor: float = 3.0,
        suffix_decoding_min_token_prob: float = 0.15,
        suffix_decoding_tree: bool = False,
    ) -> None:
        """The names are vLLM's where vLLM has them; docs/drafters/suffix.md says what each does.

        Raises ConfigError for a value out of range, naming it.
        """
        length = _integer("num_speculative_tokens", num_speculative_tokens, 1)
        self.options = options = SuffixOptions(
            suffix_decoding_max_tree_depth,
            suffix_decoding_max_cached_requests,
            suffix_decoding_max_cached_tokens,
            suffix_decoding_max_spec_factor,
            suffix_decoding_min_token_prob,
            suffix_decoding_tree,
        )
        remembered = 0
        if suffix_decoding_max_cached_requests:
            # A response that is kept has a token at least.
            texts = min(suffix_decoding_max_cached_requests, suffix_decoding_max_cached_tokens)
            remembered = most_bytes(suffix_decoding_max_cached_tokens, texts)
        self.capabilities = Capabilities(
            num_speculative_tokens=length, tree=suffix_decoding_tree, working_bytes=remembered
        )
        depth = options.suffix_decoding_max_tree_depth
        self._make_index = index_maker(depth, MAX_OCCURRENCES)
        self._limits_of: dict[int, DraftLimits] = {}
        self._states: dict[str, _State] = {}
        self._own = Estimates()
        self._past = Estimates(PRIOR_PAST)
        self.responses: ResponseCache | None = None
        if suffix_decoding_max_cached_requests:
            self.responses = ResponseCache(
                self._make_index,
                suffix_decoding_max_cached_requests,
                suffix_decoding_max_cached_tokens,
                depth,
            )

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Correct the estimates by what was accepted."""
        for result in results:
            state = self._states.get(result.id)
            if state is None or result.next_token is None:
                continue
            proposal, state.drafted = state.drafted, None
            if proposal is not None:
                found = judged(proposal.tokens, proposal.parents, emitted(result))
                self._estimates(state).learn(proposal.cells, found)
            if state.response is not None:
                kept = [row.token for row in result.rows if row.node >= 0 and row.committed]
                state.note(result, kept)

    def release(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None and state.response is not None and self.responses is not None:
            position = state.known - len(state.unshared)
            self.responses.append(state.response, position, [*state.unshared, *state.unread])

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every index agrees with its texts."""
        for request_id, state in self._states.items():
            if state.index.num_tokens != state.known or not state.index.is_consistent():
                raise RuntimeError(f"the suffix index of request {request_id} is out of date")
        if self.responses is not None:
            self.responses.check_integrity()

    def _draft(self, request: DraftRequest) -> Draft:
        state = self._states.get(request.id) or self._begun(request)
        best = self._grown(state, request)
        if best is None:  # its tokens are others
            del self._states[request.id]
            state = self._begun(request)
            best = cast(Proposal, self._grown(state, request))
        state.from_responses = best.of_others
        if best.of_others and self.responses is not None:
            self.responses.use(request.cache_salt, best.text)
        if len(state.unshared) >= SHARED_TOKENS:
            self._share(state)
        state.drafted = best if best.tokens else None
        values = self._estimates(state).values
        confidence = [values[cell] for cell in best.cells]
        if self.options.suffix_decoding_tree:
            confidence = _scaled(best.parents, confidence)
        return Draft(best.tokens, best.parents, confidence=confidence)

    def _grown(self, state: _State, request: DraftRequest) -> Proposal | None:
        """The request's draft, with all of its tokens in the state; None, and nothing done, where
        they are others than those it has.
        """
        known, key = state.known, state.response
        others = None if self.responses is None or key is None else self.responses.others(key)
        first = known - TAIL if known > TAIL else 0
        # The last known tokens are read with the new ones: one look at the request's tokens.
        tokens = request.tokens[first:]
        own, limits = -1 if key is None else key[1], self._limits(request.max_nodes)
        best = state.index.draft(
            state.text, first, tokens, limits, self._own.values, others, own, self._past.values
        )
        if best is not None:
            new = tokens[known - first :]
            state.known += len(new)
            state.unshared += new
            state.unread = []
        return best

    def _estimates(self, state: _State) -> Estimates:
        """Those of where the request's draft came from."""
        return self._past if state.from_responses else self._own

    def _limits(self, max_nodes: int) -> DraftLimits:
        limits = self._limits_of.get(max_nodes)
        if limits is None:
            options = self.options
            limits = self._limits_of[max_nodes] = DraftLimits(
                max_nodes,
                options.suffix_decoding_max_spec_factor,
                options.suffix_decoding_min_token_prob,
                options.suffix_decoding_tree,
            )
        return limits

    def _share(self, state: _State) -> None:
        """Let other requests of the salt copy what is known."""
        responses, key = self.responses, state.response
        position = state.known - len(state.unshared)
        if responses is not None and key and not responses.append(key, position, state.unshared):
            state.response = None  # evicted
        state.unshared = []

    def _begun(self, request: DraftRequest) -> _State:
        index = self._make_index()
        state = self._states[request.id] = _State(index, index.add_text())
        tokens = request.tokens[:]
        index.extend(state.text, tokens)
        state.known = len(tokens)
        if self.responses is not None:
            key = self.responses.begin(
                request.id, request.cache_salt, tokens, request.num_prompt_tokens
            )
            state.response = key if self.responses.extend(key, tokens) else None
        return state


def _scaled(parents: Sequence[int], confidence: Sequence[float]) -> list[float]:
    """Siblings' estimates add up to 1 at most: one of them is right."""
    totals: dict[int, float] = {}
    for parent, value in zip(parents, confidence, strict=True):
        totals[parent] = totals.get(parent, 0.0) + value
    return [
        value / max(1.0, totals[parent]) for parent, value in zip(parents, confidence, strict=True)
    ]


def _integer(key: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} must be an integer of {least} or more, got {value!r}")
    return value


def _number(key: str, value: object, least: float, most: float) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not least <= float(str(value)) <= most:
        raise ConfigError(f"{key} must be a number from {least} to {most:g}, got {value!r}")
