"""A handle to one cluster."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from devcluster import binaries, materials, namespace, nodes, versions
from devcluster.control import Answer, Process, Request, ask
from devcluster.errors import CommandError, ComponentError
from devcluster.npu import state as npu_state
from devcluster.paths import Layout
from devcluster.run import run
from devcluster.settings import ClusterSettings, load

Progress = Callable[[str], None]

_HEALTHY_SECONDS = 120.0
_POLL_SECONDS = 0.1
_FAKE_NODES_SECONDS = 300.0
_FAKE_NODES_POLL_SECONDS = 1.0


def say(message: str) -> None:
    """The default progress: a line on standard error."""
    print(f"devcluster: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Cluster:
    """A handle to one cluster. Cheap: it holds names and paths, every method asks the cluster itself.

    Methods that need the cluster running raise NotRunningError when it is not.
    """

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
        return materials.write_wrapper(self.layout, binary)

    def run_kubectl(self, *arguments: str, stdin: str | None = None, timeout_seconds: float | None = 60.0) -> str:
        """Run kubectl against this cluster whatever KUBECONFIG says; returns its output, raises CommandError."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        return run([self.kubectl, *arguments], stdin=stdin, env=environment, timeout_seconds=timeout_seconds)

    def processes(self) -> tuple[Process, ...]:
        """Every process of the cluster with its id on the host; the supervisor comes first."""
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

    def reload(self) -> None:
        """Let the supervisor read the stored settings again: start what is new, restart what changed."""
        self._ask(Request(action="reload"))

    def wait_healthy(self, names: Iterable[str] = (), timeout_seconds: float = _HEALTHY_SECONDS) -> None:
        """Return once the components (all by default) are healthy; raises ComponentError naming those that are not.

        Components that were stopped on purpose are left out.
        """
        wanted, deadline = set(names), time.monotonic() + timeout_seconds
        while True:
            reply = self._ask(Request(action="status")).reply
            asked = [p for p in reply.processes if not wanted or p.name in wanted]
            sick = [p.name for p in asked if not p.healthy and not p.stopped]
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
        self._check_card(card)
        npu_state.change(self.layout.npu_state, lambda state: state.with_failed(card))

    def npu_heal(self, card: int) -> None:
        """Let a card be healthy again."""
        self._check_card(card)
        npu_state.change(self.layout.npu_state, lambda state: state.with_healed(card))

    def npu_set(self, card: int, metric: str, value: float) -> None:
        """Let the pretend npu-exporter show `value` for one card; raises ConfigError for an unknown metric."""
        self._check_card(card)
        npu_state.change(self.layout.npu_state, lambda state: state.with_value(metric, card, value))

    def npu_reset(self) -> None:
        """All cards healthy and idle."""
        npu_state.change(self.layout.npu_state, lambda _: npu_state.NpuState())

    def load_image(self, archive: Path) -> tuple[str, ...]:
        """Import an OCI or Docker archive into the node; returns the names it brought, raises CommandError."""
        supervisor = self._ask(Request(action="status")).supervisor
        ctr: list[str | Path] = [self.settings.binaries["ctr"], "--namespace=k8s.io", "images", "import", "--local"]
        # The archive goes in through a pipe: the host's mounts made since the cluster started are not visible inside.
        command = [str(part) for part in namespace.command(supervisor, [*ctr, "-"])]
        with archive.open("rb") as stream:
            done = subprocess.run(command, stdin=stream, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CommandError(f"{archive} could not be imported; is it an image archive? {done.stderr.strip()[-2000:]}")
        return tuple(re.findall(r"^unpacking (\S+) ", done.stdout, re.MULTILINE))

    def fake_node_names(self) -> list[str]:
        """Names of the fake nodes."""
        out = self.run_kubectl("get", "nodes", "-l", nodes.FAKE_LABEL, "-o", "jsonpath={.items[*].metadata.name}")
        return out.split()

    def add_fake_nodes(self, count: int, npus: int, *, tainted: bool = True, progress: Progress = say) -> None:
        """Add nodes played by kwok (built on first use), each with `npus` cards; returns once all are Ready.

        Pods must tolerate the taint `kwok.x-k8s.io/node=fake:NoSchedule` unless `tainted` is False.
        """
        kwok = binaries.ensure(versions.project("kwok"), progress)["kwok"]
        stored = load(self.layout)
        if stored.binaries.get("kwok") != kwok:
            changed = stored.model_copy(update={"binaries": {**stored.binaries, "kwok": kwok}})
            self.layout.config.write_text(changed.model_dump_json(indent=1))
        self.reload()
        self.wait_healthy(["kwok"])
        names = self.fake_node_names()
        first = nodes.next_index(names)
        manifest = nodes.fake_nodes(first, count, npus, self.settings, tainted=tainted)
        self.run_kubectl("create", "-f", "-", stdin=manifest, timeout_seconds=None)
        deadline = time.monotonic() + _FAKE_NODES_SECONDS
        while missing := len(names) + count - self._ready_fake_nodes():
            if time.monotonic() > deadline:
                raise ComponentError(f"{missing} fake nodes are not Ready; see {self.layout.log / 'kwok.log'}")
            time.sleep(_FAKE_NODES_POLL_SECONDS)

    def _ready_fake_nodes(self) -> int:
        query = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
        return self.run_kubectl("get", "nodes", "-l", nodes.FAKE_LABEL, "-o", query).split().count("True")

    def remove_fake_nodes(self) -> None:
        """Remove every fake node; the controller manager deletes their pods."""
        self.run_kubectl("delete", "--raw", f"/api/v1/nodes?labelSelector={nodes.FAKE_LABEL}", timeout_seconds=None)

    def _ask(self, request: Request) -> Answer:
        return ask(self.layout, request)

    def _check_card(self, card: int) -> None:
        if not 0 <= card < self.settings.npu.count:
            raise ComponentError(f"no card {card}: the node has cards 0 to {self.settings.npu.count - 1}")


def _host_process_ids(supervisor: int) -> dict[int, int]:
    """Process ids inside the cluster's namespace to the host's, for direct children of the supervisor (process 1)."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    mapping = {1: supervisor}
    for child in children:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for line in Path(f"/proc/{child}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    mapping[int(line.split()[-1])] = int(child)
    return mapping


def get(name: str = "dev") -> Cluster:
    """A handle to an existing cluster, running or not; raises NotRunningError when there is none."""
    layout = Layout.of(name)
    return Cluster(load(layout), layout)
