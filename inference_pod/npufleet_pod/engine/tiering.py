"""The tiers below the device's KV memory, as the settings ask for them. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.memory.disk import DiskStore
from npufleet_pod.engine.memory.pool import HostRegion
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier, ThreadWorker
from npufleet_pod.errors import DeviceError

MIB = 2**20


@dataclass(slots=True)
class Tiers:
    """Host memory, and disk behind it; None where there is none."""

    host: HostTier | None = None
    disk: DiskTier | None = None
    _owned: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """End the disk's worker and forget what it kept. Harmless when repeated."""
        self._owned.close()


class Region(Protocol):
    """Host memory; see HostRegion and SharedRegion."""

    @property
    def buffer(self) -> memoryview: ...

    def give_back(self, start: int, size: int) -> None: ...


def open_tiers(
    settings: EngineSettings,
    page_bytes: int,
    clock: Callable[[], float] = time.monotonic,
    take: Callable[[int], Region] = HostRegion,
) -> Tiers:
    """Tiers of pages of `page_bytes`; `take` gives the host's memory, whose size in bytes it is told.

    Raises DeviceError if a size holds no page, EngineMemoryError if host or disk refuse.
    """
    if not settings.host_cache_mi:
        return Tiers()
    pages = {name: size_mi * MIB // page_bytes for name, size_mi in (("host", settings.host_cache_mi), ("disk", settings.disk_cache_mi))}
    for name, size_mi in (("host", settings.host_cache_mi), ("disk", settings.disk_cache_mi)):
        if size_mi and not pages[name]:
            raise DeviceError(f"{name}CacheMi: {size_mi} MiB hold no page of {page_bytes} bytes of KV: raise it, or set it to 0")
    owned = ExitStack()
    with ExitStack() as undo:
        undo.callback(owned.close)
        # Never unmapped: tensors keep views of it.
        region = take(pages["host"] * page_bytes)
        host = HostTier(pages["host"], page_bytes, region.buffer, region.give_back)
        disk = None
        if settings.disk_cache_mi:
            store = DiskStore(Path(settings.disk_cache_path))
            worker = ThreadWorker()
            owned.callback(worker.close)
            disk = DiskTier(store, worker, pages["disk"], clock)
        undo.pop_all()
    return Tiers(host, disk, owned)
