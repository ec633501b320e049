"""Shapes of models: what the roofline needs of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_operator.errors import InputError
from npufleet_operator.simulator.constants import BYTES_PER_PARAMETER

Size = Annotated[int, Field(ge=1, le=10**7)]


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder with gated feed-forward layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    """Whether the output layer uses the embedding's weights."""

    @property
    def step_parameters(self) -> int:
        """Parameters that every step reads and multiplies by: all but the embedding, of which a step reads single rows."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; norms and biases, well under 0.1 %, are left out."""
        return self.step_parameters + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * BYTES_PER_PARAMETER

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_PER_PARAMETER


SHAPES: Mapping[str, Shape] = {
    "chatglm3-6b": Shape(28, 4096, 32, 2, 128, 13696, 65024),
    "llama2-13b": Shape(40, 5120, 40, 40, 128, 13824, 32000),
    "llama3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "qwen-14b": Shape(40, 5120, 40, 40, 128, 13696, 152064),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-72b": Shape(80, 8192, 64, 8, 128, 29568, 152064),
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True),
}
"""From each model's config.json. Qwen-14B's intermediate_size of 27392 counts both halves of the gate."""


class _Config(BaseModel):
    """The fields of a config.json in the style of transformers that shape the decoder."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    tie_word_embeddings: bool = False


def shape_from_config(text: str, where: str) -> Shape:
    """The shape in a config.json, given as text. Raises InputError, which begins with `where`."""
    try:
        config = _Config.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(
            f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}: give the fields of the model's config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}: give the model's config.json") from error
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=config.head_dim or max(1, config.hidden_size // config.num_attention_heads),
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
    )
