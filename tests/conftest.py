"""What holds for every test: nothing a test starts may outlive it. A leaked asyncio task fails its test; a leaked process, thread, mount
or network namespace fails the run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A deadline, or a complaint about slow drawing, would judge the machine.
hypothesis.settings.register_profile("npufleet", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("npufleet")

RUN_ENV = "NPUFLEET_TEST_RUN"
"""Inherited by every process that the run starts, so that one that detached itself is found too."""
KEEP_ENV = "DEVCLUSTER_KEEP"
SETTLE_TURNS = 10
ENVIRONMENT_READS = 10
TEARDOWN_SECONDS = 120
"""For each fixture that hangs. pytest-timeout rings once per test: after that its teardown could hang for ever."""

_before: pytest.StashKey[set[str]] = pytest.StashKey()
_leaks: pytest.StashKey[list[str]] = pytest.StashKey()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, those on the cluster last; and a watch over the tasks of every coroutine test."""
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is not None, item.get_closest_marker("slow") is not None))
    for item in items:
        if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
            item.fixturenames.insert(0, "no_leaked_tasks")


@pytest.fixture
async def no_leaked_tasks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail the test when a task is still pending after the test and its fixtures ended, or when one failed and nobody looked."""
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    before = asyncio.all_tasks()
    yield
    pending = asyncio.all_tasks() - before - {asyncio.current_task()}
    for _ in range(SETTLE_TURNS):
        if not pending:
            break
        await asyncio.sleep(0)
        pending = {task for task in pending if not task.done()}
    for task in pending:
        task.cancel()
    assert not pending, f"{request.node.nodeid} leaves tasks behind; await or cancel them: {sorted(map(repr, pending))}"
    assert not unhandled, f"{request.node.nodeid} leaves errors that nobody handled: {unhandled}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a teardown that hangs."""

    def give_up(*_: object) -> None:
        signal.alarm(TEARDOWN_SECONDS)
        pytest.fail(f"the teardown of {item.nodeid} takes longer than {TEARDOWN_SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEARDOWN_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Mark what the run starts, and remember what was there before it."""
    os.environ[RUN_ENV] = uuid.uuid4().hex
    session.config.stash[_before] = _mounts() | _network_namespaces()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Compare with what was there before; every fixture has been torn down by now."""
    before = session.config.stash[_before]
    leaks = [*_processes(), *_threads(), *sorted((_mounts() | _network_namespaces()) - before)]
    session.config.stash[_leaks] = leaks
    if leaks:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what the run left behind."""
    leaks = config.stash.get(_leaks, [])
    if leaks:
        terminalreporter.section("left behind by the tests", red=True)
        for leak in leaks:
            terminalreporter.write_line(leak)


def _processes() -> list[str]:
    """Descendants of the run that still live. A cluster kept on request lives in namespaces of its own and is let be."""
    mark = f"{RUN_ENV}={os.environ[RUN_ENV]}".encode()
    keep = os.environ.get(KEEP_ENV) == "1"
    own_mounts = Path("/proc/self/ns/mnt").readlink()
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark not in _environment(entry).split(b"\0"):
                continue
            if keep and (entry / "ns" / "mnt").readlink() != own_mounts:
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        found.append(f"process {entry.name}: {command}")
    return found


def _environment(process: Path) -> bytes:
    """Environment of a process, by its folder in /proc. Raises OSError for kernel threads, and for processes that end meanwhile."""
    for _ in range(ENVIRONMENT_READS):
        environment = (process / "environ").read_bytes()
        (process / "exe").readlink()
        if environment:
            return environment
        # Empty while the process is in the middle of exec.
        time.sleep(0.02)
    return b""


def _threads() -> list[str]:
    main = threading.main_thread()
    return [f"thread {t.name}" for t in threading.enumerate() if t is not main and not t.daemon]


def _mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return {f"mount {line.split()[4]}" for line in lines}


def _network_namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {f"network namespace {entry.name}" for entry in folder.iterdir()} if folder.is_dir() else set()
