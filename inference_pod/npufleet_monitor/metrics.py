"""The monitor's own metrics page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from npufleet_api.report import DataState
from npufleet_monitor.monitor import Monitor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MODEL_LABELS = ("namespace", "model", "workload_class")


def render(monitor: Monitor) -> bytes:
    """The exposition text of this moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(monitor))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        monitor = self._monitor
        report = monitor.report()
        settings = monitor.settings.settings
        model = [settings.model_namespace, settings.model_name, settings.workload_class]
        valid = GaugeMetricFamily("npufleet_monitor_settings_valid", "Whether the settings file's present content is in force.")
        valid.add_metric([], float(monitor.settings.error is None))
        yield valid
        scrapes = CounterMetricFamily("npufleet_monitor_scrapes", "Scrapes by source and result.", labels=["source", "result"])
        for (source, result), count in sorted(monitor.scrapes.items()):
            scrapes.add_metric([source, result], count)
        yield scrapes
        data = GaugeMetricFamily("npufleet_monitor_data", "State of the engine's figures.", labels=["state"])
        for state in DataState:
            data.add_metric([state.value], float(report.data is state))
        yield data
        raised = {alert.name: alert for alert in report.alerts}
        alerts = GaugeMetricFamily("npufleet_monitor_alert", "Alerts that are raised.", labels=[*MODEL_LABELS, "alert", "severity"])
        for alert in raised.values():
            alerts.add_metric([*model, alert.name, alert.severity], 1)
        yield alerts
        use = report.utilisation
        for part, text, value in (
            ("compute", "Compute in use.", use.compute_percent),
            ("memory", "Device memory in use.", use.memory_percent),
            ("kv_cache", "KV cache in use.", use.kv_cache_percent),
            ("pipeline_stall", "Time that compute waited for its inputs.", use.pipeline_stall_percent),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"npufleet_monitor_{part}_percent", text, labels=MODEL_LABELS)
                gauge.add_metric(model, value)
                yield gauge
