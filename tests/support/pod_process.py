"""Starts a real `npufleet-pod serve` on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

START_SECONDS = 90
END_SECONDS = 60


class PodProcess:
    """A running server. Ports are known once it listens."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, model_path: Path) -> None:
        self.model_path = model_path
        self.process = process
        self._folder = folder
        self._ports: tuple[int, int] | None = None
        self.http = httpx.Client(timeout=60, trust_env=False)

    @property
    def url(self) -> str:
        """Base address of the OpenAI port."""
        return f"http://127.0.0.1:{self._listening()[0]}"

    @property
    def admin_url(self) -> str:
        """Base address of the admin port."""
        return f"http://127.0.0.1:{self._listening()[1]}"

    @property
    def stderr(self) -> str:
        """What the process wrote to stderr so far."""
        return (self._folder / "stderr").read_text()

    def logs(self) -> list[dict[str, Any]]:
        """The structured log so far."""
        lines = (self._folder / "stdout").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_ready(self) -> None:
        """Wait until the server takes work."""
        self.wait(lambda: self.http.get(f"{self.url}/ready").status_code == 200, "ready")

    def wait(self, condition: Any, what: str, seconds: float = START_SECONDS) -> None:
        """Poll until `condition()` is true; fails with the server's output."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.stderr}"
            time.sleep(0.02)
        raise AssertionError(f"not {what} within {seconds} s: {self.stderr} {self.logs()[-5:]}")

    def state(self) -> dict[str, Any]:
        """What the admin port tells."""
        answer: dict[str, Any] = self.http.get(f"{self.admin_url}/state").json()
        return answer

    def drain(self, deadline_seconds: float) -> dict[str, Any]:
        """Begin to drain."""
        body = {"deadline_seconds": deadline_seconds, "reason": "test"}
        answer: dict[str, Any] = self.http.post(f"{self.admin_url}/drain", json=body).raise_for_status().json()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Value of the one series called `name` that carries `labels`."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.http.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        assert len(found) == 1, f"{name} {labels}: {len(found)} series"
        return found[0]

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait_end(self) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(END_SECONDS)

    def _listening(self) -> tuple[int, int]:
        if self._ports is None:
            self.wait(lambda: any(line["message"] == "listening" for line in self.logs()), "listening")
            line = next(line for line in self.logs() if line["message"] == "listening")
            self._ports = line["port"], line["admin_port"]
        return self._ports


@contextlib.contextmanager
def start_pod(
    model: Path, folder: Path, *, environment: dict[str, str] | None = None, arguments: Sequence[str] = (), **settings: Any
) -> Iterator[PodProcess]:
    """Run a server of `model` with further engine settings (snake_case) and arguments; killed at the end if it still runs."""
    document = {
        "model_path": str(model),
        "served_name": "tiny",
        "device": "CPU",
        "cpu_threads": 1,
        "shutdown": {"accept_seconds": 0},
        **settings,
    }
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [
        *(sys.executable, "-m", "npufleet_pod.main", "serve", "--settings", str(path)),
        *("--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--termination-log", str(folder / "termination-log")),
        *arguments,
    ]
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, "POD_NAME": "pod-0", **(environment or {})})
        pod = PodProcess(process, folder, model)
        try:
            yield pod
        finally:
            pod.http.close()
            if process.poll() is None:
                process.kill()
            process.wait(END_SECONDS)
