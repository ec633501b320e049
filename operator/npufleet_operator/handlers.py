"""What kopf does for the operator: it watches, and every event goes into the mirror.

`on.event` handlers only: they add no finalizer, keep no annotation, and return None, so kopf never patches anything.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import kopf

from npufleet_operator.shell.kinds import OPTIONAL, Kind
from npufleet_operator.shell.mirror import Mirror
from npufleet_operator.shell.watchdog import Watchdog, Watched

KINDS_LOGGER = "kopf._core.reactor.observation"
SERVER_TIMEOUT_SECONDS = 300
CLIENT_TIMEOUT_SECONDS = 310
INACTIVITY_SECONDS = 70
ERROR_BACKOFFS = (0.5, 1, 2, 2, 2, 2, 2, 2)
"""Capped low: a longer one leaves the watch blind long after an outage."""


class AbsentIsFine(logging.Filter):
    """Drops kopf's warning of kinds that the cluster lacks where only optional ones do: it reads like a fault at every start."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is told."""
        message = record.getMessage()
        named = set(re.findall(r"any_name='([^']*)'", message))
        return not message.startswith("Unresolved resources") or not named or not named <= {kind.plural for kind in OPTIONAL}


def build_registry(mirror: Mirror, watchdog: Watchdog, watched: Sequence[Watched]) -> kopf.OperatorRegistry:
    """Handlers for every watched kind."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    for item in watched:
        _watch(registry, mirror, watchdog, item.kind)
    return registry


def _watch(registry: kopf.OperatorRegistry, mirror: Mirror, watchdog: Watchdog, kind: Kind) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"mirror-{kind.plural}")
    async def mirror_event(event: kopf.RawEvent, **_: Any) -> None:
        if event["type"] is None:  # kopf's mark of an object from the list with which a watch begins
            watchdog.watch_began_anew()
        if event["type"] == "DELETED":
            mirror.remove(kind, event["object"])
        else:
            mirror.upsert(kind, event["object"])


def build_settings(watched: Sequence[Watched]) -> kopf.OperatorSettings:
    """kopf's settings: quiet, bounded, and narrow where only owned objects matter."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.level = logging.CRITICAL
    settings.peering.standalone = True
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = CLIENT_TIMEOUT_SECONDS
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.watching.chunk_size = 500
    settings.networking.error_backoffs = ERROR_BACKOFFS
    for item in watched:
        if item.label_selector:
            settings.watching.label_selectors[item.kind.group, item.kind.plural] = item.label_selector
    return settings


async def watch(mirror: Mirror, watchdog: Watchdog, watched: Sequence[Watched], stop: asyncio.Event, ready: asyncio.Event) -> None:
    """Run kopf until `stop` is set. Raises what ends a watcher for good."""
    logging.getLogger(KINDS_LOGGER).addFilter(AbsentIsFine())
    await kopf.operator(
        registry=build_registry(mirror, watchdog, watched),
        settings=build_settings(watched),
        standalone=True,
        clusterwide=True,
        stop_flag=stop,
        ready_flag=ready,
    )
