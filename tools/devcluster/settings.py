"""A cluster's settings: given to `up`, kept in its data directory, read by everything else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from devcluster.errors import ConfigError, NotRunningError
from devcluster.network import Network
from devcluster.paths import Layout

DEV_IMAGE = "devcluster.local/host:dev"
PAUSE_IMAGE = "devcluster.local/pause:1"
NODE_NAME = "npu-node-0"

_MAX_CARDS = 64


class NpuSettings(BaseModel):
    """The pretend NPUs of the node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resource_name: str = Field("huawei.com/Ascend910", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=128)
    count: int = Field(8, ge=0, le=_MAX_CARDS)
    unit: int = Field(1, ge=1, le=16, description="cards that can only be given out together (2 on A3 modules)")
    chip_name: str = Field("910B3", pattern=r"^[A-Za-z0-9._-]+$", max_length=63)
    memory_mb: int = Field(65536, ge=1024, description="HBM of one card, MB")

    @model_validator(mode="after")
    def _whole_units(self) -> NpuSettings:
        if self.count % self.unit:
            raise ValueError(f"count {self.count} is no multiple of unit {self.unit}: give whole modules")
        return self


class ClusterSettings(BaseModel):
    """Everything that decides what a cluster's files and processes are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    network_index: int = Field(ge=0)
    npu: NpuSettings = NpuSettings()
    mounts: tuple[Path, ...] = Field((), description="host paths that containers of the development image see")
    python_prefix: Path = Path(sys.prefix)
    dev_image: str = DEV_IMAGE
    binaries: dict[str, Path] = Field(default_factory=dict)

    @property
    def network(self) -> Network:
        """The cluster's addresses."""
        return Network(self.network_index)

    @property
    def node_name(self) -> str:
        """The name of the one real node."""
        return NODE_NAME

    @property
    def server(self) -> str:
        """The API server's URL, reachable from the host and from pods."""
        return f"https://{self.network.node}:6443"


def describe(error: ValidationError) -> str:
    """A pydantic error in one line: field, value, what is wrong."""
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(step) for step in item["loc"])
        parts.append(f"{field} = {item.get('input')!r}: {item['msg']}" if field else str(item["msg"]))
    return "; ".join(parts)


def load(layout: Layout) -> ClusterSettings:
    """The stored settings; raises NotRunningError when there is no such cluster, ConfigError for a damaged file."""
    try:
        text = layout.config.read_text()
    except FileNotFoundError:
        name = layout.root.name
        raise NotRunningError(f"there is no cluster {name!r}; create it with `devcluster up --name {name}`") from None
    try:
        return ClusterSettings.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{layout.config} cannot be read ({describe(error)}); run `devcluster down --name {layout.root.name}`") from error


def outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The given absolute paths without those inside another of them, sorted."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return tuple(kept)


def default_mounts(checkout: Path | None, extra: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Host folders for the development image: the system's programs, this Python, its environment, the checkout."""
    system = [Path(p) for p in ("/usr", "/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache")]
    system += [Path(p) for p in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")]
    wanted = [path for path in system if path.exists() and not path.is_symlink()]
    wanted += [Path(sys.base_prefix), Path(sys.prefix)]
    if checkout is not None:
        wanted.append(checkout)
    for path in extra:
        if not path.is_absolute() or not path.exists():
            raise ConfigError(f"mount {str(path)!r} must be an absolute path that exists on this machine")
        wanted.append(path)
    return outermost(path for path in wanted if path != Path("/"))
