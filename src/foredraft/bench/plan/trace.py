"""What a drafter proposed at every step of a text, and what became of it.

Knows drafters by the protocol and steps by what drafters are told; knows no cost and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foredraft.drafters.interface import Draft, Drafter, DraftRequest, StepResult, StepRow


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """One step of one request after the one that finished its prompt."""

    position: int  # of its pending token: as many positions are cached before it
    parents: tuple[int, ...] = ()  # of the draft nodes that were verified; -1 = the pending token
    accepted: tuple[int, ...] = ()  # of these, the accepted path
    num_own_rows: int = 0  # rows of the pass that the drafter wanted for itself
    full: bool = True  # it has as many nodes as were asked for: else the drafter ended it

    @property
    def emitted(self) -> int:
        """Tokens; the last step of a text may have had one less."""
        return len(self.accepted) + 1


Text = Sequence[DraftedStep]  # the steps of one request, in order


class Recorder:
    """A drafter around another, which keeps the steps of every request."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        # What became of every draft is recorded, whether or not the drafter itself wants to know.
        self.capabilities = replace(inner.capabilities, observes=True)
        self._drafts: dict[str, tuple[Draft, bool]] = {}  # and whether it is full
        self._running: dict[str, list[DraftedStep] | None] = {}  # None: the prompt isn't finished
        self.texts: list[list[DraftedStep]] = []  # in the order in which their prompts were read

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = self._inner.propose(requests)
        for request, draft in zip(requests, drafts, strict=False):
            nodes = len(draft.tokens) if draft.verify is None else sum(draft.verify)
            self._drafts[request.id] = draft, nodes >= request.max_nodes
        return drafts

    def observe(self, results: Sequence[StepResult]) -> None:
        self._inner.observe(results)
        for result in results:
            self._note(result, *self._drafts.pop(result.id, (Draft(), False)))

    def release(self, request_id: str) -> None:
        self._inner.release(request_id)
        self._drafts.pop(request_id, None)
        self._running.pop(request_id, None)

    def _note(self, result: StepResult, draft: Draft, full: bool) -> None:
        if result.next_token is None:
            return
        steps = self._running.get(result.id)
        if steps is None:
            steps = self._running[result.id] = []
            self.texts.append(steps)
        else:
            steps.append(step_of(result.rows, draft, full))


def step_of(rows: Sequence[StepRow], draft: Draft, full: bool) -> DraftedStep:
    """The step of these rows; `draft` is what was proposed, of which an engine may cut nodes."""
    position = max(row.position for row in rows if row.node < 0)
    nodes = [row for row in rows if row.node >= 0]
    known = _places(nodes, draft, position)
    drafted = [i for i, place in enumerate(known) if draft.verify is None or draft.verify[place]]
    number = {known[i]: new for new, i in enumerate(drafted)}
    parents = tuple(number.get(draft.parents[known[i]], -1) for i in drafted)
    accepted = tuple(new for new, i in enumerate(drafted) if nodes[i].committed)
    return DraftedStep(position, parents, accepted, len(nodes) - len(drafted), full)


def _places(nodes: Sequence[StepRow], draft: Draft, position: int) -> list[int]:
    """Which node of the draft each verified one was: they come in the draft's order."""
    if len(nodes) == len(draft.tokens):
        return list(range(len(nodes)))
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    found: list[int] = []
    at = 0
    for row in nodes:
        while (draft.tokens[at], depths[at]) != (row.token, row.position - position):
            at += 1
        found.append(at)
        at += 1
    return found
