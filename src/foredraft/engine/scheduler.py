"""Who runs in the next step, with how many rows, and on which pages.

Knows lengths, pages and the row budget; knows no tensor, no token's meaning and no drafter. First
come, first served: a request is admitted when its worst case fits the free pages, so nothing can
run out of pages inside a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.cache.pool import PagePool
from foredraft.core.errors import IntegrityError, InvalidRequest
from foredraft.engine.config import EngineConfig
from foredraft.engine.request import Request, Status
from foredraft.planning.policy import Load, Policy


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

    rows: tuple[Scheduled, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()


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
        """Admit what fits, then share the row budget: decoding first, then prompts, then drafts."""
        copies = self._admit()
        decoding = sum(request.num_remaining == 1 for request in self.running)
        budget = self.config.max_num_batched_tokens - decoding
        chunk_limit = self.config.prefill_chunk_size or budget
        chains: list[tuple[Request, int]] = []
        for request in self.running:
            chain = 1
            if request.num_remaining > 1:
                chain = min(request.num_remaining, chunk_limit, budget)
                budget -= chain
            if chain:
                chains.append((request, chain))
        return Plan(tuple(self._add_drafts(chains, budget)), tuple(copies))

    def _add_drafts(self, chains: list[tuple[Request, int]], budget: int) -> Iterable[Scheduled]:
        load = Load(num_requests=len(chains), num_rows=sum(chain for _, chain in chains))
        for request, chain in chains:
            nodes = 0
            width = self.policy.width(load, request.counts)
            if chain == request.num_remaining:
                nodes = max(0, min(width, request.max_draft_nodes, budget))
                budget -= nodes
            yield Scheduled(request, chain, nodes, speculates=width > 0)

    def _admit(self) -> list[tuple[int, int]]:
        copies: list[tuple[int, int]] = []
        for request in tuple(self.waiting):
            if len(self.running) == self.config.max_num_seqs:
                break
            sibling = self._sibling(request)
            if sibling is not None and sibling.num_computed < sibling.num_prompt - 1:
                continue  # its prompt is being computed: it will share that when it is done
            shared = 0 if sibling is None else request.num_prompt - 1
            full_pages = shared // self.config.page_size
            needed = self.config.pages_for(request.worst_case_slots) - full_pages
            if needed > self.pool.num_free:
                break
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
        return copies

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
