"""Reads a decoder's weights, or a rank's part of them, from an open checkpoint, whatever the family calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from npufleet_api.model import Dtype
from npufleet_api.precision import WeightDtype
from npufleet_kernels import int8
from npufleet_kernels.native import PackedLinear
from npufleet_pod.errors import LoadCancelledError
from npufleet_pod.models.architectures import TensorNames
from npufleet_pod.models.checkpoint import TensorSource
from npufleet_pod.models.config import DecoderConfig, ExpertsConfig
from npufleet_pod.models.dtypes import TORCH_DTYPES, dtype_of
from npufleet_pod.models.precision import PrecisionPlan, RolePrecision
from npufleet_pod.models.sharding import Shard, Span

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
"""See `int8.quantise`."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: weight (out, in), and bias (out,) or None.

    scale: (out,) float32, where the weight is INT8. A stack of layers has one more dimension, the first, in each. result: the type that
    outputs are to have where they leave a role that is computed in another one; None: that of the computation. packed: the same layer as
    the device's kernels read it, in whose place `weight` has no rows.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    result: torch.dtype | None = None
    packed: PackedLinear | None = None

    def rows(self, order: Tensor) -> Projection:
        """With its outputs in another order."""
        bias, scale = (None if part is None else part[order] for part in (self.bias, self.scale))
        return replace(self, weight=self.weight[order], bias=bias, scale=scale)

    def columns(self, order: Tensor) -> Projection:
        """For inputs in another order."""
        return replace(self, weight=self.weight[:, order])


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A gated feed-forward part; gate and up lie end to end."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A mixture of experts, as two stacks: gate_up (E, 2 · intermediate, hidden), down (E, hidden, intermediate)."""

    router: Projection
    gate_up: Projection
    down: Projection
    shared: GatedWeights | None
    shared_gate: Projection | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; Q, K and V lie end to end. KV heads that are cached as INT8 come after the others, with their queries."""

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    mlp: GatedWeights | ExpertWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; the head's are the embedding itself where they are tied and one table serves both."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection


def load_weights(
    config: DecoderConfig,
    source: TensorSource,
    keep_going: Callable[[], bool],
    part: Shard,
    plan: PrecisionPlan,
    finish: Callable[[LayerWeights], LayerWeights] = lambda layer: layer,
    quantise: Quantise = int8.quantise,
) -> DecoderWeights:
    """Read `part` of all weights in the types of its `plan`, rounding or quantising each projection as it comes.

    finish: what is done with each layer before the next is read. quantise: makes INT8 values and scales of a weight (out, in) float32.

    Raises ModelError; LoadCancelledError once `keep_going` answers False, asked before each layer.
    """
    names = config.family.names
    embedding, head = _embedding_and_head(config, names, source, part, plan, quantise)
    layers = []
    for index in range(config.layers):
        if not keep_going():
            raise LoadCancelledError("loading was given up since the process ends")
        layers.append(finish(_Layer(config, part, names, source, index, plan, quantise).load()))
    norm = _read(source, f"{names.norm}.weight", TORCH_DTYPES[plan.dtype], _whole(config.hidden_size))
    return DecoderWeights(embedding=embedding, layers=tuple(layers), norm=norm, head=head)


def _embedding_and_head(
    config: DecoderConfig, names: TensorNames, source: TensorSource, part: Shard, plan: PrecisionPlan, quantise: Quantise
) -> tuple[Tensor, Projection]:
    """(the embedding, in the engine's type or in float32; the head)."""
    role, dtype = plan.output, TORCH_DTYPES[plan.dtype]
    head_name = names.embedding if config.tied_embeddings else names.head

    def table(name: str, wanted: torch.dtype) -> Tensor:
        return _read(source, f"{name}.weight", wanted, part.vocabulary, _whole(config.hidden_size))

    if role.int8:
        return table(names.embedding, dtype), _quantised(table(head_name, torch.float32), quantise)
    head_dtype = TORCH_DTYPES[Dtype(role.weights)]
    head = table(head_name, head_dtype)
    # A row of a float32 table that is rounded when it is looked up is the row of a rounded table: one table serves both.
    if config.tied_embeddings and head_dtype in (dtype, torch.float32):
        return head, Projection(head)
    return table(names.embedding, dtype), Projection(head)


def _whole(size: int) -> Span:
    return Span(0, size, size)


def _read(source: TensorSource, name: str, dtype: torch.dtype, *spans: Span) -> Tensor:
    """The given span of each dimension of a tensor."""
    whole = all(span.is_whole for span in spans)
    part = () if whole else tuple(slice(span.start, span.stop) for span in spans)
    return source.tensor(name, tuple(span.whole for span in spans), part, dtype=dtype)


def _quantised(weight: Tensor, quantise: Quantise) -> Projection:
    values, scale = quantise(weight)
    return Projection(values, scale=scale)


class _Layer:
    """Reads one layer."""

    def __init__(
        self,
        config: DecoderConfig,
        part: Shard,
        names: TensorNames,
        source: TensorSource,
        index: int,
        plan: PrecisionPlan,
        quantise: Quantise,
    ) -> None:
        self._config = config
        self._part = part
        self._names = names
        self._source = source
        self._index = index
        self._prefix = names.layer.format(index=index)
        self._hidden = _whole(config.hidden_size)
        self._precision = plan.layers[index]
        self._dtype = TORCH_DTYPES[plan.dtype]
        self._quantise = quantise

    def load(self) -> LayerWeights:
        config, names, role, own_int8 = self._config, self._names, self._precision.attention, self._precision.int8_kv_heads
        queries, keys = self._part.heads.times(config.head_size), self._part.kv_heads.times(config.head_size)
        qkv = self._projection(role, names.qkv, (queries, keys, keys), self._hidden, config.qkv_bias)
        output = self._summed(role, names.output, queries, config.output_bias)
        if config.family.rotary_interleaved:
            qkv = qkv.rows(_half_split_rows(config, self._part).to(qkv.weight.device))
        if own_int8 and len(own_int8) < self._part.kv_heads.count:
            rows, columns = _grouped_heads(config, self._part, own_int8)
            qkv, output = qkv.rows(rows.to(qkv.weight.device)), output.columns(columns.to(qkv.weight.device))
        norms, computed = config.family.query_key_norm, TORCH_DTYPES[role.compute]
        return LayerWeights(
            input_norm=self._vector(names.input_norm, config.hidden_size, self._dtype),
            qkv=qkv,
            query_norm=self._vector(names.query_norm, config.head_size, computed) if norms else None,
            key_norm=self._vector(names.key_norm, config.head_size, computed) if norms else None,
            output=output,
            mlp_norm=self._vector(names.mlp_norm, config.hidden_size, self._dtype),
            mlp=self._mlp(),
        )

    def _mlp(self) -> GatedWeights | ExpertWeights:
        config, names = self._config, self._names
        if config.experts is not None and self._index in config.experts.layers:
            return self._experts(config.experts)
        return self._gated(names.gate_up, names.down, self._part.intermediate, config.mlp_bias)

    def _gated(self, gate_up: Sequence[str], down: str, inner: Span, bias: bool) -> GatedWeights:
        role = self._precision.feed_forward
        return GatedWeights(
            gate_up=self._projection(role, gate_up, (inner, inner), self._hidden, bias),
            down=self._summed(role, down, inner, bias),
        )

    def _experts(self, experts: ExpertsConfig) -> ExpertWeights:
        names, part, hidden = self._names, self._part, self._hidden
        inner = part.expert_intermediate or _whole(experts.intermediate_size)
        shared = part.shared_intermediate
        # Which experts a token goes to is decided in the engine's type: routers are small, and a wrong choice costs more than rounding.
        routing = RolePrecision(WeightDtype(dtype_of(self._dtype)), dtype_of(self._dtype))
        return ExpertWeights(
            router=self._projection(routing, (names.router,), (_whole(experts.count),), hidden),
            gate_up=self._stack(experts.count, names.expert_gate_up, (inner, inner), hidden),
            down=self._stack(experts.count, (names.expert_down,), (hidden,), inner),
            shared=None if shared is None else self._gated(names.shared_gate_up, names.shared_down, shared, False),
            shared_gate=None if shared is None else self._projection(routing, (names.shared_gate,), (_whole(1),), hidden),
        )

    def _stack(self, count: int, names: Sequence[str], rows: Sequence[Span], columns: Span) -> Projection:
        """The same projection of every expert. Each goes straight to its place: joining them at the end would take their memory twice."""

        def read(expert: int) -> Projection:
            return self._projection(self._precision.feed_forward, [name.format(expert=expert) for name in names], rows, columns)

        first = read(0)
        weight = first.weight.new_empty((count, *first.weight.shape))
        scale = None if first.scale is None else first.scale.new_empty((count, *first.scale.shape))
        for expert in range(count):
            one = read(expert) if expert else first
            weight[expert] = one.weight
            if scale is not None and one.scale is not None:
                scale[expert] = one.scale
        return Projection(weight, scale=scale)

    def _summed(self, role: RolePrecision, name: str, columns: Span, bias: bool) -> Projection:
        """The last layer of a role, in the type of what layers add up. Results are added up over the ranks, of which one adds the bias."""
        projection = self._projection(role, (name,), (self._hidden,), columns, bias and self._part.adds_bias)
        return projection if TORCH_DTYPES[role.compute] is self._dtype else replace(projection, result=self._dtype)

    def _projection(self, role: RolePrecision, names: Sequence[str], rows: Sequence[Span], columns: Span, bias: bool = False) -> Projection:
        computed = TORCH_DTYPES[role.compute]
        weight = self._join("weight", torch.float32 if role.int8 else computed, names, rows, columns)
        own_bias = self._join("bias", computed, names, rows) if bias else None
        return replace(_quantised(weight, self._quantise), bias=own_bias) if role.int8 else Projection(weight, own_bias)

    def _join(self, kind: str, dtype: torch.dtype, names: Sequence[str], rows: Sequence[Span], *columns: Span) -> Tensor:
        """Spans of rows end to end, from one tensor each or from one in which their wholes lie end to end."""
        pieces = list(zip(names, rows, strict=True)) if len(names) == len(rows) else [(names[0], span) for span in _end_to_end(rows)]
        tensors = [_read(self._source, f"{self._prefix}.{name}.{kind}", dtype, span, *columns) for name, span in pieces]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return _read(self._source, f"{self._prefix}.{name}.weight", dtype, _whole(size))


def _end_to_end(spans: Sequence[Span]) -> list[Span]:
    """The same elements as spans of one tensor in which the wholes follow each other; one span where nothing is left out."""
    whole = sum(span.whole for span in spans)
    if all(span.is_whole for span in spans):
        return [_whole(whole)]
    starts = [sum(span.whole for span in spans[:index]) for index in range(len(spans))]
    return [Span(start + span.start, start + span.stop, whole) for start, span in zip(starts, spans, strict=True)]


def _half_split_rows(config: DecoderConfig, part: Shard) -> Tensor:
    """Row order of a rank's QKV, int64, that turns pairs that lie side by side into pairs half a rotation apart.

    Scores are products of Q and K over a head's elements, whose order does not matter as long as both have the same; V stays.
    """
    within = torch.arange(config.head_size)
    turned = config.rotary_size
    within[:turned] = torch.cat((torch.arange(0, turned, 2), torch.arange(1, turned, 2)))
    rotated_heads = part.heads.count + part.kv_heads.count
    heads = torch.arange(rotated_heads).unsqueeze(1) * config.head_size + within
    values = torch.arange(rotated_heads * config.head_size, (rotated_heads + part.kv_heads.count) * config.head_size)
    return torch.cat((heads.flatten(), values))


def _grouped_heads(config: DecoderConfig, part: Shard, int8_kv_heads: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows of a rank's QKV, columns of its output projection), int64: its INT8 heads, with their queries, behind the others."""
    heads, count = part.heads.count, part.kv_heads.count
    kv_heads = [*(head for head in range(count) if head not in int8_kv_heads), *int8_kv_heads]
    queries = [head * (heads // count) + query for head in kv_heads for query in range(heads // count)]
    keys, values = [heads + head for head in kv_heads], [heads + count + head for head in kv_heads]

    def elements(order: Sequence[int]) -> Tensor:
        return (torch.tensor(order).unsqueeze(1) * config.head_size + torch.arange(config.head_size)).flatten()

    return elements(queries + keys + values), elements(queries)
