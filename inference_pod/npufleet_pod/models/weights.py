"""Reads a decoder's weights from an open checkpoint, whatever the family calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npufleet_pod.errors import LoadCancelledError
from npufleet_pod.models.architectures import TensorNames
from npufleet_pod.models.checkpoint import TensorSource
from npufleet_pod.models.config import DecoderConfig, ExpertsConfig


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


def load_weights(config: DecoderConfig, source: TensorSource, keep_going: Callable[[], bool]) -> DecoderWeights:
    """Read all weights. Raises ModelError; LoadCancelledError once `keep_going` answers False, which is asked before each layer."""
    names = config.family.names
    table = (config.vocab_size, config.hidden_size)
    embedding = source.tensor(f"{names.embedding}.weight", table)
    layers = []
    for index in range(config.layers):
        if not keep_going():
            raise LoadCancelledError("loading was given up since the process ends")
        layers.append(_Layer(config, names, source, index).load())
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=source.tensor(f"{names.norm}.weight", (config.hidden_size,)),
        head=Projection(embedding if config.tied_embeddings else source.tensor(f"{names.head}.weight", table)),
    )


class _Layer:
    """Reads one layer."""

    def __init__(self, config: DecoderConfig, names: TensorNames, source: TensorSource, index: int) -> None:
        self._config = config
        self._names = names
        self._source = source
        self._index = index
        self._prefix = names.layer.format(index=index)

    def load(self) -> LayerWeights:
        config, names = self._config, self._names
        queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        qkv = self._projection(names.qkv, (queries, keys, keys), config.hidden_size, config.qkv_bias)
        if config.family.rotary_interleaved:
            rows = _half_split_rows(config).to(qkv.weight.device)
            qkv = Projection(qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])
        norms = config.family.query_key_norm
        return LayerWeights(
            input_norm=self._vector(names.input_norm, config.hidden_size),
            qkv=qkv,
            query_norm=self._vector(names.query_norm, config.head_size) if norms else None,
            key_norm=self._vector(names.key_norm, config.head_size) if norms else None,
            output=self._projection((names.output,), (config.hidden_size,), queries, config.output_bias),
            mlp_norm=self._vector(names.mlp_norm, config.hidden_size),
            mlp=self._mlp(),
        )

    def _mlp(self) -> GatedWeights | ExpertWeights:
        config, names = self._config, self._names
        if config.experts is not None and self._index in config.experts.layers:
            return self._experts(config.experts)
        return self._gated(names.gate_up, names.down, config.intermediate_size, config.mlp_bias)

    def _gated(self, gate_up: Sequence[str], down: str, inner: int, bias: bool) -> GatedWeights:
        hidden = self._config.hidden_size
        return GatedWeights(
            gate_up=self._projection(gate_up, (inner, inner), hidden, bias),
            down=self._projection((down,), (hidden,), inner, bias),
        )

    def _experts(self, experts: ExpertsConfig) -> ExpertWeights:
        names, hidden, inner = self._names, self._config.hidden_size, experts.intermediate_size
        router = self._projection((names.router,), (experts.count,), hidden)
        # Every expert goes straight to its place: joining them at the end would take their memory twice.
        gate_up = router.weight.new_empty((experts.count, 2 * inner, hidden))
        down = router.weight.new_empty((experts.count, hidden, inner))
        for expert in range(experts.count):
            gate_up[expert] = self._weight([name.format(expert=expert) for name in names.expert_gate_up], (inner, inner), hidden)
            down[expert] = self._weight((names.expert_down.format(expert=expert),), (hidden,), inner)
        shared = experts.shared_intermediate_size
        return ExpertWeights(
            router=router,
            gate_up=gate_up,
            down=down,
            shared=None if shared is None else self._gated(names.shared_gate_up, names.shared_down, shared, False),
            shared_gate=None if shared is None else self._projection((names.shared_gate,), (1,), hidden),
        )

    def _projection(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool = False) -> Projection:
        return Projection(self._weight(names, rows, columns), self._bias(names, rows) if bias else None)

    def _weight(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        """Projections end to end, (sum of rows, columns), from one tensor each or from one for all."""
        if len(names) == 1:
            return self._tensor(f"{names[0]}.weight", (sum(rows), columns))
        return torch.cat([self._tensor(f"{name}.weight", (count, columns)) for name, count in zip(names, rows, strict=True)])

    def _bias(self, names: Sequence[str], rows: Sequence[int]) -> Tensor:
        if len(names) == 1:
            return self._tensor(f"{names[0]}.bias", (sum(rows),))
        return torch.cat([self._tensor(f"{name}.bias", (count,)) for name, count in zip(names, rows, strict=True)])

    def _vector(self, name: str, size: int) -> Tensor:
        return self._tensor(f"{name}.weight", (size,))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.tensor(f"{self._prefix}.{name}", shape)


def _half_split_rows(config: DecoderConfig) -> Tensor:
    """Row order of a fused QKV, int64, that turns pairs that lie side by side into pairs half a rotation apart.

    Scores are products of Q and K over a head's elements, whose order does not matter as long as both have the same; V stays.
    """
    within = torch.arange(config.head_size)
    turned = config.rotary_size
    within[:turned] = torch.cat((torch.arange(0, turned, 2), torch.arange(1, turned, 2)))
    rotated_heads = config.heads + config.kv_heads
    heads = torch.arange(rotated_heads).unsqueeze(1) * config.head_size + within
    values = torch.arange(rotated_heads * config.head_size, (rotated_heads + config.kv_heads) * config.head_size)
    return torch.cat((heads.flatten(), values))
