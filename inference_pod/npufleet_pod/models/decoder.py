"""The decoder that every served family shares: one forward pass over the new tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from npufleet_kernels.dispatch import Kernels
from npufleet_pod.models.checkpoint import TensorSource
from npufleet_pod.models.collective import Alone, Collective
from npufleet_pod.models.config import DecoderConfig, ExpertsConfig
from npufleet_pod.models.rope import RotaryEmbedding
from npufleet_pod.models.sharding import Shard, shard
from npufleet_pod.models.weights import DecoderWeights, ExpertWeights, GatedWeights, LayerWeights, Projection, load_weights


class SequenceCache(Protocol):
    """Keys and values of one sequence."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values, each (n, K, D); return all of the layer's, each a (K, L, D) view."""
        ...


class BatchCache(Protocol):
    """Keys and values of all sequences of a step."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Store a layer's new keys and values, each (T, K, D); return all of the layer's, one (K, L, D) per sequence."""
        ...


OneCache = TypeVar("OneCache", bound=SequenceCache)

ALONE = Alone()


class Decoder:
    """A loaded model, or one rank's part of it. Holds no state of any sequence.

    All ranks compute the same steps in the same order; hidden states and logits are whole, and the same, on each.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: Kernels, part: Shard, ranks: Collective) -> None:
        self.config = config
        self.part = part
        self._ranks = ranks
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._kernels = kernels
        self._rotary = RotaryEmbedding(config, self.device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        query_lengths: Sequence[int],
        caches: BatchCache | list[OneCache],
        rope_lengths: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, (T, hidden).

        token_ids, positions: (T,) int64, the sequences' new tokens end to end, `query_lengths[i]` of sequence i, whose earlier tokens
        are in `caches`, of the batch or one per sequence; the new ones are added there. rope_lengths: see `RotaryEmbedding.rotation`.
        """
        kernels, config = self._kernels, self.config
        cache = _SequenceCaches(caches, query_lengths) if isinstance(caches, list) else caches
        hidden = self._embed(token_ids)
        rotation = self._rotary.rotation(positions, self.dtype, rope_lengths)
        residual: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed, residual = kernels.rms_norm(hidden, layer.input_norm, config.norm_epsilon, residual)
            hidden = self._attention(index, layer, normed, rotation, query_lengths, cache)
            normed, residual = kernels.rms_norm(hidden, layer.mlp_norm, config.norm_epsilon, residual)
            hidden = self._mlp(layer, normed)
        normed, _ = kernels.rms_norm(hidden, self._weights.norm, config.norm_epsilon, residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: hidden (N, hidden) to (N, vocabulary), float32."""
        own = self._project(hidden, self._weights.head)
        return self._ranks.all_gather(own, self.part.vocabulary_sizes).to(torch.float32)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """(T, hidden): each rank looks up the tokens whose rows it holds."""
        rows = self.part.vocabulary
        if rows.is_whole:
            return torch.nn.functional.embedding(token_ids, self._weights.embedding)
        foreign = (token_ids < rows.start) | (token_ids >= rows.stop)
        found = torch.nn.functional.embedding((token_ids - rows.start).masked_fill_(foreign, 0), self._weights.embedding)
        return self._ranks.all_reduce(found.masked_fill_(foreign.unsqueeze(1), 0))

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        rotation: tuple[Tensor, Tensor],
        query_lengths: Sequence[int],
        cache: BatchCache,
    ) -> Tensor:
        kernels, config = self._kernels, self.config
        rows = normed.shape[0]
        queries, kv_heads = self.part.heads.count, self.part.kv_heads.count
        heads = self._project(normed, layer.qkv).view(rows, queries + 2 * kv_heads, config.head_size)
        query, key, value = torch.split(heads, [queries, kv_heads, kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm_heads(query, layer.query_norm), self._norm_heads(key, layer.key_norm)
        query, key = kernels.rope(query, key, *rotation)
        keys, values = cache.append(index, key, value)
        mixed = kernels.attention(query, keys, values, query_lengths, config.head_size**-0.5)
        return self._ranks.all_reduce(self._project(mixed.reshape(rows, -1), layer.output))

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        return self._kernels.linear(x, projection.weight, projection.bias)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        normed, _ = self._kernels.rms_norm(heads.reshape(-1, heads.shape[-1]), weight, self.config.norm_epsilon)
        return normed.view(heads.shape)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if isinstance(layer.mlp, GatedWeights):
            return self._ranks.all_reduce(self._gated(layer.mlp, x))
        assert self.config.experts is not None  # noqa: S101 - weights of experts are read only where the config has them
        return self._ranks.all_reduce(self._experts(self.config.experts, layer.mlp, x))

    def _gated(self, weights: GatedWeights, x: Tensor) -> Tensor:
        return self._project(self._kernels.silu_mul(self._project(x, weights.gate_up)), weights.down)

    def _experts(self, config: ExpertsConfig, weights: ExpertWeights, x: Tensor) -> Tensor:
        kernels = self._kernels
        shares, experts = kernels.moe_route(self._project(x, weights.router), config.per_token, config.normalise)
        mixed = kernels.moe_experts(x, shares, experts, weights.gate_up, weights.down)
        if weights.shared is None or weights.shared_gate is None:
            return mixed
        return mixed + torch.sigmoid(self._project(x, weights.shared_gate)) * self._gated(weights.shared, x)


class _SequenceCaches:
    """One cache per sequence as one of the batch."""

    def __init__(self, caches: Sequence[SequenceCache], query_lengths: Sequence[int]) -> None:
        self._caches = caches
        self._lengths = list(query_lengths)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        new = zip(self._caches, torch.split(keys, self._lengths), torch.split(values, self._lengths), strict=True)
        stored = [cache.append(layer, new_keys, new_values) for cache, new_keys, new_values in new]
        return [keys for keys, _ in stored], [values for _, values in stored]


def load_decoder(
    config: DecoderConfig,
    source: TensorSource,
    kernels: Kernels,
    keep_going: Callable[[], bool] = lambda: True,
    part: Shard | None = None,
    ranks: Collective = ALONE,
) -> Decoder:
    """Read all weights, or those of `part`, whose rank computes with the others through `ranks`.

    Raises ModelError; LoadCancelledError once `keep_going` answers False, which is asked before each layer.
    """
    own = part or shard(config)
    return Decoder(config, load_weights(config, source, keep_going, own), kernels, own, ranks)
