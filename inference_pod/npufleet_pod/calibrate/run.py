"""Measures what settings name, from the attention of one layer to whole steps. torch is imported only while it runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from npufleet_api.calibration import AttentionPoint, BatchCalibration, BatchPoint, Calibration, FusionCalibration, Int8KvHeads
from npufleet_api.settings import EngineSettings
from npufleet_pod.calibrate.choice import choose_batch, choose_thresholds
from npufleet_pod.calibrate.output import Output
from npufleet_pod.calibration import calibrated_for
from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.fusion import DynamicFusionManager, FusionThresholds
from npufleet_pod.engine.limits import KV_MEMORY_SHARE, check_weights_fit, page_layout
from npufleet_pod.engine.memory.errors import EngineMemoryError
from npufleet_pod.engine.model_files import ModelFiles, inspect_model
from npufleet_pod.errors import DeviceError

if TYPE_CHECKING:
    from npufleet_pod.engine.device import Device
    from npufleet_pod.models.decoder import Decoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured. Lengths and sizes beyond the model's length or the memory are left out."""

    lengths: tuple[int, ...] = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
    chunk_tokens: int = 2048
    """Most new tokens of a prompt in one call."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    context_tokens: int = 256
    repeats: int = 7


QUICK = Effort(
    lengths=(64, 256, 512, 1024, 2048), chunk_tokens=512, batch_sizes=(1, 8, 32, 64, 96, 128, 192, 256), context_tokens=64, repeats=3
)


@dataclass(frozen=True, slots=True)
class Int8KvRequest:
    """That KV heads are to be chosen too. text: a file to measure them on; None: the model's own."""

    text: Path | None = None
    quick: bool = False


def calibrate(
    settings: EngineSettings, output: Path, effort: Effort, tell: Callable[[str], None], int8_kv: Int8KvRequest | None = None
) -> Calibration:
    """Measure, choose, and write `output`. tell: gets a line for people at every step. int8_kv: None: no heads are chosen.

    Raises SettingsError, DeviceError or ModelError; then `output` is as it was.
    """
    files = inspect_model(settings)
    with contextlib.closing(Output(output)) as file:
        heads = None if int8_kv is None else _choose_heads(settings, files, int8_kv, tell)
        calibration = _measure(settings, files, effort, tell).model_copy(update={"int8_kv_heads": heads})
        file.write(calibration)
    return calibration


def _choose_heads(settings: EngineSettings, files: ModelFiles, wanted: Int8KvRequest, tell: Callable[[str], None]) -> Int8KvHeads:
    device = open_device(settings)

    from npufleet_pod.calibrate.int8_kv import choose_kv_heads

    check_weights_fit(settings.model_copy(update={"tensor_parallel": 1}), files, device.free_memory_bytes())
    return choose_kv_heads(files, device, wanted.text, wanted.quick, tell)


def _measure(settings: EngineSettings, files: ModelFiles, effort: Effort, tell: Callable[[str], None]) -> Calibration:
    device = open_device(settings)

    import torch

    from npufleet_kernels.dispatch import select_kernels
    from npufleet_pod.calibrate.attention import AttentionShape, measure_attention
    from npufleet_pod.models.checkpoint import open_checkpoint
    from npufleet_pod.models.decoder import load_decoder
    from npufleet_pod.models.dtypes import TORCH_DTYPES
    from npufleet_pod.models.sharding import shard

    tell(f"loading {files.path} on {device.kind} with {torch.get_num_threads()} threads")
    check_weights_fit(settings, files, device.free_memory_bytes())
    kernels = select_kernels(device.torch_device.type)
    part = shard(files.config, 0, settings.tensor_parallel)
    with open_checkpoint(files.path, TORCH_DTYPES[files.dtype], device.torch_device) as checkpoint:
        decoder = load_decoder(files.config, checkpoint, kernels, part=part, precision=files.precision)
    shape = AttentionShape(part.heads.count, part.kv_heads.count, files.config.head_size, TORCH_DTYPES[files.precision.kv_dtype])
    lengths = [length for length in effort.lengths if length <= files.max_model_length] or [files.max_model_length]
    chunk = min(effort.chunk_tokens, settings.max_num_batched_tokens)
    points = measure_attention(kernels, device, shape, lengths, chunk, effort.repeats, lambda point: _tell_attention(point, tell))
    thresholds = choose_thresholds(points)
    tell(f"fusion: at once up to {thresholds.full_tokens} tokens, in two phases up to {thresholds.two_phase_tokens}, beyond in blocks")
    batches = _measure_batches(settings, files, decoder, device, thresholds, effort, tell)
    best = choose_batch(batches)
    tell(f"batch: {best} sequences")
    logger.info("calibrated", extra={"thresholds": [thresholds.full_tokens, thresholds.two_phase_tokens], "max_num_sequences": best})
    return Calibration(
        made_for=calibrated_for(files.config, files.dtype, device.kind, settings.tensor_parallel),
        fusion=FusionCalibration(full_tokens=thresholds.full_tokens, two_phase_tokens=thresholds.two_phase_tokens, points=points),
        batch=BatchCalibration(max_num_sequences=best, points=batches),
    )


def _measure_batches(
    settings: EngineSettings,
    files: ModelFiles,
    decoder: Decoder,
    device: Device,
    thresholds: FusionThresholds,
    effort: Effort,
    tell: Callable[[str], None],
) -> list[BatchPoint]:
    from npufleet_pod.calibrate.batch import measure_batches
    from npufleet_pod.engine.rank_loading import take_cache

    context = min(effort.context_tokens, files.max_model_length)
    layout = page_layout(settings, 1)
    pages = layout.pages_for(context)
    token_bytes = decoder.precision.kv_bytes_per_token(decoder.part.kv_heads.count, files.config.head_size)
    room = int(device.free_memory_bytes() * KV_MEMORY_SHARE) // (token_bytes * layout.page_tokens * pages)
    sizes = [size for size in effort.batch_sizes if size <= room]
    if not sizes:
        raise DeviceError(
            f"memory: {device.free_memory_bytes() // 2**20} MiB are left after loading, too little for the KV of one sequence of "
            f"{context} tokens: raise the memory limit"
        )
    try:
        cache = take_cache(decoder, page_layout(settings, sizes[-1] * pages), device)
    except EngineMemoryError as error:
        raise DeviceError(str(error)) from error
    fusion = DynamicFusionManager(settings.fusion_level, files.config.heads, thresholds)
    return measure_batches(decoder, cache, device, fusion, sizes, context, effort.repeats, lambda point: _tell_batch(point, tell))


def _tell_attention(point: AttentionPoint, tell: Callable[[str], None]) -> None:
    what = "next token" if point.new_tokens == 1 else f"prompt of {point.new_tokens}"
    tell(f"attention: {point.tokens} tokens, {what}, {point.strategy}: {point.milliseconds:.3f} ms")


def _tell_batch(point: BatchPoint, tell: Callable[[str], None]) -> None:
    tell(f"batch: {point.sequences} sequences: {point.tokens_per_second:.1f} tokens/s")
