"""Puts a decoder's weights into the form in which the compiled CPU kernels read them."""

from __future__ import annotations

from dataclasses import replace

import torch

from npufleet_kernels import native
from npufleet_kernels.native import PackedLinear
from npufleet_kernels.stack_cpu import CpuStack, StackLayer, StackShape
from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.dtypes import TORCH_DTYPES
from npufleet_pod.models.precision import PrecisionPlan
from npufleet_pod.models.sharding import Shard
from npufleet_pod.models.weights import DecoderWeights, GatedWeights, LayerWeights, Projection

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
"""Types that the kernels have; projections in others stay as they are, and are computed by torch."""


def pack_layer(layer: LayerWeights) -> LayerWeights:
    """The layer with its projections packed; experts stay as they are."""
    mlp = layer.mlp
    if isinstance(mlp, GatedWeights):
        mlp = GatedWeights(gate_up=pack_projection(mlp.gate_up, segments=2), down=pack_projection(mlp.down))
    return replace(layer, qkv=pack_projection(layer.qkv), output=pack_projection(layer.output), mlp=mlp)


def pack_head(weights: DecoderWeights) -> DecoderWeights:
    """The weights with the head packed; the table that it shares with the embedding is kept, since tokens are looked up there."""
    return replace(weights, head=pack_projection(weights.head))


def pack_projection(projection: Projection, segments: int = 1) -> Projection:
    """The projection packed, if the kernels have its type."""
    weight = projection.weight
    if weight.dtype not in PACKED_DTYPES:
        return projection
    packed = native.pack(weight, projection.scale, projection.bias, segments)
    return replace(projection, weight=weight.new_empty((0, weight.shape[1])), packed=packed)


def stack_of(config: DecoderConfig, weights: DecoderWeights, part: Shard, precision: PrecisionPlan) -> CpuStack | None:
    """All layers as one operation; None where some are mixtures of experts, or computed in several types or in one that it has not."""
    layers = [stack_layer(layer) for layer in weights.layers]
    computed = {role.compute for layer in precision.layers for role in (layer.attention, layer.feed_forward)}
    if computed != {precision.dtype} or TORCH_DTYPES[precision.dtype] not in PACKED_DTYPES:
        return None
    if any(layer is None for layer in layers):
        return None
    shape = StackShape(
        hidden=config.hidden_size,
        heads=part.heads.count,
        kv_heads=part.kv_heads.count,
        head_size=config.head_size,
        intermediate=part.intermediate.count,
        epsilon=config.norm_epsilon,
        narrow=TORCH_DTYPES[precision.dtype] is torch.bfloat16,
    )
    return CpuStack(shape, [layer for layer in layers if layer is not None], weights.norm)


def stack_layer(layer: LayerWeights) -> StackLayer | None:
    """A layer as the stack takes it, if all of it is packed and nothing changes its type on the way out."""
    if not isinstance(layer.mlp, GatedWeights):
        return None
    projections = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    packed: list[PackedLinear] = [one.packed for one in projections if one.packed is not None and one.result is None]
    if len(packed) < len(projections):
        return None
    qkv, output, gate_up, down = packed
    return StackLayer(layer.input_norm, qkv, layer.query_norm, layer.key_norm, output, layer.mlp_norm, gate_up, down)
