"""Prometheus metrics: vLLM V1's names and buckets, which routers and autoscalers read, and npufleet's own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from npufleet_api.contract import EngineState
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.engine.stats import EngineSnapshot, FinishedRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""vLLM V1, `v1/metrics/loggers.py`."""
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HTTP_BUCKETS = (0.1, 0.5, 1, 5, 10, 30, 60, 300)
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineMetrics:
    """All metrics of one engine, in a registry of their own; an EngineObserver. Safe to use from several threads."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE_INDEX}
        self._running = self._gauge("vllm:num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._preemptions = self._counter("vllm:num_preemptions", "Requests that gave their KV back and were computed again.")
        self._prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens sought in the prefix cache.")
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._interval = self._histogram("vllm:inter_token_latency_seconds", "Token to token.", TOKEN_BUCKETS)
        self._per_token = self._histogram("vllm:request_time_per_output_token_seconds", "Mean after the first.", TOKEN_BUCKETS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to first step.", REQUEST_BUCKETS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to end.", REQUEST_BUCKETS)
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._request_generation = self._histogram("vllm:request_generation_tokens", "Generated tokens of a request.", COUNT_BUCKETS)
        self._request_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", COUNT_BUCKETS)
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", ITERATION_BUCKETS)
        self._success = Counter("vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=self.registry)
        for reason in ("stop", "length", "abort"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._waiting_by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason", "Requests that wait, by what for.", (*LABELS, "reason"), registry=self.registry
        )
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed since their KV was there.")
        self._inference = self._histogram("vllm:request_inference_time_seconds", "First step to end.", REQUEST_BUCKETS)
        self._request_n = self._histogram("vllm:request_params_n", "n of a request.", COUNT_BUCKETS)
        self._http_requests = Counter(
            "http_requests", "Requests of the OpenAI port.", ("handler", "method", "status"), registry=self.registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "From a request's head to its last byte.",
            ("handler", "method"),
            registry=self.registry,
            buckets=HTTP_BUCKETS,
        )
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "The KV cache's shape.",
            (*LABELS, "block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching"),
            registry=self.registry,
        )
        self._load_seconds = self._gauge("npufleet:load_seconds", "Start of the process to ready.")
        self._max_length = self._gauge("npufleet:max_model_length", "Most tokens of prompt and answer.")
        self._max_running = self._gauge("npufleet:max_num_sequences", "Most requests that run at once.")
        self._stall_ratio = self._gauge("npufleet:pipeline_stall_ratio", "Share of busy time that compute waited for its input, 0 to 1.")
        self._state = Gauge("npufleet:engine_state", "1 for the state that the engine is in.", (*LABELS, "state"), registry=self.registry)

    def watch(self, snapshot: Callable[[], EngineSnapshot], state: Callable[[], EngineState], stall_ratio: Callable[[], float]) -> None:
        """Read load, state and the pipeline's stalls from these whenever the metrics are read."""
        self._stall_ratio.set_function(stall_ratio)
        self._running.set_function(lambda: snapshot().running)
        self._waiting.set_function(lambda: snapshot().waiting)
        self._waiting_by_reason.labels(**self._labels, reason="capacity").set_function(lambda: snapshot().waiting)
        # Nothing waits for what comes from elsewhere.
        self._waiting_by_reason.labels(**self._labels, reason="deferred").set(0)
        self._kv_usage.set_function(lambda: snapshot().kv_usage)
        for one in EngineState:
            self._state.labels(**self._labels, state=one.value).set_function(_is_state(state, one))

    def loaded(self, limits: SchedulerLimits, load_seconds: float, *, prefix_cache: bool, host_blocks: int) -> None:
        """The model is ready."""
        self._load_seconds.set(load_seconds)
        self._max_length.set(limits.max_model_length)
        self._max_running.set(limits.max_num_sequences)
        self._cache_config.labels(
            **self._labels,
            block_size=str(limits.kv_block_tokens),
            num_gpu_blocks=str(limits.kv_blocks),
            num_cpu_blocks=str(host_blocks),
            enable_prefix_caching=str(prefix_cache),
        ).set(1)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def on_step(self, tokens: int, preempted: int) -> None:
        """A step begins."""
        if tokens > 0:
            self._iteration.observe(tokens)
        _add(self._preemptions, preempted)

    def on_prefix_lookup(self, sought: int, found: int) -> None:
        """A request starts."""
        _add(self._prefix_queries, sought)
        _add(self._prefix_hits, found)
        _add(self._cached_tokens, found)

    def on_first_token(self, prompt_tokens: int, ttft_seconds: float) -> None:
        """A request got its first token."""
        _add(self._prompt_tokens, prompt_tokens)
        self._generation_tokens.inc()
        self._ttft.observe(max(ttft_seconds, 0))

    def on_next_token(self, interval_seconds: float) -> None:
        """A request got a further token."""
        self._generation_tokens.inc()
        self._interval.observe(max(interval_seconds, 0))

    def on_finish(self, finished: FinishedRequest) -> None:
        """A request ended."""
        self._success.labels(**self._labels, finished_reason=finished.reason.value).inc()
        self._e2e.observe(max(finished.e2e_seconds, 0))
        self._request_prompt.observe(finished.prompt_tokens)
        self._request_generation.observe(finished.generated_tokens)
        self._request_max_tokens.observe(finished.max_tokens)
        if finished.queue_seconds is not None:
            self._queue.observe(max(finished.queue_seconds, 0))
        if finished.queue_seconds is not None and finished.ttft_seconds is not None:
            self._inference.observe(max(finished.e2e_seconds - finished.queue_seconds, 0))
            decode_seconds = max(finished.e2e_seconds - finished.ttft_seconds, 0)
            self._prefill.observe(max(finished.ttft_seconds - finished.queue_seconds, 0))
            self._decode.observe(decode_seconds)
            if finished.generated_tokens > 1:
                self._per_token.observe(decode_seconds / (finished.generated_tokens - 1))

    def on_submit(self, choices: int) -> None:
        """A request for so many choices (n) was taken."""
        self._request_n.observe(choices)

    def on_http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A request of the OpenAI port ended. handler: the route's path, none if there is none."""
        method = method if method in METHODS else "other"
        self._http_requests.labels(handler=handler, method=method, status=f"{status // 100}xx" if status else "none").inc()
        self._http_duration.labels(handler=handler, method=method).observe(max(seconds, 0))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(**self._labels)


def _add(counter: Counter, amount: float) -> None:
    """Counters refuse to go down with an error, which must not end the thread that computes."""
    counter.inc(max(amount, 0))


def _is_state(state: Callable[[], EngineState], wanted: EngineState) -> Callable[[], float]:
    return lambda: float(state() is wanted)
