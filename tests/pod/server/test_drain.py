"""Drain, cancel, SIGTERM and departures with requests in flight, against real server processes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.pod_process import PodProcess, start_pod

LONG = {"model": "tiny", "prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
ENDLESS = {**LONG, "max_tokens": 2000}


class Client:
    """A stream on a thread of its own."""

    def __init__(self, pod: PodProcess, pool: ThreadPoolExecutor, body: dict[str, Any]) -> None:
        self.started = threading.Event()
        self._url = f"{pod.url}/v1/completions"
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self.result: Future[tuple[int, list[str]]] = pool.submit(self._run)

    def _run(self) -> tuple[int, list[str]]:
        data = []
        with httpx.Client(timeout=90, trust_env=False) as http, http.stream("POST", self._url, json=self._body) as answer:
            for line in answer.iter_lines():
                if line:
                    data.append(line.removeprefix("data: "))
                    self.started.set()
            self.started.set()
            return answer.status_code, data

    def tokens(self) -> int:
        """Tokens of an answer that came to its end."""
        status, data = self.result.result()
        assert status == 200
        assert data[-1] == "[DONE]"
        usage: int = json.loads(data[-2])["usage"]["completion_tokens"]
        return usage


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as one:
        yield one


@pytest.fixture(scope="module")
def narrow_pod(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """One request runs, two may wait. Tests leave it ready."""
    with start_pod(tiny_model, tmp_path_factory.mktemp("narrow"), max_num_sequences=1, max_queued_requests=2) as process:
        process.wait_ready()
        yield process


@pytest.fixture
def own_pod(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., PodProcess]]:
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> PodProcess:
            pod = stack.enter_context(start_pod(tiny_model, tmp_path, **settings))
            pod.wait_ready()
            return pod

        yield start


def begin(pod: PodProcess, pool: ThreadPoolExecutor, *bodies: dict[str, Any]) -> list[Client]:
    clients = [Client(pod, pool, body) for body in bodies]
    pod.wait(lambda: sum(pod.state()[key] for key in ("running", "waiting")) >= len(bodies), "begun")
    return clients


def test_drain_cancel_drain_and_sigterm_lose_nothing(own_pod: Callable[..., PodProcess], pool: ThreadPoolExecutor) -> None:
    pod = own_pod(max_num_sequences=2)
    clients = begin(pod, pool, *[LONG] * 4)
    state = pod.drain(60)
    assert state["state"] == "Draining"
    assert state["running"] + state["waiting"] >= 1, "what was begun is still to be finished"
    assert 0 < state["drain_deadline_seconds"] <= 60
    refused = pod.http.post(f"{pod.url}/v1/completions", json=LONG)
    assert refused.status_code == 503
    assert refused.headers["x-npufleet-draining"] == "true"
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "draining"
    assert pod.http.get(f"{pod.url}/ready").json()["error"]["code"] == "draining"
    assert pod.http.get(f"{pod.url}/health").status_code == 200

    answer = pod.http.post(f"{pod.admin_url}/drain/cancel").raise_for_status().json()
    assert answer["state"] == "Ready"
    assert answer["drain_deadline_seconds"] is None
    late = begin(pod, pool, LONG)

    pod.drain(60)
    assert [client.tokens() for client in (*clients, *late)] == [400] * 5
    pod.wait(lambda: pod.state()["state"] == "Idle", "idle")
    assert pod.metric("npufleet:engine_state", state="Idle") == 1
    pod.terminate()
    assert pod.wait_end() == 0
    assert pod.stderr == ""


def test_at_the_deadline_what_runs_ends_with_an_error_and_what_waits_is_handed_back(
    narrow_pod: PodProcess, pool: ThreadPoolExecutor
) -> None:
    pod = narrow_pod
    [running] = begin(pod, pool, ENDLESS)
    assert running.started.wait(60)
    whole = pool.submit(lambda: pod.http.post(f"{pod.url}/v1/completions", json=ENDLESS))
    pod.wait(lambda: pod.state()["waiting"] == 1, "waiting")
    pod.drain(0)
    status, data = running.result.result()
    assert status == 200
    assert json.loads(data[-1])["error"]["code"] == "drain_deadline"
    assert whole.result().status_code == 503
    assert whole.result().json()["error"]["code"] in ("draining", "drain_deadline")  # the newcomer may have begun, and the other waits
    pod.wait(lambda: pod.state() == {"state": "Idle", "running": 0, "waiting": 0, "drain_deadline_seconds": 0}, "idle")
    assert pod.http.post(f"{pod.admin_url}/drain/cancel").json()["state"] == "Ready"
    assert begin(pod, pool, LONG)[0].tokens() == 400


def test_sigterm_keeps_accepting_for_a_while_then_drains_and_ends_well(
    own_pod: Callable[..., PodProcess], pool: ThreadPoolExecutor
) -> None:
    pod = own_pod(shutdown={"accept_seconds": 3, "drain_seconds": 60})
    clients = begin(pod, pool, LONG)
    pod.terminate()
    pod.wait(lambda: pod.http.get(f"{pod.url}/ready").json().get("error", {}).get("code") == "terminating", "terminating")
    clients += begin(pod, pool, *[LONG] * 3)
    pod.terminate()
    assert [client.tokens() for client in clients] == [400] * 4
    assert pod.http.post(f"{pod.admin_url}/drain/cancel").status_code == 409
    assert pod.wait_end() == 0
    assert pod.stderr == ""


@pytest.mark.slow
def test_sigterm_gives_up_what_outlasts_its_drain(own_pod: Callable[..., PodProcess], pool: ThreadPoolExecutor) -> None:
    pod = own_pod(shutdown={"accept_seconds": 0, "drain_seconds": 0})
    [client] = begin(pod, pool, ENDLESS)
    assert client.started.wait(60)
    pod.terminate()
    _, data = client.result.result()
    assert json.loads(data[-1])["error"]["code"] == "drain_deadline"
    assert pod.wait_end() == 0


def test_sigterm_while_loading_ends_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with start_pod(tiny_model, tmp_path, shutdown={"accept_seconds": 60}) as pod:
        pod.wait(lambda: pod.state()["state"] == "Loading", "loading")
        assert pod.http.get(f"{pod.url}/ready").json()["error"]["code"] == "loading"
        refused = pod.http.post(f"{pod.url}/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert "x-npufleet-draining" not in refused.headers
        pod.terminate()
        assert pod.wait_end() == 0
        assert pod.stderr == ""


def test_the_server_answers_before_torch_is_imported() -> None:
    program = "import sys, npufleet_pod.server.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_full_queue_refuses_with_429_and_departures_free_it(narrow_pod: PodProcess, pool: ThreadPoolExecutor) -> None:
    pod = narrow_pod
    aborted = pod.metric("vllm:request_success_total", finished_reason="abort")
    sockets = [raw_request(pod, {**ENDLESS, "stream": index % 2 == 0}) for index in range(3)]
    pod.wait(lambda: pod.state()["waiting"] == 2, "full")
    refused = pod.http.post(f"{pod.url}/v1/completions", json=LONG)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    # The last in the queue leaves first, before it was ever run.
    for one in reversed(sockets):
        one.close()
    pod.wait(lambda: pod.state() == {"state": "Ready", "running": 0, "waiting": 0, "drain_deadline_seconds": None}, "freed")
    assert pod.metric("vllm:request_success_total", finished_reason="abort") == aborted + 3
    assert pod.metric("vllm:kv_cache_usage_perc") == 0
    assert begin(pod, pool, LONG)[0].tokens() == 400


def test_a_client_that_does_not_read_does_not_hold_others_up(pod: PodProcess, pool: ThreadPoolExecutor) -> None:
    deaf = raw_request(pod, {**ENDLESS, "stream": True})
    assert begin(pod, pool, LONG)[0].tokens() == 400
    deaf.close()
    pod.wait(lambda: pod.state()["running"] == 0, "freed")


def raw_request(pod: PodProcess, body: dict[str, Any]) -> socket.socket:
    """Send a request, read nothing."""
    content = json.dumps(body).encode()
    host, port = pod.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    return connection
