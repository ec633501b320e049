"""OpenTelemetry: one span per request, a child of the trace that the client or the gateway began. Off unless an exporter is configured.

Configured by OpenTelemetry's own environment variables, of which OTEL_EXPORTER_OTLP_ENDPOINT, or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, turns
it on. Attributes are those of vLLM's spans (`vllm/tracing`), after OpenTelemetry's conventions for generative AI. Never a prompt, never an
answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npufleet_pod.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SPAN_NAME = "llm_request"
CLOSE_SECONDS = 3.0


class Tracing:
    """Makes spans of requests that have ended. Exporting is a thread of the SDK's; nothing here waits for it."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("npufleet")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def request(
        self, headers: Mapping[str, str], request_id: str, path: str, status: int, seconds: float, detail: Mapping[str, Any]
    ) -> None:
        """Tell of a request that has just ended. detail: further attributes."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=end - int(seconds * 1e9),
            attributes={
                "gen_ai.request.id": request_id,
                "gen_ai.response.model": self._model_name,
                "gen_ai.latency.e2e": seconds,
                "http.route": path,
                "http.response.status_code": status,
                **detail,
            },
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what is not sent yet, for CLOSE_SECONDS at most. Blocks."""
        # Shutting down sends everything, and the SDK keeps no bound while an export runs. Its threads do not hold the process.
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def open_tracing(model_name: str, replica: str) -> Tracing | None:
    """Tracing as the environment configures it; None if it does not. Raises SettingsError where the SDK is missing."""
    variable = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if variable is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"{variable} is set, but tracing needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http ({error}): "
            "install npufleet[tracing], or unset it"
        ) from error
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "npufleet-engine", "service.instance.id": replica})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, model_name)
