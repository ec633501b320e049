"""The state of the pretend cards: which have failed, which values the exporter shows."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from devcluster.errors import ConfigError
from devcluster.npu.metrics import METRICS

FILE_NAME = "npu.json"


class NpuState(BaseModel):
    """Failed cards, and values set by hand as metric name → card → value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failed: tuple[int, ...] = ()
    values: dict[str, dict[int, float]] = Field(default_factory=dict)

    def with_failed(self, card: int) -> NpuState:
        """A copy in which `card` has failed."""
        return self.model_copy(update={"failed": tuple(sorted({*self.failed, card}))})

    def with_healed(self, card: int) -> NpuState:
        """A copy in which `card` is healthy."""
        return self.model_copy(update={"failed": tuple(other for other in self.failed if other != card)})

    def with_value(self, metric: str, card: int, value: float) -> NpuState:
        """A copy in which the exporter shows `value`; raises ConfigError for a metric it does not have."""
        if metric not in METRICS:
            raise ConfigError(f"no metric {metric!r}; the exporter has {', '.join(sorted(METRICS))}")
        values = {name: dict(cards) for name, cards in self.values.items()}
        values.setdefault(metric, {})[card] = value
        return self.model_copy(update={"values": values})


def read(file: Path) -> NpuState:
    """The state in `file`; the initial state when there is none; raises ConfigError for a damaged one."""
    try:
        return NpuState.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return NpuState()
    except ValidationError as error:
        raise ConfigError(f"{file} cannot be read: {error}; delete it to have all cards healthy") from error


def change(file: Path, edit: Callable[[NpuState], NpuState]) -> NpuState:
    """Replace the state in `file` by `edit` of it; safe against other processes doing the same."""
    lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = edit(read(file))
        fresh = file.with_suffix(".new")
        fresh.write_text(state.model_dump_json())
        fresh.replace(file)
    finally:
        os.close(lock)
    return state
