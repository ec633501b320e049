"""Sizes and messages that the memory's parts share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from npufleet_pod.engine.memory.errors import LayoutError

MIN_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 128
MAX_SCOPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of the KV cache.

    A page is what a kernel addresses and what is allocated: `page_tokens` (128 on an NPU, one block on a CPU). A block is what is shared:
    two sequences that differ within a page have their common blocks copied rather than computed. A page holds whole blocks.
    Raises LayoutError.
    """

    block_tokens: int
    page_tokens: int
    page_count: int

    def __post_init__(self) -> None:
        if not MIN_BLOCK_TOKENS <= self.block_tokens <= MAX_BLOCK_TOKENS or self.block_tokens % MIN_BLOCK_TOKENS:
            raise LayoutError(
                f"block_tokens: {self.block_tokens} is not a multiple of {MIN_BLOCK_TOKENS} up to {MAX_BLOCK_TOKENS}: choose one"
            )
        if self.page_tokens < self.block_tokens or self.page_tokens % self.block_tokens:
            raise LayoutError(f"page_tokens: {self.page_tokens} does not hold whole blocks of {self.block_tokens}: choose a multiple of it")
        if self.page_count < 1:
            raise LayoutError(f"page_count: {self.page_count} holds no token: give the KV cache more memory")

    @property
    def blocks_per_page(self) -> int:
        """Blocks in a page."""
        return self.page_tokens // self.block_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence take."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Whose KV it is: equal tokens under another adapter, or another client's salt, never match."""

    adapter: str = ""
    salt: str = ""


class Room(Enum):
    """Whether a sequence can grow."""

    READY = auto()
    """It has the pages."""
    AFTER_STEP = auto()
    """The steps in flight, or loads under way, hold enough freed pages: wait for them and preempt nobody."""
    NONE = auto()
    """Only another sequence's pages would do."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the KV of a page's first `tokens` tokens to another page, on the device."""

    source_page: int
    target_page: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Store:
    """Copy a whole page from the device to a slot of the host tier."""

    page: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class Load:
    """Copy a whole page from a slot of the host tier to the device."""

    host_slot: int
    page: int


Transfer = Copy | Store | Load


NO_SCOPE = CacheScope()
"""The base model, and no salt."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Tokens of a prompt whose KV exists, by the slowest tier that has to be read: device first, then host, then disk."""

    device_tokens: int
    host_tokens: int
    disk_tokens: int

    @property
    def tokens(self) -> int:
        """All tokens matched."""
        return self.device_tokens + self.host_tokens + self.disk_tokens
