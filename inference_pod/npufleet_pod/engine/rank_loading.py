"""Gets a rank's part of a model, or all of it, onto its device, and the memory for its KV."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from npufleet_kernels.dispatch import select_kernels
from npufleet_kernels.errors import KernelError
from npufleet_pod.engine.device import Device
from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.memory.kv_parts import PageOrder
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.errors import DeviceError
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.collective import Collective
from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.decoder import Decoder, load_decoder
from npufleet_pod.models.dtypes import TORCH_DTYPES
from npufleet_pod.models.precision import PrecisionPlan
from npufleet_pod.models.sharding import shard


def load_part(
    config: DecoderConfig,
    path: Path,
    precision: PrecisionPlan,
    device: Device,
    collective: Collective,
    keep_going: Callable[[], bool],
    rank: int = 0,
) -> Decoder:
    """Read the weights of `rank`, of as many as the collective has. precision: the whole model's. Raises ModelError, LoadCancelledError."""
    try:
        kernels = select_kernels(device.torch_device.type)
    except KernelError as error:
        raise DeviceError(str(error)) from error
    with open_checkpoint(path, TORCH_DTYPES[precision.dtype], device.torch_device) as checkpoint:
        part = shard(config, rank, collective.size)
        return load_decoder(config, checkpoint, kernels, keep_going, part, collective, precision, packed=True)


def take_cache(decoder: Decoder, layout: CacheLayout, device: Device) -> ZeroCopyKVCache:
    """Memory for the KV of the decoder's heads. Raises EngineMemoryError."""
    config, precision, place = decoder.config, decoder.precision, device.torch_device
    return ZeroCopyKVCache(
        layout,
        config.layers,
        decoder.part.kv_heads.count,
        config.head_size,
        TORCH_DTYPES[precision.kv_dtype],
        place,
        PageOrder.HEAD_MAJOR if place.type == "cpu" else PageOrder.PAGE_MAJOR,
        int8_heads=[len(heads) for heads in precision.int8_kv_heads],
        write_pair=partial(decoder.kernels.kv_write_pair, decoder.kernels),
        write_int8=decoder.kernels.kv_write_int8,
    )
