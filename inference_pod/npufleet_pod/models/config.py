"""Parses a checkpoint's config.json into what the decoder needs. Imports no torch, so that a bad model is told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_api.model import Dtype
from npufleet_pod.errors import ModelError, describe_validation_error, one_line, shorten

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024

Size = Annotated[int, Field(ge=1, le=1 << 24)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family differs from plain Llama. None: the checkpoint's config says."""

    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(qkv_bias=None, output_bias=None, mlp_bias=None),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, output_bias=False, mlp_bias=False),
}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency-dependent RoPE scaling of Llama 3.1 (its reference code, `apply_scaling`)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with rotary positions, grouped key/value heads and a gated feed-forward layer."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    checkpoint_dtype: Dtype
    eos_token_ids: frozenset[int]

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that keys and values of all layers take for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size


class _RopeParameters(BaseModel):
    model_config = ConfigDict(extra="ignore")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    low_freq_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    high_freq_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    original_max_position_embeddings: Size | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _HubConfig(BaseModel):
    """config.json as the hub's tools write it; transformers 5 moved the RoPE fields into `rope_parameters`."""

    model_config = ConfigDict(extra="ignore")

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)] | None = None
    vocab_size: Size
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    rope_scaling: _RopeParameters | None = None
    rope_parameters: _RopeParameters | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    eos_token_id: TokenId | list[TokenId] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _GenerationConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    eos_token_id: TokenId | list[TokenId] | None = None


_DTYPES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}


def load_config(model_dir: Path) -> DecoderConfig:
    """Read config.json, and generation_config.json if there is one, of `model_dir`. Raises ModelError."""
    if not model_dir.is_dir():
        raise ModelError(f"modelPath {model_dir}: no such directory: mount the model's volume there, or correct modelPath")
    try:
        empty = not any(model_dir.iterdir())
    except OSError as error:
        raise ModelError(f"modelPath {model_dir}: {error.strerror}: give the pod's user access to the volume") from error
    if empty:
        remedy = "copy the model's files into the volume, or correct the path in model.uri"
        raise ModelError(f"modelPath {model_dir}: the directory is empty: {remedy}")
    return parse_config(read_json(model_dir / CONFIG_FILE), _generation_config(model_dir))


def parse_config(document: Mapping[str, Any], generation: _GenerationConfig | None = None) -> DecoderConfig:
    """Turn the content of config.json into a DecoderConfig. Raises ModelError."""
    name, architecture = _architecture(document)
    if document.get("quantization_config") is not None:
        method = document["quantization_config"].get("quant_method") if isinstance(document["quantization_config"], dict) else None
        raise ModelError(f"{CONFIG_FILE}: quantization_config: {shorten(method)} weights are not served: use the unquantised checkpoint")
    try:
        hub = _HubConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ModelError(f"{CONFIG_FILE}: {describe_validation_error(error)}: use the config.json that belongs to the weights") from error
    heads, kv_heads = hub.num_attention_heads, hub.num_key_value_heads or hub.num_attention_heads
    if heads % kv_heads:
        raise ModelError(f"{CONFIG_FILE}: num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}: correct one of them")
    if hub.head_dim is None and hub.hidden_size % (2 * heads):
        raise ModelError(f"{CONFIG_FILE}: num_attention_heads: {heads} heads do not split hidden_size {hub.hidden_size}: set head_dim")
    rope = hub.rope_parameters or hub.rope_scaling or _RopeParameters()
    eos = generation.eos_token_id if generation is not None and generation.eos_token_id is not None else hub.eos_token_id
    return DecoderConfig(
        architecture=name,
        layers=hub.num_hidden_layers,
        hidden_size=hub.hidden_size,
        intermediate_size=hub.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=hub.head_dim or hub.hidden_size // heads,
        vocab_size=hub.vocab_size,
        max_positions=hub.max_position_embeddings,
        norm_epsilon=hub.rms_norm_eps,
        rope_theta=rope.rope_theta or hub.rope_theta or 10000.0,
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=hub.tie_word_embeddings,
        qkv_bias=hub.attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=hub.attention_bias if architecture.output_bias is None else architecture.output_bias,
        mlp_bias=hub.mlp_bias if architecture.mlp_bias is None else architecture.mlp_bias,
        checkpoint_dtype=_dtype(hub.dtype or hub.torch_dtype),
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file. Raises ModelError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file: copy the whole model into {path.parent}, or correct modelPath") from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: give the pod's user access to the volume") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelError(f"{path}: more than {MAX_CONFIG_BYTES} bytes: this is not a model's configuration")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {one_line(str(error))}: copy the file again") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: holds {type(document).__name__}, not an object: copy the file again")
    return document


def _generation_config(model_dir: Path) -> _GenerationConfig | None:
    path = model_dir / GENERATION_CONFIG_FILE
    if not path.exists():
        return None
    try:
        return _GenerationConfig.model_validate(read_json(path))
    except ValidationError as error:
        raise ModelError(f"{path}: {describe_validation_error(error)}: copy the file again, or remove it") from error


def _architecture(document: Mapping[str, Any]) -> tuple[str, Architecture]:
    named = document.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ModelError(f"{CONFIG_FILE}: architectures: {shorten(named)} names none: use the config.json that belongs to the weights")
    known = ARCHITECTURES.get(named[0])
    if known is None:
        raise ModelError(f"{CONFIG_FILE}: architectures: {shorten(named[0])} is not served: use a model of {' or '.join(ARCHITECTURES)}")
    return named[0], known


def _rope_scaling(rope: _RopeParameters) -> Llama3Scaling | None:
    if rope.kind == "default":
        return None
    if rope.kind != "llama3":
        raise ModelError(f"{CONFIG_FILE}: rope_scaling: type {shorten(rope.kind)} is not served: use a model with llama3 scaling or none")
    values = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings)
    factor, low, high, original = values
    if factor is None or low is None or high is None or original is None:
        raise ModelError(
            f"{CONFIG_FILE}: rope_scaling: llama3 needs factor, low_freq_factor, high_freq_factor and original_max_position_embeddings: "
            "use the config.json that belongs to the weights"
        )
    if low >= high:
        raise ModelError(f"{CONFIG_FILE}: rope_scaling: low_freq_factor {low} is not below high_freq_factor {high}: correct one of them")
    return Llama3Scaling(factor, low, high, original)


def _dtype(name: str | None) -> Dtype:
    if name is None:
        return Dtype.FLOAT32
    known = _DTYPES.get(name.removeprefix("torch."))
    if known is None:
        raise ModelError(f"{CONFIG_FILE}: dtype: {shorten(name)} is not served: use a checkpoint in {', '.join(_DTYPES)}")
    return known
