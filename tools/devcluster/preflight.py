"""Whether this machine can host a cluster, and what to do when it cannot."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import CommandError, UnsupportedMachineError
from devcluster.run import run
from devcluster.versions import DEBIAN_PACKAGES, KUBERNETES

Progress = Callable[[str], None]

KIND = f"""\
On a machine with Docker, kind gives a similar cluster (without the pretend NPUs and the development image):
  kind create cluster --name dev --image kindest/node:v{KUBERNETES}
  kubectl label node dev-control-plane node.kubernetes.io/npu.chip.name=910B3
  kubectl patch node dev-control-plane --subresource=status --type=json \\
    -p '[{{"op":"add","path":"/status/capacity/huawei.com~1Ascend910","value":"8"}}]'
  kind load docker-image IMAGE --name dev
"""


@dataclass(frozen=True)
class Machine:
    """What counts when deciding whether a cluster can run."""

    platform: str
    user_id: int
    missing_programs: tuple[str, ...]
    has_apt: bool


def inspect() -> Machine:
    """This machine."""
    return Machine(
        platform=sys.platform,
        user_id=os.geteuid(),
        missing_programs=tuple(program for program in DEBIAN_PACKAGES if _find(program) is None),
        has_apt=shutil.which("apt-get") is not None,
    )


def _find(program: str) -> Path | None:
    if program.startswith("/"):
        return Path(program) if Path(program).exists() else None
    # Root's login shell has the sbin folders on PATH, a service or a test runner often has not.
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
    found = shutil.which(program, path=path)
    return None if found is None else Path(found)


def program(name: str) -> Path:
    """Where a program of the system is; raises UnsupportedMachineError when it is not installed."""
    found = _find(name)
    if found is None:
        raise UnsupportedMachineError(f"{name} is not installed; it is in Debian's package {DEBIAN_PACKAGES[name]}")
    return found


def packages_for(missing: Iterable[str], table: Mapping[str, str] = DEBIAN_PACKAGES) -> tuple[str, ...]:
    """The Debian packages that bring the missing programs, sorted."""
    return tuple(sorted({table[program] for program in missing}))


def problems(machine: Machine) -> tuple[str, ...]:
    """What stands in the way and cannot be mended by installing packages; empty when nothing does."""
    found = []
    if machine.platform != "linux":
        found.append(f"this is {machine.platform}: devcluster needs Linux (its namespaces, cgroups and iptables)")
    elif machine.user_id != 0:
        found.append(f"user id {machine.user_id} is not root: run it with sudo (it makes mounts, links and namespaces)")
    if machine.missing_programs and not machine.has_apt:
        found.append(
            f"missing programs: {', '.join(machine.missing_programs)}; install what brings them"
            f" (on Debian: {' '.join(packages_for(machine.missing_programs))})"
        )
    return tuple(found)


def check(machine: Machine) -> None:
    """Raise UnsupportedMachineError listing every problem, with the kind commands as the way out."""
    found = problems(machine)
    if found:
        raise UnsupportedMachineError("\n".join([*found, "", KIND]))


def install(missing: Iterable[str], progress: Progress) -> None:
    """Install the Debian packages of `missing` programs, saying so first."""
    packages = packages_for(missing)
    if not packages:
        return
    progress(f"installing Debian packages: {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    try:
        run(command, env=environment)
    except CommandError:
        # Package lists may be old or absent, as in a fresh container.
        run(["apt-get", "update"], env=environment)
        run(command, env=environment)
