"""Kubernetes Events: one object per subject, reason and message, counted up when it happens again, and bounded in rate."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from npufleet_api import API_VERSION
from npufleet_api.contract import FIELD_MANAGER
from npufleet_operator.core.conditions import timestamp
from npufleet_operator.errors import ApiError
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.kinds import EVENT
from npufleet_operator.shell.metrics import APPLIES

logger = logging.getLogger(__name__)

BURST = 25
"""Events of one subject in a row, as client-go's recorder allows; then one every REFILL_SECONDS. A noisy model silences no other."""
REFILL_SECONDS = 5.0
REMEMBERED = 4096
MESSAGE_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Subject:
    """The resource that an Event is about. Events of cluster-scoped resources are kept in `default`."""

    kind: str
    namespace: str
    name: str
    uid: str


class EventRecorder:
    """Never raises: an Event that cannot be written is logged and counted."""

    def __init__(self, client: KubeClient, clock: Callable[[], datetime]) -> None:
        self._client = client
        self._clock = clock
        self._counts: dict[str, tuple[int, str]] = {}
        self._tokens: dict[str, tuple[float, datetime]] = {}

    async def record(self, subject: Subject, reason: str, message: str, *, warning: bool = False) -> None:
        """Write one Event."""
        if not self._take_token(subject.uid):
            APPLIES.labels("Event", "dropped").inc()
            return
        message = message[:MESSAGE_LIMIT]
        namespace = subject.namespace or "default"
        digest = hashlib.sha256(f"{subject.uid}/{reason}/{message}".encode()).hexdigest()[:16]
        name = f"{subject.name[:200]}.{digest}"
        count, first = self._counts.get(name, (0, timestamp(self._clock())))
        if len(self._counts) >= REMEMBERED:
            self._counts.pop(next(iter(self._counts)))
        self._counts[name] = (count + 1, first)
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "count": count + 1,
            "firstTimestamp": first,
            "lastTimestamp": timestamp(self._clock()),
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": FIELD_MANAGER,
        }
        try:
            await self._client.apply(EVENT, manifest, FIELD_MANAGER)
            APPLIES.labels("Event", "applied").inc()
        except ApiError as error:
            APPLIES.labels("Event", "failed").inc()
            logger.warning("event was not written", extra={"reason": reason, "subject": subject.name, "error": str(error)})

    def _take_token(self, uid: str) -> bool:
        now = self._clock()
        left, refilled = self._tokens.pop(uid, (float(BURST), now))
        left = min(float(BURST), left + max(0.0, (now - refilled).total_seconds()) / REFILL_SECONDS)
        taken = left >= 1
        self._tokens[uid] = (left - 1 if taken else left, now)
        if len(self._tokens) > REMEMBERED:
            self._tokens.pop(next(iter(self._tokens)))
        return taken
