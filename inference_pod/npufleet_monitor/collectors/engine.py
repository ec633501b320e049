"""What an engine tells, under vLLM's metric names and npufleet's own. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from npufleet_monitor.collectors.exposition import Samples, parse

TTFT = "vllm:time_to_first_token_seconds"
TPOT = ("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""The first that an engine shows: per request where it can, else between tokens, under vLLM's new and old name."""

PREFIXES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:request_success_total",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_prefill_time_seconds_sum",
    "npufleet:load_seconds",
    "npufleet:max_num_sequences",
    "npufleet:pipeline_stall_ratio",
    "npufleet:request_timeouts_total",
    f"{TTFT}_bucket",
    *(f"{name}_bucket" for name in TPOT),
)


MAX_KV_TOKENS = 1e12
MAX_ADAPTERS = 64
MAX_NAME = 253


@dataclass(frozen=True, slots=True)
class CumulativeHistogram:
    """A histogram as Prometheus shows it: observations up to each bound, ascending, and in all (the +Inf bucket)."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine; summed over the engine's label sets. None where it does not tell."""

    running: float | None = None
    waiting: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    kv_cache_percent: float | None = None
    stall_percent: float | None = None
    load_seconds: float | None = None
    max_running: float | None = None
    finished: float | None = None
    """Requests that ended, however they ended."""
    timeouts: float | None = None
    prefix_queries: float | None = None
    """Prompt tokens sought in the prefix cache."""
    prefix_hits: float | None = None
    prefill_seconds: float | None = None
    """That all requests together spent in prefill."""
    kv_cache_tokens: float | None = None
    adapters: tuple[str, ...] = ()
    ttft: CumulativeHistogram = field(default_factory=CumulativeHistogram)
    tpot: CumulativeHistogram = field(default_factory=CumulativeHistogram)


def parse_engine(raw: bytes) -> EngineSample:
    """An engine's metrics page. Raises ScrapeError."""
    samples = parse(raw, PREFIXES)
    tpot = next((name for name in TPOT if f"{name}_bucket" in samples), TPOT[0])
    timeouts = _sum(samples, "npufleet:request_timeouts_total")
    if timeouts is None:
        timeouts = _sum(samples, "vllm:request_success_total", finished_reason="timeout")
    return EngineSample(
        running=_sum(samples, "vllm:num_requests_running"),
        waiting=_sum(samples, "vllm:num_requests_waiting"),
        prompt_tokens=_sum(samples, "vllm:prompt_tokens_total"),
        generation_tokens=_sum(samples, "vllm:generation_tokens_total"),
        kv_cache_percent=_share(samples, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        stall_percent=_share(samples, "npufleet:pipeline_stall_ratio"),
        load_seconds=_maximum(samples, "npufleet:load_seconds"),
        max_running=_sum(samples, "npufleet:max_num_sequences"),
        finished=_sum(samples, "vllm:request_success_total"),
        timeouts=timeouts,
        prefix_queries=_sum(samples, "vllm:prefix_cache_queries_total"),
        prefix_hits=_sum(samples, "vllm:prefix_cache_hits_total"),
        prefill_seconds=_sum(samples, "vllm:request_prefill_time_seconds_sum"),
        kv_cache_tokens=_kv_cache_tokens(samples),
        adapters=_adapters(samples),
        ttft=_histogram(samples, TTFT),
        tpot=_histogram(samples, tpot),
    )


def _sum(samples: Samples, name: str, **labels: str) -> float | None:
    values = [s.value for s in samples.get(name, ()) if all(s.labels.get(key) == value for key, value in labels.items())]
    return max(0.0, sum(values)) if values else None


def _kv_cache_tokens(samples: Samples) -> float | None:
    """Blocks on the device and in host memory times tokens per block, over all engines of the replica; None where they do not tell."""
    total = 0.0
    for sample in samples.get("vllm:cache_config_info", ()):
        try:
            device, host = (float(sample.labels[label]) for label in ("num_gpu_blocks", "num_cpu_blocks"))
            tokens = (device + host) * float(sample.labels["block_size"])
        except (KeyError, ValueError):
            continue
        if 0 < tokens <= MAX_KV_TOKENS:
            total += tokens
    return total or None


def _adapters(samples: Samples) -> tuple[str, ...]:
    """Adapters that run or wait by the latest of vLLM's info series, whose value is the time of its last change."""
    latest = max(samples.get("vllm:lora_requests_info", ()), key=lambda sample: sample.value, default=None)
    if latest is None:
        return ()
    names = {
        name.strip()
        for label in ("running_lora_adapters", "waiting_lora_adapters")
        for name in latest.labels.get(label, "").split(",")
        if 0 < len(name.strip()) <= MAX_NAME
    }
    return tuple(sorted(names)[:MAX_ADAPTERS])


def _maximum(samples: Samples, name: str) -> float | None:
    return max((max(0.0, sample.value) for sample in samples.get(name, ())), default=None)


def _share(samples: Samples, *names: str) -> float | None:
    """A ratio of 0…1 in percent; of several engines the fullest, which is what refuses work first."""
    for name in names:
        value = _maximum(samples, name)
        if value is not None:
            return min(100.0, value * 100)
    return None


def _histogram(samples: Samples, name: str) -> CumulativeHistogram:
    by_bound: dict[float, float] = {}
    total = 0.0
    for sample in samples.get(f"{name}_bucket", ()):
        try:
            bound = float(sample.labels.get("le", ""))
        except ValueError:
            continue
        if bound == float("inf"):
            total += max(0.0, sample.value)
        elif bound == bound:
            by_bound[bound] = by_bound.get(bound, 0.0) + max(0.0, sample.value)
    bounds = tuple(sorted(by_bound))
    return CumulativeHistogram(bounds, tuple(by_bound[bound] for bound in bounds), total)
