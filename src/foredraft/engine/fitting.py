"""Drafts under a grammar, before the target's pass: what can never be accepted is left out, and
what the grammar forces is put in.

Knows checked drafts and the grammars of requests; knows neither logits nor any drafter. A forced
token is the only one that the mask of its row allows, so it is sure to be accepted, and drafting it
costs nothing. It is verified like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.core.trees import ROOT, Topology, topology
from foredraft.engine.drafting import NO_DRAFT, CheckedDraft
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduled
from foredraft.engine.trimming import cut_draft
from foredraft.grammar.guide import Guide


def fitted(
    rows: Sequence[Scheduled], drafts: Mapping[str, CheckedDraft]
) -> dict[str, CheckedDraft]:
    """The drafts by request id, those of requests with a grammar fitted to it."""
    found: dict[str, CheckedDraft] = {}
    for row in rows:
        request = row.request
        if request.matcher is not None and row.emits and row.max_nodes:
            draft = drafts.get(request.id, NO_DRAFT)
            found[request.id] = _fit(draft, request, Guide(request.matcher), row.max_nodes)
    return {**drafts, **found}


def _fit(draft: CheckedDraft, request: Request, guide: Guide, room: int) -> CheckedDraft:
    if draft.own is not None or (draft.resume is not None and not draft.tree.is_chain):
        return draft  # rows are tied to all of its nodes
    # A token that was drawn is not dropped for its own value where the law it was drawn from
    # decides (DESIGN, law 2): the rule rejects it, and only what stands on it is left out.
    drawn = draft.probs is not None and not (request.sampler.greedy or request.coupled)
    kept = _kept(draft, guide, drawn)
    if len(kept) < len(draft.tokens):
        draft = cut_draft(draft, kept)
    if drawn:
        return draft
    growing = _Growing(guide, room)
    if draft.resume is None:
        growing.force(ROOT)
    growing.enter(draft, forces=draft.resume is None)
    if growing.tokens == list(draft.tokens):
        return draft
    return draft._replace(
        tokens=tuple(growing.tokens),
        tree=topology(tuple(growing.parents)),
        probs=None,
        confidence=growing.confidence(draft),
    )


def _kept(draft: CheckedDraft, guide: Guide, drawn: bool) -> list[int]:
    """Nodes that the grammar can follow; where tokens are `drawn`, those right below them too."""
    kept: list[int] = []
    followed = {ROOT}
    for node, parent in enumerate(draft.tree.parents):
        if parent not in followed:
            continue
        if guide.follows([draft.tokens[each] for each in draft.tree.path(node)]):
            followed.add(node)
            kept.append(node)
        elif drawn:
            kept.append(node)
    return kept


class _Growing:
    """A tree that a draft's nodes are entered in, forced tokens between them."""

    def __init__(self, guide: Guide, room: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._sources: list[int | None] = []  # node of the draft; None: forced
        self._guide = guide
        self._room = room
        self._forced: dict[int, int] = {}  # node -> the only one that may follow it

    def force(self, node: int) -> None:
        """What the grammar forces after `node`, as far as there is room."""
        for token in self._guide.forced(self._path(node), self._room - len(self.tokens)):
            added = self._add(token, node, None)
            self._forced[node] = added
            node = added

    def enter(self, draft: CheckedDraft, *, forces: bool) -> None:
        """The nodes of `draft`, as far as there is room; a forced token has no siblings."""
        place = {ROOT: ROOT}
        tree: Topology = draft.tree
        for node, (token, parent) in enumerate(zip(draft.tokens, tree.parents, strict=True)):
            if parent not in place:
                continue
            under = place[parent]
            forced = self._forced.get(under)
            if forced is not None:
                if self.tokens[forced] == token:
                    place[node] = forced
            elif len(self.tokens) < self._room:
                place[node] = self._add(token, under, node)
                if forces:
                    self.force(place[node])

    def confidence(self, draft: CheckedDraft) -> tuple[float, ...] | None:
        """Of each node, as the draft says it; nobody doubts a forced one."""
        stated = draft.confidence
        if stated is None and draft.tokens:
            return None
        return tuple(
            1.0 if source is None or stated is None else stated[source] for source in self._sources
        )

    def _add(self, token: int, parent: int, source: int | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self._sources.append(source)
        return len(self.tokens) - 1

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]
