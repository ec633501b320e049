"""`Timeline`: what happened how long ago, by the process's own monotonic clock, so that a wall clock that jumps ends nothing early.

The API server, the kubelets and the operator before its restart leave wall clock times behind. How far they can be trusted:

- An age is taken over once, at the first look, and grows by the monotonic clock from then on.
- What was not there at the look before is no older than that look, whatever its time says.
- Nothing is younger than zero.
- How much of a drain is left the engine knows better, which counts by its own monotonic clock: after a restart its word replaces the
  time on the pod, and while it has not been heard, the drain goes on for `REACH_SECONDS` at least.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from npufleet_api.model import ScalingStatus
from npufleet_operator.core.conditions import parse_timestamp, timestamp
from npufleet_operator.core.observed import EPOCH, EngineProbe, ModelView, Observed, PodView

TOLERANCE_SECONDS = 5.0
"""A time that is no further off than this stays as it is written, since clocks of several machines are never quite alike; a drain's does
not."""
REWRITTEN_SECONDS = 2.0
"""A time in our own status that lies this near to what was made of the one before is the same moment, written anew."""
REACH_SECONDS = 10.0
"""How long an engine may take to be heard after a restart of the operator: several polls."""


@dataclass(frozen=True, slots=True)
class _Anchor:
    """One moment, as it is written, and its age at one reading of the monotonic clock."""

    written: datetime
    age: float
    at: float
    presented: datetime
    provisional: bool = False
    """A drain whose engine has not been heard yet."""


class Timeline:
    """One per pool task; remembers only what its last look saw."""

    def __init__(self) -> None:
        self._anchors: dict[Hashable, _Anchor] = {}
        self._last_look: float | None = None

    def present(self, observed: Observed, now: datetime, monotonic: float) -> Observed:
        """The same observation, with the times of pods and moves such that `now` less each is its age. monotonic: seconds."""
        look = _Look(self._anchors, self._last_look, now, monotonic)
        drain_seconds = float(observed.pool.spec.rebalancing.drain_seconds) if observed.pool and observed.pool.spec else None
        pods = tuple(look.pod(pod, observed.probes.get(pod.uid), drain_seconds) if pod.owner_name else pod for pod in observed.pods)
        models = tuple(look.model(model) for model in observed.models)
        self._anchors, self._last_look = look.anchors, monotonic
        return replace(observed, pods=pods, models=models)


class _Look:
    """One look at everything."""

    def __init__(self, before: dict[Hashable, _Anchor], last_look: float | None, now: datetime, monotonic: float) -> None:
        self.anchors: dict[Hashable, _Anchor] = {}
        self._before = before
        self._oldest_news = None if last_look is None else monotonic - last_look
        self._now = now
        self._monotonic = monotonic

    def pod(self, pod: PodView, probe: EngineProbe | None, drain_seconds: float | None) -> PodView:
        """Both times of its beginning are shifted alike: what lies between them is the load time."""
        created = self._moment((pod.uid, "created"), pod.created)
        drain = pod.drain_started
        if drain is not None and drain_seconds is not None:
            drain = self._drain((pod.uid, "drain"), drain, probe, drain_seconds)
        if created == pod.created and drain == pod.drain_started:
            return pod
        ready = pod.ready_since
        if ready is not None and created != pod.created:
            ready = self._ago((self._now - created).total_seconds() - (ready - pod.created).total_seconds())
        return replace(pod, created=created, drain_started=drain, ready_since=ready)

    def model(self, model: ModelView) -> ModelView:
        """The moves that its status remembers."""
        scaling = model.status.scaling
        if scaling is None:
            return model
        up, down = (self._written((model.uid, name), getattr(scaling, name)) for name in ("last_up_time", "last_down_time"))
        if (up, down) == (scaling.last_up_time, scaling.last_down_time):
            return model
        moved: ScalingStatus = scaling.model_copy(update={"last_up_time": up, "last_down_time": down})
        return replace(model, status=model.status.model_copy(update={"scaling": moved}))

    def _written(self, key: Hashable, text: str | None) -> str | None:
        moment = parse_timestamp(text) if text else None
        if moment is None:
            return text
        presented = self._moment(key, moment)
        return text if presented == moment else timestamp(presented)

    def _drain(self, key: Hashable, written: datetime, probe: EngineProbe | None, drain_seconds: float) -> datetime:
        known = self._before.get(key)
        first = known is None and self._oldest_news is None
        if not first and not (known is not None and known.provisional):
            return self._moment(key, written, tolerance=0.0)
        if probe is not None and probe.state is not None:
            # One that was not told before the restart has the whole time before it.
            left = drain_seconds if probe.left_seconds is None else probe.left_seconds
            return self._remember(key, written, max(0.0, drain_seconds - left), tolerance=0.0)
        age = self._age(key, written)
        age = min(age, max(0.0, drain_seconds - REACH_SECONDS)) if first else age
        return self._remember(key, written, age, tolerance=0.0, provisional=True)

    def _moment(self, key: Hashable, written: datetime, tolerance: float = TOLERANCE_SECONDS) -> datetime:
        return self._remember(key, written, self._age(key, written), tolerance)

    def _age(self, key: Hashable, written: datetime) -> float:
        known = self._before.get(key)
        if known is not None and (known.written == written or _near(known.presented, written)):
            return known.age + self._monotonic - known.at
        age = max(0.0, (self._now - written).total_seconds())
        return age if self._oldest_news is None else min(age, self._oldest_news)

    def _remember(self, key: Hashable, written: datetime, age: float, tolerance: float, *, provisional: bool = False) -> datetime:
        presented = self._ago(age)
        if abs((presented - written).total_seconds()) <= tolerance:
            presented = written
        self.anchors[key] = _Anchor(written, age, self._monotonic, presented, provisional)
        return presented

    def _ago(self, seconds: float) -> datetime:
        return self._now - timedelta(seconds=min(seconds, max(0.0, (self._now - EPOCH).total_seconds())))


def _near(one: datetime, other: datetime) -> bool:
    return abs((one - other).total_seconds()) <= REWRITTEN_SECONDS
