"""The monitor's process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from monitor.monitor_support import free_port, write_settings
from npufleet_api.report import DataState, parse_monitor_report

IDENTITY = {"POD_NAME": "r0", "POD_NAMESPACE": "team-a", "POD_UID": "u"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from npufleet_monitor.main import main; main()", "serve", *arguments]


@pytest.mark.parametrize(
    ("text", "environment", "says"),
    [
        ("pool: prod\n", IDENTITY, "modelNamespace: Field required"),
        ("{", IDENTITY, "not YAML"),
        (None, IDENTITY, "No such file"),
        ("", {"POD_NAME": "r0"}, "POD_NAMESPACE is not set"),
    ],
)
def test_bad_settings_end_the_process_with_one_line(tmp_path: Path, text: str | None, environment: dict[str, str], says: str) -> None:
    path = tmp_path / "monitor.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("POD_")}
    ended = subprocess.run(
        command("--settings", str(path)), env={**inherited, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert says in line


async def test_it_serves_its_pages_and_ends_on_sigterm_without_error(tmp_path: Path) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *command("--settings", str(write_settings(tmp_path)), "--host", "127.0.0.1", "--port", str(port)),
        env={**os.environ, **IDENTITY},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            url = f"http://127.0.0.1:{port}"
            while True:
                try:
                    async with session.get(f"{url}/health") as response:
                        assert response.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
            async with session.get(f"{url}/report") as response:
                report = parse_monitor_report(await response.read())
            assert report.pod_uid == "u"
            assert report.data in (DataState.NO_DATA, DataState.FRESH)
            async with session.get(f"{url}/metrics") as response:
                assert "npufleet_monitor_settings_valid 1.0" in await response.text()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_beside_vllm_it_serves_the_admin_port_and_ends_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *command("--settings", str(write_settings(tmp_path)), "--host", "127.0.0.1", "--port", str(free_port())),
        *("--vllm-url", f"http://127.0.0.1:{free_port()}", "--admin-port", str(port)),
        env={**os.environ, **IDENTITY},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            while True:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/state") as response:
                        state = await response.json()
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
            assert state["state"] == "Loading"
            async with session.get(f"http://127.0.0.1:{port}/ready") as response:
                assert response.status == 503
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_when_its_loops_fail_the_process_ends_so_that_the_kubelet_restarts_it(tmp_path: Path) -> None:
    broken = (
        "from npufleet_monitor import monitor, main\n"
        "async def fail(self, session): raise RuntimeError('broken on purpose')\n"
        "monitor.Monitor.scrape = fail\n"
        "main.main()\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", broken, "serve", "--settings", str(write_settings(tmp_path)), "--host", "127.0.0.1"),
        *("--port", str(free_port())),
        env={**os.environ, **IDENTITY},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"broken on purpose" in stderr
