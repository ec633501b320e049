"""Spans as a collector gets them: OTLP over HTTP, from a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from npufleet_pod.errors import SettingsError
from npufleet_pod.server.tracing import open_tracing
from support.pod_process import start_pod

SECRET = "a very private prompt"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []
        self.raw = b""


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name that the base class has
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_request_is_a_span_of_its_clients_trace(tiny_model: Path, tmp_path: Path, collector: Collector) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    with start_pod(tiny_model, tmp_path, environment=environment) as pod:
        pod.wait_ready()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "find-me"}
        body = {"model": "tiny", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
        assert pod.http.post(f"{pod.url}/v1/completions", json={**body, "stream": True}, headers=headers).status_code == 200
        assert pod.http.post(f"{pod.url}/v1/completions", json={}).status_code == 400
        pod.terminate()
        assert pod.wait_end() == 0
        assert pod.stderr == ""
    spans = {span.trace_id.hex(): span for span in collector.spans}
    assert len(collector.spans) == len(spans) == 2
    attributes = {one.key: one.value for one in spans[TRACE].attributes}
    assert spans[TRACE].name == "llm_request"
    assert spans[TRACE].parent_span_id.hex() == PARENT
    assert attributes["gen_ai.request.id"].string_value == "find-me"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3
    assert attributes["gen_ai.latency.time_to_first_token"].double_value <= attributes["gen_ai.latency.e2e"].double_value
    assert attributes["http.route"].string_value == "/v1/completions"
    assert spans[TRACE].start_time_unix_nano < spans[TRACE].end_time_unix_nano
    assert SECRET.encode() not in collector.raw


def test_a_collector_that_is_away_holds_nobody_up(tiny_model: Path, tmp_path: Path) -> None:
    with start_pod(tiny_model, tmp_path, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) as pod:
        pod.wait_ready()
        assert pod.http.post(f"{pod.url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}).status_code == 200
        pod.terminate()
        assert pod.wait_end() == 0


def test_without_a_collector_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert open_tracing("m", "pod-0") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("m", "pod-0") is None


def test_a_missing_sdk_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set, but .* install npufleet\[tracing\], or unset it"):
        open_tracing("m", "pod-0")
