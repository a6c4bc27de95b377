"""Who runs in the next step, with how many rows, and on which pages.

Knows lengths, pages and the row budget; knows no tensor, no token's meaning and no drafter. First
come, first served. Pages are settled before a step for all that it writes, drafts included, so
nothing can run out of them inside one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from foredraft.cache.pool import PagePool
from foredraft.core.errors import IntegrityError, InvalidRequest
from foredraft.engine.config import EngineConfig
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
    """Waiting and running requests, and the pages they hold."""

    def __init__(self, config: EngineConfig, pool: PagePool, policy: Policy) -> None:
        self.config = config
        self.pool = pool
        self.policy = policy
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def check_fits(self, request: Request) -> None:
        """Raise InvalidRequest, with the sizes, if the request could never be admitted."""
        pages = self.config.pages_for(request.worst_case_slots)
        if pages > self.pool.num_pages:
            raise InvalidRequest(
                f"request {request.id} needs {pages} pages of {self.config.page_size} tokens "
                f"({request.num_prompt} prompt + {request.rules.max_tokens} max_tokens), the cache "
                f"has {self.pool.num_pages}; lower max_tokens or raise kv_cache_gib"
            )

    def add(self, request: Request) -> None:
        """Queue a request that fits."""
        request.queued = True
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Who runs next: decoding first, then prompts, then newcomers, then drafts.

        Every slot that the step writes has its page when this returns. Where pages run short, first
        drafts shrink, then the youngest requests go back to the queue, to be computed anew: the
        oldest always goes on.
        """
        self._release_spare_pages()
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
                chain = self._chain(request, budget)
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

    def _missing_pages(self, request: Request, slots: int) -> int:
        return max(0, self.config.pages_for(slots) - len(request.pages))

    def _make_room(self, request: Request, chain: int, preempted: list[Request]) -> bool:
        """Pages for the slots of `chain`; the youngest give theirs up. False: it was the one."""
        missing = self._missing_pages(request, request.num_computed + chain)
        while missing > self.pool.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(missing)
        return True

    def _release_spare_pages(self) -> None:
        """Take back what drafts that were not accepted have left beyond the committed tokens."""
        for request in self.running:
            kept = self.config.pages_for(request.num_tokens)
            spare, request.pages = request.pages[kept:], request.pages[:kept]
            self.pool.release(spare)

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue, without pages; its tokens stay, and are computed anew."""
        self.waiting.appendleft(request)
        self.running.remove(request)
        pages, request.pages = request.pages, []
        request.wait()
        self.pool.release(pages)

    def _add_drafts(
        self, chains: list[tuple[Request, int]], budget: int, load: Load
    ) -> Iterable[Scheduled]:
        widths = self._widths(chains, load)
        for request, chain in chains:
            nodes, width = 0, widths[request.id]
            if chain == request.num_remaining:
                end = request.num_tokens
                room = (len(request.pages) + self.pool.num_free) * self.config.page_size - end
                nodes = max(0, min(width, request.max_draft_nodes, budget, room))
                budget -= nodes
                request.pages += self.pool.allocate(self._missing_pages(request, end + nodes))
            speculates = min(width, request.max_draft_nodes) > 0
            yield Scheduled(request, chain, nodes, speculates)

    def _widths(self, chains: list[tuple[Request, int]], load: Load) -> dict[str, int]:
        """The policy's widths; of a request whose prompt is still being read, the width it would
        have if these requests all decoded.
        """
        widths: dict[str, int] = {}
        later = replace(load, num_rows=load.num_requests)
        for emits, asked in ((True, load), (False, later)):
            group = [r for r, chain in chains if (chain == r.num_remaining) == emits]
            chosen = self.policy.widths(asked, [state_of(r) for r in group]) if group else []
            widths |= zip((request.id for request in group), chosen, strict=True)
        return widths

    def _admit(self, copies: list[tuple[int, int]]) -> Iterable[Request]:
        """Start waiting requests, in their order, as long as there are pages for all their tokens,
        the widest draft of their first step, and one more for each request that runs already, which
        will soon need it. Pages that siblings share are copied where they part.
        """
        for request in tuple(self.waiting):
            if len(self.running) == self.config.max_num_seqs:
                return
            sibling = self._sibling(request)
            if sibling is not None and sibling.num_computed < sibling.num_prompt - 1:
                continue  # its prompt is being computed: it will share that when it is done
            shared = 0 if sibling is None else request.num_prompt - 1
            full_pages = shared // self.config.page_size
            load = Load(len(self.running) + 1, request.num_remaining)
            (width,) = self.policy.widths(load, [state_of(request)])
            width = min(width, request.max_draft_nodes)
            price = self.config.pages_for(request.num_tokens + max(0, width)) - full_pages
            if price + len(self.running) > self.pool.num_free:
                return
            needed = self.config.pages_for(request.num_tokens) - full_pages
            pages = self.pool.allocate(needed)
            if sibling is not None:
                self.pool.share(sibling.pages[:full_pages])
                if shared % self.config.page_size:
                    copies.append((sibling.pages[full_pages], pages[0]))
                pages = sibling.pages[:full_pages] + pages
            # In this order an interrupt leaves no request that is nowhere.
            self.running.append(request)
            request.admit(pages, shared)
            self.waiting.remove(request)
            yield request

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
        self.policy.release(request.id)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        pages, request.pages = request.pages, []
        return pages

    def reclaim(self) -> None:
        """Free every page that no request holds: an interrupt can fall between a page's leaving
        the pool and its reaching a request, or the other way. What requests hold is the truth.
        """
        self.running = [request for request in self.running if not request.finished]
        self.waiting = deque(
            request for request in self.waiting if request.status is Status.WAITING
        )
        self.pool.rebuild(request.pages for request in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Raise IntegrityError or RuntimeError if pages or requests contradict each other."""
        self.pool.check_integrity()
        for request in (*self.waiting, *self.running):
            request.check_integrity(self.config.page_size)
        held: dict[int, int] = {}
        for request in self.running:
            for page in request.pages:
                held[page] = held.get(page, 0) + 1
        if len(held) != self.pool.num_used:
            raise IntegrityError(
                f"{self.pool.num_used} pages in use, running requests hold {len(held)}"
            )
        for page, holders in held.items():
            if self.pool.references(page) != holders:
                raise IntegrityError(
                    f"page {page} is counted {self.pool.references(page)} times, "
                    f"held {holders} times"
                )


def _load_of(chains: Iterable[tuple[Request, int]]) -> Load:
    """What a step carries without drafts."""
    requests, lengths = zip(*chains, strict=True) if chains else ((), ())
    return Load(len(requests), sum(lengths), sum(request.num_computed for request in requests))


def state_of(request: Request) -> RequestState:
    """What a policy may see of a request."""
    return RequestState(
        id=request.id,
        request_type=request.request_type,
        max_width=max(0, request.max_draft_nodes),
        num_positions=request.num_computed,
        counts=request.counts,
    )
