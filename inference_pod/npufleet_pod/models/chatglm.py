"""Reads ChatGLM's own config.json (ChatGLM2, ChatGLM3 and GLM-4 in their original layout). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_pod.errors import ModelError, describe_validation_error

Size = Annotated[int, Field(ge=1, le=1 << 24)]
ROPE_BASE = 10000.0
"""Base of the rotary frequencies in ChatGLM's modelling code; `rope_ratio` multiplies it."""
ROTARY_FRACTION = 0.5
"""ChatGLM rotates the first half of a head, in pairs that lie side by side."""


class _ChatGlmConfig(BaseModel):
    """The fields that say what is computed; those with one value exist in other values that the decoder does not compute."""

    model_config = ConfigDict(extra="ignore")

    num_layers: Annotated[int, Field(ge=1, le=1024)]
    hidden_size: Size
    ffn_hidden_size: Size
    num_attention_heads: Size
    kv_channels: Size
    multi_query_attention: bool = False
    multi_query_group_num: Size = 1
    padded_vocab_size: Size
    seq_length: Size
    layernorm_epsilon: float = 1e-5
    rope_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    add_qkv_bias: bool = False
    tie_word_embeddings: bool = False
    add_bias_linear: Literal[False] = False
    rmsnorm: Literal[True] = True
    post_layer_norm: Literal[True] = True
    apply_residual_connection_post_layernorm: Literal[False] = False


def hub_fields(document: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The same configuration in the hub's usual fields. Raises ModelError, which names `file`."""
    try:
        own = _ChatGlmConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ModelError(f"{file}: {describe_validation_error(error)}: use the config.json of ChatGLM2, ChatGLM3 or GLM-4") from error
    return {
        "hidden_size": own.hidden_size,
        "intermediate_size": own.ffn_hidden_size,
        "num_hidden_layers": own.num_layers,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.multi_query_group_num if own.multi_query_attention else own.num_attention_heads,
        "head_dim": own.kv_channels,
        "vocab_size": own.padded_vocab_size,
        "max_position_embeddings": own.seq_length,
        "rms_norm_eps": own.layernorm_epsilon,
        "rope_theta": ROPE_BASE * own.rope_ratio,
        "partial_rotary_factor": ROTARY_FRACTION,
        "tie_word_embeddings": own.tie_word_embeddings,
        "qkv_bias": own.add_qkv_bias,
        "eos_token_id": document.get("eos_token_id"),
        "dtype": document.get("dtype"),
        "torch_dtype": document.get("torch_dtype"),
    }
