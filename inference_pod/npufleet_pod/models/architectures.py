"""How the served families differ: one row each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a family's checkpoints keep their weights. Names of a layer follow its prefix; `.weight` or `.bias` is added.

    Projections that read the same input are listed in the order in which they lie end to end; a single name is one fused tensor.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{index}"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    expert_down: str = "mlp.experts.{expert}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


HUB_NAMES = TensorNames()
GLM_NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))
CHATGLM_NAMES = TensorNames(
    embedding="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    layer="transformer.encoder.layers.{index}",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family differs from plain Llama. A bias is there, is not, or is there where the named field of the config says so."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    query_key_norm: bool = False
    """Each head of Q and K is normalised before it is rotated."""
    experts: bool = False
    shared_expert: bool = False
    rotary_interleaved: bool = False
    """Element 2i of a head pairs with 2i + 1 in the checkpoint, not with i + half."""
    names: TensorNames = HUB_NAMES
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers' configuration class assumes where config.json does not say."""


_CHATGLM = Architecture(qkv_bias="qkv_bias", rotary_interleaved=True, names=CHATGLM_NAMES)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen2MoeForCausalLM": Architecture(
        qkv_bias="qkv_bias", experts=True, shared_expert=True, defaults={"qkv_bias": True, "norm_topk_prob": False}
    ),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias", output_bias="attention_bias", query_key_norm=True, defaults={"head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": Architecture(
        qkv_bias="attention_bias", output_bias="attention_bias", query_key_norm=True, experts=True, defaults={"norm_topk_prob": False}
    ),
    "GlmForCausalLM": Architecture(
        qkv_bias="attention_bias",
        rotary_interleaved=True,
        names=GLM_NAMES,
        defaults={"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
    ),
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
}
CHATGLM_ARCHITECTURES = frozenset(name for name, architecture in ARCHITECTURES.items() if architecture is _CHATGLM)
ENCODER_ARCHITECTURES = frozenset(
    {"BertModel", "BertForMaskedLM", "BertForSequenceClassification", "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel"}
)
"""Families that `encoder.py` computes, for embeddings."""
