"""Parses config.json of a BERT-type encoder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_pod.errors import ModelError, describe_validation_error, shorten
from npufleet_pod.models.architectures import ENCODER_ARCHITECTURES
from npufleet_pod.models.config import CONFIG_FILE, read_json

Size = Annotated[int, Field(ge=1, le=1 << 24)]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A bidirectional transformer with learned positions, normalised after each part (Devlin et al. 2018, arXiv:1810.04805)."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    vocab_size: int
    token_types: int
    positions: int
    """Rows of the position table."""
    first_position: int
    """Row of a sequence's first token: RoBERTa keeps those up to its padding token's for padding."""
    norm_epsilon: float
    cubic_gelu: bool

    @property
    def max_positions(self) -> int:
        """Tokens of a sequence."""
        return self.positions - self.first_position

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """None: an encoder writes no text."""
        return frozenset()


class _HubEncoder(BaseModel):
    """config.json as the hub's tools write it."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)]
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    type_vocab_size: Size = 2
    max_position_embeddings: Size
    pad_token_id: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False


def load_encoder_config(model_dir: Path) -> EncoderConfig:
    """Read config.json of `model_dir`. Raises ModelError."""
    return parse_encoder_config(read_json(model_dir / CONFIG_FILE))


def parse_encoder_config(document: Mapping[str, Any]) -> EncoderConfig:
    """Turn the content of config.json into an EncoderConfig. Raises ModelError."""
    named = document.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in ENCODER_ARCHITECTURES:
        known = ", ".join(sorted(ENCODER_ARCHITECTURES))
        raise ModelError(f"{CONFIG_FILE}: architectures: {shorten(named)} is no encoder that is known: use a model of {known}")
    try:
        hub = _HubEncoder.model_validate(dict(document))
    except ValidationError as error:
        raise ModelError(f"{CONFIG_FILE}: {describe_validation_error(error)}: use the config.json that belongs to the weights") from error
    if hub.hidden_size % hub.num_attention_heads:
        raise ModelError(f"{CONFIG_FILE}: num_attention_heads: {hub.num_attention_heads} heads do not split hidden_size {hub.hidden_size}")
    first = 0 if name.startswith("Bert") else hub.pad_token_id + 1
    if first >= hub.max_position_embeddings:
        raise ModelError(f"{CONFIG_FILE}: pad_token_id: {hub.pad_token_id} leaves no position of {hub.max_position_embeddings}: correct it")
    return EncoderConfig(
        architecture=name,
        layers=hub.num_hidden_layers,
        hidden_size=hub.hidden_size,
        intermediate_size=hub.intermediate_size,
        heads=hub.num_attention_heads,
        vocab_size=hub.vocab_size,
        token_types=hub.type_vocab_size,
        positions=hub.max_position_embeddings,
        first_position=first,
        norm_epsilon=hub.layer_norm_eps,
        cubic_gelu=hub.hidden_act != "gelu",
    )
