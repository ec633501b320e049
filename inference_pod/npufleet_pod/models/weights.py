"""Reads a decoder's weights, or a rank's part of them, from an open checkpoint, whatever the family calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npufleet_pod.errors import LoadCancelledError
from npufleet_pod.models.architectures import TensorNames
from npufleet_pod.models.checkpoint import TensorSource
from npufleet_pod.models.config import DecoderConfig, ExpertsConfig
from npufleet_pod.models.sharding import Shard, Span


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: weight (out, in), and bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A gated feed-forward part; gate and up lie end to end."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A mixture of experts: gate_up (E, 2 · intermediate, hidden), down (E, hidden, intermediate)."""

    router: Projection
    gate_up: Tensor
    down: Tensor
    shared: GatedWeights | None
    shared_gate: Projection | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; Q, K and V lie end to end."""

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    mlp: GatedWeights | ExpertWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; the head's are the embedding itself where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection


def load_weights(config: DecoderConfig, source: TensorSource, keep_going: Callable[[], bool], part: Shard) -> DecoderWeights:
    """Read `part` of all weights. Raises ModelError; LoadCancelledError once `keep_going` answers False, asked before each layer."""
    names = config.family.names
    hidden = _whole(config.hidden_size)
    embedding = _read(source, f"{names.embedding}.weight", part.vocabulary, hidden)
    layers = []
    for index in range(config.layers):
        if not keep_going():
            raise LoadCancelledError("loading was given up since the process ends")
        layers.append(_Layer(config, part, names, source, index).load())
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=_read(source, f"{names.norm}.weight", hidden),
        head=Projection(embedding if config.tied_embeddings else _read(source, f"{names.head}.weight", part.vocabulary, hidden)),
    )


def _whole(size: int) -> Span:
    return Span(0, size, size)


def _read(source: TensorSource, name: str, *spans: Span) -> Tensor:
    """The given span of each dimension of a tensor."""
    whole = all(span.is_whole for span in spans)
    part = () if whole else tuple(slice(span.start, span.stop) for span in spans)
    return source.tensor(name, tuple(span.whole for span in spans), part)


class _Layer:
    """Reads one layer."""

    def __init__(self, config: DecoderConfig, part: Shard, names: TensorNames, source: TensorSource, index: int) -> None:
        self._config = config
        self._part = part
        self._names = names
        self._source = source
        self._index = index
        self._prefix = names.layer.format(index=index)
        self._hidden = _whole(config.hidden_size)

    def load(self) -> LayerWeights:
        config, names = self._config, self._names
        queries, keys = self._part.heads.times(config.head_size), self._part.kv_heads.times(config.head_size)
        qkv = self._projection(names.qkv, (queries, keys, keys), self._hidden, config.qkv_bias)
        if config.family.rotary_interleaved:
            rows = _half_split_rows(config, self._part).to(qkv.weight.device)
            qkv = Projection(qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])
        norms = config.family.query_key_norm
        return LayerWeights(
            input_norm=self._vector(names.input_norm, config.hidden_size),
            qkv=qkv,
            query_norm=self._vector(names.query_norm, config.head_size) if norms else None,
            key_norm=self._vector(names.key_norm, config.head_size) if norms else None,
            output=self._summed(names.output, queries, config.output_bias),
            mlp_norm=self._vector(names.mlp_norm, config.hidden_size),
            mlp=self._mlp(),
        )

    def _mlp(self) -> GatedWeights | ExpertWeights:
        config, names = self._config, self._names
        if config.experts is not None and self._index in config.experts.layers:
            return self._experts(config.experts)
        return self._gated(names.gate_up, names.down, self._part.intermediate, config.mlp_bias)

    def _gated(self, gate_up: Sequence[str], down: str, inner: Span, bias: bool) -> GatedWeights:
        return GatedWeights(
            gate_up=self._projection(gate_up, (inner, inner), self._hidden, bias),
            down=self._summed(down, inner, bias),
        )

    def _experts(self, experts: ExpertsConfig) -> ExpertWeights:
        names, part, hidden = self._names, self._part, self._hidden
        inner = part.expert_intermediate or _whole(experts.intermediate_size)
        router = self._projection((names.router,), (_whole(experts.count),), hidden)
        # Every expert goes straight to its place: joining them at the end would take their memory twice.
        gate_up = router.weight.new_empty((experts.count, 2 * inner.count, hidden.count))
        down = router.weight.new_empty((experts.count, hidden.count, inner.count))
        for expert in range(experts.count):
            gate_up[expert] = self._join("weight", [name.format(expert=expert) for name in names.expert_gate_up], (inner, inner), hidden)
            down[expert] = self._join("weight", (names.expert_down.format(expert=expert),), (hidden,), inner)
        shared = part.shared_intermediate
        return ExpertWeights(
            router=router,
            gate_up=gate_up,
            down=down,
            shared=None if shared is None else self._gated(names.shared_gate_up, names.shared_down, shared, False),
            shared_gate=None if shared is None else self._projection((names.shared_gate,), (_whole(1),), hidden),
        )

    def _summed(self, name: str, columns: Span, bias: bool) -> Projection:
        """A layer whose results are added up over the ranks, of which one adds the bias."""
        return self._projection((name,), (self._hidden,), columns, bias and self._part.adds_bias)

    def _projection(self, names: Sequence[str], rows: Sequence[Span], columns: Span, bias: bool = False) -> Projection:
        return Projection(self._join("weight", names, rows, columns), self._join("bias", names, rows) if bias else None)

    def _join(self, kind: str, names: Sequence[str], rows: Sequence[Span], *columns: Span) -> Tensor:
        """Spans of rows end to end, from one tensor each or from one in which their wholes lie end to end."""
        pieces = list(zip(names, rows, strict=True)) if len(names) == len(rows) else [(names[0], span) for span in _end_to_end(rows)]
        tensors = [_read(self._source, f"{self._prefix}.{name}.{kind}", span, *columns) for name, span in pieces]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _vector(self, name: str, size: int) -> Tensor:
        return _read(self._source, f"{self._prefix}.{name}.weight", _whole(size))


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
