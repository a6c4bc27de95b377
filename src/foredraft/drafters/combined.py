"""Several drafters as one: the best draft of each step, or all of them in one tree.

Knows drafters by their capabilities and their drafts; knows no method by name. What a drafter says
of its own confidence is corrected by its track record, so that drafters can be compared. Drafts
that cost nothing are made by all members and judged by what the output turned out to be, whichever
was verified; a drafter that pays for its tokens is asked where it promises more than the others
have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.drafters.catalog import DEFAULT_DRAFT_LENGTH, build_member
from foredraft.drafters.interface import Capabilities, Draft, Drafter, DraftRequest, StepResult
from foredraft.drafters.member import Member, Rated
from foredraft.models.interface import HEAD_INPUT
from foredraft.models.load import LoadedModel

BEST, MERGE = "best", "merge"
WAYS = (BEST, MERGE)
DEFAULT_DRAFTERS: Sequence[Mapping[str, Any]] = ({"method": "suffix"}, {"method": "recycling"})


class CombinedDrafter:
    """Asks its members and gives one draft a request."""

    def __init__(
        self,
        target: LoadedModel,
        drafters: Sequence[Mapping[str, Any] | Drafter] = DEFAULT_DRAFTERS,
        combine: str = BEST,
        num_speculative_tokens: int | None = None,
    ) -> None:
        """`drafters`: each a method with its options, as in a config of its own, or an object.
        `combine` "best": each step the draft with the largest expected number of accepted tokens;
        "merge": the likeliest nodes of all drafts as one tree. `num_speculative_tokens`: nodes of a
        draft; None: as many as the member that wants most.

        Raises ConfigError for an unknown way, a member that can't be made, named by its key, and
        one that can't be combined: whose drafts are drawn, or whose cache is one too many.
        """
        if combine not in WAYS:
            raise ConfigError(f"combine must be one of {', '.join(WAYS)}, got {combine!r}")
        if not isinstance(drafters, Sequence) or isinstance(drafters, str) or not drafters:
            raise ConfigError(f"drafters must be a list of one or more objects, got {drafters!r}")
        length = num_speculative_tokens
        if length is not None and (type(length) is not int or length < 1):
            raise ConfigError(
                f"num_speculative_tokens must be an integer of 1 or more, got {length!r}"
            )
        made = [build_member(f"drafters[{i}]", each, target) for i, each in enumerate(drafters)]
        self._merges = combine == MERGE
        self._check([each.capabilities for each in made])
        self.members = [Member(each, target.weight_bytes) for each in made]
        self._free = [each for each in self.members if not each.capabilities.costs_passes]
        self._paying = [each for each in self.members if each.capabilities.costs_passes]
        self.capabilities = self._merged_capabilities(length)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        found: list[list[Rated]] = [[] for _ in requests]
        for member in self._free:
            _ask(member, requests, found, [each.max_nodes for each in requests])
        if self._paying:
            chosen = [self._worth_asking(*each) for each in zip(requests, found, strict=True)]
            for member in self._paying:
                lengths = [length if each is member else 0 for each, length in chosen]
                _ask(member, requests, found, lengths)
        choose = merged if self._merges else best
        return [choose(rated, each) for rated, each in zip(found, requests, strict=True)]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Tell all members, whatever one of them does."""
        told = self.capabilities
        _for_all(self.members, lambda member: member.observe(member.cut(results, told)))

    def release(self, request_id: str) -> None:
        """Tell all members, whatever one of them does."""
        _for_all(self.members, lambda member: member.release(request_id))

    def _worth_asking(
        self, request: DraftRequest, rated: Sequence[Rated]
    ) -> tuple[Member | None, int]:
        """The member that pays and promises most, and how much to ask it for; None where what is
        there promises more. Decided before it draws anything, so that its drafts may be drawn.
        """
        promises = [(*member.promise(request.max_nodes), member) for member in self._paying]
        value, length, member = max(promises, key=lambda each: each[0])
        if not self._free:  # nothing else drafts: how much is for the policy to say
            return member, request.max_nodes
        free = max((each.score for each in rated), default=0.0)
        return (member, length) if value > 1.0 + free else (None, 0)

    def _check(self, members: Sequence[Capabilities]) -> None:
        cached = [i for i, each in enumerate(members) if each.cache is not None]
        if len(cached) > 1:
            raise ConfigError(
                f"drafters[{cached[1]}] keeps keys and values of its own, and so does "
                f"drafters[{cached[0]}]: one of them at most can"
            )
        depths = [d for each in members for d in each.feature_layers if d != HEAD_INPUT]
        run = max(each.target_layers for each in members)
        if depths and min(depths) < run:
            raise ConfigError(
                f"drafters run {run} layers of the target, and read its hidden states at depth "
                f"{min(depths)}, which the pass behind them doesn't have"
            )
        layers = sorted({each.target_layers for each in members} - {0})
        if len(layers) > 1:
            raise ConfigError(
                f"drafters run {' and '.join(map(str, layers))} layers of the target: all that do "
                "must run the same"
            )
        for i, each in enumerate(members):
            if not each.deterministic and (self._merges or not each.costs_passes):
                raise ConfigError(
                    f"drafters[{i}] draws its drafts from a law, which can't be "
                    f"{'merged' if self._merges else 'chosen by what was drawn'}: valid are "
                    'drafters of fixed drafts, as with "draft_sample_method": "greedy"'
                )

    def _merged_capabilities(self, length: int | None) -> Capabilities:
        members = [each.capabilities for each in self.members]
        wishes = [each.num_speculative_tokens or DEFAULT_DRAFT_LENGTH for each in members]
        contexts = [each.max_positions for each in members if each.max_positions is not None]
        return Capabilities(
            deterministic=all(each.deterministic for each in members),
            tree=self._merges or any(each.tree for each in members),
            num_speculative_tokens=max(wishes) if length is None else length,
            cache=next((each.cache for each in members if each.cache is not None), None),
            weight_bytes=sum(each.weight_bytes for each in members),
            working_bytes=sum(each.working_bytes for each in members),
            costs_passes=not self._free,
            max_positions=max(contexts) if len(contexts) == len(members) else None,
            top_ids=max(each.top_ids for each in members),
            prediction=any(each.prediction for each in members),
            target_layers=max(each.target_layers for each in members),
            feature_layers=tuple(dict.fromkeys(d for m in members for d in m.feature_layers)),
        )


def _ask(
    member: Member,
    requests: Sequence[DraftRequest],
    found: Sequence[list[Rated]],
    lengths: Sequence[int],
) -> None:
    """Ask a member for drafts of at most `lengths` nodes, and to read along where it does."""
    asked: list[DraftRequest] = []
    places: list[list[Rated]] = []
    for request, rated, length in zip(requests, found, lengths, strict=True):
        if length or member.reads_along(request):
            same = length == request.max_nodes
            asked.append(request if same else request._replace(max_nodes=length))
            places.append(rated)
    if asked:
        for rated, draft in zip(places, member.propose(asked), strict=True):
            rated.append(draft)


def best(rated: Sequence[Rated], request: DraftRequest) -> Draft:
    """The draft that was paid for, where it has tokens; else the one of the largest score, of equal
    ones the first.
    """
    paid = [each for each in rated if each.paid and each.draft.tokens]
    chosen = max(paid or rated, key=lambda each: each.score, default=None)
    draft = Draft() if chosen is None else chosen.draft
    return replace(draft, num_cached=_num_cached(rated))


def merged(rated: Sequence[Rated], request: DraftRequest) -> Draft:
    """The `max_nodes` likeliest nodes of all drafts, equal paths once.

    A node that several drafts have is as likely as the surest of them says; siblings add up to 1 at
    most. Rows of a drafter's own are left out.
    """
    parents: list[int] = []
    tokens: list[int] = []
    confidence: list[float] = []
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for each in rated:
        _enter(each.draft, parents, tokens, confidence, nodes)
    totals: dict[int, float] = {}
    for parent, value in zip(parents, confidence, strict=True):
        totals[parent] = totals.get(parent, 0.0) + value
    paths: list[float] = []
    for node, parent in enumerate(parents):
        confidence[node] /= max(1.0, totals[parent])
        paths.append(confidence[node] * (paths[parent] if parent >= 0 else 1.0))
    # No node is likelier than its parent, and the sort is stable: parents come first.
    chosen = sorted(range(len(paths)), key=lambda node: -paths[node])[: request.max_nodes]
    place = {node: i for i, node in enumerate(chosen)} | {-1: -1}
    return Draft(
        tuple(tokens[node] for node in chosen),
        tuple(place[parents[node]] for node in chosen),
        confidence=[confidence[node] for node in chosen],
        num_cached=_num_cached(rated),
    )


def _enter(
    draft: Draft,
    parents: list[int],
    tokens: list[int],
    confidence: list[float],
    nodes: dict[tuple[int, int], int],
) -> None:
    """One draft's nodes into the lists that a tree is merged in."""
    stated = draft.confidence or ()
    entered: dict[int, int] = {-1: -1}  # node of the draft -> node of the tree
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if draft.verify is not None and not draft.verify[node]:
            continue
        key = entered[parent], token
        if key not in nodes:
            nodes[key] = len(tokens)
            tokens.append(token)
            parents.append(key[0])
            confidence.append(0.0)
        entered[node] = nodes[key]
        confidence[nodes[key]] = max(confidence[nodes[key]], stated[node])


def _num_cached(rated: Iterable[Rated]) -> int:
    return max((each.draft.num_cached for each in rated), default=0)


def _for_all(members: Sequence[Member], call: Callable[[Member], None]) -> None:
    """Call for every member, whatever fails; the first failure is raised at the end."""
    failures: list[Exception] = []
    for member in members:
        try:
            call(member)
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
