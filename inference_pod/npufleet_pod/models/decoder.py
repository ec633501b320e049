"""The decoder that every served family shares: one forward pass over the new tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from npufleet_kernels import native
from npufleet_kernels.dispatch import Kernels
from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.layer_step import Attention, AttentionPart, LayerStep
from npufleet_kernels.paged import PagedStep
from npufleet_kernels.stack_cpu import CpuStack
from npufleet_pod.models.checkpoint import TensorSource
from npufleet_pod.models.collective import Alone, Collective
from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.dtypes import TORCH_DTYPES, dtype_of
from npufleet_pod.models.fusion_plan import AttentionStrategy, FusionPlan, uniform_plan
from npufleet_pod.models.packing import PACKED_DTYPES, pack_head, pack_layer, stack_of
from npufleet_pod.models.precision import PrecisionPlan, uniform_precision
from npufleet_pod.models.rope import RotaryEmbedding
from npufleet_pod.models.sharding import Shard, shard
from npufleet_pod.models.weights import DecoderWeights, Projection, load_weights


class SequenceCache(Protocol):
    """Keys and values of one sequence."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values, each (n, K, D); return all of the layer's, each a (K, L, D) view."""
        ...


class BatchCache(Protocol):
    """Keys and values of all sequences of a step."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Sequence[HeadGroup]:
        """Store a layer's new keys and values, each (T, K, D); return all of the layer's, in one or two groups of heads."""
        ...


@runtime_checkable
class PagedCache(Protocol):
    """A cache of the batch that kernels may read and write themselves."""

    def paged(self) -> PagedStep:
        """Where everything lies."""
        ...


OneCache = TypeVar("OneCache", bound=SequenceCache)

ALONE = Alone()
FUSION_LEVELS = (1, 2, 3)
STACK_LEVEL = 2
"""From this level on all layers are one operation, where there is one: half layers and whole ones would only be called more often."""


class Decoder:
    """A loaded model, or one rank's part of it. Holds no state of any sequence.

    All ranks compute the same steps in the same order; hidden states are whole, and the same, on each; logits are whole on rank 0.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        kernels: Kernels,
        part: Shard,
        ranks: Collective,
        precision: PrecisionPlan,
        stack: CpuStack | None = None,
    ) -> None:
        """precision: of `part`. stack: all layers as one operation, for steps whose cache is paged."""
        self.config = config
        self.part = part
        self.precision = precision
        self._ranks = ranks
        self.device = weights.embedding.device
        self.dtype = TORCH_DTYPES[precision.dtype]
        self.attention_dtype = TORCH_DTYPES[precision.kv_dtype]
        self._weights = weights
        self._levels = {level: kernels.at_level(level) for level in FUSION_LEVELS}
        self._strategies = {
            AttentionStrategy.FULL: kernels.attention_full,
            AttentionStrategy.TWO_PHASE: kernels.attention_two_phase,
            AttentionStrategy.BLOCKED: kernels.attention_blocked,
        }
        self._kernels = kernels
        self._stack = stack
        self._rotary = RotaryEmbedding(config, self.device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        query_lengths: Sequence[int],
        caches: BatchCache | list[OneCache],
        rope_lengths: Tensor | None = None,
        plan: FusionPlan | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, (T, hidden).

        token_ids, positions: (T,) int64, the sequences' new tokens end to end, `query_lengths[i]` of sequence i, whose earlier tokens
        are in `caches`, of the batch or one per sequence; the new ones are added there. rope_lengths: see `RotaryEmbedding.rotation`.
        plan: how to compute it, which changes no more than rounding; None: operators in pairs and attention in blocks.
        """
        plan = plan or uniform_plan(len(query_lengths))
        if self._stack is not None and plan.level >= STACK_LEVEL and isinstance(caches, PagedCache):
            rotation = self.rotation(positions, rope_lengths)
            return self._stack.forward(self._embed(token_ids), rotation, query_lengths, caches.paged())
        kernels = self._levels[plan.level]
        cache = _SequenceCaches(caches, query_lengths) if isinstance(caches, list) else caches
        hidden = self._embed(token_ids)
        step = self._layer_step(self._rotary.rotation(positions, self.attention_dtype, rope_lengths), query_lengths, plan)
        residual: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            hidden, residual = kernels.layer(kernels, hidden, residual, layer, step, partial(cache.append, index))
        normed, _ = kernels.rms_norm(hidden, self._weights.norm, self.config.norm_epsilon, residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: hidden (N, hidden) to (N, vocabulary), float32; on ranks other than 0 those of their own rows of it."""
        head, compute = self._weights.head, TORCH_DTYPES[self.precision.output.compute]
        if head.packed is not None:
            own = head.packed(hidden, torch.float32)
        elif head.scale is None and compute is torch.float32:
            own = self._kernels.linear_float32(hidden, head.weight)
        else:
            own = self._project(hidden.to(compute), head)
        return self._ranks.gather(own, self.part.vocabulary_sizes).to(torch.float32)

    @property
    def kernels(self) -> Kernels:
        """The operations that it computes with."""
        return self._kernels

    @property
    def weights(self) -> DecoderWeights:
        """What was loaded."""
        return self._weights

    def attention(self, strategy: AttentionStrategy) -> Attention:
        """The operation by which a strategy is computed."""
        return self._strategies[strategy]

    def alone(self) -> Decoder:
        """The same part of the model without its other ranks: it does the same work, and gives a share of the result."""
        return Decoder(self.config, self._weights, self._kernels, self.part, ALONE, self.precision, self._stack)

    def rotation(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin) in float32: see `RotaryEmbedding.rotation`."""
        return self._rotary.rotation(positions, torch.float32, lengths)

    @property
    def stack(self) -> CpuStack | None:
        """All layers as one operation, where there is one."""
        return self._stack

    def _embed(self, token_ids: Tensor) -> Tensor:
        """(T, hidden): each rank looks up the tokens whose rows it holds."""
        rows = self.part.vocabulary
        if rows.is_whole:
            return torch.nn.functional.embedding(token_ids, self._weights.embedding).to(self.dtype)
        foreign = (token_ids < rows.start) | (token_ids >= rows.stop)
        found = torch.nn.functional.embedding((token_ids - rows.start).masked_fill_(foreign, 0), self._weights.embedding).to(self.dtype)
        return self._ranks.all_reduce(found.masked_fill_(foreign.unsqueeze(1), 0))

    def _layer_step(self, rotation: tuple[Tensor, Tensor], query_lengths: Sequence[int], plan: FusionPlan) -> LayerStep:
        config = self.config
        return LayerStep(
            heads=self.part.heads.count,
            kv_heads=self.part.kv_heads.count,
            head_size=config.head_size,
            epsilon=config.norm_epsilon,
            rotation=rotation,
            query_lengths=query_lengths,
            parts=[AttentionPart(self._strategies[run.strategy], run.sequences) for run in plan.runs],
            project=self._project,
            mix_experts=self._mix_experts,
            add_ranks=self._ranks.all_reduce,
            experts_per_token=0 if config.experts is None else config.experts.per_token,
            normalise_experts=config.experts is not None and config.experts.normalise,
        )

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        if projection.packed is not None:
            computed = x.dtype if projection.scale is not None else projection.weight.dtype
            return projection.packed(x.to(computed), projection.result or computed)
        if projection.scale is not None:
            output = self._kernels.linear_int8(x, projection.weight, projection.scale, projection.bias)
        else:
            output = self._kernels.linear(x.to(projection.weight.dtype), projection.weight, projection.bias)
        return output if projection.result is None else output.to(projection.result)

    def _mix_experts(self, x: Tensor, shares: Tensor, experts: Tensor, gate_up: Projection, down: Projection) -> Tensor:
        if gate_up.scale is not None and down.scale is not None:
            return self._kernels.moe_experts_int8(x, shares, experts, gate_up.weight, gate_up.scale, down.weight, down.scale)
        dtype = gate_up.weight.dtype
        return self._kernels.moe_experts(x.to(dtype), shares.to(dtype), experts, gate_up.weight, down.weight).to(x.dtype)


class _SequenceCaches:
    """One cache per sequence as one of the batch."""

    def __init__(self, caches: Sequence[SequenceCache], query_lengths: Sequence[int]) -> None:
        self._caches = caches
        self._lengths = list(query_lengths)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[HeadGroup]:
        new = zip(self._caches, torch.split(keys, self._lengths), torch.split(values, self._lengths), strict=True)
        stored = [cache.append(layer, new_keys, new_values) for cache, new_keys, new_values in new]
        return (HeadGroup(keys.shape[1], [keys for keys, _ in stored], [values for _, values in stored]),)


def load_decoder(
    config: DecoderConfig,
    source: TensorSource,
    kernels: Kernels,
    keep_going: Callable[[], bool] = lambda: True,
    part: Shard | None = None,
    ranks: Collective = ALONE,
    precision: PrecisionPlan | None = None,
    packed: bool = False,
) -> Decoder:
    """Read all weights, or those of `part`, whose rank computes with the others through `ranks`, in the types of `precision`.

    precision: of the whole model; None: everything in the source's type. packed: put the weights into the form that the kernels read
    fastest, if they have one, in which nothing else can read them.

    Raises ModelError; LoadCancelledError once `keep_going` answers False, which is asked before each layer.
    """
    own = part or shard(config)
    whole = precision or uniform_precision(dtype_of(source.dtype), config)
    types = whole.for_heads(range(own.kv_heads.start, own.kv_heads.stop))
    # What the packed layers are multiplied with, and give, is of the engine's type.
    if not (packed and kernels.packs_weights and TORCH_DTYPES[types.dtype] in PACKED_DTYPES):
        return Decoder(config, load_weights(config, source, keep_going, own, types), kernels, own, ranks, types)
    weights = pack_head(load_weights(config, source, keep_going, own, types, pack_layer, native.quantise))
    # Between a layer's halves ranks exchange, which one call of all layers cannot.
    stack = stack_of(config, weights, own, types) if ranks.size == 1 else None
    return Decoder(config, weights, kernels, own, ranks, types, stack)
