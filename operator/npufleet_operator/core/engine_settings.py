"""Profile and overrides resolved into the settings that an engine reads."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_api.contract import MODEL_DIR
from npufleet_api.model import AscendModelSpec, Dtype, EngineProfile, ResolvedEngine
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.settings import EngineSettings, ShutdownSettings


@dataclass(frozen=True, slots=True)
class ProfileDefaults:
    """What a profile says where the model says nothing."""

    max_num_sequences: int
    max_num_batched_tokens: int


PROFILES = {
    EngineProfile.HIGH_CONCURRENCY_CHAT: ProfileDefaults(max_num_sequences=128, max_num_batched_tokens=8192),
    EngineProfile.BATCH_DOCUMENT_PROCESSING: ProfileDefaults(max_num_sequences=32, max_num_batched_tokens=65536),
    EngineProfile.BALANCED: ProfileDefaults(max_num_sequences=64, max_num_batched_tokens=16384),
}


def engine_settings(namespace: str, name: str, spec: AscendModelSpec, pool: InferencePoolSpec) -> EngineSettings:
    """The settings file of a model's engines."""
    engine = spec.engine
    defaults = PROFILES[engine.profile]
    served = spec.model.served_name or name
    qualified = f"{namespace}/{name}"
    return EngineSettings(
        model_path=MODEL_DIR,
        served_name=served,
        aliases=[] if qualified == served else [qualified],
        device=pool.pod_template.device,
        profile=engine.profile,
        dtype=engine.dtype or Dtype.AUTO,
        max_model_length=engine.max_model_length,
        max_num_sequences=engine.max_num_sequences or defaults.max_num_sequences,
        max_num_batched_tokens=engine.max_num_batched_tokens or defaults.max_num_batched_tokens,
        max_queued_requests=engine.max_queued_requests or 256,
        tensor_parallel=spec.parallelism.tensor,
        shutdown=ShutdownSettings(drain_seconds=pool.rebalancing.drain_seconds),
    )


def resolved(settings: EngineSettings) -> ResolvedEngine:
    """What the model's status shows of its engine settings."""
    return ResolvedEngine(
        profile=settings.profile,
        device=settings.device.value,
        dtype=settings.dtype,
        max_model_length=settings.max_model_length,
        max_num_sequences=settings.max_num_sequences,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
