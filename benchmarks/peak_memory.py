"""Peak memory of a whole run of a model, split into weights, KV, activations and scratch.

Prompts are computed and answered through the engine's scheduler and runner on one thread. Weights are the tensors that the model holds, KV
the region of the cache; what torch allocates beyond them while the run lasts is recorded at every allocation (`engine/allocations.py`):
of its peak, what passes between operations is activations, what the operation of that moment takes for itself is scratch. The four add up
to the peak. Beside it stands the most that the process had resident: interpreter, libraries and code are in it, and of the KV only what
was written.
"""

from __future__ import annotations

import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.allocations import forget_process_peak, process_peak, record_allocations
from npufleet_pod.engine.changes import Added, Change
from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.fusion import DynamicFusionManager
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.rank import Rank
from npufleet_pod.engine.rank_loading import load_part, take_cache
from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams
from npufleet_pod.engine.runner import ModelRunner
from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy
from npufleet_pod.models.decoder import ALONE, Decoder

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS, STEP_TOKENS = 8, 256, 8, 1024


def measure_peak_memory(model: Path, sequences: int = SEQUENCES, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Bytes of each part, and what they are of."""
    settings = EngineSettings.model_validate(
        {"model_path": str(model), "served_name": "m", "device": "CPU", "dtype": "Float32", "max_num_batched_tokens": STEP_TOKENS}
    )
    files = inspect_model(settings)
    device = open_device(settings)
    started = process_peak()
    decoder = load_part(files.config, files.path, files.precision, device, ALONE, lambda: True)
    block = int(settings.block_size)
    pages = sequences * -(-(prompt_tokens + NEW_TOKENS) // block)
    cache = take_cache(decoder, CacheLayout(block, block, pages), device)
    runner = ModelRunner(Rank(decoder, cache, device), DynamicFusionManager(settings.fusion_level, files.config.heads))
    limits = SchedulerLimits(sequences, STEP_TOKENS, sequences, files.max_model_length, pages, block)
    forget_process_peak()
    _run(runner, limits, sequences, prompt_tokens)
    resident = process_peak()
    # A second time, since the record takes memory of its own.
    with record_allocations() as allocations:
        steps = _run(runner, limits, sequences, prompt_tokens)
    weights, kv = weight_bytes(decoder), cache.page_bytes * pages
    parts = {"weights": weights, "kv": kv, "activations": allocations.activation_bytes, "scratch": allocations.scratch_bytes}
    return {
        "peak_memory": {
            **{f"{name}_mib": _mib(size) for name, size in parts.items()},
            "peak_mib": _mib(weights + kv + allocations.peak_bytes),
            "process_mib": _mib(resident or 0),
            "process_before_loading_mib": _mib(started or 0),
            "of": {
                "model": model.name,
                "dtype": "float32",
                "sequences": sequences,
                "prompt_tokens": prompt_tokens,
                "new_tokens": NEW_TOKENS,
                "steps": steps,
            },
        }
    }


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the tensors that a decoder's weights are; one that is used twice counts once."""
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            for one in value:
                visit(one)
        elif is_dataclass(value):
            for field in fields(value):
                visit(getattr(value, field.name))

    visit(decoder.weights)
    return sum(storages.values())


def _run(runner: ModelRunner, limits: SchedulerLimits, sequences: int, prompt_tokens: int) -> int:
    """Answer all prompts; returns the steps that it took."""
    scheduler = Scheduler(limits, SchedulerPolicy(), KVCacheManager(limits.layout, time.monotonic, prefix_caching=False))
    changes: list[Change] = []
    remaining = {}
    for index in range(sequences):
        prompt = tuple(3 + (7 * index + position) % 200 for position in range(prompt_tokens))
        scheduler.add(str(index), prompt, NEW_TOKENS)
        stop = StopParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        changes.append(Added(GenerationRequest(str(index), prompt, stop, SamplingParams(temperature=0)), index))
        remaining[str(index)] = NEW_TOKENS
    steps = 0
    while not scheduler.idle:
        step = scheduler.schedule()
        sampled = runner.compute(runner.prepare(step, changes))
        changes, steps = [], steps + 1
        for name in sampled:
            remaining[name] -= 1
        ended = [name for name in sampled if not remaining[name]]
        scheduler.commit(step, {name: token.token_id for name, token in sampled.items()}, ended)
        for name in ended:
            runner.remove(name)
    return steps


def _mib(size_bytes: int) -> float:
    return round(size_bytes / 2**20, 3)
