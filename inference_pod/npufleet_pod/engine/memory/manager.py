"""What the scheduler asks of the memory: the pages of a request, what of its prompt is cached, whether it can grow. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from npufleet_pod.engine.memory.access_pattern import TIERS, PredictiveAccessPattern, Tier
from npufleet_pod.engine.memory.blocks import AscendBlockAllocator, HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.layout import NO_SCOPE, CacheLayout, CacheScope, PrefixMatch, Room, Transfer
from npufleet_pod.engine.memory.prefix_cache import CachedPage, PrefixCache, blake2_digest
from npufleet_pod.engine.memory.residency import Residency, ResidencyStats, TransferBatch
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier


@dataclass(slots=True)
class _Sequence:
    """A request's memory. `cached` are the pages of its prefix that are in the tree, which it holds."""

    root: CachedPage
    digests: list[bytes]
    expected_pages: int
    table: HierarchicalBlockTable
    tokens: list[int] = field(default_factory=list)
    """Tokens whose KV is written, or will be by the step in flight."""
    cached: list[CachedPage] = field(default_factory=list)
    sharable: bool = True
    """False once a page's digest was taken by other content: what follows cannot be found."""
    last_step: int = -1
    first_use: tuple[int, int, int] | None = None
    """Tokens, cached tokens and pages found on the device, until the first commit counts them: an admission may be undone."""


@dataclass(slots=True)
class _Step:
    number: int
    batch: TransferBatch
    fenced: list[int] = field(default_factory=list)


@dataclass(slots=True)
class CacheStats:
    """Tokens of admitted prompts, and those of them whose KV was there. Both only grow."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVCacheManager:
    """Gives pages to requests and shares their common prefixes. Not thread-safe: the scheduler's thread owns it.

    A step's life: `reserve` for each of its requests, `begin_step`, `take_transfers` (which the runner executes first), the forward pass,
    `commit` for each, `end_step`. Several steps may be in flight; they end in the order of their begin. Pages that a step in flight may
    still write or read are fenced: freed when it ends.
    """

    def __init__(
        self,
        layout: CacheLayout,
        clock: Callable[[], float],
        *,
        prefix_caching: bool = True,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        digest: Callable[[bytes], bytes] = blake2_digest,
    ) -> None:
        self.layout = layout
        self.stats = CacheStats()
        self._clock = clock
        self._prefix_caching = prefix_caching
        self._allocator = AscendBlockAllocator(layout)
        self._cache = PrefixCache(layout, digest)
        self._pattern = PredictiveAccessPattern(layout.page_count)
        self._residency = Residency(self._allocator, self._cache, self._pattern, host, disk)
        self._sequences: dict[str, _Sequence] = {}
        self._steps: list[_Step] = []
        self._steps_begun = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be had at once: free, or cached and held by nobody."""
        return self._allocator.free + self._allocator.retained

    @property
    def fenced_pages(self) -> int:
        """Pages that can be had once the steps in flight have ended."""
        fenced = Counter(page for step in self._steps for page in step.fenced)
        return sum(self._allocator.references(page) == count for page, count in fenced.items())

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1. Cached pages that nobody holds do not count: they are free for the asking."""
        return self._allocator.held / self.layout.page_count

    @property
    def residency_stats(self) -> ResidencyStats:
        """What moved between the tiers."""
        return self._residency.stats

    def match(self, tokens: Sequence[int], scope: CacheScope = NO_SCOPE) -> PrefixMatch:
        """What `admit` would find, by tier. Changes nothing. The last token never matches: something has to be computed."""
        counts = [0] * len(TIERS)
        for page in self._find(tokens, scope)[1]:
            if page.tier is not None:
                counts[page.tier] += self.layout.page_tokens
        return PrefixMatch(*counts)

    def prefetch(self, tokens: Sequence[int], scope: CacheScope = NO_SCOPE) -> int:
        """Start to read from disk what a queued request will need; the tokens that are on the way."""
        self._residency.poll()
        pages = [page for page in self._find(tokens, scope)[1] if page.tier is Tier.DISK]
        return self._residency.fetch(pages) * self.layout.page_tokens

    def admit(self, request_id: str, tokens: Sequence[int], scope: CacheScope = NO_SCOPE, *, expected_tokens: int = 0) -> int:
        """Take a request and hold what is cached of its prompt; how many tokens that is. What is on disk only is not waited for.

        expected_tokens: how long it may become, so that it is placed where it can grow. Raises MemoryStateError if it is held already.
        """
        if request_id in self._sequences:
            raise MemoryStateError(f"request {request_id} is admitted already: free it first")
        self._residency.poll()
        digests, found = self._find(tokens, scope)
        sequence = _Sequence(
            self._cache.root(scope), digests, self.layout.pages_for(max(expected_tokens, len(tokens))), HierarchicalBlockTable(self.layout)
        )
        self._sequences[request_id] = sequence
        on_device = list(takewhile(lambda page: page.tier is Tier.DEVICE, found))
        on_host = list(takewhile(lambda page: page.tier is Tier.HOST, found[len(on_device) :]))
        sequence.table.pages = [self._residency.hold(page) for page in on_device]
        last = sequence.table.pages[-1] if sequence.table.pages else None
        loaded = self._residency.load(on_host, last, sequence.expected_pages - len(on_device))
        sequence.table.pages += loaded
        sequence.cached = [*on_device, *on_host[: len(loaded)]]
        hit_tokens = len(sequence.cached) * self.layout.page_tokens
        hit_tokens += self._copy_common_blocks(sequence, tokens[hit_tokens:-1])
        sequence.tokens = list(tokens[:hit_tokens])
        sequence.first_use = (len(tokens), hit_tokens, len(on_device))
        return hit_tokens

    def reserve(self, request_id: str, total_tokens: int) -> Room:
        """See to it that the request's tokens [0, total_tokens) have pages that it may write. All or nothing. Raises MemoryStateError."""
        sequence = self._sequence(request_id)
        table = sequence.table
        shared = self._shared_last_page(sequence)
        grown = max(0, self.layout.pages_for(total_tokens) - len(table.pages))
        needed = grown + (shared is not None)
        if not self._residency.reclaim(needed):
            return Room.AFTER_STEP if needed <= self.free_pages + self.fenced_pages else Room.NONE
        if shared is not None:
            source = table.pages[shared]
            (table.pages[shared],) = self._allocator.allocate(1, after=table.pages[shared - 1] if shared else None)
            # Whole: a step in flight may be writing tokens to it that are not committed yet.
            self._residency.copy(source, table.pages[shared], self.layout.page_tokens)
            self._let_go(source, sequence)
        last = table.pages[-1] if table.pages else None
        table.pages += self._allocator.allocate(grown, after=last, expected=sequence.expected_pages - len(table.pages))
        return Room.READY

    def commit(self, request_id: str, tokens: Sequence[int]) -> None:
        """The KV of these tokens, the next of the request, is written: its full pages can be matched from now on.

        A request that was freed in the meantime is no error. Raises MemoryStateError if the tokens have no pages.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if len(sequence.tokens) + len(tokens) > sequence.table.capacity_tokens:
            raise MemoryStateError(
                f"request {request_id} wrote {len(tokens)} tokens behind {len(sequence.tokens)} "
                f"and holds pages for {sequence.table.capacity_tokens}: reserve first"
            )
        self._count_use(sequence)
        sequence.tokens += tokens
        if self._prefix_caching:
            self._register(sequence)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Let a new request share what another has written; the last page is copied once one of them goes on. Raises MemoryStateError."""
        parent = self._sequence(parent_id)
        if child_id in self._sequences:
            raise MemoryStateError(f"request {child_id} is admitted already: free it first")
        table = HierarchicalBlockTable(self.layout)
        table.pages = parent.table.pages[: self.layout.pages_for(len(parent.tokens))]
        for page in table.pages:
            self._allocator.share(page)
        self._sequences[child_id] = _Sequence(
            parent.root,
            list(parent.digests),
            parent.expected_pages,
            table,
            list(parent.tokens),
            list(parent.cached),
            parent.sharable,
            parent.last_step,
        )

    def free(self, request_id: str) -> None:
        """Let go of all that a request holds, when the steps in flight have ended. Its full pages stay cached. Unknown: no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        for page in sequence.table.pages:
            self._let_go(page, sequence)

    def begin_step(self, request_ids: Iterable[str]) -> int:
        """A step with these requests is about to run; its number. Raises MemoryStateError for an unknown request."""
        number = self._steps_begun
        for request_id in request_ids:
            self._sequence(request_id).last_step = number
        self._steps_begun += 1
        self._steps.append(_Step(number, self._residency.take_batch()))
        return number

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Transfers of the step that began last, to be executed in order before its kernels. Raises MemoryStateError without a step."""
        if not self._steps:
            raise MemoryStateError("no step is in flight: begin one before taking its transfers")
        return self._steps[-1].batch.transfers

    def end_step(self, number: int) -> None:
        """The step, and its transfers, ran. Raises MemoryStateError if it is not the oldest in flight."""
        if not self._steps or self._steps[0].number != number:
            flying = [step.number for step in self._steps]
            raise MemoryStateError(f"step {number} ended, in flight are {flying}: steps end in the order of their begin")
        step = self._steps.pop(0)
        for page in step.fenced:
            self._residency.release(page)
        self._residency.finish(step.batch)

    def table(self, request_id: str) -> HierarchicalBlockTable:
        """Where the request's tokens are. Raises MemoryStateError for an unknown request."""
        return self._sequence(request_id).table

    def written_tokens(self, request_id: str) -> int:
        """Tokens whose KV is cached or committed. Raises MemoryStateError for an unknown request."""
        return len(self._sequence(request_id).tokens)

    def shrink_host(self, pages: int) -> int:
        """Give memory of the host tier back when the host is short of it; the pages that were."""
        return self._residency.shrink_host(pages)

    def restore_host(self, pages: int) -> int:
        """Use the memory again; the pages that were."""
        return self._residency.restore_host(pages)

    def check_integrity(self) -> None:
        """Raise MemoryStateError if anything is lost, held twice or counted wrongly. To be called when idle: it looks at every page."""
        holders = [page for sequence in self._sequences.values() for page in sequence.table.pages]
        holders += [page for step in self._steps for page in step.fenced]
        self._allocator.check_integrity(holders)
        self._residency.check_integrity()
        for request_id, sequence in self._sequences.items():
            places = [page.place for page in sequence.cached]
            if places != sequence.table.pages[: len(places)] or len(sequence.tokens) > sequence.table.capacity_tokens:
                raise MemoryStateError(f"request {request_id} holds other pages than those that cache its prefix, or too few")

    def _sequence(self, request_id: str) -> _Sequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise MemoryStateError(f"request {request_id} holds no memory: admit it first") from None

    def _find(self, tokens: Sequence[int], scope: CacheScope) -> tuple[list[bytes], list[CachedPage]]:
        """Digests of all full pages, and the cached prefix that leaves a token to compute."""
        if not self._prefix_caching:
            return [], []
        root = self._cache.root(scope)
        contents = self._cache.contents(tokens)
        digests = self._cache.digests(root.digest, contents)
        usable = max(0, len(tokens) - 1) // self.layout.page_tokens
        return digests, self._cache.find(root, digests[:usable], contents[:usable])

    def _count_use(self, sequence: _Sequence) -> None:
        if sequence.first_use is None:
            return
        queried, hits, on_device = sequence.first_use
        sequence.first_use = None
        self.stats.queried_tokens += queried
        self.stats.hit_tokens += hits
        if sequence.digests:
            self._pattern.use(sequence.digests, on_device, self._clock())

    def _copy_common_blocks(self, sequence: _Sequence, rest: Sequence[int]) -> int:
        parent = sequence.cached[-1] if sequence.cached else sequence.root
        common = self._cache.common_blocks(parent, rest[: self.layout.page_tokens - 1])
        if common is None:
            return 0
        source, blocks = common
        # Held while room is made: it may itself be what is worth least.
        number = self._residency.hold(source)
        copied = self._residency.reclaim(1)
        if copied:
            last = sequence.table.pages[-1] if sequence.table.pages else None
            (target,) = self._allocator.allocate(1, after=last, expected=sequence.expected_pages - len(sequence.table.pages))
            sequence.table.pages.append(target)
            self._residency.copy(number, target, blocks * self.layout.block_tokens)
        self._residency.release(number)
        return blocks * self.layout.block_tokens if copied else 0

    def _shared_last_page(self, sequence: _Sequence) -> int | None:
        """Index of the page that is written next, if another request shares it."""
        index, offset = divmod(len(sequence.tokens), self.layout.page_tokens)
        if not offset or index >= len(sequence.table.pages):
            return None
        return index if self._allocator.references(sequence.table.pages[index]) > 1 else None

    def _register(self, sequence: _Sequence) -> None:
        first, end = len(sequence.cached), len(sequence.tokens) // self.layout.page_tokens
        if not sequence.sharable or first >= end:
            return
        size = self.layout.page_tokens
        contents = self._cache.contents(sequence.tokens[first * size : end * size])
        parent = sequence.cached[-1] if sequence.cached else sequence.root
        known = len(sequence.digests)
        if end > known:
            prefix = sequence.digests[-1] if known else sequence.root.digest
            made = self._cache.digests(prefix, contents[known - first :])
            self._pattern.extend(prefix, made, self._clock())
            sequence.digests += made
        for index, content in zip(range(first, end), contents, strict=True):
            page = self._cache.insert(parent, sequence.digests[index], content)
            if page is None:
                sequence.sharable = False
                return
            own = sequence.table.pages[index]
            if page.place is None or page.place != own or page.tier is not Tier.DEVICE:
                sequence.table.pages[index] = self._residency.adopt(page, own)
                if sequence.table.pages[index] != own:
                    self._let_go(own, sequence)
            sequence.cached.append(page)
            parent = page

    def _let_go(self, page: int, sequence: _Sequence) -> None:
        """Release a page, after the last step that may use it."""
        for step in self._steps:
            if step.number == sequence.last_step:
                step.fenced.append(page)
                return
        self._residency.release(page)
