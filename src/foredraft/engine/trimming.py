"""Drafts as a policy sees them, and what is left of them when it has chosen.

Knows checked drafts and the policy's seam; knows neither costs nor any drafter. Nodes may be left
out by what they are where no random draw is dropped for its own value: deterministic drafts, and
all where the target's own token decides (DESIGN, law 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.core.trees import ROOT, topology
from foredraft.engine.config import Rule
from foredraft.engine.drafting import CheckedDraft
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Plan
from foredraft.planning.policy import Offer, Policy


def offers_of(plan: Plan, drafts: Mapping[str, CheckedDraft]) -> dict[str, Offer]:
    """What the drafter has for each request that it was asked for nodes, by id."""
    if not drafts:  # plain decoding is the common case
        return {}
    offers = {}
    for row in plan.rows:
        draft = drafts.get(row.request.id)
        if draft is not None and row.max_nodes:
            request = row.request
            offers[request.id] = Offer(
                request.id,
                request.request_type,
                request.num_computed,
                draft.tree.parents,
                draft.confidence,
                _may_cut(request, draft),
            )
    return offers


def trimmed(
    policy: Policy,
    plan: Plan,
    drafts: Mapping[str, CheckedDraft],
    offers: Mapping[str, Offer],
) -> dict[str, CheckedDraft]:
    """The drafts with the nodes that the policy keeps."""
    some = [offer for offer in offers.values() if offer.parents]
    if not some:
        return dict(drafts)
    kept = policy.keep(plan.load, some)
    cut = {
        offer.id: cut_draft(drafts[offer.id], nodes)
        for offer, nodes in zip(some, kept, strict=True)
        if len(nodes) < len(offer.parents)
    }
    return {**drafts, **cut}


def cut_draft(draft: CheckedDraft, nodes: Sequence[int]) -> CheckedDraft:
    """`draft` with `nodes` only, which rise and hold their parents."""
    number = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
    return draft._replace(
        tokens=tuple(draft.tokens[node] for node in nodes),
        tree=topology(tuple(number[draft.tree.parents[node]] for node in nodes)),
        probs=None if draft.probs is None else draft.probs[list(nodes)],
        confidence=None
        if draft.confidence is None
        else tuple(draft.confidence[node] for node in nodes),
    )


def _may_cut(request: Request, draft: CheckedDraft) -> bool:
    if draft.own is not None:  # these rows stand on the nodes
        return False
    if draft.resume is not None and not draft.tree.is_chain:  # it covers the whole tree
        return False
    if draft.probs is None or request.sampler.greedy or request.coupled:
        return request.verification.rule is not Rule.SYNTHETIC
    return False
