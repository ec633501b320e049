"""Compares what a list says with what the watches delivered: heals the mirror, and tells a silent watch from a quiet cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from npufleet_operator.core.actions import ObjectId
from npufleet_operator.errors import ApiError
from npufleet_operator.shell.client import Json, KubeClient
from npufleet_operator.shell.kinds import Kind
from npufleet_operator.shell.metrics import WATCH_BEHIND
from npufleet_operator.shell.mirror import Mirror, identify, version_of

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 60.0
RELISTED_SECONDS = 2.0
"""After a watch began anew: what was deleted in the gap is told by no event, so the next round comes soon."""
GRACE_SECONDS = 10.0
SILENT_ROUNDS = 3
"""Rounds in a row in which a watch stayed behind: then it is silent, and the process should be restarted."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind, and the part of it that is watched."""

    kind: Kind
    namespace: str = ""
    label_selector: str = ""


class Watchdog:
    """An API outage is not a silent watch: a list that fails says nothing."""

    def __init__(
        self, client: KubeClient, mirror: Mirror, watched: tuple[Watched, ...], optional: Callable[[], tuple[Watched, ...]] = tuple
    ) -> None:
        """optional: what else is there to compare at the moment."""
        self._client = client
        self._mirror = mirror
        self._watched = watched
        self._optional = optional
        self._behind_rounds: dict[Kind, int] = {}
        self._relisted = asyncio.Event()

    async def prime(self) -> None:
        """Fill the mirror before anything is planned. Raises ApiError."""
        for watched in (*self._watched, *self._optional()):
            items, version = await self._client.list(watched.kind, watched.namespace, watched.label_selector)
            self._heal(watched.kind, items, version)

    def watch_began_anew(self) -> None:
        """A watch lists again what exists, but not what was deleted since its last event."""
        self._relisted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(INTERVAL_SECONDS):
                    await self._relisted.wait()
                await asyncio.sleep(RELISTED_SECONDS)
            except TimeoutError:
                pass
            self._relisted.clear()
            for watched in (*self._watched, *self._optional()):
                try:
                    await self.check(watched, GRACE_SECONDS)
                except ApiError as error:
                    logger.warning("list failed", extra={"kind": watched.kind.kind, "error": str(error)})

    async def check(self, watched: Watched, grace_seconds: float) -> int:
        """Objects of the kind whose change the watch did not deliver within the grace time. Raises ApiError."""
        items, version = await self._client.list(watched.kind, watched.namespace, watched.label_selector)
        missing = self._behind(watched.kind, items, version)
        if missing:
            await asyncio.sleep(grace_seconds)
            missing = [identity for identity in self._behind(watched.kind, items, version) if identity in missing]
        self._behind_rounds[watched.kind] = self._behind_rounds.get(watched.kind, 0) + 1 if missing else 0
        WATCH_BEHIND.labels(watched.kind.kind).set(len(missing))
        if missing:
            logger.warning("watch is behind", extra={"kind": watched.kind.kind, "objects": len(missing), "first": "/".join(missing[0])})
            self._heal(watched.kind, items, version)
        return len(missing)

    def silent(self) -> list[str]:
        """Kinds whose watch has been behind for several rounds."""
        return sorted(kind.kind for kind, rounds in self._behind_rounds.items() if rounds >= SILENT_ROUNDS)

    def _behind(self, kind: Kind, items: list[Json], list_version: int) -> list[ObjectId]:
        behind = []
        for item in items:
            known, listed = self._mirror.version(identify(kind, item)), version_of(item)
            if known is None or known.number < listed.number:
                behind.append(identify(kind, item))
        return behind + self._vanished(kind, items, list_version)

    def _vanished(self, kind: Kind, items: list[Json], list_version: int) -> list[ObjectId]:
        listed = {identify(kind, item) for item in items}
        return [identity for identity, version in self._mirror.known(kind) if identity not in listed and version.number <= list_version]

    def _heal(self, kind: Kind, items: list[Json], list_version: int) -> None:
        for identity in self._vanished(kind, items, list_version):
            self._mirror.forget(kind, identity)
        for item in items:
            self._mirror.upsert(kind, item)
