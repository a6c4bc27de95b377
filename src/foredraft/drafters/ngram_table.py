"""The n-gram table as a drafter: what the target tends to say, and what this request says.

Knows token ids, one table and the texts of running requests; knows no model. Drafts are
deterministic, so that they are exact under every acceptance rule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from foredraft.core.errors import ConfigError, ModelError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.ngram_blend import NO_TEXT, BlendLimits, BlendProposal, Law
from foredraft.drafters.ngram_table_file import Header, NgramTableFile
from foredraft.drafters.ngram_table_source import MAX_OCCURRENCES, TextSource, text_maker
from foredraft.drafters.shipped.catalog import built_in_table
from foredraft.drafters.suffix_responses import Key, ResponseCache
from foredraft.drafters.suffix_source import index_maker, most_bytes
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel

_logger = logging.getLogger("foredraft")

# LOG.md, "N-gram table".
DEFAULT_DRAFT_LENGTH = 8
DEFAULT_LEAST = 0.08
DEFAULT_LEARNED_TOKENS = 100_000
MAX_LEARNED_REQUESTS = 10_000
SHARED_TOKENS = 16  # as in `suffix`: fewer, longer visits to what other requests wrote
TAIL = 8  # known tokens compared with a request's, to see that its history is the same


@dataclass(slots=True)
class _State:
    """What is kept for a running request."""

    text: TextSource
    response: Key | None = None  # among what is learned
    shared: int = 0  # tokens of the text that are there too


class NgramTableDrafter:
    """Drafts the likeliest tokens by a table of the target's n-grams and the request's own."""

    def __init__(
        self,
        target: LoadedModel,
        ngram_table_path: str | None = None,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        ngram_table_tree: bool = True,
        ngram_table_min_token_prob: float = DEFAULT_LEAST,
        ngram_table_learn: bool = True,
        ngram_table_max_learned_tokens: int = DEFAULT_LEARNED_TOKENS,
    ) -> None:
        """`ngram_table_path` is a table's file, made by `foredraft train ngram`; None: the one that
        comes with the target. docs/drafters/ngram_table.md says what each option does.

        Raises ConfigError for a value out of range, a target that no table comes with, and a table
        of another vocabulary; ModelError for a file that is no table.
        """
        length = _integer("num_speculative_tokens", num_speculative_tokens)
        most = _integer("ngram_table_max_learned_tokens", ngram_table_max_learned_tokens)
        for key, value in (
            ("ngram_table_tree", ngram_table_tree),
            ("ngram_table_learn", ngram_table_learn),
        ):
            if not isinstance(value, bool):
                raise ConfigError(f"{key} must be true or false, got {value!r}")
        self.least_path = _probability("ngram_table_min_token_prob", ngram_table_min_token_prob)
        self._tree = ngram_table_tree
        self.table = _table(target, ngram_table_path)
        self._make_text = text_maker(self.table)
        self._states: dict[str, _State] = {}
        self.learned: ResponseCache | None = None
        remembered = 0
        if ngram_table_learn:
            depth = self.table.layout.num_orders
            make_index = index_maker(depth, MAX_OCCURRENCES)
            self.learned = ResponseCache(make_index, MAX_LEARNED_REQUESTS, most, depth)
            remembered = most_bytes(most, min(most, MAX_LEARNED_REQUESTS))
        self.capabilities = Capabilities(
            tree=ngram_table_tree,
            num_speculative_tokens=length,
            working_bytes=remembered + self.table.num_bytes,
        )

    @staticmethod
    def suits(target: LoadedModel | None) -> bool:
        """Whether a table comes with this target."""
        return target is not None and built_in_table(target.name, target.path) is not None

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def next_tokens(self, request: DraftRequest) -> Law:
        """What it believes to follow the request's tokens and a path behind them; good until the
        next call for this request.
        """
        state, _ = self._updated(request, BlendLimits(0, 1.0))
        past, own = self._others(state)

        def law(path: Sequence[int]) -> list[tuple[int, float]]:
            return state.text.law(self.table, path, past, own)

        return law

    def observe(self, results: Sequence[StepResult]) -> None:
        """Nothing: all that is needed is read from the requests' tokens."""

    def release(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._share(state)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every text agrees with itself, and what is learned too."""
        for request_id, state in self._states.items():
            if not state.text.is_consistent():
                raise RuntimeError(f"the n-gram text of request {request_id} is out of date")
        if self.learned is not None:
            self.learned.check_integrity()

    def _draft(self, request: DraftRequest) -> Draft:
        limits = BlendLimits(request.max_nodes, self.least_path, self._tree)
        _, made = self._updated(request, limits)
        return Draft(made.tokens, made.parents, confidence=made.confidence)

    def _updated(self, request: DraftRequest, limits: BlendLimits) -> tuple[_State, BlendProposal]:
        """The request's state with all of its tokens in it, and a draft behind them."""
        state = self._states.get(request.id) or self._begun(request)
        made = self._grown(state, request, limits)
        if made is None:  # its tokens are others
            state = self._begun(request)
            made = cast(BlendProposal, self._grown(state, request, limits))
        if state.text.num_tokens - state.shared >= SHARED_TOKENS:
            self._share(state)
        return state, made

    def _grown(
        self, state: _State, request: DraftRequest, limits: BlendLimits
    ) -> BlendProposal | None:
        """The request's draft, with all of its tokens in the state; None, and nothing done, where
        they are others than those it has.
        """
        first = max(0, state.text.num_tokens - TAIL)
        return state.text.draft(
            self.table, first, request.tokens[first:], limits, *self._others(state)
        )

    def _others(self, state: _State) -> tuple[Any, int]:
        """The texts of past requests, and which of them is this request's own."""
        key = state.response
        past = None if self.learned is None or key is None else self.learned.others(key)
        return past, NO_TEXT if key is None else key[1]

    def _share(self, state: _State) -> None:
        """Let other requests of the salt learn from what is known."""
        learned, key = self.learned, state.response
        new = state.text.tokens(state.shared)
        if learned is not None and key and not learned.append(key, state.shared, new):
            state.response = None  # evicted
        state.shared += len(new)

    def _begun(self, request: DraftRequest) -> _State:
        state = self._states[request.id] = _State(self._make_text())
        tokens = request.tokens[:]
        state.text.extend(tokens)
        state.shared = len(tokens)
        if self.learned is not None:
            key = self.learned.begin(
                request.id, request.cache_salt, tokens, request.num_prompt_tokens
            )
            state.response = key if self.learned.extend(key, tokens) else None
        return state


def _table(target: LoadedModel, path: str | None) -> NgramTableFile:
    if path is not None and (not isinstance(path, str) or not path):
        raise ConfigError(f"ngram_table_path must be the path of an n-gram table, got {path!r}")
    found = built_in_table(target.name, target.path) if path is None else Path(path)
    if found is None:
        raise ConfigError(
            f"no n-gram table comes with {target.name!r}: `foredraft train ngram` makes one, to be "
            "given as ngram_table_path"
        )
    table = NgramTableFile.open(found)
    header = table.header
    if header.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"n-gram table {str(found)!r} is for a vocabulary of {header.vocab_size}, "
            f"the target {target.name!r} has {target.config.vocab_size}"
        )
    if not _made_for(header, target):
        _logger.warning(
            "n-gram table %r was made of answers of %r, not of %r: its drafts may be poor",
            str(found),
            header.target,
            target.name,
        )
    return table


def _made_for(header: Header, target: LoadedModel) -> bool:
    if header.target == target.name:
        return True
    try:
        return header.target_sha256 == fingerprint(target.path)
    except ModelError:  # a model that was made in memory
        return False


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be an integer of 1 or more, got {value!r}")
    return value


def _probability(key: str, value: object) -> float:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not 0.0 <= float(str(value)) <= 1.0:
        raise ConfigError(f"{key} must be a number from 0 to 1, got {value!r}")
    return float(str(value))
