"""`npufleet-fetch run` as the kubelet runs it: ended in its middle, and never telling a token."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from fetch.conftest import WEIGHTS
from npufleet_api.fetching import FETCH_PATH, FetchOutcome, FetchProgress
from support.hub_server import Fault, Hub

TOKEN = "hf_a_token_that_nobody_may_see"


@dataclass
class Pod:
    """Folders of a pod, and its fetch container."""

    root: Path
    hub: Hub

    @property
    def termination_log(self) -> Path:
        """What the kubelet reads."""
        return self.root / "termination-log"

    async def start(self, port: int = 0, **changes: object) -> asyncio.subprocess.Process:
        """Run the container."""
        settings = {"uri": "hf://org/tiny", "endpoint": self.hub.url, "partMi": 1, "connections": 1, "credentials": True, **changes}
        (self.root / "fetch.yaml").write_text(json.dumps(settings))
        self.termination_log.write_text("")
        program = Path(sys.executable).parent / "npufleet-fetch"
        folders: list[str | Path] = ["--cache", self.root / "cache", "--credentials", self.root / "secret"]
        folders += ["--link", self.root / "models" / "current"]
        files: list[str | Path] = ["--settings", self.root / "fetch.yaml", "--termination-log", self.termination_log]
        return await asyncio.create_subprocess_exec(
            program, "run", *folders, *files, "--port", str(port), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )

    def outcome(self) -> FetchOutcome:
        """The container's termination message."""
        return FetchOutcome.model_validate_json(self.termination_log.read_text())

    def weights(self) -> bytes:
        """What the engine finds."""
        return (self.root / "models" / "current" / WEIGHTS).read_bytes()


@pytest.fixture
async def pod(hub: Hub, tmp_path: Path) -> Pod:
    """A pod whose model needs a token."""
    hub.token = TOKEN
    for name in ("secret", "models"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "token").write_text(TOKEN)
    return Pod(tmp_path, hub)


def shown(pid: int, name: str) -> bytes:
    """What the kernel shows of a process."""
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_a_token_is_in_no_log_argument_environment_or_message(pod: Pod, hub: Hub) -> None:
    hold = asyncio.Event()
    hub.faults[WEIGHTS] = [Fault(status=503), Fault(hold=hold)]
    process = await pod.start()
    await hub.held.wait()
    seen = [shown(process.pid, name) for name in ("environ", "cmdline")]
    hold.set()
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    assert b"trying again" in output
    for told in (*seen, output, pod.termination_log.read_bytes(), json.dumps(hub.leaked).encode()):
        assert TOKEN.encode() not in told
    assert pod.weights() == hub.files[WEIGHTS]
    assert (pod.outcome().revision, pod.outcome().reason) == (hub.commit, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_fetch_that_is_ended_in_its_middle_shows_nothing_and_goes_on_later(pod: Pod, hub: Hub, number: signal.Signals) -> None:
    hold = asyncio.Event()
    hub.faults[WEIGHTS] = [Fault(), Fault(), Fault(hold=hold)]
    process = await pod.start()
    await hub.held.wait()
    process.send_signal(number)
    await process.communicate()
    hold.set()
    assert process.returncode != 0
    assert not (pod.root / "models" / "current").exists()
    again = await pod.start()
    output, _ = await again.communicate()
    assert again.returncode == 0, output
    assert pod.weights() == hub.files[WEIGHTS]
    assert pod.outcome().bytes_fetched < pod.outcome().bytes


async def test_a_failure_is_told_with_its_reason(pod: Pod, hub: Hub) -> None:
    process = await pod.start(revision="no-such")
    await process.communicate()
    assert process.returncode == 1
    assert pod.outcome().reason == "SourceNotFound"
    assert "model.revision" in pod.outcome().message


async def test_a_running_fetch_tells_how_far_it_is(pod: Pod, hub: Hub, unused_tcp_port: int) -> None:
    hold = asyncio.Event()
    hub.faults[WEIGHTS] = [Fault(), Fault(hold=hold)]
    process = await pod.start(unused_tcp_port)
    await hub.held.wait()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{unused_tcp_port}{FETCH_PATH}") as answer:
        told = FetchProgress.model_validate_json(await answer.read())
    hold.set()
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    assert told.phase == "Downloading"
    assert 1 << 20 <= told.bytes_done < told.bytes_total
    assert told.bytes_total == pod.outcome().bytes
