"""What can be read of a model before torch is imported: configuration, tokenizer, types, and whether they fit the settings."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from npufleet_api.calibration import Calibration
from npufleet_api.model import Dtype
from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.calibration import calibrated_for, check_calibration, load_calibration
from npufleet_pod.engine.resources import cpu_model
from npufleet_pod.errors import DeviceError, ModelError, SettingsError
from npufleet_pod.models.config import DecoderConfig, load_config
from npufleet_pod.models.precision import PrecisionPlan, plan_precision
from npufleet_pod.models.sharding import max_ranks
from npufleet_pod.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What can be read of a model without torch, in well under a second."""

    path: Path
    config: DecoderConfig
    tokenizer: TextTokenizer
    dtype: Dtype
    precision: PrecisionPlan
    max_model_length: int
    """What the settings ask for, else the model's own limit; memory may allow less."""
    calibration: Calibration | None = None
    """Made for this model; on an NPU, whether for this kind of device is known once it is open."""


def inspect_model(settings: EngineSettings) -> ModelFiles:
    """Check all that needs no torch, so that a mistake is told at once. Raises SettingsError, DeviceError or ModelError."""
    if settings.device is Device.NPU and importlib.util.find_spec("torch_npu") is None:
        raise DeviceError("device: NPU needs torch_npu, which is not installed: use the Ascend image, or set device CPU for development")
    path = Path(settings.model_path)
    config = load_config(path)
    ranks = settings.tensor_parallel
    if ranks > max_ranks(config):
        raise SettingsError(
            f"tensorParallel: {ranks} ranks, but a model with {config.heads} attention heads can be cut into {max_ranks(config)} at most: "
            "lower it, and parallelism.tensor of the AscendModel"
        )
    tokenizer = fitting_tokenizer(path, config.vocab_size)
    wanted = settings.max_model_length
    if wanted is not None and wanted > config.max_positions:
        raise SettingsError(
            f"maxModelLength: {wanted} is beyond the model's max_position_embeddings {config.max_positions}: lower maxModelLength"
        )
    dtype = compute_dtype(settings.dtype, config.checkpoint_dtype, settings.device)
    calibration = _calibration(settings, config, dtype)
    precision = plan_precision(settings.precision, dtype, config, None if calibration is None else calibration.int8_kv_heads)
    return ModelFiles(path, config, tokenizer, dtype, precision, wanted or config.max_positions, calibration)


def fitting_tokenizer(path: Path, vocab_size: int) -> TextTokenizer:
    """The model's tokenizer. Raises ModelError, also where it has more tokens than the model."""
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"{path}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json's vocab_size is {vocab_size}: "
            "use the tokenizer that belongs to the weights"
        )
    return tokenizer


def _calibration(settings: EngineSettings, config: DecoderConfig, dtype: Dtype) -> Calibration | None:
    if settings.calibration_path is None:
        return None
    path = Path(settings.calibration_path)
    calibration = load_calibration(path)
    device = cpu_model() if settings.device is Device.CPU else calibration.made_for.device
    check_calibration(path, calibration, calibrated_for(config, dtype, device, settings.tensor_parallel))
    return calibration


def compute_dtype(wanted: Dtype, checkpoint: Dtype, device: Device) -> Dtype:
    """Type of weights, activations and KV.

    Auto is the checkpoint's on an NPU. On a CPU it is Float32: few CPUs multiply bfloat16 faster than float32 (those with AMX or
    AVX512-BF16), and in float32 an answer does not depend on the batch it was computed in.
    """
    if wanted is not Dtype.AUTO:
        return wanted
    return Dtype.FLOAT32 if device is Device.CPU else checkpoint
