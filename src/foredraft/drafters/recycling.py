"""Token recycling: what the target found likely after a token before will follow it again.

Knows token ids, their ranks and one table of likely successors; knows no text, no model and no
probability. The tree is deterministic, so that it is exact under every acceptance rule.

Source: Luo et al., "Turning Trash into Treasure" (2408.08696): the table and what fills it. The
shape of their tree is fixed; here it is the best one for the nodes at hand, by how often each rank
has been right.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult, StepRow
from foredraft.models.load import LoadedModel

DEFAULT_DRAFT_LENGTH = 4
DEFAULT_TOP_K = 8
MAX_TOP_K = 64
MAX_TABLES = 8  # the one used longest ago goes first
SALT, ALL = "salt", "all"
SCOPES = (SALT, ALL)
NONE = -1
HALF_LIFE = 4096  # successors seen until what was counted before weighs half
# Before anything is counted: a rank is right half as often as the one before it.
PRIOR = 16.0


class RecyclingDrafter:
    """Grows a tree from the pending token over a table of likely successors.

    The table holds for each token the ids of the `recycling_top_k` largest logits of the last
    verified row whose token it was, best first; rows of accepted tokens go before those of rejected
    ones. Prompts are read by their pairs of neighbours. It outlives requests.
    """

    def __init__(
        self,
        target: LoadedModel,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        recycling_top_k: int = DEFAULT_TOP_K,
        recycling_scope: str = SALT,
    ) -> None:
        """`recycling_top_k` successors are kept of a token. `recycling_scope` "salt": requests of
        one `cache_salt` share a table, and no others see it (8 tables at most are kept); "all": all
        share one.

        Raises ConfigError for a value out of range, naming it.
        """
        for key, value in (
            ("num_speculative_tokens", num_speculative_tokens),
            ("recycling_top_k", recycling_top_k),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key} must be an integer of 1 or more, got {value!r}")
        if recycling_top_k > MAX_TOP_K:
            raise ConfigError(f"recycling_top_k must be at most {MAX_TOP_K}, got {recycling_top_k}")
        if recycling_scope not in SCOPES:
            raise ConfigError(
                f"recycling_scope must be one of {', '.join(SCOPES)}, got {recycling_scope!r}"
            )
        self.capabilities = Capabilities(
            tree=True, num_speculative_tokens=num_speculative_tokens, top_ids=recycling_top_k
        )
        self._vocab_size = target.config.vocab_size
        self._shared = recycling_scope == ALL
        self._tables: OrderedDict[str, SuccessorTable] = OrderedDict()
        self.ranks = RankRates(recycling_top_k)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        rates = self.ranks.rates
        return [
            best_tree(self._table(request.cache_salt), rates, request.tokens[-1], request.max_nodes)
            for request in requests
        ]

    def observe(self, results: Sequence[StepResult]) -> None:
        for result in results:
            self._learn(self._table(result.cache_salt), result)

    def release(self, request_id: str) -> None:
        """Nothing is kept by request."""

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        return sum(table.num_bytes for table in self._tables.values())

    def _table(self, salt: str) -> SuccessorTable:
        salt = "" if self._shared else salt
        table = self._tables.get(salt)
        if table is None:
            table = SuccessorTable(self._vocab_size, self.capabilities.top_ids)
            self._tables[salt] = table
            if len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(salt)
        return table

    def _learn(self, table: SuccessorTable, result: StepResult) -> None:
        committed = [row for row in result.rows if row.committed]
        for row in result.rows:
            if not row.committed and row.top_ids:
                table.put(row.token, row.top_ids)
        for row, successor in _pairs(committed, result.next_token):
            if row.top_ids:
                if successor is not None:
                    self.ranks.count(table.rank(row.token, successor))
                table.put(row.token, row.top_ids)
            elif successor is not None:
                table.put_first(row.token, successor)


class SuccessorTable:
    """For each token of the vocabulary its likely successors, best first; `V * k` integers of four
    bytes, whatever is put into it.
    """

    def __init__(self, vocab_size: int, k: int) -> None:
        self.k = k
        self._ids = array("i", [NONE]) * (vocab_size * k)

    @property
    def num_bytes(self) -> int:
        return len(self._ids) * self._ids.itemsize

    def successors(self, token: int) -> Sequence[int]:
        """`k` ids, -1 where fewer are known."""
        return self._ids[token * self.k : (token + 1) * self.k]

    def put(self, token: int, ids: Sequence[int]) -> None:
        """At most `k` ids, best first, in place of those that were there."""
        start = token * self.k
        self._ids[start : start + len(ids)] = array("i", ids)

    def put_first(self, token: int, successor: int) -> None:
        """One successor that was seen, before the others."""
        known = self.successors(token)
        if known[0] != successor:
            others = [each for each in known if each != successor]
            self.put(token, [successor, *others[: self.k - 1]])

    def rank(self, token: int, successor: int) -> int | None:
        """Where `successor` stands, `k` if it is not there; None for a token without any."""
        known = self.successors(token)
        if known[0] == NONE:
            return None
        try:
            return known.index(successor)
        except ValueError:
            return self.k


class RankRates:
    """How often the successor of each rank was the next token, of late."""

    def __init__(self, k: int) -> None:
        self._hits = [PRIOR * 0.5 ** (rank + 1) for rank in range(k)]
        self._total = PRIOR

    def count(self, rank: int | None) -> None:
        """One successor was of this rank; `k` or more: of none."""
        if rank is None:
            return
        if rank < len(self._hits):
            self._hits[rank] += 1.0
        self._total += 1.0
        if self._total >= 2 * HALF_LIFE:
            self._hits = [hits / 2 for hits in self._hits]
            self._total /= 2

    @property
    def rates(self) -> Sequence[float]:
        """By rank. None is taken to be better than the one before it: trees grow by that order."""
        return tuple(accumulate((hits / self._total for hits in self._hits), min))


def best_tree(table: SuccessorTable, rates: Sequence[float], root: int, max_nodes: int) -> Draft:
    """The `max_nodes` nodes that are most likely to be reached, where a node's probability is the
    product of the rates of the ranks on its path; the children of a node in the order of ranks.
    Its confidence is the rate of its rank.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    # -probability, order of arrival, parent, its successors, its probability, rank
    frontier: list[tuple[float, int, int, Sequence[int], float, int]] = []
    order = 0
    known = table.successors(root)
    if max_nodes and known[0] != NONE:
        heappush(frontier, (-rates[0], order, -1, known, 1.0, 0))
    while frontier and len(tokens) < max_nodes:
        negative, _, parent, ids, reached, rank = heappop(frontier)
        token, node = ids[rank], len(tokens)
        tokens.append(token)
        parents.append(parent)
        confidence.append(rates[rank])
        if rank + 1 < len(ids) and ids[rank + 1] != NONE:
            order += 1
            heappush(frontier, (-reached * rates[rank + 1], order, parent, ids, reached, rank + 1))
        known = table.successors(token)
        if known[0] != NONE:
            order += 1
            heappush(frontier, (negative * rates[0], order, node, known, -negative, 0))
    return Draft(tuple(tokens), tuple(parents), confidence=confidence)


def _pairs(rows: Sequence[StepRow], next_token: int | None) -> Sequence[tuple[StepRow, int | None]]:
    """Each committed row with the token that was committed after it."""
    after = [row.token for row in rows[1:]]
    return list(zip(rows, [*after, next_token], strict=True))
