"""A threshold on what a drafter believes, beside any policy.

Knows the seam of a policy; knows no cost and nothing of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.policy import (
    Load,
    Offer,
    Policy,
    RequestState,
    StepRecord,
    Stopping,
)


@dataclass(frozen=True, slots=True)
class ConfidentOnly:
    """`policy`, among the nodes that a drafter believes in at least as much as `threshold`.

    Drafts of a drafter that says nothing of its confidence, or that may not be cut, stay whole.
    """

    policy: Policy
    threshold: float

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        return self.policy.widths(load, requests)

    def stopping(self, load: Load) -> Stopping:
        return replace(self.policy.stopping(load), confidence_threshold=self.threshold)

    def keep(self, load: Load, offers: Sequence[Offer]) -> Sequence[Sequence[int]]:
        believed = [self._believed(offer) for offer in offers]
        chosen = self.policy.keep(
            load, [_part(offer, nodes) for offer, nodes in zip(offers, believed, strict=True)]
        )
        return [[nodes[i] for i in kept] for nodes, kept in zip(believed, chosen, strict=True)]

    def _believed(self, offer: Offer) -> list[int]:
        """The nodes above the threshold whose parents are."""
        nodes: list[int] = []
        for node, parent in enumerate(offer.parents):
            sure = offer.confidence is None or offer.confidence[node] >= self.threshold
            if not offer.may_cut or (sure and (parent < 0 or parent in nodes)):
                nodes.append(node)
        return nodes

    def explain(self, record: StepRecord) -> str:
        return self.policy.explain(record)

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)

    def release(self, request_id: str) -> None:
        self.policy.release(request_id)


def learning(policy: Policy) -> AdaptivePolicy | None:
    """The policy that learns costs and chooses by them, behind a threshold or not; None: the
    choice is static.
    """
    inner = policy.policy if isinstance(policy, ConfidentOnly) else policy
    return inner if isinstance(inner, AdaptivePolicy) else None


def _part(offer: Offer, nodes: Sequence[int]) -> Offer:
    """The offer of these nodes only, which rise and hold their parents."""
    number = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    return replace(
        offer,
        parents=[number[offer.parents[node]] for node in nodes],
        confidence=None if offer.confidence is None else [offer.confidence[node] for node in nodes],
    )
