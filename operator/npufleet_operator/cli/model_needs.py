"""What a model's config says of the NPUs that it needs. An estimate: the engine measures the rest when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

GIB = 1 << 30
USABLE = 0.9
"""Of a device's memory: the driver holds about 3 of 64 GB, and a step needs room of its own."""
KV_BYTES = 2
"""Of one number in a 16-bit KV cache."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One degree of tensor parallelism on one kind of device."""

    tensor: int
    device_gib: int
    fits: bool
    weights_gib: float
    """On each device."""
    kv_tokens: int
    """For which there is room beside the weights, over all devices."""


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What is known of a model without its weights."""

    architecture: str
    revision: str
    weights_bytes: int
    total_bytes: int
    context: int
    chat_template: bool
    licence: str
    kv_bytes_per_token: int
    fits: tuple[Fit, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"architecture    {self.architecture or 'not named in config.json'}",
            f"revision        {self.revision}",
            f"weights         {self.weights_bytes / GIB:.1f} GiB ({self.total_bytes / GIB:.1f} GiB to fetch)",
            f"context         {self.context or 'not named'}",
            f"KV per token    {self.kv_bytes_per_token} bytes",
            f"chat template   {'yes' if self.chat_template else 'no'}",
            f"licence file    {self.licence or 'none'}",
            "",
            "TENSOR  DEVICE  WEIGHTS/NPU  KV TOKENS",
        ]
        for fit in self.fits:
            room = str(fit.kv_tokens) if fit.fits else "does not fit"
            lines.append(f"{fit.tensor:>6}  {fit.device_gib:>3} GB  {fit.weights_gib:>7.1f} GiB  {room:>9}")
        return "\n".join(lines)


def needs(
    config: Mapping[str, Any],
    revision: str,
    weights: int,
    total: int,
    context_tokens: int,
    devices_gib: Sequence[int],
    *,
    template: bool,
    licence: str,
) -> ModelNeeds:
    """From a config.json in the hub's form. KV per token: layers × 2 × KV heads × head size × 2 bytes; heads are cut over ranks."""
    layers, heads = _number(config, "num_hidden_layers", "num_layers"), _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", "multi_query_group_num") or heads
    head = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
    per_token = layers * 2 * kv_heads * head * KV_BYTES
    fits = []
    for tensor in (1, 2, 4, 8, 16):
        if heads and heads % tensor:
            continue
        # With more ranks than KV heads each head is held more than once.
        per_rank = per_token * max(1, -(-kv_heads // tensor)) // max(1, kv_heads)
        for device in devices_gib:
            room = int(device * GIB * USABLE) - weights // tensor
            tokens = room // per_rank if per_rank and room > 0 else 0
            fits.append(Fit(tensor, device, tokens >= context_tokens, round(weights / tensor / GIB, 2), max(0, tokens)))
    names = config.get("architectures")
    return ModelNeeds(
        architecture=str(names[0])[:128] if isinstance(names, list) and names else "",
        revision=revision,
        weights_bytes=weights,
        total_bytes=total,
        context=_number(config, "max_position_embeddings", "seq_length"),
        chat_template=template,
        licence=licence,
        kv_bytes_per_token=per_token,
        fits=tuple(fits),
    )


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int) and 0 < value < 10**9), 0)
