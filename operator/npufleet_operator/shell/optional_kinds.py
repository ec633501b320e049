"""Which optional kinds the cluster has at the moment: their CRDs may come and go while the operator runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from npufleet_operator.errors import ApiError
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.kinds import OPTIONAL, Kind
from npufleet_operator.shell.mirror import Mirror
from npufleet_operator.shell.watchdog import Watched

logger = logging.getLogger(__name__)

POLL_SECONDS = 15.0


class OptionalKinds:
    """Asks the API server, forgets the objects of a kind that is gone, and has every pool planned again when anything changed."""

    def __init__(self, client: KubeClient, mirror: Mirror, label_selector: str, kinds: Sequence[Kind] = OPTIONAL) -> None:
        self._client = client
        self._mirror = mirror
        self._watched = tuple(Watched(kind, label_selector=label_selector) for kind in kinds)
        self._present: frozenset[Kind] = frozenset()

    @property
    def watched(self) -> tuple[Watched, ...]:
        """All of them: a watch of a kind that is absent waits for it."""
        return self._watched

    def present(self) -> tuple[Watched, ...]:
        """Those that the cluster has."""
        return tuple(item for item in self._watched if item.kind in self._present)

    @property
    def names(self) -> frozenset[str]:
        """Their names, for planning."""
        return frozenset(kind.kind for kind in self._present)

    async def refresh(self) -> None:
        """Ask once. Raises ApiError."""
        found = frozenset([item.kind for item in self._watched if await self._client.serves(item.kind)])
        came, went = found - self._present, self._present - found
        if not came and not went:
            return
        self._present = found
        for kind in went:
            for identity, _ in self._mirror.known(kind):
                self._mirror.forget(kind, identity, deleted=False)
        logger.info("kinds came or went", extra={"came": sorted(k.kind for k in came), "went": sorted(k.kind for k in went)})
        self._mirror.replan_all()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.refresh()
            except ApiError as error:
                logger.warning("kinds not listed", extra={"error": str(error)})
