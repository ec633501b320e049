"""The watch over leaks fails what leaks, and only that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

CLEAN = """
import asyncio
async def test_clean():
    await asyncio.create_task(asyncio.sleep(0))
"""
LEAKS_TASK = """
import asyncio
async def test_leaks():
    test_leaks.task = asyncio.create_task(asyncio.sleep(60), name="forgotten")
"""
LEAKS_FAILURE = """
import asyncio, gc
async def test_leaks():
    async def fail():
        raise ValueError("nobody looks")
    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
"""
LEAKS_PROCESS = """
import os, subprocess
def test_leaks():
    test_leaks.process = subprocess.Popen(["sh", "-c", "exec sleep 60"], start_new_session=True)
"""
LEAKS_THREAD = """
import threading, time
def test_leaks():
    threading.Thread(target=time.sleep, args=(3,), name="forgotten").start()
"""

HANGS_IN_TEARDOWN = """
import asyncio, pytest
@pytest.fixture
async def stuck():
    yield
    await asyncio.Event().wait()
@pytest.mark.timeout(1)
async def test_hangs(stuck):
    await asyncio.Event().wait()
def test_the_next_one_runs():
    pass
"""


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run one test file under the project's conftest, in a process of its own."""
    (folder / "conftest.py").write_text(_conftest(), encoding="utf-8")
    (folder / "test_it.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _conftest() -> str:
    text = (HERE / "conftest.py").read_text(encoding="utf-8")
    assert "TEARDOWN_SECONDS = 120\n" in text
    return text.replace("TEARDOWN_SECONDS = 120\n", "TEARDOWN_SECONDS = 1\n")


def test_a_clean_run_passes(tmp_path: Path) -> None:
    result = run(tmp_path, CLEAN)
    assert result.returncode == 0, result.stdout
    assert "left behind" not in result.stdout


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (LEAKS_TASK, "forgotten"),
        (LEAKS_FAILURE, "nobody looks"),
        (LEAKS_PROCESS, "sleep 60"),
        (LEAKS_THREAD, "thread forgotten"),
    ],
    ids=["task", "failed task", "process", "thread"],
)
def test_a_leak_fails_the_run_and_is_named(tmp_path: Path, source: str, named: str) -> None:
    result = run(tmp_path, source)
    for pid in re.findall(r"^process (\d+): sleep 60$", result.stdout, re.MULTILINE):
        os.kill(int(pid), signal.SIGKILL)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert named in result.stdout


def test_a_teardown_that_hangs_after_a_timeout_fails_and_the_run_goes_on(tmp_path: Path) -> None:
    result = run(tmp_path, HANGS_IN_TEARDOWN)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "Timeout" in result.stdout
    assert "the teardown of test_it.py::test_hangs takes longer" in result.stdout
    assert "1 failed, 1 passed" in result.stdout
