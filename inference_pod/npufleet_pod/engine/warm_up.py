"""Computes a prompt and a token of no client, so that the first client does not wait for what a device prepares once."""

from __future__ import annotations

import time

from npufleet_pod.engine.changes import Added, Change
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams
from npufleet_pod.engine.runner import ModelRunner
from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy

WARM_UP_TOKENS = 32
NAME = "warm-up"


def warm_up(runner: ModelRunner, limits: SchedulerLimits) -> None:
    """Run the whole path from scheduling to sampling. What it leaves in the KV cache is known to nobody."""
    scheduler = Scheduler(limits, SchedulerPolicy(), KVCacheManager(limits.layout, time.monotonic, prefix_caching=False))
    tokens = 2
    prompt = (0,) * max(1, min(WARM_UP_TOKENS, limits.max_model_length - tokens))
    scheduler.add(NAME, prompt, tokens)
    changes: list[Change] = [Added(GenerationRequest(NAME, prompt, StopParams(max_tokens=tokens), SamplingParams(temperature=0)), 0)]
    while not scheduler.idle:
        step = scheduler.schedule()
        sampled = runner.compute(runner.prepare(step, changes))
        changes = []
        chosen = {request_id: token.token_id for request_id, token in sampled.items()}
        tokens -= len(chosen)
        scheduler.commit(step, chosen, () if tokens else (NAME,))
    runner.remove(NAME)
