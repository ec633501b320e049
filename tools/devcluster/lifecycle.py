"""Bringing a cluster up and down."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devcluster import binaries, cgroups, materials, network, preflight, versions
from devcluster.cluster import Cluster, Progress, say
from devcluster.control import Request, ask
from devcluster.errors import CommandError, ComponentError, ConfigError, NotRunningError
from devcluster.launch import launch, start_time
from devcluster.paths import Layout, state_home
from devcluster.settings import ClusterSettings, NpuSettings, default_mounts, load, outermost

_START_SECONDS = 60.0
_NODE_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1
_MACHINE_LOCK = Path("/run/lock/devcluster.lock")


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # `down` removes the file while it holds the lock: whoever waited then holds a lock that nobody else sees.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == file.stat().st_ino:
                break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def is_running(layout: Layout) -> bool:
    """Whether a supervisor lives: the kernel holds its lock exactly as long."""
    try:
        descriptor = os.open(layout.alive, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def checkout_of(folder: Path) -> Path | None:
    """The git checkout around `folder`, None outside of one."""
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)


def _prepare(missing: Sequence[str], progress: Progress) -> dict[str, Path]:
    """Debian packages and binaries, side by side."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        installed = pool.submit(preflight.install, missing, progress)
        found: dict[str, Path] = {}
        for name in versions.CORE_PROJECTS:
            found |= binaries.ensure(versions.project(name), progress)
        installed.result()
    return found


def _known_indices() -> set[int]:
    taken = set()
    for file in state_home().glob("*/cluster.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a damaged cluster claims no addresses
            taken.add(int(json.loads(file.read_text())["network_index"]))
    return taken


def up(
    name: str = "dev",
    npu: NpuSettings | None = None,
    *,
    npus: int | None = None,
    checkout: Path | None = None,
    mounts: Sequence[Path] = (),
    progress: Progress = say,
) -> Cluster:
    """Bring the cluster to a Ready node with its NPUs; idempotent, and resumes after a reboot or a kill of any part.

    Without `npu` (or `npus`, only their number) a cluster keeps the cards it has, and a new one gets eight 910B3.
    Containers of the development image see `checkout` (by default the git checkout around the current folder), `mounts`
    and what earlier calls named. Raises a DevclusterError that says what stands in the way.
    """
    machine = preflight.inspect()
    preflight.check(machine)
    layout = Layout.of(name)
    with _locked(layout.lock):
        found = _prepare(machine.missing_programs, progress)
        previous = load(layout) if layout.config.exists() else None
        running = previous is not None and is_running(layout)
        visible = default_mounts(checkout or checkout_of(Path.cwd()), mounts)
        if previous is not None:
            visible = outermost([*visible, *(path for path in previous.mounts if path.exists())])
            found = {**previous.binaries, **found}
        cards = npu or (previous.npu if previous else NpuSettings())
        if npus is not None:
            cards = NpuSettings.model_validate({**cards.model_dump(), "count": npus})

        def settings(index: int) -> ClusterSettings:
            return ClusterSettings(name=name, network_index=index, npu=cards, mounts=visible, binaries=found)

        if running and previous is not None:
            cluster = Cluster(settings(previous.network_index), layout)
            if cluster.settings != previous:
                _write(cluster)
                _adapt(cluster, previous, progress)
        else:
            clear_leftovers(layout)
            with _locked(_MACHINE_LOCK):
                routes = network.host_routes()
                if previous is None:
                    index = network.choose(_known_indices(), routes).index
                else:
                    index = previous.network_index
                    network.check_free(previous.network, routes)
                cluster = Cluster(settings(index), layout)
                _write(cluster)
                progress(f"starting {name} at {cluster.settings.server}")
                launch(layout)
                _wait_started(cluster)
            _furnish(cluster)
        _wait_node(cluster)
    return cluster


def _write(cluster: Cluster) -> None:
    layout = cluster.layout
    layout.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    materials.write_all(cluster.settings, layout, datetime.datetime.now(datetime.UTC))
    layout.config.write_text(cluster.settings.model_dump_json(indent=1))


def _adapt(cluster: Cluster, previous: ClusterSettings, progress: Progress) -> None:
    """Bring a running cluster to changed settings without touching what they do not concern."""
    changed = sorted(field for field in ClusterSettings.model_fields if getattr(previous, field) != getattr(cluster.settings, field))
    progress(f"changed settings ({', '.join(changed)}): restarting what they concern")
    cluster.reload()
    if "npu" in changed:
        cluster.restart("npu")
        cluster.restart("kubelet")
    if "mounts" in changed:
        cluster.restart("containerd")
    _furnish(cluster)


def _furnish(cluster: Cluster) -> None:
    cluster.wait_healthy(["containerd"])
    for archive in materials.IMAGE_ARCHIVES:
        cluster.load_image(cluster.layout.images / archive)
    cluster.wait_healthy(["kube-apiserver"])
    addons = str(cluster.layout.etc / "addons.yaml")
    cluster.run_kubectl("apply", "--server-side", "--force-conflicts", "-f", addons)


def _launcher_lives(layout: Layout) -> bool:
    try:
        identity = json.loads(layout.launcher.read_text())
        return bool(start_time(identity["pid"]) == identity["start_time"])
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_started(cluster: Cluster) -> None:
    layout, deadline = cluster.layout, time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(NotRunningError):
            ask(layout, Request(action="status"))
            return
        ended = layout.launcher.exists() and not _launcher_lives(layout)
        if ended or time.monotonic() > deadline:
            log = layout.log / "supervisor.log"
            tail = log.read_text()[-2000:] if log.exists() else ""
            raise ComponentError(f"the supervisor did not start; end of {log}:\n{tail}")
        time.sleep(_POLL_SECONDS)


def _wait_node(cluster: Cluster) -> None:
    cluster.wait_healthy()
    npu = cluster.settings.npu
    resource = npu.resource_name.replace(".", "\\.")
    query = "jsonpath={.status.conditions[?(@.type=='Ready')].status} {.status.capacity." + resource + "}"
    deadline, seen = time.monotonic() + _NODE_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            seen = cluster.run_kubectl("get", "node", cluster.node_name, "-o", query)
            ready, _, capacity = seen.partition(" ")
            if ready == "True" and (capacity or "0") == str(npu.count) and _has_service_account(cluster):
                return
        except CommandError as error:
            seen = str(error)
        time.sleep(_POLL_SECONDS)
    raise ComponentError(
        f"node {cluster.node_name} is not Ready with {npu.count} {npu.resource_name} after {_NODE_SECONDS:.0f} s"
        f" (ready and capacity: {seen!r}); see {cluster.layout.log / 'kubelet.log'}"
    )


def _has_service_account(cluster: Cluster) -> bool:
    # The API server refuses pods in a namespace until the controller manager has made its account.
    return bool(cluster.run_kubectl("get", "serviceaccount", "default", "--namespace=default", "--ignore-not-found", "-o", "name"))


def clear_leftovers(layout: Layout) -> None:
    """End what is left of a cluster and remove its cgroups; nothing happens when nothing is left.

    Ending the launcher ends the namespaces' first process, and the kernel everything in them. Raises ComponentError
    when a process survives that.
    """
    ran = _launcher_lives(layout) or bool(cgroups.processes(layout.group))
    if _launcher_lives(layout):
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(layout.launcher.read_text())["pid"], signal.SIGKILL)
    deadline = time.monotonic() + _STOP_SECONDS
    while remaining := cgroups.processes(layout.group):
        if time.monotonic() > deadline:
            raise ComponentError(f"processes {sorted(remaining)} of cluster {layout.root.name!r} do not end; end them by hand")
        time.sleep(_POLL_SECONDS)
    cgroups.remove(layout.group)
    if ran:
        _wait_for_link(layout, deadline)


def _wait_for_link(layout: Layout, deadline: float) -> None:
    """The kernel takes a network namespace, and with it the host's link and routes, down some time after its last process."""
    try:
        link = load(layout).network.host_link
    except (NotRunningError, ConfigError):
        return
    while Path("/sys/class/net", link).exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _shut_down(layout: Layout) -> None:
    with contextlib.suppress(NotRunningError):
        ask(layout, Request(action="shutdown"))
    deadline = time.monotonic() + _STOP_SECONDS
    while is_running(layout) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _wait_for_link(layout, deadline)


def down(name: str = "dev", *, keep_data: bool = False, progress: Progress = say) -> bool:
    """End the cluster and remove every trace of it, its data included unless `keep_data`; False if there was none.

    Works after any crash. With `keep_data` the processes end in an orderly way and the next `up` resumes.
    """
    preflight.check(preflight.inspect())
    layout = Layout.of(name)
    with _locked(layout.lock):
        existed = layout.root.exists()
        if keep_data and is_running(layout):
            _shut_down(layout)
        clear_leftovers(layout)
        if not keep_data:
            if existed:
                shutil.rmtree(layout.root)
            layout.lock.unlink()
    progress(f"{name} is down" if existed else f"there was no cluster {name}")
    return existed
