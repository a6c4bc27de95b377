"""Pages that are full, by the tokens in them and before them: what a later request may share.

Knows token ids and page ids; knows no tensor, no request and no model. A node is one page's tokens
under the page before it. A page is kept in the pool while it has a node, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from foredraft.cache.pool import PagePool

_NO_PAGE = -1
_Key = str | tuple[int, ...]  # of a salt's root, of a page


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One full page. `depth` pages lead to it, itself included; 0 is the root of a salt."""

    key: _Key
    page: int
    depth: int
    parent: PrefixNode | None
    drafted: bool = False  # the drafter's own cache is filled for this page as well ...
    follower: int | None = None  # ... as it is before this token; None: before any
    children: dict[_Key, PrefixNode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest known beginning of a sequence, in full pages."""

    pages: tuple[int, ...] = ()
    num_drafted: int = 0  # of `pages`, from the first: those that are filled for the drafter too
    node: PrefixNode | None = None  # of the last page


class PrefixTree:
    """A tree of pages for each salt; sequences share pages only within one.

    Every page on the way to a node that a sequence has put there or found is that sequence's to
    hold. One that came second with the same tokens holds copies instead: only then can a page be
    idle that leads to pages in use, and if it is evicted, they leave the tree with it.
    """

    def __init__(self, page_size: int, pool: PagePool) -> None:
        """Raises ValueError for a `page_size` below 1."""
        if page_size < 1:
            raise ValueError(f"page_size must be 1 or more, got {page_size}")
        self._page_size = page_size
        self._pool = pool
        self._salts = PrefixNode("", _NO_PAGE, -1, None)
        self._nodes: dict[int, PrefixNode] = {}

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def match(
        self, salt: str, tokens: Sequence[int], most_pages: int, *, drafted: bool = False
    ) -> PrefixHit:
        """The pages of the longest beginning of `tokens` that is known, `most_pages` at most; with
        `drafted` of those that are filled for the drafter too.

        They are the caller's to share before anything is evicted.
        """
        node = self._salts.children.get(salt)
        pages: list[int] = []
        num_drafted = 0
        while node is not None:
            hit = node
            node = None
            if len(pages) < most_pages:
                node = hit.children.get(self._key(tokens, hit.depth))
            if node is None:
                break
            if num_drafted == len(pages) and self._is_drafted(node, tokens):
                num_drafted += 1
            elif drafted:
                break
            pages.append(node.page)
        return PrefixHit(tuple(pages), num_drafted, hit) if pages else PrefixHit()

    def publish(
        self,
        salt: str,
        tokens: Sequence[int],
        pages: Sequence[int],
        after: PrefixNode | None = None,
    ) -> PrefixNode | None:
        """Give `pages`, the first of a sequence, which are held and hold the keys and values of its
        first `tokens`, to whoever comes with the same; the node of the last one.

        Where the tree has these tokens, it keeps the page it has, unless nobody holds that: then
        the one given takes its place. `after` is what the last call gave for this sequence; without
        it the sequence is followed from its first token.
        """
        node = after if after is not None and self._nodes.get(after.page) is after else None
        if not pages:
            return node
        if node is None:
            node = self._salts.children.get(salt) or _add_child(self._salts, salt, _NO_PAGE)
        for depth in range(node.depth, len(pages)):
            node = self._put(node, self._key(tokens, depth), pages[depth])
        return node

    def _is_drafted(self, node: PrefixNode, tokens: Sequence[int]) -> bool:
        """Whether the drafter's own cache is filled for a page that `tokens` go through."""
        if not node.drafted or node.follower is None:
            return node.drafted
        end = node.depth * self._page_size
        return end < len(tokens) and tokens[end] == node.follower

    def mark_drafted(
        self, pages: Sequence[int], followers: Sequence[int | None] | None = None
    ) -> None:
        """Note that the drafter's own cache is filled for `pages`; those without a node are none of
        the tree's. `followers`: the token behind each, where what is filled depends on it.
        """
        for page, follower in zip(pages, followers or [None] * len(pages), strict=True):
            node = self._nodes.get(page)
            if node is not None:
                node.drafted, node.follower = True, follower

    def evict(self) -> None:
        """Free the idle page that was in use longest ago, and whatever it leads to.

        Raises ValueError if no page is idle.
        """
        page = self._pool.longest_idle
        if page is None:
            raise ValueError("no page is idle: every page of the tree is in use")
        node = self._nodes[page]
        parent = node.parent
        if parent is not None:
            del parent.children[node.key]
        for below in _with_descendants(node):
            del self._nodes[below.page]
            self._pool.forget(below.page)
        if parent is not None and parent.depth == 0 and not parent.children:
            del self._salts.children[parent.key]

    def clear(self) -> None:
        """Forget every page: those that nobody holds are free."""
        for page in self._nodes:
            self._pool.forget(page)
        self._nodes = {}
        self._salts.children = {}

    def check_integrity(self) -> None:
        """Raises RuntimeError if the tree contradicts itself or the pool."""
        found = [node for node in _with_descendants(self._salts) if node.depth > 0]
        if {node.page: node for node in found} != self._nodes or len(found) != len(self._nodes):
            raise RuntimeError("the pages of the tree are not those of its nodes")
        if self._pool.num_kept != len(found):
            raise RuntimeError(f"{self._pool.num_kept} pages are kept, the tree has {len(found)}")
        for node in found:
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node:
                raise RuntimeError(f"page {node.page} is not below the page before it")
            if node.depth != parent.depth + 1 or len(node.key) != self._page_size:
                raise RuntimeError(f"page {node.page} is not a full page at its depth")
            if not self._pool.is_kept(node.page):
                raise RuntimeError(f"page {node.page} is not kept in the pool")
        if any(not root.children for root in self._salts.children.values()):
            raise RuntimeError("a salt has no pages")

    def _key(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        return tuple(tokens[depth * self._page_size : (depth + 1) * self._page_size])

    def _put(self, node: PrefixNode, key: _Key, page: int) -> PrefixNode:
        """The node of `key` below, on `page` if it has no page in use."""
        child = node.children.get(key)
        if child is not None and (child.page == page or self._pool.references(child.page)):
            return child
        self._pool.keep(page)
        if child is None:
            child = _add_child(node, key, page)
        else:
            self._pool.forget(child.page)
            del self._nodes[child.page]
            child.page, child.drafted = page, False
        self._nodes[page] = child
        return child


def _add_child(node: PrefixNode, key: _Key, page: int) -> PrefixNode:
    child = node.children[key] = PrefixNode(key, page, node.depth + 1, node)
    return child


def _with_descendants(node: PrefixNode) -> Iterator[PrefixNode]:
    """A node and all below it, deepest first on every way down."""
    found = [node]
    for each in found:
        found += each.children.values()
    return reversed(found)
