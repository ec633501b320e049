"""Which replica gets the next request: the one with the fewest outstanding; one that failed is set aside for a while. Injected clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from npufleet_gateway.routing import Replica

FIRST_ASIDE_SECONDS = 0.5
LONGEST_ASIDE_SECONDS = 15.0
DRAINING_ASIDE_SECONDS = 2.0
"""A replica that says it drains is usually out of the view before this has passed; if the drain was cancelled, it comes back."""


@dataclass(slots=True)
class _Load:
    outstanding: int = 0
    last_pick: int = 0
    failures: int = 0
    aside_until: float = 0.0


class Balancer:
    """Outstanding requests and failures of each replica, by pod UID."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads: dict[str, _Load] = {}
        self._picks = 0

    def pick(self, replicas: Iterable[Replica], excluded: Collection[str] = ()) -> Replica | None:
        """The replica with the fewest outstanding requests; of equals, the one picked longest ago.

        Replicas set aside are chosen only if there is no other; those in `excluded` (pod UIDs) never.
        """
        now = self._clock()
        best: Replica | None = None
        best_rank = (True, 0, 0)
        for replica in replicas:
            if replica.pod_uid in excluded:
                continue
            load = self._loads.get(replica.pod_uid)
            rank = (load.aside_until > now, load.outstanding, load.last_pick) if load else (False, 0, 0)
            if best is None or rank < best_rank:
                best, best_rank = replica, rank
        return best

    def started(self, replica: Replica) -> None:
        """A request was sent to `replica`."""
        load = self._loads.setdefault(replica.pod_uid, _Load())
        load.outstanding += 1
        self._picks += 1
        load.last_pick = self._picks

    def finished(self, replica: Replica) -> None:
        """A request that was sent to `replica` has ended, however it ended."""
        load = self._loads.get(replica.pod_uid)
        if load is not None:
            load.outstanding = max(0, load.outstanding - 1)

    def succeeded(self, replica: Replica) -> None:
        """`replica` answered: what it failed before is forgotten."""
        load = self._loads.get(replica.pod_uid)
        if load is not None and load.failures:
            load.failures = 0
            load.aside_until = 0.0

    def failed(self, replica: Replica) -> None:
        """`replica` could not be reached or is not ready: set aside, for twice as long each time in a row."""
        load = self._loads.setdefault(replica.pod_uid, _Load())
        load.failures += 1
        seconds = min(LONGEST_ASIDE_SECONDS, FIRST_ASIDE_SECONDS * 2.0 ** min(load.failures - 1, 16))
        load.aside_until = self._clock() + seconds

    def draining(self, replica: Replica) -> None:
        """`replica` refused because it drains: set aside without counting a failure."""
        load = self._loads.setdefault(replica.pod_uid, _Load())
        load.aside_until = max(load.aside_until, self._clock() + DRAINING_ASIDE_SECONDS)

    def outstanding(self, pod_uid: str) -> int:
        """Requests that are running on a replica through this gateway."""
        load = self._loads.get(pod_uid)
        return load.outstanding if load else 0

    def retain(self, pod_uids: Collection[str]) -> None:
        """Forget replicas that are gone and have nothing outstanding."""
        self._loads = {uid: load for uid, load in self._loads.items() if load.outstanding or uid in pod_uids}
