"""Prometheus metrics of the gateway. Labels are bounded by the pool's models and classes; names that clients send are never labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from npufleet_api.slo import Exchange, Judgement, Outcome
from npufleet_gateway.errors import Refusal
from npufleet_gateway.hedging import HedgeResult
from npufleet_gateway.routing import ModelKey

MODEL_LABELS = ("namespace", "model", "workload_class")
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 40, 80)
TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 1.5)
QUEUE_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value that is read when metrics are scraped."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    counter: bool = False


@dataclass(frozen=True, slots=True)
class _ModelSeries:
    labels: tuple[str, ...]
    outcomes: dict[Outcome, Counter]
    judged: Counter
    attained: Counter
    ttft: Histogram
    tpot: Histogram
    duration: Histogram
    queue: Histogram
    admissions: dict[str, Counter]
    hedges: dict[HedgeResult, Counter]


ADMITTED = "admitted"
ADMISSIONS = (ADMITTED, *(refusal.value for refusal in Refusal))


class Metrics:
    """Counters and histograms, and the samples that `read_samples` supplies at each scrape."""

    def __init__(self, read_samples: Callable[[], list[Sample]]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter("npufleet_gateway_requests", "Requests by how they ended.", (*MODEL_LABELS, "outcome"), registry=registry)
        self._judged = Counter("npufleet_gateway_slo_judged", "Requests that count towards attainment.", MODEL_LABELS, registry=registry)
        self._attained = Counter("npufleet_gateway_slo_attained", "Requests that met every target.", MODEL_LABELS, registry=registry)
        self._ttft = Histogram(
            "npufleet_gateway_time_to_first_token_seconds", "TTFT of streams.", MODEL_LABELS, buckets=TTFT_BUCKETS, registry=registry
        )
        self._tpot = Histogram(
            "npufleet_gateway_time_per_output_token_seconds",
            "TPOT of streams of at least two tokens.",
            MODEL_LABELS,
            buckets=TPOT_BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "npufleet_gateway_request_duration_seconds", "Time from arrival to the end.", MODEL_LABELS, buckets=REQUEST_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._queue = Histogram(
            "npufleet_gateway_queue_seconds",
            "Wait for a slot, of those who got one and of those who gave up.",
            MODEL_LABELS,
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self._admissions = Counter(
            "npufleet_gateway_admissions",
            "Requests with a model: admitted to its replicas, or why not.",
            (*MODEL_LABELS, "result"),
            registry=registry,
        )
        self._hedges = Counter(
            "npufleet_gateway_hedges",
            "Streams that were late, by what became of their copy, or why they got none.",
            (*MODEL_LABELS, "result"),
            registry=registry,
        )
        self.retries = Counter(
            "npufleet_gateway_retries", "Attempts that were repeated on another replica.", ("reason",), registry=registry
        )
        self.rejected = Counter(
            "npufleet_gateway_rejected", "Requests answered before they came to a model's door.", ("status", "cause"), registry=registry
        )
        self.reports = Counter("npufleet_gateway_monitor_reports", "Collected monitor reports.", ("result",), registry=registry)
        registry.register(_Samples(read_samples))
        self._series: dict[tuple[ModelKey, str], _ModelSeries] = {}

    def missed(self, key: ModelKey, workload_class: str) -> None:
        """Count a request that missed a target and has not ended."""
        self._of(key, workload_class).judged.inc()

    def admission(self, key: ModelKey, workload_class: str, refusal: Refusal | None, queue_seconds: float | None) -> None:
        """Count a request that was admitted (None) or refused; `queue_seconds` where it came as far as the queue."""
        series = self._of(key, workload_class)
        series.admissions[refusal.value if refusal is not None else ADMITTED].inc()
        if queue_seconds is not None:
            series.queue.observe(queue_seconds)

    def hedged(self, key: ModelKey, workload_class: str, result: HedgeResult) -> None:
        """Count a stream that was late."""
        self._of(key, workload_class).hedges[result].inc()

    def finished(self, key: ModelKey, workload_class: str, exchange: Exchange, judgement: Judgement) -> None:
        """Count a request that ended."""
        series = self._of(key, workload_class)
        series.outcomes[exchange.outcome].inc()
        if judgement.judged:
            series.judged.inc()
        if judgement.attained:
            series.attained.inc()
        if exchange.ttft_ms is not None:
            series.ttft.observe(exchange.ttft_ms / 1000)
        if exchange.tpot_ms is not None:
            series.tpot.observe(exchange.tpot_ms / 1000)
        series.duration.observe(exchange.elapsed_ms / 1000)

    def retain(self, keys: Collection[ModelKey]) -> None:
        """Drop the series of models that are gone."""
        for key in [key for key in self._series if key[0] not in keys]:
            labels = self._series.pop(key).labels
            for outcome in Outcome:
                self._requests.remove(*labels, outcome.value)
            for result in ADMISSIONS:
                self._admissions.remove(*labels, result)
            for hedge in HedgeResult:
                self._hedges.remove(*labels, hedge.value)
            for metric in (self._judged, self._attained, self._ttft, self._tpot, self._duration, self._queue):
                metric.remove(*labels)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _of(self, key: ModelKey, workload_class: str) -> _ModelSeries:
        series = self._series.get((key, workload_class))
        if series is None:
            series = self._series[key, workload_class] = self._build((*key, workload_class))
        return series

    def _build(self, labels: tuple[str, str, str]) -> _ModelSeries:
        return _ModelSeries(
            labels=labels,
            outcomes={outcome: self._requests.labels(*labels, outcome.value) for outcome in Outcome},
            judged=self._judged.labels(*labels),
            attained=self._attained.labels(*labels),
            ttft=self._ttft.labels(*labels),
            tpot=self._tpot.labels(*labels),
            duration=self._duration.labels(*labels),
            queue=self._queue.labels(*labels),
            hedges={result: self._hedges.labels(*labels, result.value) for result in HedgeResult},
            admissions={result: self._admissions.labels(*labels, result) for result in ADMISSIONS},
        )


class _Samples(Collector):
    def __init__(self, read: Callable[[], list[Sample]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._read():
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if sample.counter else GaugeMetricFamily
                family = families[sample.name] = kind(sample.name, sample.help, labels=[name for name, _ in sample.labels])
            family.add_metric([value for _, value in sample.labels], sample.value)
        yield from families.values()
