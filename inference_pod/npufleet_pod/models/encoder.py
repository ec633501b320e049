"""BERT-type encoders: hidden states of many sequences in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npufleet_kernels.dispatch import Kernels
from npufleet_pod.errors import ContextLengthError
from npufleet_pod.models.checkpoint import Checkpoint
from npufleet_pod.models.encoder_config import EncoderConfig

PREFIXES = ("", "bert.", "roberta.")
"""Models with a head keep their encoder under a name of its own."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias of a layer normalisation."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Projection:
    """Weight (out, in) and bias (out,)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Weights of one layer; Q, K and V lie end to end."""

    qkv: Projection
    output: Projection
    attention_norm: Norm
    up: Projection
    down: Projection
    mlp_norm: Norm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights up to the last hidden states; poolers and heads are left in the checkpoint."""

    words: Tensor
    positions: Tensor
    token_types: Tensor
    norm: Norm
    layers: tuple[EncoderLayer, ...]


class Encoder:
    """A loaded encoder. Holds no state of any sequence."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights, kernels: Kernels) -> None:
        self.config = config
        self.device = weights.words.device
        self.dtype = weights.words.dtype
        self._weights = weights
        self._kernels = kernels

    def forward(self, token_ids: Tensor, lengths: Sequence[int], token_types: Tensor | None = None) -> Tensor:
        """Hidden states of the last layer, (T, hidden).

        token_ids: (T,) int64, whole sequences without padding, end to end, `lengths[i]` tokens of sequence i. token_types: (T,) int64,
        None: all 0. Raises ContextLengthError for a sequence longer than the model's positions.
        """
        config, weights = self.config, self._weights
        longest = max(lengths, default=0)
        if longest > config.max_positions:
            raise ContextLengthError(f"{longest} tokens are more than the model's {config.max_positions}: shorten the text", "input")
        rows = torch.cat([torch.arange(length, device=self.device) for length in lengths]) + config.first_position
        types = torch.zeros_like(token_ids) if token_types is None else token_types
        embedded = weights.words[token_ids] + weights.token_types[types] + weights.positions[rows]
        hidden = self._norm(embedded, weights.norm)
        for layer in weights.layers:
            hidden = self._norm(self._attention(layer, hidden, lengths), layer.attention_norm, hidden)
            inner = self._kernels.gelu(self._project(hidden, layer.up), config.cubic_gelu)
            hidden = self._norm(self._project(inner, layer.down), layer.mlp_norm, hidden)
        return hidden

    def _attention(self, layer: EncoderLayer, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        config = self.config
        size = config.hidden_size // config.heads
        heads = self._project(hidden, layer.qkv).view(hidden.shape[0], 3, config.heads, size)
        query, key, value = heads.unbind(1)
        keys = [part.transpose(0, 1) for part in torch.split(key, list(lengths))]
        values = [part.transpose(0, 1) for part in torch.split(value, list(lengths))]
        mixed = self._kernels.attention_blocked(query.contiguous(), keys, values, lengths, size**-0.5, causal=False)
        return self._project(mixed.reshape(hidden.shape[0], -1), layer.output)

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        return self._kernels.linear(x, projection.weight, projection.bias)

    def _norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return self._kernels.layer_norm(x, norm.weight, norm.bias, self.config.norm_epsilon, residual)


def load_encoder(config: EncoderConfig, checkpoint: Checkpoint, kernels: Kernels) -> Encoder:
    """Read all weights from an open safetensors checkpoint. Raises ModelError."""
    return Encoder(config, _Reader(config, checkpoint).weights(), kernels)


class _Reader:
    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._prefix = next((prefix for prefix in PREFIXES if f"{prefix}embeddings.word_embeddings.weight" in checkpoint), "")

    def weights(self) -> EncoderWeights:
        config = self._config
        return EncoderWeights(
            words=self._tensor("embeddings.word_embeddings.weight", (config.vocab_size, config.hidden_size)),
            positions=self._tensor("embeddings.position_embeddings.weight", (config.positions, config.hidden_size)),
            token_types=self._tensor("embeddings.token_type_embeddings.weight", (config.token_types, config.hidden_size)),
            norm=self._norm("embeddings.LayerNorm"),
            layers=tuple(self._layer(f"encoder.layer.{index}") for index in range(config.layers)),
        )

    def _layer(self, name: str) -> EncoderLayer:
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        parts = [self._projection(f"{name}.attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")]
        return EncoderLayer(
            qkv=Projection(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])),
            output=self._projection(f"{name}.attention.output.dense", hidden, hidden),
            attention_norm=self._norm(f"{name}.attention.output.LayerNorm"),
            up=self._projection(f"{name}.intermediate.dense", inner, hidden),
            down=self._projection(f"{name}.output.dense", hidden, inner),
            mlp_norm=self._norm(f"{name}.output.LayerNorm"),
        )

    def _projection(self, name: str, rows: int, columns: int) -> Projection:
        return Projection(self._tensor(f"{name}.weight", (rows, columns)), self._tensor(f"{name}.bias", (rows,)))

    def _norm(self, name: str) -> Norm:
        shape = (self._config.hidden_size,)
        # Checkpoints converted from TensorFlow, the first BERTs among them, say gamma and beta.
        weight, bias = ("gamma", "beta") if f"{self._prefix}{name}.gamma" in self._checkpoint else ("weight", "bias")
        return Norm(self._tensor(f"{name}.{weight}", shape), self._tensor(f"{name}.{bias}", shape))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.tensor(f"{self._prefix}{name}", shape)
