"""The decoder of the Llama family: one forward pass over the new tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from npufleet_kernels.dispatch import Kernels
from npufleet_pod.errors import LoadCancelledError
from npufleet_pod.models.checkpoint import Checkpoint
from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.rope import inverse_frequencies, rotation


class SequenceCache(Protocol):
    """Keys and values of one sequence."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values, each (n, K, D); return all of the layer's, each a (K, L, D) view."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; projections that read the same input lie end to end: Q, K, V and gate, up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; `head` is `embedding` itself where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


class Decoder:
    """A loaded model. Holds no state of any sequence."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: Kernels) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._kernels = kernels
        self._frequencies = inverse_frequencies(config, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, query_lengths: Sequence[int], caches: Sequence[SequenceCache]) -> Tensor:
        """Hidden states after the last norm, (T, hidden).

        token_ids, positions: (T,) int64, the sequences' new tokens end to end, `query_lengths[i]` of sequence i, whose
        earlier tokens are in `caches[i]`; the new ones are added there.
        """
        kernels, config = self._kernels, self.config
        hidden = torch.nn.functional.embedding(token_ids, self._weights.embedding)
        cos, sin = rotation(positions, self._frequencies, self.dtype)
        residual: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed, residual = kernels.rms_norm(hidden, layer.input_norm, config.norm_epsilon, residual)
            hidden = self._attention(index, layer, normed, cos, sin, query_lengths, caches)
            normed, residual = kernels.rms_norm(hidden, layer.mlp_norm, config.norm_epsilon, residual)
            hidden = kernels.linear(
                kernels.silu_mul(kernels.linear(normed, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
            )
        normed, _ = kernels.rms_norm(hidden, self._weights.norm, config.norm_epsilon, residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: hidden (N, hidden) to (N, vocabulary), float32."""
        return self._kernels.linear(hidden, self._weights.head).to(torch.float32)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_lengths: Sequence[int],
        caches: Sequence[SequenceCache],
    ) -> Tensor:
        config = self.config
        rows = normed.shape[0]
        heads = self._kernels.linear(normed, layer.qkv, layer.qkv_bias).view(rows, config.heads + 2 * config.kv_heads, config.head_size)
        query, key, value = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        query, key = self._kernels.rope(query, key, cos, sin)
        lengths = list(query_lengths)
        new = zip(caches, torch.split(key, lengths), torch.split(value, lengths), strict=True)
        stored = [cache.append(index, new_keys, new_values) for cache, new_keys, new_values in new]
        mixed = self._kernels.attention(
            query, [keys for keys, _ in stored], [values for _, values in stored], query_lengths, config.head_size**-0.5
        )
        return self._kernels.linear(mixed.reshape(rows, -1), layer.output, layer.output_bias)


def load_decoder(config: DecoderConfig, checkpoint: Checkpoint, kernels: Kernels, keep_going: Callable[[], bool] = lambda: True) -> Decoder:
    """Read all weights. Raises ModelError; LoadCancelledError once `keep_going` answers False, which is asked before each layer."""
    hidden = config.hidden_size
    embedding = checkpoint.tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = []
    for index in range(config.layers):
        if not keep_going():
            raise LoadCancelledError("loading was given up since the process ends")
        layers.append(_load_layer(config, checkpoint, f"model.layers.{index}"))
    tied = config.tied_embeddings
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=checkpoint.tensor("model.norm.weight", (hidden,)),
        head=embedding if tied else checkpoint.tensor("lm_head.weight", (config.vocab_size, hidden)),
    )
    return Decoder(config, weights, kernels)


def _load_layer(config: DecoderConfig, checkpoint: Checkpoint, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, keys = config.heads * config.head_size, config.kv_heads * config.head_size

    def bias(wanted: bool, *parts: tuple[str, int]) -> Tensor | None:
        return torch.cat([checkpoint.tensor(f"{prefix}.{name}.bias", (rows,)) for name, rows in parts]) if wanted else None

    def weight(columns: int, *parts: tuple[str, int]) -> Tensor:
        tensors = [checkpoint.tensor(f"{prefix}.{name}.weight", (rows, columns)) for name, rows in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    qkv = (("self_attn.q_proj", query), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))
    gate_up = (("mlp.gate_proj", inner), ("mlp.up_proj", inner))
    return LayerWeights(
        input_norm=checkpoint.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=weight(hidden, *qkv),
        qkv_bias=bias(config.qkv_bias, *qkv),
        output=weight(query, ("self_attn.o_proj", hidden)),
        output_bias=bias(config.output_bias, ("self_attn.o_proj", hidden)),
        mlp_norm=checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=weight(hidden, *gate_up),
        gate_up_bias=bias(config.mlp_bias, *gate_up),
        down=weight(inner, ("mlp.down_proj", hidden)),
        down_bias=bias(config.mlp_bias, ("mlp.down_proj", hidden)),
    )
