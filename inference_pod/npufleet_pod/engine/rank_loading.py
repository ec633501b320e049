"""Gets a rank's part of a model, or all of it, onto its device, and the memory for its KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from npufleet_api.model import Dtype
from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.engine.device import Device
from npufleet_pod.engine.memory.kv_cache import PageOrder, ZeroCopyKVCache
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.collective import Collective
from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.decoder import Decoder, load_decoder
from npufleet_pod.models.sharding import shard

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


def load_part(
    config: DecoderConfig,
    path: Path,
    dtype: Dtype,
    device: Device,
    collective: Collective,
    keep_going: Callable[[], bool],
    rank: int = 0,
) -> Decoder:
    """Read the weights of `rank`, of as many as the collective has. Raises ModelError, LoadCancelledError."""
    kernels = select_kernels(device.torch_device.type)
    with open_checkpoint(path, TORCH_DTYPES[dtype], device.torch_device) as checkpoint:
        return load_decoder(config, checkpoint, kernels, keep_going, shard(config, rank, collective.size), collective)


def take_cache(decoder: Decoder, layout: CacheLayout, device: Device) -> ZeroCopyKVCache:
    """Memory for the KV of the decoder's heads. Raises EngineMemoryError."""
    config, place = decoder.config, device.torch_device
    order = PageOrder.HEAD_MAJOR if place.type == "cpu" else PageOrder.PAGE_MAJOR
    return ZeroCopyKVCache(layout, config.layers, decoder.part.kv_heads.count, config.head_size, decoder.dtype, place, order)
