"""How often draft nodes of each kind were right, beside what was believed of them at first.

Knows drafts, what the steps emitted, and kinds as numbers; knows no drafter. A node is judged by
the tokens that the request went on with, whether it was verified or left out by the engine, and
whoever drafted them: a node is right where its path and its token are those of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foredraft.drafters.interface import StepResult

PRIOR_NODES = 16.0  # weight of what was believed at first, in judged nodes
FORGET_AFTER = 4000.0  # judged nodes of a kind; then old ones count half


def emitted(result: StepResult) -> Sequence[int]:
    """The tokens that a step committed after its pending token; none while a prompt is read.

    Where a stop cut it at a draft token, `next_token` is that token once more; then, and wherever
    it can't be told apart from that, it is left out.
    """
    if result.next_token is None:
        return ()
    accepted = [row.token for row in result.rows if row.node >= 0 and row.committed]
    if accepted and accepted[-1] == result.next_token:
        return accepted
    return [*accepted, result.next_token]


def judged(
    tokens: Sequence[int], parents: Sequence[int], output: Sequence[int]
) -> list[tuple[int, bool]]:
    """(node, whether it was right) for the nodes whose parents were and whose place is known."""
    found: list[tuple[int, bool]] = []
    depths = {-1: 0}  # of the root and the right nodes
    for node, parent in enumerate(parents):
        depth = depths.get(parent)
        if depth is not None and depth < len(output):
            # Of equal siblings the first is right.
            right = tokens[node] == output[depth] and len(depths) == depth + 1
            found.append((node, right))
            if right:
                depths[node] = depth + 1
    return found


class TrackRecord:
    """Acceptance by kind: `(w * believed + right) / (w + judged)`, w = PRIOR_NODES (Laplace)."""

    def __init__(self, prior_nodes: float = PRIOR_NODES) -> None:
        self._weight = prior_nodes
        self._counts: dict[int, list[float]] = {}  # kind -> [right, judged]
        self._drafts: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def value(self, kind: int, believed: float) -> float:
        """Of a node of `kind`, in 0..1."""
        counts = self._counts.get(kind)
        if counts is None:
            return believed
        return (self._weight * believed + counts[0]) / (self._weight + counts[1])

    def learn(self, kind: int, right: bool) -> None:
        """One node of `kind` was judged."""
        counts = self._counts.setdefault(kind, [0.0, 0.0])
        counts[0] += right
        counts[1] += 1.0
        if counts[1] > FORGET_AFTER:
            counts[0] /= 2.0
            counts[1] /= 2.0

    def expect(
        self, request_id: str, tokens: Sequence[int], parents: Sequence[int], kinds: Sequence[int]
    ) -> None:
        """What was drafted for a request, to be judged by its next step."""
        self._drafts[request_id] = tokens, parents, kinds

    def observe(self, results: Iterable[StepResult]) -> None:
        """Judge what was expected of the requests in a step."""
        for result in results:
            expected = self._drafts.pop(result.id, None)
            if expected is not None:
                tokens, parents, kinds = expected
                for node, right in judged(tokens, parents, emitted(result)):
                    self.learn(kinds[node], right)

    def forget(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)

    @property
    def num_expected(self) -> int:
        """Requests whose drafts are not judged yet."""
        return len(self._drafts)
