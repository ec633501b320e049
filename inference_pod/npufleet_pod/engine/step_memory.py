"""Measures what steps take beyond weights and KV, on steps so small that starting takes no longer for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.device import Device
from npufleet_pod.engine.fusion import MAX_SCORE_BYTES, QUERY_BLOCK_TOKENS, DynamicFusionManager, score_bytes
from npufleet_pod.engine.limits import largest_step, page_layout
from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.memory.sizing import LinearBytes, StepMemory
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.rank_loading import take_cache
from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams
from npufleet_pod.engine.sampling import Sampler
from npufleet_pod.engine.step_cache import StepCache
from npufleet_pod.models.decoder import Decoder
from npufleet_pod.models.fusion_plan import AttentionStrategy, uniform_plan

logger = logging.getLogger(__name__)

TOKENS = (16, 128)
"""New tokens of the two steps that the forward pass is measured on."""
SEQUENCES = (1, 8)
"""Sequences of the two that choosing tokens is measured on."""
KEY_BLOCK_TOKENS = 1024
"""Keys whose scores blocks hold at once (`npufleet_kernels.attention`)."""
COSTLIEST = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.05, frequency_penalty=0.1, repetition_penalty=1.1)
"""Everything that a client may ask of sampling."""


def largest_step_bytes(settings: EngineSettings, files: ModelFiles, decoder: Decoder, device: Device, fusion: DynamicFusionManager) -> int:
    """What the largest step that the settings allow takes on this device, beyond weights and KV. Raises EngineMemoryError."""
    layout = page_layout(settings, 1)
    cache = take_cache(decoder, page_layout(settings, layout.pages_for(TOKENS[-1])), device)
    memory = measure_step_memory(decoder, cache, device, fusion, settings.max_num_batched_tokens, files.max_model_length)
    tokens = largest_step(settings, files)
    peak = memory.peak_bytes(tokens, settings.max_num_sequences)
    logger.info(
        "step measured",
        extra={
            "bytes": peak,
            "tokens": tokens,
            "sequences": settings.max_num_sequences,
            "bytes_per_token": round(memory.forward.each),
            "bytes_per_sequence": round(memory.sampling.each),
            "attention_bytes": memory.attention_bytes,
            "beside_bytes": memory.beside_bytes,
        },
    )
    return peak


def measure_step_memory(
    decoder: Decoder, cache: ZeroCopyKVCache, device: Device, fusion: DynamicFusionManager, max_tokens: int, max_length: int
) -> StepMemory:
    """What steps of up to `max_tokens` new tokens, of sequences of up to `max_length`, are made of.

    `cache` holds `TOKENS[-1]` tokens from slot 0 on; what it held is lost. Other ranks of the model take no part. The first step of each
    kind is done twice: once for what a device prepares.
    """
    decoder = decoder.alone()
    with torch.inference_mode():
        forward, beside_forward = _line(device, TOKENS, lambda tokens: _forward(decoder, cache, device, tokens, fusion.level))
        sampling, beside_sampling = _line(device, SEQUENCES, lambda sequences: _sample(decoder, device, sequences))
        attention = max(_attention_bytes(decoder, device, fusion, strategy, max_tokens, max_length) for strategy in AttentionStrategy)
    return StepMemory(
        forward, attention, sampling, decoder.config.hidden_size * decoder.dtype.itemsize, max(beside_forward, beside_sampling)
    )


def _line(device: Device, numbers: tuple[int, int], work: Callable[[int], object]) -> tuple[LinearBytes, int]:
    """Memory through torch by number, and what the larger work took beside it."""
    small, large = numbers
    work(small)
    less, more = device.measure_peak(lambda: work(small)), device.measure_peak(lambda: work(large))
    return LinearBytes.through((small, less.allocated_bytes), (large, more.allocated_bytes)), more.beside_bytes


def _forward(decoder: Decoder, cache: ZeroCopyKVCache, device: Device, tokens: int, level: int) -> Tensor:
    place = device.torch_device
    positions = torch.arange(tokens, device=place)
    step = StepCache(cache, [slice(0, tokens)], positions)
    lengths = torch.full_like(positions, tokens)
    return decoder.forward(torch.zeros_like(positions), positions, [tokens], step, lengths, uniform_plan(1, level=level))


def _sample(decoder: Decoder, device: Device, sequences: int) -> None:
    sampler = Sampler(decoder.config.vocab_size)
    names = [str(index) for index in range(sequences)]
    for name in names:
        sampler.add(GenerationRequest(name, (0,), StopParams(max_tokens=1), COSTLIEST, logprobs=1), 0, ())
    hidden = torch.zeros((sequences, decoder.config.hidden_size), dtype=decoder.dtype, device=device.torch_device)
    logits = decoder.logits(hidden)
    missing = decoder.config.vocab_size - logits.shape[1]
    # What the other ranks would have given.
    sampler.sample(names, torch.nn.functional.pad(logits, (0, missing)) if missing else logits)


def _attention_bytes(
    decoder: Decoder, device: Device, fusion: DynamicFusionManager, strategy: AttentionStrategy, max_tokens: int, max_length: int
) -> int:
    """Scratch of one layer's attention at the greatest length that the strategy is used for."""
    part, size = decoder.part, decoder.config.head_size
    new_tokens, length = greatest_attention(fusion, part.heads.count, strategy, max_tokens, max_length)
    dtype, place = decoder.attention_dtype, device.torch_device
    query = torch.zeros((new_tokens, part.heads.count, size), dtype=dtype, device=place)
    keys = torch.zeros((part.kv_heads.count, length, size), dtype=dtype, device=place)
    attend = decoder.attention(strategy)
    return device.measure_peak(lambda: attend(query, [keys], [keys], [new_tokens], size**-0.5)).allocated_bytes


def greatest_attention(
    fusion: DynamicFusionManager, heads: int, strategy: AttentionStrategy, max_tokens: int, max_length: int
) -> tuple[int, int]:
    """New tokens and length for which a strategy takes the most scratch; two phases and blocks take no more for more new tokens."""
    if strategy is AttentionStrategy.BLOCKED:
        return min(TOKENS[-1], max_tokens, max_length), min(KEY_BLOCK_TOKENS, max_length)
    if strategy is AttentionStrategy.FULL:
        length = min(fusion.thresholds.full_tokens, max_length)
        new_tokens = min(length, max_tokens)
    else:
        length = min(fusion.thresholds.two_phase_tokens, max_length)
        new_tokens = min(QUERY_BLOCK_TOKENS, length, max_tokens)
    allowed = MAX_SCORE_BYTES // score_bytes(strategy, heads, 1, length)
    return max(1, min(new_tokens, allowed)), length
