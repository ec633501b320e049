"""Bringing a cluster up and down, and a handle to one that runs."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster import addons, binaries, cgroups, files, images, namespace, network, pki, preflight, settings, versions
from devcluster.control import Answer, Process, Request, ask
from devcluster.errors import CommandError, ComponentError, NotRunningError
from devcluster.launch import start_time
from devcluster.npu import state as npu_state
from devcluster.paths import Layout, state_home
from devcluster.run import run
from devcluster.settings import PAUSE_IMAGE, ClusterSettings, NpuSettings

Progress = Callable[[str], None]

_START_SECONDS = 120.0
_NODE_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1


def say(message: str) -> None:
    """The default progress: a line on standard error."""
    print(f"devcluster: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Cluster:
    """A handle to one cluster. Cheap: it holds names and paths, every method asks the cluster itself."""

    settings: ClusterSettings
    layout: Layout

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.settings.name

    @property
    def data_dir(self) -> Path:
        """Where all its files are."""
        return self.layout.root

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.layout.kubeconfig

    @property
    def kubectl(self) -> Path:
        """kubectl for this cluster: a wrapper with its kubeconfig (unless KUBECONFIG is set) and its own cache."""
        return self.layout.bin / "kubectl"

    @property
    def node_name(self) -> str:
        """The one real node."""
        return self.settings.node_name

    @property
    def dev_image(self) -> str:
        """The image whose containers see the host's Python, its environment and the checkout, read-only."""
        return self.settings.dev_image

    def helm(self, progress: Progress = say) -> Path:
        """Helm for this cluster, built on first use; raises BuildError."""
        binary = binaries.ensure(versions.project("helm"), progress)["helm"]
        return _write_wrapper(self.layout, binary)

    def processes(self) -> tuple[Process, ...]:
        """Every process of the cluster with its id on the host; raises NotRunningError."""
        answer = self._ask(Request(action="status"))
        on_host = _host_process_ids(answer.supervisor)
        own = Process(name="supervisor", pid=answer.supervisor, healthy=True)
        rest = (p.model_copy(update={"pid": on_host.get(p.pid or 0)}) for p in answer.reply.processes)
        return (own, *rest)

    def kill(self, component: str) -> None:
        """SIGKILL a component; the supervisor restarts it. Raises ComponentError when there is none or it is down."""
        self._ask(Request(action="kill", component=component))

    def stop(self, component: str) -> None:
        """Stop a component until `start`."""
        self._ask(Request(action="stop", component=component))

    def start(self, component: str) -> None:
        """Start a component that was stopped."""
        self._ask(Request(action="start", component=component))

    def restart(self, component: str) -> None:
        """Stop a component in an orderly way and start it again."""
        self._ask(Request(action="restart", component=component))

    def wait_healthy(self, names: Iterable[str] = (), timeout_seconds: float = _START_SECONDS) -> None:
        """Return once the components (all by default) are healthy; raises ComponentError naming those that are not."""
        wanted, deadline = set(names), time.monotonic() + timeout_seconds
        while True:
            reply = self._ask(Request(action="status")).reply
            sick = [p.name for p in reply.processes if (p.name in wanted or not wanted) and not p.healthy and not p.stopped]
            if not sick:
                return
            if time.monotonic() > deadline:
                logs = ", ".join(str(self.layout.log / f"{name}.log") for name in sick)
                raise ComponentError(f"not healthy after {timeout_seconds:.0f} s: {', '.join(sick)}; see {logs}")
            time.sleep(_POLL_SECONDS)

    def npu_state(self) -> npu_state.NpuState:
        """Failed cards and values set by hand."""
        return npu_state.read(self.layout.npu_state)

    def npu_fail(self, card: int) -> None:
        """Let a card fail: the node's allocatable falls, its capacity stays. Raises ComponentError for no such card."""
        npu_state.change(self.layout.npu_state, lambda state: state.with_failed(self._card(card)))

    def npu_heal(self, card: int) -> None:
        """Let a card be healthy again."""
        npu_state.change(self.layout.npu_state, lambda state: state.with_healed(self._card(card)))

    def npu_set(self, card: int, metric: str, value: float) -> None:
        """Let the pretend npu-exporter show `value` for one card; raises ConfigError for an unknown metric."""
        npu_state.change(self.layout.npu_state, lambda state: state.with_value(metric, self._card(card), value))

    def load_image(self, archive: Path) -> tuple[str, ...]:
        """Import an OCI or Docker archive into the node; returns the names it brought."""
        supervisor = self._ask(Request(action="status")).supervisor
        return _import_image(self.settings, supervisor, archive)

    def run_kubectl(self, *arguments: str, stdin: str | None = None, timeout_seconds: float | None = 60.0) -> str:
        """Run kubectl against this cluster whatever KUBECONFIG says; returns its output, raises CommandError."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        return run([self.kubectl, *arguments], stdin=stdin, env=environment, timeout_seconds=timeout_seconds)

    def _ask(self, request: Request) -> Answer:
        return ask(self.layout, request)

    def _card(self, card: int) -> int:
        if not 0 <= card < self.settings.npu.count:
            raise ComponentError(f"no card {card}: the node has cards 0 to {self.settings.npu.count - 1}")
        return card


def _host_process_ids(supervisor: int) -> dict[int, int]:
    """Process ids inside the cluster's namespace to the host's, for direct children of the supervisor (process 1)."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    mapping = {1: supervisor}
    for child in children:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{child}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    mapping[int(line.split()[-1])] = int(child)
    return mapping


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _runs(layout: Layout) -> bool:
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


def _write_wrapper(layout: Layout, binary: Path) -> Path:
    layout.bin.mkdir(exist_ok=True)
    wrapper = layout.bin / binary.name
    wrapper.write_text(files.wrapper(binary, layout))
    wrapper.chmod(0o755)
    return wrapper


def _write_files(stored: ClusterSettings, layout: Layout) -> None:
    for folder in (layout.etc / "cni", layout.log, layout.images):
        folder.mkdir(parents=True, exist_ok=True)
    if not pki.complete(layout.pki):
        leaves = pki.identities(stored.network, stored.node_name)
        pki.write_all(layout.pki, leaves, datetime.datetime.now(datetime.UTC))
    pem = {file.name: file.read_bytes() for file in layout.pki.iterdir()}
    for user in ("controller-manager", "scheduler", "proxy", "coredns", "kwok", "kubelet"):
        _write_private(layout.component_kubeconfig(user), files.kubeconfig(stored, user, pem))
    _write_private(layout.kubeconfig, files.kubeconfig(stored, "admin", pem))
    default_spec = run([stored.binaries["ctr"], "oci", "spec"])
    texts = {
        "base-spec.json": files.base_spec(default_spec, stored.mounts),
        "containerd.toml": files.containerd_toml(layout, preflight.program("runc")),
        "cni/10-devcluster.conflist": files.cni_conflist(stored),
        "kubelet.yaml": files.kubelet_yaml(stored, layout),
        "kube-proxy.yaml": files.kube_proxy_yaml(stored, layout),
        "Corefile": files.corefile(stored, layout),
        "resolv.conf": "",
        "addons.yaml": addons.manifests(stored),
    }
    for name, text in texts.items():
        (layout.etc / name).write_text(text)
    pause = stored.binaries["pause"].read_bytes()
    (layout.images / "pause.tar").write_bytes(images.pause_image(PAUSE_IMAGE, pause))
    links = images.host_root_links()
    dev = images.dev_image(stored.dev_image, stored.mounts, links, stored.python_prefix)
    (layout.images / "host.tar").write_bytes(dev)
    _write_wrapper(layout, stored.binaries["kubectl"])


def _write_private(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(text)


def _import_image(stored: ClusterSettings, supervisor: int, archive: Path) -> tuple[str, ...]:
    with archive.open("rb") as stream:
        arguments: list[str | Path] = [stored.binaries["ctr"], "--namespace=k8s.io", "images", "import", "--local", "-"]
        done = subprocess.run(
            [str(part) for part in namespace.command(supervisor, arguments)],
            stdin=stream,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise CommandError(f"importing {archive} failed: {done.stderr.strip()[-2000:]}")
    return tuple(line.split()[0] for line in done.stdout.splitlines() if line.strip())


def _launch(layout: Layout) -> None:
    layout.launcher.unlink(missing_ok=True)
    with (layout.log / "supervisor.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "devcluster.launch", str(layout.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=layout.root,
            start_new_session=True,
        )


def _wait_started(cluster: Cluster) -> int:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return ask(cluster.layout, Request(action="status")).supervisor
        except NotRunningError:
            if time.monotonic() > deadline:
                log = cluster.layout.log / "supervisor.log"
                tail = log.read_text()[-2000:] if log.exists() else ""
                raise ComponentError(f"the supervisor did not start; end of {log}:\n{tail}") from None
            time.sleep(_POLL_SECONDS)


def _resolve_binaries(progress: Progress) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name in versions.CORE_PROJECTS:
        found |= binaries.ensure(versions.project(name), progress)
    return found


def _known_indices() -> set[int]:
    taken = set()
    for file in state_home().glob("*/cluster.json"):
        with contextlib.suppress(Exception):
            taken.add(json.loads(file.read_text())["network_index"])
    return taken


def checkout_of(folder: Path) -> Path | None:
    """The git checkout around `folder`, None outside of one."""
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)


def up(
    name: str = "dev",
    npu: NpuSettings | None = None,
    *,
    checkout: Path | None = None,
    mounts: Sequence[Path] = (),
    progress: Progress = say,
) -> Cluster:
    """Bring the cluster to a Ready node with its NPUs; idempotent, and resumes after a reboot or a kill of any part.

    `npu` None keeps what the cluster has, or eight 910B3 for a new one. `checkout` (by default the git checkout around the
    current folder) and `mounts` are visible in containers of the development image. Raises a DevclusterError that says
    what stands in the way.
    """
    machine = preflight.inspect()
    preflight.check(machine)
    layout = Layout.of(name)
    with _locked(layout.lock):
        preflight.install(machine.missing_programs, progress)
        visible = settings.default_mounts(checkout or checkout_of(Path.cwd()), mounts)
        found = _resolve_binaries(progress)
        previous = settings.load(layout) if layout.config.exists() else None
        running = previous is not None and _runs(layout)
        if running and previous is not None and found != previous.binaries:
            progress("the binaries changed: starting anew with the same data")
            _shut_down(layout)
            running = False
        if not running:
            _clear_leftovers(layout, name)
        index = previous.network_index if previous else network.choose(_known_indices(), network.host_routes()).index
        wanted = ClusterSettings(
            name=name,
            network_index=index,
            npu=npu or (previous.npu if previous else NpuSettings()),
            mounts=visible,
            binaries=found,
        )
        cluster = Cluster(wanted, layout)
        if not (running and wanted == previous):
            if not running:
                network.check_free(wanted.network, network.host_routes())
            layout.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            layout.config.write_text(wanted.model_dump_json(indent=1))
            _write_files(wanted, layout)
        if not running:
            progress(f"starting {name} at {wanted.server}")
            _launch(layout)
        supervisor = _wait_started(cluster)
        if running and wanted != previous:
            progress("settings changed: restarting containerd and the NPUs")
            cluster.restart("containerd")
            cluster.restart("npu")
        if not (running and wanted == previous):
            cluster.wait_healthy(["containerd"])
            for archive in ("pause.tar", "host.tar"):
                _import_image(wanted, supervisor, layout.images / archive)
            cluster.wait_healthy(["kube-apiserver"])
            cluster.run_kubectl("apply", "--server-side", "--force-conflicts", "-f", str(layout.etc / "addons.yaml"))
        _wait_node(cluster)
    return cluster


def _wait_node(cluster: Cluster) -> None:
    cluster.wait_healthy()
    npu = cluster.settings.npu
    resource = npu.resource_name.replace(".", "\\.")
    query = "jsonpath={.status.conditions[?(@.type=='Ready')].status} {.status.capacity." + resource + "}"
    deadline = time.monotonic() + _NODE_SECONDS
    seen = ""
    while time.monotonic() < deadline:
        with contextlib.suppress(CommandError):
            seen = cluster.run_kubectl("get", "node", cluster.node_name, "-o", query)
            ready, _, capacity = seen.partition(" ")
            if ready == "True" and (npu.count == 0 or capacity == str(npu.count)):
                return
        time.sleep(_POLL_SECONDS)
    log = cluster.layout.log / "kubelet.log"
    raise ComponentError(
        f"node {cluster.node_name} is not Ready with {npu.count} {npu.resource_name} after {_NODE_SECONDS:.0f} s"
        f" (ready and capacity: {seen!r}); see {log}"
    )


def _kill_launcher(layout: Layout) -> None:
    """End the namespaces' first process, and with it everything in them; nothing happens when it is gone already."""
    try:
        identity = json.loads(layout.launcher.read_text())
        # A process id is reused after a reboot; the start time tells the same process from another.
        if start_time(identity["pid"]) == identity["start_time"]:
            os.kill(identity["pid"], signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


def _shut_down(layout: Layout) -> None:
    with contextlib.suppress(NotRunningError):
        ask(layout, Request(action="shutdown"))
    deadline = time.monotonic() + _STOP_SECONDS
    while _runs(layout) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _clear_leftovers(layout: Layout, name: str) -> None:
    """Remove what a cluster leaves that no longer runs."""
    _kill_launcher(layout)
    deadline = time.monotonic() + _STOP_SECONDS
    while remaining := cgroups.processes(name):
        if time.monotonic() > deadline:
            raise ComponentError(f"processes {sorted(remaining)} of {name} do not end")
        time.sleep(_POLL_SECONDS)
    cgroups.remove(name)


def down(name: str = "dev", *, keep_data: bool = False, progress: Progress = say) -> bool:
    """End the cluster and remove every trace of it, its data included unless `keep_data`; False if there was none.

    Works after any crash. With `keep_data` the processes end in an orderly way and the next `up` resumes.
    """
    preflight.check(preflight.inspect())
    layout = Layout.of(name)
    with _locked(layout.lock):
        existed = layout.root.exists()
        if keep_data and _runs(layout):
            _shut_down(layout)
        _clear_leftovers(layout, name)
        if existed and not keep_data:
            shutil.rmtree(layout.root)
        with contextlib.suppress(OSError):
            Path(files.KUBELET_ROOT).rmdir()
    progress(f"{name} is down" if existed else f"there was no cluster {name}")
    return existed


def get(name: str = "dev") -> Cluster:
    """A handle to an existing cluster, running or not; raises NotRunningError when there is none."""
    layout = Layout.of(name)
    return Cluster(settings.load(layout), layout)
