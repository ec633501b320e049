"""Which part of a model each tensor-parallel rank holds (Shoeybi et al. 2019, arXiv:1909.08053). Imports no torch.

Columns of the feed-forward parts and rows of the vocabulary are cut evenly. Heads are cut so that each rank's query heads are a contiguous
run whose count is a multiple of its key/value heads, as the attention kernels want them: whole groups while there are enough key/value
heads, else runs within one group, whose key/value head is then held by every rank that has a run of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_pod.errors import ModelError
from npufleet_pod.models.config import DecoderConfig

TILE = 32
"""Cuts lie on multiples of it where there are enough: elements of a block of GGUF's simple quantisations, and of a row of the NPU's
NZ tiles for INT8."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of `whole`."""

    start: int
    stop: int
    whole: int

    @property
    def count(self) -> int:
        """Elements in it."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.count == self.whole

    def times(self, size: int) -> Span:
        """The same where each element is `size` elements."""
        return Span(self.start * size, self.stop * size, self.whole * size)


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `ranks` holds; norms, routers and rotary angles are every rank's."""

    rank: int
    ranks: int
    heads: Span
    kv_heads: Span
    intermediate: Span
    expert_intermediate: Span | None
    shared_intermediate: Span | None
    vocabulary: Span
    vocabulary_sizes: tuple[int, ...]
    """Rows of the vocabulary that each rank holds."""

    @property
    def adds_bias(self) -> bool:
        """Whether this rank holds the biases of layers whose results are added up over the ranks: only one may."""
        return self.rank == 0


def max_ranks(config: DecoderConfig) -> int:
    """Ranks that the model can be cut into: each needs a query head, a column of every feed-forward part and a row of the vocabulary."""
    experts = config.experts
    inner = [config.intermediate_size]
    if experts is not None:
        inner += [size for size in (experts.intermediate_size, experts.shared_intermediate_size) if size is not None]
    return min(config.heads, config.vocab_size, *inner)


def shard(config: DecoderConfig, rank: int = 0, ranks: int = 1) -> Shard:
    """The part of `rank`. Raises ModelError for more ranks than `max_ranks`."""
    most = max_ranks(config)
    if not 1 <= ranks <= most or not 0 <= rank < ranks:
        raise ModelError(f"tensorParallel: {ranks} ranks are more than the {most} that a model of {config.heads} heads can be cut into")
    heads, kv_heads = _heads(config, rank, ranks)
    experts = config.experts
    shared = None if experts is None else experts.shared_intermediate_size
    return Shard(
        rank=rank,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=cut(config.intermediate_size, rank, ranks, TILE),
        expert_intermediate=None if experts is None else cut(experts.intermediate_size, rank, ranks, TILE),
        shared_intermediate=None if shared is None else cut(shared, rank, ranks, TILE),
        vocabulary=cut(config.vocab_size, rank, ranks, TILE),
        vocabulary_sizes=tuple(cut(config.vocab_size, other, ranks, TILE).count for other in range(ranks)),
    )


def cut(size: int, rank: int, ranks: int, tile: int = 1) -> Span:
    """Part `rank` of `ranks` of `size` elements: contiguous, as even as whole tiles allow; tiles of 1 where there are too few."""
    if -(-size // tile) < ranks:
        tile = 1
    tiles = -(-size // tile)
    share, more = divmod(tiles, ranks)
    first = rank * share + min(rank, more)
    last = first + share + (rank < more)
    return Span(min(first * tile, size), min(last * tile, size), size)


def _heads(config: DecoderConfig, rank: int, ranks: int) -> tuple[Span, Span]:
    """(query heads, key/value heads)."""
    group = config.heads // config.kv_heads
    if ranks <= config.kv_heads:
        kv_heads = cut(config.kv_heads, rank, ranks)
        return kv_heads.times(group), kv_heads
    # The ranks are shared out over the key/value heads, and each head's queries over its ranks.
    for head in range(config.kv_heads):
        own = cut(ranks, head, config.kv_heads)
        if own.start <= rank < own.stop:
            queries = cut(group, rank - own.start, own.count)
            first = head * group
            return Span(first + queries.start, first + queries.stop, config.heads), Span(head, head + 1, config.kv_heads)
    raise AssertionError(f"rank {rank} of {ranks} has no head")
