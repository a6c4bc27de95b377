"""N-gram drafting (prompt lookup): what followed the last tokens before will follow them again.

Knows token ids and keeps one index per request; knows no model, text or probability. The draft is
deterministic, so that it is exact under every acceptance rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.track_record import TrackRecord

# LOG.md, "N-gram drafting": near the best on copies, no loss on chat.
DEFAULT_DRAFT_LENGTH = 5
DEFAULT_MIN = 2
DEFAULT_MAX = 4
MAX_LOOKUP = 64  # tokens; a table is kept, and looked into, for each length
LATEST = "latest"
MATCHES = (LATEST, "earliest")
MAX_MATCHES = 16
# A match counts half of the one before it, the longest and latest being the first; of those that
# follow a continuation, each next token goes on so with this probability.
MATCH_DECAY = 0.5
PERSISTENCE = 0.8
# What is believed of a draft token before anything is counted, by the length of the n-gram that it
# follows, those longer than the last alike; less where a shorter ending of the same tokens was last
# followed by another token.
BELIEVED = (0.35, 0.6, 0.7, 0.77, 0.81, 0.84, 0.87, 0.9, 0.92, 0.94)
DISPUTED = 0.5
NUM_TENTHS = 10  # of a tree's shares: the kinds that its nodes are counted by


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """What an `NgramDrafter` was told; raises ConfigError for a value out of range."""

    prompt_lookup_min: int  # shortest n-gram looked up, >= 1
    prompt_lookup_max: int  # longest n-gram looked up, <= 64
    prompt_lookup_match: str  # which earlier occurrence is continued: "latest" or "earliest"
    prompt_lookup_num_matches: int = 1  # occurrences continued at once, as a tree; 1: a chain

    def __post_init__(self) -> None:
        for key in ("prompt_lookup_min", "prompt_lookup_max"):
            if _positive(key, getattr(self, key)) > MAX_LOOKUP:
                raise ConfigError(f"{key} must be at most {MAX_LOOKUP}, got {getattr(self, key)}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min must be at most prompt_lookup_max = {self.prompt_lookup_max}, "
                f"got {self.prompt_lookup_min}"
            )
        if self.prompt_lookup_match not in MATCHES:
            raise ConfigError(
                f"prompt_lookup_match must be one of {', '.join(MATCHES)}, "
                f"got {self.prompt_lookup_match!r}"
            )
        count = _positive("prompt_lookup_num_matches", self.prompt_lookup_num_matches)
        if count > MAX_MATCHES:
            raise ConfigError(
                f"prompt_lookup_num_matches must be at most {MAX_MATCHES}, got {count}"
            )
        if count > 1 and self.prompt_lookup_match != LATEST:
            raise ConfigError(
                f"prompt_lookup_num_matches = {count} needs prompt_lookup_match {LATEST!r}, "
                f"got {self.prompt_lookup_match!r}"
            )


class NgramDrafter:
    """Continues an earlier occurrence of the last tokens, the longest n-gram first.

    The cost of a step depends on the tokens committed since the last one and on the n-gram lengths,
    not on the length of the context: each appended token is one entry in the table of each length.
    """

    def __init__(
        self,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        prompt_lookup_match: str = LATEST,
        prompt_lookup_num_matches: int = 1,
    ) -> None:
        """A bound left out is the default (2 to 4), or the other bound where that lies beyond it.
        With several matches the draft is a tree: the likeliest of their continuations' nodes.

        `num_speculative_tokens` is what the engine asks for where the config says nothing; a draft
        has as many tokens as its request may have nodes.

        Raises ConfigError for a value out of range, naming it.
        """
        length = _positive("num_speculative_tokens", num_speculative_tokens)
        lowest, highest = prompt_lookup_min, prompt_lookup_max
        if highest is None:
            highest = max(
                DEFAULT_MAX,
                _positive("prompt_lookup_min", DEFAULT_MIN if lowest is None else lowest),
            )
        if lowest is None:
            lowest = min(DEFAULT_MIN, _positive("prompt_lookup_max", highest))
        self.options = NgramOptions(lowest, highest, prompt_lookup_match, prompt_lookup_num_matches)
        self.capabilities = Capabilities(
            tree=prompt_lookup_num_matches > 1, num_speculative_tokens=length
        )
        self._indexes: dict[str, NgramIndex] = {}
        self._record = TrackRecord()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Learn how sure a draft is; its tokens come from those that `propose` reads."""
        self._record.observe(results)

    def release(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
        self._record.forget(request_id)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every index agrees with one built from its tokens at once."""
        for request_id, index in self._indexes.items():
            if not index.is_consistent():
                raise RuntimeError(f"the n-gram index of request {request_id} is out of date")

    def _draft(self, request: DraftRequest) -> Draft:
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = NgramIndex(self.options)
        index.extend(request.tokens[len(index.tokens) :])
        if self.options.prompt_lookup_num_matches == 1:
            return self._chain(request, index)
        return self._tree(
            request, merged(index.continuations(request.max_nodes), request.max_nodes)
        )

    def _chain(self, request: DraftRequest, index: NgramIndex) -> Draft:
        """Each token follows an n-gram that is longer by one; kinds: length, disputed or not."""
        found = index.match()
        if found is None:
            return Draft()
        position, match, disputed = found
        tokens = index.continued(position, request.max_nodes)
        kinds: list[int] = []
        confidence: list[float] = []
        for length in range(match - 1, match - 1 + len(tokens)):
            row = min(length, len(BELIEVED) - 1)
            kinds.append(2 * row + disputed)
            believed = BELIEVED[row] * (DISPUTED if disputed and length < match else 1.0)
            confidence.append(self._record.value(kinds[-1], believed))
        draft = Draft.chain(tokens, confidence=confidence)
        self._record.expect(request.id, draft.tokens, draft.parents, kinds)
        return draft

    def _tree(self, request: DraftRequest, tree: Draft) -> Draft:
        """`tree` with the track record of nodes of about its confidence."""
        believed = tree.confidence or ()
        kinds = [-1 - min(int(NUM_TENTHS * each), NUM_TENTHS - 1) for each in believed]
        self._record.expect(request.id, tree.tokens, tree.parents, kinds)
        confidence = [
            self._record.value(kind, each) for kind, each in zip(kinds, believed, strict=True)
        ]
        return replace(tree, confidence=confidence)


class NgramIndex:
    """Where the n-grams of one growing token sequence were seen, for each length in the options.

    `tables[i]` maps an n-gram of length `prompt_lookup_min + i` to the position after its latest
    (or earliest) occurrence. Keys are the tokens themselves, so a hit is a match. The n-grams that
    end the sequence are entered only when a token follows them: the suffix never finds itself.
    Where several matches are wanted, `earlier[i]` has for each position of a table the one that it
    took the place of.
    """

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.tokens: list[int] = []
        self.lengths = range(options.prompt_lookup_min, options.prompt_lookup_max + 1)
        self.tables: list[dict[tuple[int, ...], int]] = [{} for _ in self.lengths]
        self.earlier: list[dict[int, int]] = [{} for _ in self.lengths]
        self._longest_first = list(zip(self.lengths, self.tables, self.earlier, strict=True))[::-1]

    def extend(self, new: Iterable[int]) -> None:
        """Append tokens and enter the n-grams that now have a continuation."""
        tokens, known = self.tokens, len(self.tokens)
        tokens.extend(new)
        linked = self.options.prompt_lookup_num_matches > 1
        latest = self.options.prompt_lookup_match == LATEST
        for n, table, earlier in self._longest_first:
            for position in range(max(known, n), len(tokens)):
                gram = tuple(tokens[position - n : position])
                if linked and gram in table:
                    earlier[position] = table[gram]
                if latest or gram not in table:
                    table[gram] = position

    def match(self) -> tuple[int, int, bool] | None:
        """Position after the match, its length, and whether some shorter ending of the sequence was
        followed by another token, for the longest suffix seen before; or None.
        """
        tokens = self.tokens
        longest: tuple[int, int] | None = None
        for n, table, _ in self._longest_first:
            position = table.get(tuple(tokens[-n:]))
            if position is None:
                continue
            if longest is None:
                longest = position, n
            elif tokens[position] != tokens[longest[0]]:
                return *longest, True
        return None if longest is None else (*longest, False)

    def matches(self) -> list[int]:
        """Positions after the earlier occurrences of the suffix, the longest and latest first, as
        many as the options ask for.
        """
        found: dict[int, None] = {}
        for n, table, earlier in self._longest_first:
            position = table.get(tuple(self.tokens[-n:]))
            while position is not None:
                found[position] = None
                if len(found) == self.options.prompt_lookup_num_matches:
                    return list(found)
                position = earlier.get(position)
        return list(found)

    def continuations(self, limit: int) -> list[list[int]]:
        """`limit` tokens that follow each of `matches`."""
        return [self.continued(position, limit) for position in self.matches()]

    def continued(self, position: int, limit: int) -> list[int]:
        """`limit` tokens from `position` on.

        A match that ends near the end of the sequence is continued by the proposal itself, so that
        a repetition goes on with its own period.
        """
        copied = self.tokens[position : position + limit]
        period = len(self.tokens) - position
        for i in range(len(copied), limit):
            copied.append(copied[i - period])
        return copied

    def is_consistent(self) -> bool:
        """Whether the tables are those of the tokens entered at once."""
        fresh = NgramIndex(self.options)
        fresh.extend(self.tokens)
        return fresh.tables == self.tables and fresh.earlier == self.earlier


def merged(chains: Sequence[Sequence[int]], max_nodes: int) -> Draft:
    """One tree of the `max_nodes` likeliest nodes of `chains`, which come the best first.

    A node is as likely as the share of the chains' weights that goes through it, less for each
    token it is deep: with one chain that is the chain.
    """
    weights = [MATCH_DECAY**number for number in range(len(chains))]
    scale = sum(weights)
    through: dict[tuple[int, ...], float] = {}
    for weight, chain in zip(weights, chains, strict=True):
        for depth in range(1, len(chain) + 1):
            path = tuple(chain[:depth])
            through[path] = through.get(path, 0.0) + weight / scale * PERSISTENCE**depth
    # Sorting is stable, and no path has more than the one it goes on from: parents come first.
    best = sorted(through, key=through.__getitem__, reverse=True)[:max_nodes]
    nodes = {path: node for node, path in enumerate(best)}
    return Draft(
        tuple(path[-1] for path in best),
        tuple(nodes.get(path[:-1], -1) for path in best),
        confidence=[min(1.0, through[path] / through.get(path[:-1], 1.0)) for path in best],
    )


def _positive(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be an integer of 1 or more, got {value!r}")
    return value
