"""How much the scheduler may hold, from what memory is left once the weights are loaded. Imports no torch."""

from __future__ import annotations

import logging

from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.memory.sizing import KVBudget, kv_page_count
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.engine.tiering import MIB
from npufleet_pod.errors import DeviceError

logger = logging.getLogger(__name__)

KV_MEMORY_SHARE = 0.8
"""Share of the memory left after loading that KV may take; activations and the allocator's slack take the rest."""
CACHED_SHARE = 2
"""With a prefix cache, up to so many times the KV that running requests can hold is of use."""
NPU_PAGE_TOKENS = 128
"""Tokens of a page that the NPU's attention addresses (vllm-ascend's block size); a page holds whole blocks."""
MIN_MODEL_LENGTH = 16


def memory_limits(settings: EngineSettings, files: ModelFiles, free_bytes: int, token_bytes: int | None = None) -> SchedulerLimits:
    """Bounds of the scheduler where `free_bytes` are left after loading. Raises DeviceError if the asked length does not fit.

    token_bytes: KV of a token that is to lie there, of all tensor-parallel ranks that share it; None: the whole model's.
    """
    block_tokens = int(settings.block_size)
    page_blocks = NPU_PAGE_TOKENS // block_tokens if settings.device is Device.NPU else 1
    page_tokens = block_tokens * page_blocks
    whole = files.precision.kv_bytes_per_token(files.config.kv_heads, files.config.head_size)
    page_bytes = (token_bytes or whole) * page_tokens
    if settings.device is Device.CPU:
        free_bytes = max(0, free_bytes - settings.host_cache_mi * MIB)
    useful = settings.max_num_sequences * -(-files.max_model_length // page_tokens) * (CACHED_SHARE if settings.prefix_cache else 1)
    pages = kv_page_count(KVBudget(free_bytes, 0, KV_MEMORY_SHARE), page_bytes, useful_pages=useful, min_pages=0)
    held = pages * page_tokens
    if settings.max_model_length is not None and held < settings.max_model_length:
        raise DeviceError(
            f"maxModelLength: {settings.max_model_length} tokens of KV do not fit the {free_bytes // 2**20} MiB that are left, "
            f"which hold {held}: lower maxModelLength or raise the memory limit"
        )
    if held < MIN_MODEL_LENGTH:
        raise DeviceError(f"memory: {free_bytes // 2**20} MiB are left after loading, too little for any KV: raise the memory limit")
    if held < files.max_model_length:
        logger.warning("memory holds less than the model's length", extra={"model_length": files.max_model_length, "kv_tokens": held})
    return SchedulerLimits(
        max_num_sequences=settings.max_num_sequences,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_model_length=min(files.max_model_length, held),
        kv_blocks=pages * page_blocks,
        kv_block_tokens=block_tokens,
        kv_page_blocks=page_blocks,
    )
