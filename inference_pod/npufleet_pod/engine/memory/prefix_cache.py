"""Which content is cached where: pages of KV by the tokens that they and their prefixes hold. Imports no torch.

A page is found by a digest of its tokens chained to its prefix's, and taken only if its tokens and its prefix are the same: equal
digests of different content are a miss, never a wrong answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

from npufleet_pod.engine.memory.access_pattern import TIERS, Tier
from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.layout import CacheLayout, CacheScope

TOKEN_BYTES = array("I").itemsize
DIGEST_BYTES = 16

Digest = Callable[[bytes], bytes]


def blake2_digest(data: bytes) -> bytes:
    """BLAKE2b cut to 128 bits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class CachedPage:
    """A page's content, and where it is: page number on the device, slot on the host, None on disk (its digest names the file)."""

    __slots__ = ("children", "children_on", "content", "digest", "first_blocks", "moving", "parent", "place", "tier")

    def __init__(self, digest: bytes, parent: CachedPage | None, content: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.content = content
        self.tier: Tier | None = None
        self.place: int | None = None
        self.moving = False
        """A worker reads it from disk, or writes it there."""
        self.children: dict[bytes, CachedPage] = {}
        self.children_on = [0] * len(TIERS)
        self.first_blocks: dict[bytes, CachedPage] = {}


class PrefixCache:
    """A tree of cached pages for each scope."""

    def __init__(self, layout: CacheLayout, digest: Digest = blake2_digest) -> None:
        self._page_bytes = layout.page_tokens * TOKEN_BYTES
        self._block_bytes = layout.block_tokens * TOKEN_BYTES
        self._layout = layout
        self._digest = digest
        self._roots: dict[CacheScope, CachedPage] = {}
        self._pages: dict[bytes, CachedPage] = {}
        self._on_device: dict[int, CachedPage] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[CachedPage]:
        return iter(self._pages.values())

    def root(self, scope: CacheScope) -> CachedPage:
        """The empty prefix of a scope. Scopes are told apart by tagged, length-prefixed fields: no adapter's name equals a salt."""
        root = self._roots.get(scope)
        if root is None:
            fields = [("adapter", scope.adapter.encode()), ("salt", scope.salt.encode())]
            key = b"".join(tag.encode() + b":" + str(len(value)).encode() + b":" + value for tag, value in fields)
            root = CachedPage(self._digest(b"npufleet-kv:" + key), None, key)
            self._roots[scope] = root
        return root

    def contents(self, tokens: Sequence[int]) -> list[bytes]:
        """The tokens of each full page, packed."""
        packed = array("I", tokens).tobytes()
        return [packed[start : start + self._page_bytes] for start in range(0, len(packed) - self._page_bytes + 1, self._page_bytes)]

    def digests(self, prefix: bytes, contents: Sequence[bytes]) -> list[bytes]:
        """Digests of pages one behind the other, the first behind the page, or root, whose digest is `prefix`."""
        result = []
        for content in contents:
            prefix = self._digest(prefix + content)
            result.append(prefix)
        return result

    def find(self, root: CachedPage, digests: Sequence[bytes], contents: Sequence[bytes]) -> list[CachedPage]:
        """The longest cached prefix, in whatever tiers."""
        found: list[CachedPage] = []
        parent = root
        for digest, content in zip(digests, contents, strict=True):
            page = self._pages.get(digest)
            if page is None or page.parent is not parent or page.content != content:
                break
            found.append(page)
            parent = page
        return found

    def get(self, digest: bytes) -> CachedPage:
        """The page of a digest that is cached. Raises MemoryStateError."""
        try:
            return self._pages[digest]
        except KeyError:
            raise MemoryStateError(f"no page with the digest {digest.hex()} is cached") from None

    def on_device(self, page: int) -> CachedPage | None:
        """The content of a page of the device, if it is cached."""
        return self._on_device.get(page)

    def common_blocks(self, parent: CachedPage, tokens: Sequence[int]) -> tuple[CachedPage, int] | None:
        """A page on the device behind `parent` that begins with the same whole blocks as `tokens`, and how many; None if there is none."""
        if self._layout.blocks_per_page == 1:
            return None
        packed = array("I", tokens).tobytes()
        page = parent.first_blocks.get(packed[: self._block_bytes])
        if page is None or page.tier is not Tier.DEVICE:
            return None
        whole = range(0, len(packed) - self._block_bytes + 1, self._block_bytes)
        same = 0
        for start in whole:
            if page.content[start : start + self._block_bytes] != packed[start : start + self._block_bytes]:
                break
            same += 1
        return (page, same) if same else None

    def insert(self, parent: CachedPage, digest: bytes, content: bytes) -> CachedPage | None:
        """The page of this content, new or known; None if another content has its digest."""
        page = self._pages.get(digest)
        if page is not None:
            return page if page.parent is parent and page.content == content else None
        page = CachedPage(digest, parent, content)
        self._pages[digest] = page
        parent.children[digest] = page
        parent.first_blocks[content[: self._block_bytes]] = page
        return page

    def place(self, page: CachedPage, tier: Tier | None, place: int | None) -> None:
        """Say where a page is from now on; None: nowhere yet."""
        if page.tier is Tier.DEVICE and page.place is not None:
            del self._on_device[page.place]
        if page.parent is not None:
            if page.tier is not None:
                page.parent.children_on[page.tier] -= 1
            if tier is not None:
                page.parent.children_on[tier] += 1
        page.tier, page.place = tier, place
        if tier is Tier.DEVICE and place is not None:
            self._on_device[place] = page

    def leaf(self, page: CachedPage) -> CachedPage:
        """A page behind `page`, or itself, with none behind it that stays on its tier: what is behind a page is of no use without it."""
        tier = page.tier
        while tier is not None and page.children_on[tier]:
            staying = next((child for child in page.children.values() if child.tier is tier and not child.moving), None)
            if staying is None:
                break
            page = staying
        return page

    def subtree(self, page: CachedPage) -> list[CachedPage]:
        """The page and all behind it, the deepest first."""
        order = [page]
        for each in order:
            order += each.children.values()
        return order[::-1]

    def remove(self, page: CachedPage) -> None:
        """Forget a page that has none behind it. Raises MemoryStateError if it has."""
        if page.children:
            raise MemoryStateError(f"page {page.digest.hex()} is removed before the {len(page.children)} behind it")
        self.place(page, None, None)
        del self._pages[page.digest]
        parent = page.parent
        if parent is not None:
            del parent.children[page.digest]
            first = page.content[: self._block_bytes]
            if parent.first_blocks.get(first) is page:
                del parent.first_blocks[first]

    def check_integrity(self) -> None:
        """Raise MemoryStateError if the tree contradicts itself."""
        for page in [*self._roots.values(), *self._pages.values()]:
            counts = [0] * len(TIERS)
            for child in page.children.values():
                if child.parent is not page or self._pages.get(child.digest) is not child:
                    raise MemoryStateError(f"page {child.digest.hex()} is a child of a page that is not its parent")
                if child.tier is not None:
                    counts[child.tier] += 1
            if counts != page.children_on:
                raise MemoryStateError(f"page {page.digest.hex()} counts {page.children_on} children by tier, there are {counts}")
        on_device = {page.place: page for page in self._pages.values() if page.tier is Tier.DEVICE}
        if on_device != self._on_device:
            raise MemoryStateError("the pages of the device differ from the pages that say they are there")
