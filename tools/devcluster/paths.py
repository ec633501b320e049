"""Where a cluster keeps its files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")


def checked_name(name: str) -> str:
    """`name` when it can name a cluster (a DNS label of at most 32 characters); raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"cluster name {name!r} is not usable: at most 32 lower-case letters, digits and inner dashes, such as 'dev'")
    return name


def _xdg(environ: Mapping[str, str], variable: str, default: str) -> Path:
    given = environ.get(variable, "")
    # The XDG base directory specification: a relative value is to be ignored.
    base = Path(given) if given.startswith("/") else Path(environ.get("HOME") or "/root") / default
    return base / "devcluster"


def state_home(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of all clusters: `$XDG_STATE_HOME/devcluster`, else `~/.local/state/devcluster`."""
    return _xdg(os.environ if environ is None else environ, "XDG_STATE_HOME", ".local/state")


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of built binaries: `$XDG_CACHE_HOME/devcluster`, else `~/.cache/devcluster`."""
    return _xdg(os.environ if environ is None else environ, "XDG_CACHE_HOME", ".cache")


@dataclass(frozen=True)
class Layout:
    """The files of one cluster, all under its data directory."""

    root: Path

    @classmethod
    def of(cls, name: str) -> Layout:
        """The layout of the cluster called `name`; raises ConfigError for an unusable name."""
        return cls(state_home() / checked_name(name))

    @property
    def group(self) -> str:
        """Name of its cgroups: two state folders may hold clusters of the same name."""
        return f"{self.root.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}"

    @property
    def config(self) -> Path:
        """The cluster's settings (ClusterConfig as JSON)."""
        return self.root / "cluster.json"

    @property
    def lock(self) -> Path:
        """Held by whoever changes the cluster (`up`, `down`)."""
        return self.root.parent / f".{self.root.name}.lock"

    @property
    def alive(self) -> Path:
        """Locked by the supervisor for as long as it lives."""
        return self.root / "supervisor.lock"

    @property
    def launcher(self) -> Path:
        """Process id, in the host's view, whose death ends the whole cluster."""
        return self.root / "launcher.json"

    @property
    def control(self) -> Path:
        """The supervisor's Unix socket."""
        return self.root / "control.sock"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.root / "kubeconfig"

    @property
    def npu_state(self) -> Path:
        """Failed cards and the exporter's values."""
        return self.root / "npu.json"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.root / "pki"

    @property
    def etc(self) -> Path:
        """Configuration files of the components."""
        return self.root / "etc"

    @property
    def log(self) -> Path:
        """One log file per process."""
        return self.root / "log"

    @property
    def bin(self) -> Path:
        """Wrappers for kubectl and helm that know this cluster."""
        return self.root / "bin"

    @property
    def images(self) -> Path:
        """Image archives that `up` imports."""
        return self.root / "images"

    def component_kubeconfig(self, user: str) -> Path:
        """The kubeconfig of one component."""
        return self.etc / f"{user}.kubeconfig"
