"""The cluster's first process: prepares its namespaces, keeps the components running, reaps, answers on a socket.

Started by `devcluster.launch` as process 1 of a process-id namespace: `python -m devcluster.supervisor DATA_DIR FD`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from devcluster import namespace, probes
from devcluster.backoff import Backoff
from devcluster.components import Component, components
from devcluster.control import Process, Reply, Request, socket_address
from devcluster.errors import DevclusterError
from devcluster.paths import Layout
from devcluster.settings import load

_LOG = logging.getLogger("devcluster.supervisor")
_PROBE_INTERVAL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_MAX_REQUEST_BYTES = 4096
_KEPT_LOG_BYTES = 16 << 20


class Keeper:
    """Keeps one component running until told to stop it."""

    def __init__(
        self,
        component: Component,
        log_file: Path,
        prerequisites: Iterable[Keeper],
        spawned: Callable[[subprocess.Popen[bytes], asyncio.Future[int]], None],
    ) -> None:
        self.component = component
        self.restarts = 0
        self._log_file = log_file
        self._prerequisites = tuple(prerequisites)
        self._spawned = spawned
        self._process: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._ready = asyncio.Event()
        self._backoff = Backoff()
        self._started = False
        self._asked_to_end = False

    @property
    def pid(self) -> int | None:
        """Process id in this namespace, None while down."""
        return None if self._process is None else self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether it is down because someone asked."""
        return not self._wanted.is_set()

    async def wait_ready(self) -> None:
        """Return once the component has been healthy since its last start."""
        await self._ready.wait()

    async def run(self) -> None:
        """Start, watch and restart; ends only by cancellation."""
        while True:
            await self._wanted.wait()
            if not self._started:
                # Only the first start is ordered: later each component copes with the others' absence, as anywhere.
                for prerequisite in self._prerequisites:
                    await prerequisite.wait_ready()
                self._started = True
            started = time.monotonic()
            try:
                exited = self._spawn()
            except OSError as error:
                status = str(error)  # its program is missing: perhaps only while it is being built anew
            else:
                watcher = asyncio.create_task(self._watch_ready())
                try:
                    status = str(await exited)
                finally:
                    watcher.cancel()
                    await asyncio.gather(watcher, return_exceptions=True)
            self._process = None
            self._ready.clear()
            if self._asked_to_end:
                self._asked_to_end = False
                continue
            self.restarts += 1
            delay = self._backoff.after(time.monotonic() - started)
            _LOG.warning("%s ended with status %s; restart in %.1f s", self.component.name, status, delay)
            await asyncio.sleep(delay)

    def _spawn(self) -> asyncio.Future[int]:
        environment = {**os.environ, **self.component.env}
        if self._log_file.exists() and self._log_file.stat().st_size > _KEPT_LOG_BYTES:
            self._log_file.replace(self._log_file.with_suffix(".log.1"))
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.component.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._exited = asyncio.get_running_loop().create_future()
        self._spawned(self._process, self._exited)
        _LOG.info("%s started as process %d", self.component.name, self._process.pid)
        return self._exited

    async def _watch_ready(self) -> None:
        while not await probes.healthy(self.component.probe):  # noqa: ASYNC110 -- another process, no event to wait for
            await asyncio.sleep(_PROBE_INTERVAL_SECONDS)
        self._ready.set()
        _LOG.info("%s is healthy", self.component.name)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL; returns once the process is gone."""
        if self._process is not None and self._exited is not None:
            self.signal(signal.SIGKILL)
            await asyncio.wait({self._exited})

    async def stop(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """SIGTERM, then SIGKILL after the grace; returns once it is down. It stays down until `start`."""
        self._wanted.clear()
        exited = self._exited
        if self._process is None or exited is None:
            return
        self._asked_to_end = True
        self.signal(signal.SIGTERM)
        done, _ = await asyncio.wait({exited}, timeout=grace_seconds)
        if not done:
            await self.kill()

    def start(self) -> None:
        """Want it running again."""
        self._backoff = Backoff()
        self._wanted.set()


class Supervisor:
    """All components of one cluster and the control socket."""

    def __init__(self, layout: Layout, wanted: Iterable[Component]) -> None:
        self._layout = layout
        self._children: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        self._keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = asyncio.Event()
        for component in wanted:
            self._add(component)

    def _add(self, component: Component) -> None:
        self._keepers[component.name] = Keeper(
            component,
            self._layout.log / f"{component.name}.log",
            (self._keepers[name] for name in component.after),
            self._register,
        )

    def _keep(self, name: str) -> None:
        task = asyncio.create_task(self._keepers[name].run(), name=name)
        task.add_done_callback(self._kept)
        self._tasks[name] = task

    def _kept(self, task: asyncio.Task[None]) -> None:
        # A keeper ends by cancellation only; any other end is a fault of this program, and half a cluster helps nobody.
        if not task.cancelled():
            _LOG.error("the keeper of %s failed", task.get_name(), exc_info=task.exception())
            self._ending.set()

    async def _reload(self) -> None:
        for component in components(load(self._layout), self._layout):
            keeper = self._keepers.get(component.name)
            if keeper is None:
                self._add(component)
                self._keep(component.name)
            elif keeper.component != component:
                was_stopped = keeper.stopped
                await keeper.stop()
                keeper.component = component
                if not was_stopped:
                    keeper.start()

    def _register(self, process: subprocess.Popen[bytes], exited: asyncio.Future[int]) -> None:
        self._children[process.pid] = (process, exited)

    def _reap(self) -> None:
        # Process 1 inherits every orphan of the namespace (containerd's shims above all), so all are reaped here and
        # Popen is told what became of its own.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                process, exited = self._children.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                if not exited.done():
                    exited.set_result(process.returncode)

    async def run(self) -> None:
        """Run until asked to end, then stop the components in reverse order."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        directory = os.open(self._layout.root, os.O_PATH | os.O_DIRECTORY)
        self._layout.control.unlink(missing_ok=True)
        old_umask = os.umask(0o077)
        server = await asyncio.start_unix_server(self._serve, socket_address(self._layout, directory), limit=_MAX_REQUEST_BYTES)
        os.umask(old_umask)
        for name in self._keepers:
            self._keep(name)
        try:
            await self._ending.wait()
            await self._stop_all()
        finally:
            server.close()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            os.close(directory)

    async def _stop_all(self) -> None:
        first = [keeper.stop() for name, keeper in self._keepers.items() if name not in ("etcd", "kube-apiserver")]
        await asyncio.gather(*first)
        for name in ("kube-apiserver", "etcd"):
            await self._keepers[name].stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                request = Request.model_validate_json(await reader.readline())
                reply = await self._handle(request)
            except (ValidationError, ValueError) as error:
                reply = Reply(error=f"not a request: {error}")
            writer.write(reply.model_dump_json().encode())
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _handle(self, request: Request) -> Reply:
        if request.action == "status":
            return Reply(processes=tuple(await asyncio.gather(*map(self._describe, self._keepers.values()))))
        if request.action == "shutdown":
            self._ending.set()
            return Reply()
        if request.action == "reload":
            try:
                await self._reload()
            except DevclusterError as error:
                return Reply(error=str(error))
            return Reply()
        keeper = self._keepers.get(request.component or "")
        if keeper is None:
            return Reply(error=f"no component {request.component!r}; there are {', '.join(self._keepers)}")
        if request.action == "kill":
            if keeper.pid is None:
                return Reply(error=f"{request.component} is not running")
            await keeper.kill()
        elif request.action == "start":
            keeper.start()
        else:
            await keeper.stop()
            if request.action == "restart":
                keeper.start()
        return Reply()

    async def _describe(self, keeper: Keeper) -> Process:
        healthy = keeper.pid is not None and await probes.healthy(keeper.component.probe)
        return Process(
            name=keeper.component.name,
            pid=keeper.pid,
            healthy=healthy,
            restarts=keeper.restarts,
            stopped=keeper.stopped,
        )


def main() -> None:
    """Entry point of process 1."""
    layout, host_network = Layout(Path(sys.argv[1])), int(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    alive = os.open(layout.alive, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    settings = load(layout)
    namespace.enter(settings, layout, host_network)
    os.close(host_network)
    asyncio.run(Supervisor(layout, components(settings, layout)).run())


if __name__ == "__main__":
    main()
