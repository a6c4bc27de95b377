"""Lookahead decoding: the target guesses ahead of itself, in rows beside its own pass.

Knows token ids, a window of guesses and a pool of n-grams for each request; knows no model, text or
probability. Its drafts are deterministic, so that they are exact under every acceptance rule.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(2402.02057). Their attention mask is a tree: row i of level 0 comes after row i - 1, and row i of
level l after row i of level l - 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult, StepRow
from foredraft.drafters.track_record import TrackRecord, emitted

# LOG.md, "Lookahead": more rows are accepted more and cost more; these are 12.
DEFAULT_WINDOW, DEFAULT_NGRAM, DEFAULT_GUESSES = 4, 3, 2
MAX_WINDOW, MAX_NGRAM, MAX_GUESSES = 64, 16, 64
MAX_KEYS = 4096  # first tokens that a request's pool remembers; the one used longest ago goes first
STRIDE = 7919  # a prime: windows begin with tokens from all over the text
# What is believed of a guess before anything is counted: of its first token, and of a later one
# whose parent was right.
BELIEVED_FIRST, BELIEVED_LATER = 0.3, 0.6


class LookaheadDrafter:
    """Verifies n-grams that begin with the pending token and makes new ones in the same pass.

    A window of `W` columns of `N - 1` guesses each lies ahead of the pending token. Every pass
    computes the token after each column; column and token are an n-gram of `N` for the pool, and
    the column moves on by one token. The rows of a column are the drafter's own: they are never
    accepted. Guesses come first where nodes are few, then as many columns as there is room for.
    """

    def __init__(
        self,
        lookahead_window: int = DEFAULT_WINDOW,
        lookahead_ngram: int = DEFAULT_NGRAM,
        lookahead_guesses: int = DEFAULT_GUESSES,
    ) -> None:
        """`lookahead_window`: columns (W). `lookahead_ngram`: tokens of an n-gram, its first one
        included (N). `lookahead_guesses`: n-grams verified at once, kept of each first token (G).

        A step has at most `(W + G) * (N - 1)` nodes, which is the draft length unless the config
        names another. Raises ConfigError for a value out of range, naming it.
        """
        self._width = _checked("lookahead_window", lookahead_window, 1, MAX_WINDOW)
        self._ngram = _checked("lookahead_ngram", lookahead_ngram, 2, MAX_NGRAM)
        self._guesses = _checked("lookahead_guesses", lookahead_guesses, 1, MAX_GUESSES)
        self.capabilities = Capabilities(
            tree=self._guesses > 1,
            num_speculative_tokens=(self._width + self._guesses) * (self._ngram - 1),
            top_ids=1,
        )
        self._states: dict[str, Lookahead] = {}
        self._record = TrackRecord()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        self._record.observe(results)
        for result in results:
            state = self._states.get(result.id)
            if state is not None:
                state.learn(result)

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._record.forget(request_id)

    def _draft(self, request: DraftRequest) -> Draft:
        state = self._states.get(request.id)
        if state is None:
            state = Lookahead(self._width, self._ngram, self._guesses)
            self._states[request.id] = state
        tokens, parents = trie(state.pool.after(request.tokens[-1]), request.max_nodes)
        kinds = _depths(parents)
        self._record.expect(request.id, tuple(tokens), tuple(parents), kinds)
        confidence = [
            self._record.value(kind, BELIEVED_LATER if kind else BELIEVED_FIRST) for kind in kinds
        ]
        num_guesses = len(tokens)
        columns = state.window(request.tokens, request.max_nodes - num_guesses, num_guesses)
        before = -1
        for column in columns:
            first = len(tokens)
            tokens += column
            parents += [before, *range(first, first + len(column) - 1)]
            before = first
        if not columns:
            return Draft(tokens, parents, confidence=confidence)
        num_own = len(tokens) - num_guesses
        verify = [True] * num_guesses + [False] * num_own
        return Draft(tokens, parents, None, [*confidence, *[0.0] * num_own], verify)


class NgramPool:
    """For each first token the last few n-grams that began with it, the newest first; bounded."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._rests: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rests)

    def add(self, ngram: Sequence[int]) -> None:
        """An n-gram of two tokens or more; one that is known becomes the newest."""
        first, rest = ngram[0], tuple(ngram[1:])
        known = self._rests.get(first, [])
        others = [each for each in known if each != rest]
        self._rests[first] = [rest, *others[: self._guesses - 1]]
        self._rests.move_to_end(first)
        if len(self._rests) > MAX_KEYS:
            self._rests.popitem(last=False)

    def after(self, token: int) -> Sequence[tuple[int, ...]]:
        """What followed `token`."""
        return self._rests.get(token, ())


@dataclass(slots=True)
class _Asked:
    """The columns that the last draft had, and where among its nodes they begin."""

    first: int = 0
    columns: Sequence[Sequence[int]] = ()


@dataclass(slots=True)
class Lookahead:
    """One request's window and pool. The first token of column i is a guess of the token that comes
    i + 1 places after the pending one.
    """

    width: int
    ngram: int
    guesses: int
    pool: NgramPool = field(init=False)
    _columns: list[list[int]] = field(default_factory=list)
    _length: int = 1  # of every column: they grow one token a step up to `ngram - 1`
    _asked: _Asked = field(default_factory=_Asked)
    _num_filled: int = 0

    def __post_init__(self) -> None:
        self.pool = NgramPool(self.guesses)

    def window(self, tokens: Sequence[int], room: int, first: int) -> Sequence[Sequence[int]]:
        """The columns to compute in the next pass, with `room` rows, behind `first` guesses."""
        count = min(self.width, max(0, room) // self._length)
        while len(self._columns) < count:
            self._columns.append(self._from_text(tokens))
        columns = [list(column) for column in self._columns[:count]]
        self._asked = _Asked(first, columns)
        return columns

    def _from_text(self, tokens: Sequence[int]) -> list[int]:
        """A column to begin with: some tokens of the text, from another place each time."""
        self._num_filled += 1
        # Columns grow with the text, which began with a token: it is never the shorter one.
        start = self._num_filled * STRIDE % (len(tokens) - self._length + 1)
        return list(tokens[start : start + self._length])

    def learn(self, result: StepResult) -> None:
        """Take up what the columns were followed by, and move on with the text."""
        asked, self._asked = self._asked, _Asked()
        rows = {row.node: row for row in result.rows if row.node >= 0}
        grows = self._length < self.ngram - 1
        moved: list[list[int]] = []
        last = asked.first - 1
        for column in asked.columns:
            last += len(column)
            follower = _follower(rows.get(last), column)
            if follower is None:
                break
            if len(column) == self.ngram - 1:
                self.pool.add([*column, follower])
            moved.append([*column, follower][0 if grows else 1 :])
        num_emitted = len(emitted(result))
        if moved:
            self._columns = moved  # what was not computed is begun anew
            self._length += grows
            num_emitted -= not grows  # a column that lost its first token is one place ahead
        del self._columns[: max(0, num_emitted)]
        self._columns = [column for column in self._columns if len(column) == self._length]


def trie(paths: Iterable[Sequence[int]], max_nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree of `paths`, common beginnings once, the first paths whole as
    long as there are nodes.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for path in paths:
        at = -1
        for token in path:
            if (at, token) not in nodes:
                if len(tokens) == max_nodes:
                    return tokens, parents
                nodes[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = nodes[at, token]
    return tokens, parents


def _depths(parents: Sequence[int]) -> list[int]:
    """0 for a child of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _follower(row: StepRow | None, column: Sequence[int]) -> int | None:
    """The target's best token after a column, if the row is that of its end."""
    if row is None or row.token != column[-1] or not row.top_ids:
        return None
    return row.top_ids[0]


def _checked(key: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{key} must be an integer in {least}..{most}, got {value!r}")
    return value
