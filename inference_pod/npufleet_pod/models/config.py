"""Parses a checkpoint's config.json into what the decoder needs. Imports no torch, so that a bad model is told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_api.model import Dtype
from npufleet_pod.errors import ModelError, describe_validation_error, one_line, shorten
from npufleet_pod.models.architectures import ARCHITECTURES, CHATGLM_ARCHITECTURES, ENCODER_ARCHITECTURES, Architecture
from npufleet_pod.models.chatglm import hub_fields
from npufleet_pod.models.gguf_config import gguf_file, read_gguf_config
from npufleet_pod.models.rope_scaling import DynamicScaling, PairScaling, RopeParameters, RopeScaling, parse_scaling, served_positions

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024

Parsed = TypeVar("Parsed", bound=BaseModel)
Size = Annotated[int, Field(ge=1, le=1 << 24)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Feed-forward layers that are mixtures of experts."""

    count: int
    per_token: int
    intermediate_size: int
    normalise: bool
    """Whether the weights of a token's experts add up to 1."""
    shared_intermediate_size: int | None
    """Inner size of the expert that every token goes to; None: there is none."""
    layers: frozenset[int]
    """Layers with experts; the others have a plain feed-forward part."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with rotary positions, grouped key/value heads and gated feed-forward layers."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    """Tokens of a sequence, with the stretching that `rope_scaling` gives."""
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rotary_size: int
    """Elements of a head that are rotated, from the first."""
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    experts: ExpertsConfig | None
    checkpoint_dtype: Dtype
    eos_token_ids: frozenset[int]

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that keys and values of all layers take for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size

    @property
    def family(self) -> Architecture:
        """What sets the model's family apart."""
        return ARCHITECTURES[self.architecture]

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a token's keys depend on the length of its sequence, so that sequences cannot share them beyond `original_positions`."""
        return isinstance(self.rope_scaling, DynamicScaling)

    @property
    def original_positions(self) -> int:
        """Length up to which the positions are those of the model's training."""
        return self.rope_scaling.original_max_positions if isinstance(self.rope_scaling, DynamicScaling) else self.max_positions


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
    original_max_position_embeddings: Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _HubExperts(BaseModel):
    """The fields of a mixture-of-experts model."""

    model_config = ConfigDict(extra="ignore")

    num_experts: Annotated[int, Field(ge=1, le=4096)]
    num_experts_per_tok: Annotated[int, Field(ge=1, le=4096)]
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool
    decoder_sparse_step: Annotated[int, Field(ge=1, le=1024)] = 1
    mlp_only_layers: Annotated[list[int], Field(max_length=1024)] = []


class _GenerationConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    eos_token_id: TokenId | list[TokenId] | None = None


_DTYPES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}


def load_config(model_dir: Path) -> DecoderConfig:
    """Read config.json, and generation_config.json if there is one, of `model_dir`; without the first, a GGUF file's. Raises ModelError."""
    if not model_dir.is_dir():
        raise ModelError(f"modelPath {model_dir}: no such directory: mount the model's volume there, or correct modelPath")
    try:
        empty = not any(model_dir.iterdir())
    except OSError as error:
        raise ModelError(f"modelPath {model_dir}: {error.strerror}: give the pod's user access to the volume") from error
    if empty:
        remedy = "copy the model's files into the volume, or correct the path in model.uri"
        raise ModelError(f"modelPath {model_dir}: the directory is empty: {remedy}")
    generation = _generation_config(model_dir)
    gguf = gguf_file(model_dir)
    if gguf is not None and not (model_dir / CONFIG_FILE).exists():
        return parse_config(read_gguf_config(gguf), generation, gguf.name)
    return parse_config(read_json(model_dir / CONFIG_FILE), generation)


def parse_config(document: Mapping[str, Any], generation: _GenerationConfig | None = None, file: str = CONFIG_FILE) -> DecoderConfig:
    """Turn the content of config.json into a DecoderConfig. Raises ModelError, which names `file`."""
    name, family = _architecture(document, file)
    _refuse_quantised(document, file)
    if name in CHATGLM_ARCHITECTURES:
        document = hub_fields(document, file)
    fields = {**family.defaults, **{key: value for key, value in document.items() if value is not None or key not in family.defaults}}
    hub = _validate(_HubConfig, fields, file)
    heads, kv_heads = hub.num_attention_heads, hub.num_key_value_heads or hub.num_attention_heads
    if heads % kv_heads:
        raise ModelError(f"{file}: num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}: correct one of them")
    if hub.head_dim is None and hub.hidden_size % (2 * heads):
        raise ModelError(f"{file}: num_attention_heads: {heads} heads do not split hidden_size {hub.hidden_size}: set head_dim")
    head_size = hub.head_dim or hub.hidden_size // heads
    rope = hub.rope_parameters or hub.rope_scaling or RopeParameters()
    if rope.original_max_position_embeddings is None:
        rope = rope.model_copy(update={"original_max_position_embeddings": hub.original_max_position_embeddings})
    scaling = parse_scaling(rope, hub.max_position_embeddings, file)
    rotary_size = _rotary_size(head_size, rope.partial_rotary_factor or hub.partial_rotary_factor or 1.0, scaling, file)
    eos = generation.eos_token_id if generation is not None and generation.eos_token_id is not None else hub.eos_token_id
    return DecoderConfig(
        architecture=name,
        layers=hub.num_hidden_layers,
        hidden_size=hub.hidden_size,
        intermediate_size=hub.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=hub.vocab_size,
        max_positions=served_positions(scaling, hub.max_position_embeddings),
        norm_epsilon=hub.rms_norm_eps,
        rope_theta=rope.rope_theta or hub.rope_theta or 10000.0,
        rope_scaling=scaling,
        rotary_size=rotary_size,
        tied_embeddings=hub.tie_word_embeddings,
        qkv_bias=_bias(hub, family.qkv_bias),
        output_bias=_bias(hub, family.output_bias),
        mlp_bias=_bias(hub, family.mlp_bias),
        experts=_experts(_validate(_HubExperts, fields, file), hub, family, file) if family.experts else None,
        checkpoint_dtype=_dtype(hub.dtype or hub.torch_dtype, file),
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


def _validate(kind: type[Parsed], fields: Mapping[str, Any], file: str) -> Parsed:
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise ModelError(f"{file}: {describe_validation_error(error)}: use the config.json that belongs to the weights") from error


def _generation_config(model_dir: Path) -> _GenerationConfig | None:
    path = model_dir / GENERATION_CONFIG_FILE
    if not path.exists():
        return None
    try:
        return _GenerationConfig.model_validate(read_json(path))
    except ValidationError as error:
        raise ModelError(f"{path}: {describe_validation_error(error)}: copy the file again, or remove it") from error


def _architecture(document: Mapping[str, Any], file: str) -> tuple[str, Architecture]:
    named = document.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ModelError(f"{file}: architectures: {shorten(named)} names none: use the config.json that belongs to the weights")
    known = ARCHITECTURES.get(named[0])
    if known is None:
        what = "is an encoder, which writes no text" if named[0] in ENCODER_ARCHITECTURES else "is not served"
        raise ModelError(f"{file}: architectures: {shorten(named[0])} {what}: use a model of {', '.join(ARCHITECTURES)}")
    return named[0], known


def _refuse_quantised(document: Mapping[str, Any], file: str) -> None:
    quantisation = document.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise ModelError(f"{file}: quantization_config: {shorten(method)} weights are not served: use the unquantised checkpoint")


def _bias(hub: _HubConfig, source: bool | str) -> bool:
    return source if isinstance(source, bool) else bool(getattr(hub, source))


def _rotary_size(head_size: int, fraction: float, scaling: RopeScaling | None, file: str) -> int:
    size = int(head_size * fraction)
    if size < 2 or size % 2:
        raise ModelError(
            f"{file}: partial_rotary_factor: {fraction} of head size {head_size} is not an even number of elements: correct it"
        )
    if isinstance(scaling, PairScaling) and len(scaling.factors) != size // 2:
        raise ModelError(f"{file}: rope_freqs: {len(scaling.factors)} factors for {size // 2} pairs: copy the file again")
    return size


def _experts(hub: _HubExperts, whole: _HubConfig, family: Architecture, file: str) -> ExpertsConfig:
    if hub.num_experts_per_tok > hub.num_experts:
        raise ModelError(f"{file}: num_experts_per_tok: {hub.num_experts_per_tok} of {hub.num_experts} experts: correct one of them")
    if family.shared_expert and hub.shared_expert_intermediate_size is None:
        raise ModelError(f"{file}: shared_expert_intermediate_size: field is missing: use the config.json that belongs to the weights")
    layers = range(whole.num_hidden_layers)
    return ExpertsConfig(
        count=hub.num_experts,
        per_token=hub.num_experts_per_tok,
        intermediate_size=hub.moe_intermediate_size,
        normalise=hub.norm_topk_prob,
        shared_intermediate_size=hub.shared_expert_intermediate_size if family.shared_expert else None,
        layers=frozenset(i for i in layers if i not in hub.mlp_only_layers and (i + 1) % hub.decoder_sparse_step == 0),
    )


def _dtype(name: str | None, file: str) -> Dtype:
    if name is None:
        return Dtype.FLOAT32
    known = _DTYPES.get(name.removeprefix("torch."))
    if known is None:
        raise ModelError(f"{file}: dtype: {shorten(name)} is not served: use a checkpoint in {', '.join(_DTYPES)}")
    return known
