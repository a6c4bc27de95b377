"""Which pages each request holds, and what a newcomer finds filled already.

Knows lengths, pages and known prefixes; knows no order of service, no row budget and no tensor.
Pages that nobody holds are as good as free: the one in use longest ago is evicted where one is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foredraft.cache.pool import PagePool
from foredraft.cache.prefix import PrefixNode, PrefixTree
from foredraft.core.errors import IntegrityError
from foredraft.engine.config import EngineConfig
from foredraft.engine.request import Request

# Tokens, found computed instead of computed anew, for which a request may start a step later: they
# take longer than a step of decoding wherever rows cost time.
WORTH_WAITING = 64


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request may start: behind positions that others have computed."""

    num_computed: int = 0
    num_draft_cached: int = 0  # of these, those that the drafter's own cache holds too
    shared: tuple[int, ...] = ()  # full pages
    copied: int | None = None  # the page after them, filled in part, to be copied
    node: PrefixNode | None = None  # of the last shared page, if they are the tree's


class PageTables:
    """The pages of running requests, and the tree of those that were filled."""

    def __init__(
        self, config: EngineConfig, pool: PagePool, *, reads_features: bool = False
    ) -> None:
        """`reads_features`: the drafter fills a cache of its own from the target's rows, a position
        from the features there and the next token. So what it lacks has to be computed anew, and
        what it has of a page's last position is good before the same token alone.
        """
        self.reads_features = reads_features
        self.config = config
        self.pool = pool
        self.prefixes = PrefixTree(config.page_size, pool)
        self.prefix_query_tokens = 0  # of requests that looked for a prefix, counted once each
        self.prefix_hit_tokens = 0

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody holds."""
        return self.pool.num_free + self.pool.num_idle

    def start(self, request: Request, sibling: Request | None) -> Start:
        """Behind what a running completion of the same prompt has computed, or behind the longest
        known prefix, whichever is more. At least one token is left to compute.
        """
        found = Start()
        if sibling is not None:
            shared = request.num_prompt - 1
            drafted = min(sibling.num_draft_cached, shared)
            if self._needs_drafted(request):
                shared = drafted
            full, rest = divmod(shared, self.config.page_size)
            found = Start(
                shared,
                drafted,
                tuple(sibling.pages[:full]),
                sibling.pages[full] if rest else None,
            )
        known = self._known(request)
        return known if known.num_computed > found.num_computed else found

    def _known(self, request: Request) -> Start:
        # Log-probabilities of the prompt need the rows of the prompt.
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return Start()
        size = self.config.page_size
        most = (request.num_tokens - 1) // size
        drafted = self._needs_drafted(request)
        hit = self.prefixes.match(request.cache_salt, request.tokens, most, drafted=drafted)
        return Start(len(hit.pages) * size, hit.num_drafted * size, hit.pages, node=hit.node)

    def _needs_drafted(self, request: Request) -> bool:
        """Whether a request starts behind no more than what the drafter has too."""
        return self.reads_features and request.max_draft_nodes > 0

    def is_behind(self, request: Request, end: int) -> bool:
        """Whether a running request is about to compute what comes before `end`, or its drafter is,
        which lags by the step after its prompt.
        """
        if request.num_computed < end:
            return True
        lags = self._needs_drafted(request) and request.num_output <= 1
        return lags and request.num_draft_cached < end

    def awaits(self, request: Request, start: Start, running: Iterable[Request]) -> bool:
        """Whether one of `running` is about to compute so much of what follows `start` that it is
        worth a step's wait. Nobody waits for long: who computes that goes on, or is there no more.
        """
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return False
        size = self.config.page_size
        end = start.num_computed + self.config.pages_for(WORTH_WAITING) * size
        if end >= request.num_tokens:
            return False
        wanted = request.tokens[:end]
        return any(
            end <= other.num_tokens
            and self.is_behind(other, end)
            and other.cache_salt == request.cache_salt
            and other.tokens[:end] == wanted
            for other in running
        )

    def can_admit(self, start: Start, num_slots: int, spare: int) -> bool:
        """Whether a request can have `num_slots` slots, with `spare` pages left for others."""
        needed = self.config.pages_for(num_slots) - len(start.shared)
        idle = sum(self.pool.references(page) == 0 for page in start.shared)
        return needed + spare <= self.num_available - idle

    def admit(self, request: Request, start: Start) -> tuple[int, int] | None:
        """Let a request run on pages for all its tokens; the page to copy and where, if any."""
        self.pool.share(start.shared)
        own = self._take(self.config.pages_for(request.num_tokens) - len(start.shared))
        self._count(request, start)
        request.admit([*start.shared, *own], start.num_computed)
        request.num_draft_cached = start.num_draft_cached
        request.num_drafted_pages = 0
        request.prefix_node = start.node
        return None if start.copied is None else (start.copied, own[0])

    def _count(self, request: Request, start: Start) -> None:
        if request.num_preemptions or not self.config.enable_prefix_caching:
            return
        of_sibling = start.node is None and start.num_computed > 0
        if of_sibling or request.params.prompt_logprobs is not None:
            return
        request.num_cached_tokens = start.num_computed
        self.prefix_query_tokens += request.num_tokens
        self.prefix_hit_tokens += start.num_computed

    def missing(self, request: Request, num_slots: int) -> int:
        """Pages that a request lacks for its first `num_slots` slots."""
        return max(0, self.config.pages_for(num_slots) - len(request.pages))

    def grow(self, request: Request, num_slots: int) -> None:
        """Give a request pages for its first `num_slots` slots."""
        request.pages += self._take(self.missing(request, num_slots))

    def room_for_drafts(self, request: Request) -> int:
        """Draft tokens that a request can have slots for behind its tokens.

        Cached pages that nobody holds count: what was computed for others changes no draft.
        """
        pages = len(request.pages) + self.num_available
        return pages * self.config.page_size - request.num_tokens

    def _take(self, n: int) -> list[int]:
        while self.pool.num_free < n and self.pool.num_idle:
            self.prefixes.evict()
        return self.pool.allocate(n)

    def release_spare(self, requests: Iterable[Request]) -> None:
        """Take back what drafts that were not accepted have left beyond the committed tokens."""
        for request in requests:
            kept = self.config.pages_for(request.num_tokens)
            if len(request.pages) > kept:
                spare, request.pages = request.pages[kept:], request.pages[:kept]
                self.pool.release(spare)

    def publish(self, request: Request) -> None:
        """Make known the pages that a request has filled with committed tokens."""
        if not self.config.enable_prefix_caching:
            return
        size, node = self.config.page_size, request.prefix_node
        full = request.num_computed // size
        if full > (0 if node is None else node.depth):
            request.prefix_node = self.prefixes.publish(
                request.cache_salt, request.tokens, request.pages[:full], node
            )
        drafted = request.num_draft_cached // size
        pages = range(request.num_drafted_pages, drafted)
        followers: list[int | None] = [None] * len(pages)
        if self.reads_features:
            followers = [request.tokens[(page + 1) * size] for page in pages]
        self.prefixes.mark_drafted([request.pages[page] for page in pages], followers)
        request.num_drafted_pages = drafted

    def clear(self) -> None:
        """Forget all prefixes; running requests keep their pages."""
        self.prefixes.clear()

    def reclaim(self, running: Iterable[Request]) -> None:
        """What requests hold is the truth; all other pages are free, and no prefix is known."""
        self.prefixes = PrefixTree(self.config.page_size, self.pool)
        self.pool.rebuild(request.pages for request in running)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raise IntegrityError or RuntimeError if pages, prefixes and requests contradict each
        other.
        """
        self.pool.check_integrity()
        self.prefixes.check_integrity()
        held: dict[int, int] = {}
        for request in running:
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
