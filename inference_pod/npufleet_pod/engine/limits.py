"""How much the scheduler may hold, from what memory is left once the weights are loaded. Imports no torch."""

from __future__ import annotations

import logging

from npufleet_api.pool import Device
from npufleet_api.precision import WeightDtype
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.memory.sizing import KVBudget, kv_page_count
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.engine.tiering import MIB
from npufleet_pod.errors import DeviceError
from npufleet_pod.models.precision import DTYPE_BYTES

logger = logging.getLogger(__name__)

KV_MEMORY_SHARE = 0.9
"""Share of the memory left after loading, and beyond what a step takes, that KV may have; the rest is for the allocator's slack and for
what the process takes later."""
CACHED_SHARE = 2
"""With a prefix cache, up to so many times the KV that running requests can hold is of use."""
NPU_PAGE_TOKENS = 128
"""Tokens of a page that the NPU's attention addresses (vllm-ascend's block size); a page holds whole blocks."""
MIN_MODEL_LENGTH = 16


def page_layout(settings: EngineSettings, pages: int) -> CacheLayout:
    """Blocks as the settings say, in pages as the device's kernels address them."""
    block_tokens = int(settings.block_size)
    page_tokens = NPU_PAGE_TOKENS if settings.device is Device.NPU else block_tokens
    return CacheLayout(block_tokens, page_tokens, pages)


def check_weights_fit(settings: EngineSettings, files: ModelFiles, free_bytes: int) -> None:
    """Raise DeviceError if the weights alone are larger than `free_bytes`: the kernel would kill the process while it loads them.

    Files are counted; of types that are not the checkpoint's it is not known how much smaller they will be, so the least counts.
    """
    sizes = [path.stat().st_size for pattern in ("*.safetensors", "*.gguf") for path in files.path.glob(pattern)]
    stored = DTYPE_BYTES[files.config.checkpoint_dtype]
    roles = (settings.precision.attention, settings.precision.feed_forward, settings.precision.output)
    smallest = 1 if WeightDtype.INT8 in roles else DTYPE_BYTES[files.dtype]
    scale = 1.0 if any(files.path.glob("*.gguf")) else smallest / stored
    # NPUs hold a part each, ranks on CPUs all of it together.
    memories = settings.tensor_parallel if settings.device is Device.NPU else 1
    needed = int(sum(sizes) * scale / memories)
    if needed > free_bytes:
        raise DeviceError(
            f"memory: the weights take {needed // MIB} MiB, {free_bytes // MIB} MiB are free, {-(-(needed - free_bytes) // MIB)} MiB are "
            "missing: raise the memory limit, or serve a smaller model or type"
        )


def largest_step(settings: EngineSettings, files: ModelFiles) -> int:
    """Most tokens that one step can compute."""
    return min(settings.max_num_batched_tokens, settings.max_num_sequences * files.max_model_length)


def memory_limits(
    settings: EngineSettings, files: ModelFiles, free_bytes: int, token_bytes: int | None = None, *, step_bytes: int = 0
) -> SchedulerLimits:
    """Bounds of the scheduler where `free_bytes` are left after loading, of which the largest step takes `step_bytes`.

    token_bytes: KV of a token that is to lie there, of all tensor-parallel ranks that share it; None: the whole model's.
    Raises DeviceError if the length that was asked for does not fit, or no KV at all.
    """
    layout = page_layout(settings, 1)
    page_tokens = layout.page_tokens
    token_bytes = token_bytes or files.precision.kv_bytes_per_token(files.config.kv_heads, files.config.head_size)
    if settings.device is Device.CPU:
        free_bytes = max(0, free_bytes - settings.host_cache_mi * MIB)
    useful = settings.max_num_sequences * -(-files.max_model_length // page_tokens) * (CACHED_SHARE if settings.prefix_cache else 1)
    budget = KVBudget(free_bytes, step_bytes, KV_MEMORY_SHARE, gathered_share=1 / files.config.layers)
    pages = kv_page_count(budget, token_bytes * page_tokens, useful_pages=useful, min_pages=0)
    held = pages * page_tokens
    wanted = settings.max_model_length or min(MIN_MODEL_LENGTH, files.max_model_length)
    if held < wanted:
        field, remedy = ("maxModelLength", "maxModelLength or ") if settings.max_model_length else ("memory", "")
        missing = budget.bytes_for(-(-wanted // page_tokens) * page_tokens * token_bytes) - free_bytes
        raise DeviceError(
            f"{field}: {wanted} tokens of KV do not fit the "
            f"{free_bytes // MIB} MiB that are left, of which a step of {largest_step(settings, files)} tokens takes {step_bytes // MIB}: "
            f"{-(-missing // MIB)} MiB are missing: raise the memory limit, or lower {remedy}maxNumBatchedTokens"
        )
    if held < files.max_model_length:
        logger.warning("memory holds less than the model's length", extra={"model_length": files.max_model_length, "kv_tokens": held})
    return SchedulerLimits(
        max_num_sequences=settings.max_num_sequences,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_model_length=min(files.max_model_length, held),
        kv_blocks=pages * layout.blocks_per_page,
        kv_block_tokens=layout.block_tokens,
        kv_page_blocks=layout.blocks_per_page,
    )
