"""The supervisor with real processes: restarts, stops, orphans, orders, its socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from devcluster.control import Process, Request, ask
from devcluster.errors import ComponentError, NotRunningError
from devcluster.paths import Layout

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the process-id namespace that the supervisor is first in")

# Components as real programs: `etcd` answers on a Unix socket and leaves an orphan that ends, `kube-apiserver` waits for it.
PROGRAM = """
import asyncio, sys
from contextlib import contextmanager, suppress
from pathlib import Path
from devcluster.components import Component, SocketProbe
from devcluster.paths import Layout
from devcluster.supervisor import Supervisor
root = Path(sys.argv[1])
serve = '''
import os, pathlib, socket, sys, time
path = sys.argv[1]
pathlib.Path(path).unlink(missing_ok=True)
listener = socket.socket(socket.AF_UNIX); listener.bind(path); listener.listen()
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.1); pathlib.Path(path + ".orphan").touch()
    os._exit(0)
os.wait()
while True: listener.accept()[0].close()
'''
def component(name, *after):
    path = str(root / f"{name}.s")
    return Component(name, (sys.executable, "-c", serve, path), SocketProbe(path), after)
wanted = [component("etcd"), component("kube-apiserver", "etcd"), Component("failing", ("/bin/false",), SocketProbe(str(root / "none.s")))]
wanted.append(Component("missing", (str(root / "nothing"),), SocketProbe(str(root / "none.s"))))
if sys.argv[2] == "stubborn":
    ignores = "trap '' TERM; touch $0; while :; do sleep 0.1; done"
    wanted.append(Component("stubborn", ("/bin/sh", "-c", ignores, str(root / "stubborn")), SocketProbe(str(root / "etcd.s"))))
asyncio.run(Supervisor(Layout(root), wanted).run())
"""


def until(check: Callable[[], bool]) -> None:
    """Return once `check` holds; the test's own time limit ends a wait in vain."""
    while not check():
        time.sleep(0.02)


@contextmanager
def running(root: Path, *, stubborn: bool = False) -> Iterator[Layout]:
    """A supervisor as first process of a namespace; ends well when asked to."""
    layout = Layout(root)
    layout.log.mkdir()
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen([*namespace, sys.executable, "-c", PROGRAM, str(root), "stubborn" if stubborn else ""]) as launcher:
        try:
            until(layout.control.exists)
            yield layout
            with suppress(NotRunningError):
                ask(layout, Request(action="shutdown"))
            assert launcher.wait() == 0
        finally:
            launcher.kill()


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    """A running supervisor."""
    with running(tmp_path) as layout:
        yield layout


def processes(layout: Layout) -> dict[str, Process]:
    return {process.name: process for process in ask(layout, Request(action="status")).reply.processes}


def is_healthy(layout: Layout, *names: str) -> bool:
    now = processes(layout)
    return all(now[name].healthy for name in names)


def test_components_start_in_order_and_become_healthy(layout: Layout) -> None:
    until(lambda: is_healthy(layout, "etcd", "kube-apiserver"))
    now = processes(layout)
    first, second = now["etcd"].pid, now["kube-apiserver"].pid
    assert first is not None
    assert second is not None
    assert first < second
    assert now["failing"].healthy is False


def test_what_is_killed_comes_back_and_what_fails_is_tried_again(layout: Layout) -> None:
    until(lambda: is_healthy(layout, "etcd"))
    before = processes(layout)["etcd"]
    ask(layout, Request(action="kill", component="etcd"))
    until(lambda: is_healthy(layout, "etcd"))
    after = processes(layout)["etcd"]
    assert after.pid != before.pid
    assert after.restarts == 1
    until(lambda: all(processes(layout)[name].restarts >= 2 for name in ("failing", "missing")))


def test_a_stopped_component_stays_down_until_it_is_started(layout: Layout) -> None:
    until(lambda: is_healthy(layout, "kube-apiserver"))
    ask(layout, Request(action="stop", component="kube-apiserver"))
    stopped = processes(layout)["kube-apiserver"]
    assert (stopped.pid, stopped.stopped, stopped.healthy) == (None, True, False)
    with pytest.raises(ComponentError, match="kube-apiserver is not running"):
        ask(layout, Request(action="kill", component="kube-apiserver"))
    ask(layout, Request(action="start", component="kube-apiserver"))
    until(lambda: is_healthy(layout, "kube-apiserver"))
    ask(layout, Request(action="restart", component="kube-apiserver"))
    until(lambda: is_healthy(layout, "kube-apiserver"))
    assert processes(layout)["kube-apiserver"].restarts == 0, "only what nobody asked for counts"


@pytest.mark.slow
def test_one_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with running(tmp_path, stubborn=True) as layout:
        until((tmp_path / "stubborn").exists)
        ask(layout, Request(action="stop", component="stubborn"))
        assert processes(layout)["stubborn"].pid is None


def test_orphans_are_reaped(layout: Layout) -> None:
    until((layout.root / "etcd.s.orphan").exists)
    supervisor = ask(layout, Request(action="status")).supervisor

    def states() -> set[str]:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return {Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children}

    ask(layout, Request(action="stop", component="kube-apiserver"))
    until(lambda: "Z" not in states())
    assert states(), "the check must see the components"


def test_unknown_components_and_nonsense_are_answered_not_fatal(layout: Layout) -> None:
    with pytest.raises(ComponentError, match="no component 'x'; there are etcd, kube-apiserver, failing, missing"):
        ask(layout, Request(action="kill", component="x"))
    for nonsense in (b"\n", b"{}\n", b'{"action": "dance"}\n', b"x" * 100_000 + b"\n", b"\xff\xfe\n", b"[" * 3000 + b"\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(layout.control))
            connection.sendall(nonsense)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert json.loads(answer)["error"].startswith("not a request")
    assert processes(layout)
    assert layout.control.stat().st_mode & 0o077 == 0, "only the owner may command the cluster"


def test_shutdown_ends_the_supervisor_and_with_it_everything(layout: Layout) -> None:
    until(lambda: is_healthy(layout, "etcd", "kube-apiserver"))
    ask(layout, Request(action="shutdown"))

    def is_gone() -> bool:
        try:
            processes(layout)
        except NotRunningError:
            return True
        return False

    until(is_gone)


def test_without_a_supervisor_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match="create it with `devcluster up --name gone`"):
        ask(Layout(tmp_path / "gone"), Request(action="status"))
    with pytest.raises(NotRunningError, match="start it with `devcluster up --name"):
        ask(Layout(tmp_path), Request(action="status"))


def test_a_socket_path_longer_than_unix_allows_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(NotRunningError):
        ask(Layout(deep), Request(action="status"))
