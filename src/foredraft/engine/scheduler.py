"""Who runs in the next step, and with how many rows.

Knows lengths, the row budget and who gives way where pages run short; knows no tensor, no token's
meaning and no drafter. First come, first served. Pages are settled before a step for all that it
writes, drafts included, so nothing can run out of them inside one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from foredraft.cache.pool import PagePool
from foredraft.core.errors import InvalidRequest
from foredraft.engine.config import EngineConfig
from foredraft.engine.pages import PageTables, Start
from foredraft.engine.request import Request, Status
from foredraft.planning.policy import Load, Policy, RequestState


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step: rows that go on from its cache, and the draft nodes it may
    add.
    """

    request: Request
    chain: int  # committed tokens to compute: prompt chunk, pending token
    max_nodes: int  # 0 = no draft; only a request whose chain ends at its pending token may draft
    speculates: bool  # the policy drafts for this request, now or once its prompt is read
    limit: str = ""  # what kept the draft from being as long as the policy would have it

    @property
    def emits(self) -> bool:
        """Whether the chain reaches the pending token, so that the step yields a new one."""
        return self.chain == self.request.num_remaining


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step. `page_copies` are (source, destination) pages to copy before it."""

    load: Load
    rows: tuple[Scheduled, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Request, ...] = ()  # lost their pages before this step


class Scheduler:
    """Waiting and running requests."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        policy: Policy,
        *,
        reads_features: bool = False,
    ) -> None:
        """`reads_features`: the drafter fills a cache of its own from the target's rows."""
        self.config = config
        self.pool = pool
        self.pages = PageTables(config, pool, reads_features=reads_features)
        self.policy = policy
        self.num_preemptions = 0
        # A queue of which any request can leave at once, however many wait.
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running: list[Request] = []

    def check_fits(self, request: Request) -> None:
        """Raise InvalidRequest, with the sizes, if the request could never be admitted."""
        pages = self.config.pages_for(request.worst_case_slots)
        if pages > self.pool.num_pages:
            raise InvalidRequest(
                f"request {request.id} needs {pages} pages of {self.config.page_size} tokens "
                f"({request.num_prompt} prompt + {request.rules.max_tokens} max_tokens), the cache "
                f"has {self.pool.num_pages}; lower max_tokens or raise memory or kv_cache_gib"
            )

    def add(self, request: Request) -> None:
        """Queue a request that fits."""
        request.queued = True
        self.waiting[request] = None

    def schedule(self) -> Plan:
        """Who runs next: decoding first, then prompts, then newcomers, then drafts.

        Every slot that the step writes has its page when this returns. Where pages run short,
        cached ones that nobody holds are evicted, then drafts shrink, then the youngest requests go
        back to the queue, to be computed anew: the oldest always goes on.
        """
        self.pages.release_spare(self.running)
        decoding = sum(request.num_remaining == 1 for request in self.running)
        budget = self.config.max_num_batched_tokens - decoding
        chains: list[tuple[Request, int]] = []
        preempted: list[Request] = []
        for request in tuple(self.running):
            if request in preempted:
                continue
            chain = self._chain(request, budget)
            if chain and self._make_room(request, chain, preempted):
                chains.append((request, chain))
                budget -= chain if request.num_remaining > 1 else 0
        chains = [(request, chain) for request, chain in chains if request not in preempted]
        copies: list[tuple[int, int]] = []
        if not preempted:
            for request in self._admit(copies):
                chain = min(self._chain(request, budget), budget)
                if chain:
                    chains.append((request, chain))
                    budget -= chain
        load = _load_of(chains)
        rows = tuple(self._add_drafts(chains, budget, load))
        return Plan(load, rows, tuple(copies), tuple(preempted))

    def _chain(self, request: Request, budget: int) -> int:
        """Committed tokens to compute: the pending one, or a chunk of what is left to read."""
        if request.num_remaining == 1:
            return 1
        limit = self.config.prefill_chunk_size or self.config.max_num_batched_tokens
        return max(0, min(request.num_remaining, limit, budget))

    def _make_room(self, request: Request, chain: int, preempted: list[Request]) -> bool:
        """Pages for the slots of `chain`; the youngest give theirs up. False: it was the one."""
        num_slots = request.num_computed + chain
        while self.pages.missing(request, num_slots) > self.pages.num_available:
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        self.pages.grow(request, num_slots)
        return True

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue, without pages; its tokens stay, and are computed anew."""
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)
        self.running.remove(request)
        self.num_preemptions += 1
        pages, request.pages = request.pages, []
        request.wait()
        self.pool.release(pages)

    def _add_drafts(
        self, chains: list[tuple[Request, int]], budget: int, load: Load
    ) -> Iterable[Scheduled]:
        widths = self._widths(chains, load)
        for request, chain in chains:
            nodes, width, limit = 0, widths[request.id], ""
            if chain == request.num_remaining:
                room = self.pages.room_for_drafts(request)
                nodes = max(0, min(width, request.max_draft_nodes, budget, room))
                limit = _limit(request, width, budget, room)
                budget -= nodes
                self.pages.grow(request, request.num_tokens + nodes)
            speculates = min(width, request.max_draft_nodes) > 0
            yield Scheduled(request, chain, nodes, speculates, limit)

    def _widths(self, chains: list[tuple[Request, int]], load: Load) -> dict[str, int]:
        """The policy's widths; of a request whose prompt is still being read, the width it would
        have if these requests all decoded.
        """
        emitting = [request for request, chain in chains if chain == request.num_remaining]
        reading = [request for request, chain in chains if chain != request.num_remaining]
        widths: dict[str, int] = {}
        for group in filter(None, (emitting, reading)):
            asked = load if group is emitting else replace(load, num_rows=load.num_requests)
            chosen = self.policy.widths(asked, [state_of(request) for request in group])
            widths |= zip((request.id for request in group), chosen, strict=True)
        return widths

    def _admit(self, copies: list[tuple[int, int]]) -> list[Request]:
        """Start waiting requests, in their order, as long as there are pages for all their tokens,
        the widest draft of their first step, and one more for each request that runs already, which
        will soon need it. What others have computed is shared: full pages as they are, a sibling's
        last one as a copy. One that will share what is being computed waits for it, and the place
        that it will run in with it.
        """
        admitted: list[Request] = []
        held = 0
        for request in self.waiting:
            if len(self.running) + held == self.config.max_num_seqs:
                break
            sibling = self._sibling(request)
            if sibling is not None and self.pages.is_behind(sibling, sibling.num_prompt - 1):
                held += 1
                continue
            start = self.pages.start(request, sibling)
            if sibling is None and self.pages.awaits(request, start, self.running):
                held += 1
                continue
            slots = request.num_tokens + self._first_width(request, start)
            if not self.pages.can_admit(start, slots, spare=len(self.running)):
                break
            # Until the end it is in both: an interrupt leaves no request that is nowhere.
            self.running.append(request)
            copy = self.pages.admit(request, start)
            if copy is not None:
                copies.append(copy)
            admitted.append(request)
        for request in admitted:
            del self.waiting[request]
        return admitted

    def _first_width(self, request: Request, start: Start) -> int:
        load = Load(len(self.running) + 1, request.num_tokens - start.num_computed)
        (width,) = self.policy.widths(load, [state_of(request)])
        return max(0, min(width, request.max_draft_nodes))

    def _sibling(self, request: Request) -> Request | None:
        """A running completion of the same prompt, whose keys and values can be shared."""
        if request.params.n == 1:
            return None
        for other in self.running:
            if other.group == request.group:
                return other
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and give back what it holds. No-op if it is out."""
        self.pool.release(self.take_out(request))

    def take_out(self, request: Request) -> list[int]:
        """Take a request out, wherever it is; its pages are the caller's to give back."""
        # First, so that an interrupt leaves no request outside that names pages.
        pages, request.pages = request.pages, []
        self.policy.release(request.id)
        self.waiting.pop(request, None)
        if request in self.running:
            self.running.remove(request)
        return pages

    def reclaim(self) -> None:
        """Free every page that no request holds: an interrupt can fall between a page's leaving
        the pool and its reaching a request, or the other way. What requests hold is the truth.
        """
        self.running = [request for request in self.running if not request.finished]
        self.waiting = OrderedDict.fromkeys(
            request for request in self.waiting if request.status is Status.WAITING
        )
        self.pages.reclaim(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def pages_in_use(self) -> int:
        """Pages that running requests hold; cached ones that nobody holds are not in use."""
        return self.pool.num_used

    @property
    def num_cached_pages(self) -> int:
        """Pages known by their tokens, in use or not."""
        return self.pages.prefixes.num_pages

    @property
    def prefix_query_tokens(self) -> int:
        """Tokens of the requests that looked for a known prefix, each request counted once."""
        return self.pages.prefix_query_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Of `prefix_query_tokens`, those that were found computed."""
        return self.pages.prefix_hit_tokens

    def check_integrity(self) -> None:
        """Raise IntegrityError or RuntimeError if pages or requests contradict each other."""
        for request in (*self.waiting, *self.running):
            request.check_integrity(self.config.page_size)
        self.pages.check_integrity(self.running)


def _load_of(chains: Iterable[tuple[Request, int]]) -> Load:
    """What a step carries without drafts."""
    requests, lengths = zip(*chains, strict=True) if chains else ((), ())
    return Load(len(requests), sum(lengths), sum(request.num_computed for request in requests))


def _limit(request: Request, width: int, budget: int, room: int) -> str:
    """What keeps a draft from being as long as the policy would have it; "": nothing. A policy may
    have been told what the request has use for, and have chosen that.
    """
    own = max(0, request.max_draft_nodes)
    if min(budget, room) < min(width, own):
        return "budget" if budget <= room else "pages"
    if width < own:
        return ""
    return "request" if own == request.max_width else "max_tokens"


def state_of(request: Request) -> RequestState:
    """What a policy may see of a request."""
    return RequestState(
        id=request.id,
        request_type=request.request_type,
        max_width=max(0, request.max_draft_nodes),
        num_positions=request.num_computed,
        counts=request.counts,
    )
