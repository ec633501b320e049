"""Conditions with their transitions: the time moves only when the status does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from npufleet_api.conditions import Condition, ConditionStatus, Reason

MESSAGE_LIMIT = 1024


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime | None:
    """A time in UTC, or None where the text is none."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


class Conditions:
    """Conditions of one resource, collected during one plan."""

    def __init__(self, before: Sequence[Condition], generation: int, now: datetime) -> None:
        self._before = {condition.type: condition for condition in before}
        self._generation = generation
        self._now = timestamp(now)
        self._set: dict[str, Condition] = {}

    def set(self, kind: str, status: bool | None, reason: Reason, message: str) -> None:
        """Set one condition; None is Unknown."""
        value = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}[status]
        before = self._before.get(kind)
        message = message[:MESSAGE_LIMIT]
        unchanged = before is not None and before.status is value
        if before and unchanged and (before.reason, before.message, before.observed_generation) == (reason, message, self._generation):
            self._set[kind] = before
            return
        self._set[kind] = Condition(
            type=kind,
            status=value,
            reason=reason.value,
            message=message,
            last_transition_time=before.last_transition_time if unchanged and before else self._now,
            observed_generation=self._generation,
        )

    def result(self) -> list[Condition]:
        """The conditions in the order in which they were set."""
        return list(self._set.values())
