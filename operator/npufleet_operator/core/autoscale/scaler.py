"""`scale`: how many replicas one model wants, and why. Two loops: a forecast gives the floor, the present load moves by what is predicted.

Whatever is not known holds: nothing is taken away on missing, old or incomplete reports, and nothing is added on a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from math import ceil

from npufleet_api.conditions import Reason
from npufleet_api.model import AscendModelSpec, LearnedCapacity, ScalingStatus, Slo
from npufleet_api.pool import InferencePoolSpec, PoolMode
from npufleet_api.report import DataState
from npufleet_operator.core.autoscale.forecast import forecast
from npufleet_operator.core.autoscale.learning import learn
from npufleet_operator.core.autoscale.prediction import MARGIN, at_its_worst, headroom, misses, unsafe_to_remove
from npufleet_operator.core.autoscale.prediction import measured as is_measured
from npufleet_operator.core.autoscale.signals import MIN_JUDGED, Signals, signals
from npufleet_operator.core.autoscale.target import Target
from npufleet_operator.core.autoscale.worth import Worth, needed, remember, worth
from npufleet_operator.core.conditions import parse_timestamp, timestamp
from npufleet_operator.core.measured import Measured
from npufleet_operator.core.observed import ModelView, PodView
from npufleet_operator.core.replicas import Replicas

UNKNOWN_LOAD_SECONDS = 600.0
"""How long a loading replica counts as supply while nothing is known of the model's load time."""
FETCH_SECONDS = 3600.0
"""How long one whose files are being fetched does: 145 GB at 40 MB/s."""
LOAD_ALLOWANCE = 1.5
LOAD_MARGIN_SECONDS = 30.0
"""A replica may take this much longer than usual before it no longer counts as supply."""
GROWTH = 2
"""At most this many times the replicas by one decision, as HPA and KPA step; two at least."""
RECENT_SECONDS = 30.0
"""A request that was turned away longer ago than this wakes nobody."""
DAY_SECONDS = 86400
UP = frozenset({Reason.PREDICTED_MISS, Reason.ATTAINMENT_LOW, Reason.FORECAST_DEMAND})


@dataclass(frozen=True, slots=True)
class _Verdict:
    wanted: int
    reason: Reason
    message: str


def scale(
    model: ModelView, pool: InferencePoolSpec, replicas: Replicas, measured: Measured, now: datetime, *, refused: bool = False
) -> Target:
    """The model's target. A refused model keeps what it was granted."""
    spec, before = model.spec, model.status.scaling or ScalingStatus()
    if spec is None or refused:
        desired = model.status.desired_replicas
        message = "not planned: the model is not accepted"
        return Target(desired, desired, 0, Reason.PENDING, message, before, elastic=False)
    ready = [pod for pod in replicas.live if pod.engine_ready]
    s = signals(measured, model.key, ready)
    capacity = learn(before.capacity, s, ready, spec.slo)
    up, down = _not_after(before.last_up_time, now), _not_after(before.last_down_time, now)
    seen = {
        "data": s.data.value,
        "capacity": capacity,
        "last_up_time": timestamp(up) if up else None,
        "last_down_time": timestamp(down) if down else None,
    }
    if spec.replicas is not None:
        message = f"spec.replicas fixes {spec.replicas}"
        pinned = {"wanted_replicas": spec.replicas, "forecast_replicas": 0, "reason": Reason.PINNED.value, "message": message}
        status = before.model_copy(update={**seen, **pinned})
        return Target(spec.replicas, spec.replicas, spec.replicas, Reason.PINNED, message, status, elastic=False)
    base = _base(model, spec, pool, replicas)
    view = _View(spec, pool, replicas, s, capacity, base, before, up, down, now)
    verdict = view.verdict()
    decided = {
        "wanted_replicas": verdict.wanted,
        "forecast_replicas": view.floor,
        "reason": verdict.reason.value,
        "message": verdict.message[:1000],
    }
    status = before.model_copy(update={**seen, **decided})
    return Target(
        base,
        verdict.wanted,
        min(view.lowest, verdict.wanted),
        verdict.reason,
        verdict.message,
        status,
        worth=view.worth(),
        known=tuple(remember(before.attained, s)),
        settled=view.settled,
        rests=view.rests(),
    )


def _not_after(text: str | None, now: datetime) -> datetime | None:
    """A remembered time; one that lies in the future, since a clock jumped, becomes now."""
    moment = parse_timestamp(text) if text else None
    return min(moment, now) if moment else None


def _base(model: ModelView, spec: AscendModelSpec, pool: InferencePoolSpec, replicas: Replicas) -> int:
    """What the model was granted: from its status; where that is lost, what runs. Advice starts from what runs."""
    live = len(replicas.live)
    if pool.mode is PoolMode.ADVISORY:
        return live
    if model.status.observed_generation == 0:
        return max(spec.scaling.min_replicas, live)
    return model.status.desired_replicas


class _View:
    """One decision."""

    def __init__(
        self,
        spec: AscendModelSpec,
        pool: InferencePoolSpec,
        replicas: Replicas,
        s: Signals,
        capacity: LearnedCapacity,
        base: int,
        before: ScalingStatus,
        up: datetime | None,
        down: datetime | None,
        now: datetime,
    ) -> None:
        self._slo: Slo | None = spec.slo
        self._s = s
        self._capacity = capacity
        self._base = base
        self._before = before
        self._up, self._down, self._now = up, down, now
        self._cooldown = pool.rebalancing.cooldown_seconds
        self._interval = pool.rebalancing.interval_seconds
        self._idle_limit = spec.scaling.idle_seconds
        self.lowest = spec.scaling.min_replicas
        self._highest = max(spec.scaling.max_replicas or max(1, self.lowest), self.lowest)
        self._horizon = capacity.load_seconds * LOAD_ALLOWANCE + LOAD_MARGIN_SECONDS if capacity.load_seconds else UNKNOWN_LOAD_SECONDS
        loading = [pod for pod in replicas.live if not pod.engine_ready]
        self._pending = sum((now - pod.created).total_seconds() <= self._allowance(pod) for pod in loading)
        """Loading replicas that count as supply: those that may still be within their usual load time."""
        self._late = len(loading) - self._pending
        self._unsettled = bool(loading or replicas.outdated or replicas.leaving)
        """Replicas come or go, also by a rollout: what each carries says little of what it will."""
        self._unmet = before.reason in UP and before.wanted_replicas > base
        """More were wanted than were granted."""
        self.settled = not self._unsettled and s.data is DataState.FRESH
        self.floor = self._forecast_floor()

    def _allowance(self, pod: PodView) -> float:
        """While its files come over the network, a replica is not late: another one would only share the line. A fetch that stands still
        ends by itself."""
        return max(self._horizon, FETCH_SECONDS) if pod.fetching else self._horizon

    def verdict(self) -> _Verdict:
        """The first rule that has something to say."""
        base = min(self._highest, max(self.lowest, self._base))
        if base != self._base:
            bounds = f"scaling.minReplicas {self.lowest} and maxReplicas {self._highest}"
            return _Verdict(base, Reason.OUTSIDE_BOUNDS, f"brought within {bounds}")
        if self._highest == self.lowest:
            return _Verdict(base, Reason.STEADY, "scaling.minReplicas and maxReplicas leave no choice")
        if base == 0:
            return self._asleep()
        if self._s.data in (DataState.NO_DATA, DataState.STALE):
            what = "no gateway reports the model" if self._s.data is DataState.NO_DATA else "the gateways' reports are too old"
            return _Verdict(base, Reason.HOLD_NO_DATA, f"{what}: nothing is moved on a guess")
        return self._grow() or self._sleep() or self._shrink() or _Verdict(base, Reason.STEADY, "the load fits the replicas")

    def _forecast_floor(self) -> int:
        """Replicas for the highest forecast until a replica that is started now would serve.

        What one was seen to do is the least that it can do; where those of the present have headroom, they can do more.
        """
        s = self._s
        if self._capacity.work_per_second <= 0 or not s.work or s.bucket_seconds <= 0:
            return 0
        present = sum(r.work_per_second for r in s.replicas) / len(s.replicas) if s.replicas else 0.0
        capacity = max(self._capacity.work_per_second, present * headroom(s.replicas, self._slo))
        steps = ceil((self._capacity.load_seconds + self._interval) / s.bucket_seconds)
        expected = forecast(s.work, min(max(1, steps), 60), int(DAY_SECONDS // s.bucket_seconds))
        return min(self._highest, ceil(expected / capacity))

    def _asleep(self) -> _Verdict:
        s = self._s
        turned_away = s.failed_for_capacity > 0 and s.idle_seconds <= RECENT_SECONDS
        if s.in_flight > 0 or turned_away:
            waiting = f"{s.in_flight} request(s) wait" if s.in_flight else "a request was turned away"
            return _Verdict(1, Reason.WOKEN_BY_DEMAND, waiting)
        return _Verdict(0, Reason.STEADY, "scaled to zero; the next request starts a replica")

    def _grow(self) -> _Verdict | None:
        base = self._base
        wish = self._wish()
        if wish is None or wish.reason is Reason.SLO_UNATTAINABLE:
            return wish
        if base >= self._highest:
            return _Verdict(base, Reason.CLAMPED_BY_MAXIMUM, f"{wish.message}, but scaling.maxReplicas is {self._highest}: raise it")
        if wish.wanted <= base or self._waits_for_late():
            return _Verdict(base, Reason.HOLD_PENDING, f"{wish.message}, but {self._pending + self._late} replica(s) are loading")
        if self._left(self._down) > 0:
            return _Verdict(base, Reason.HOLD_COOLDOWN, f"{wish.message}, but one was taken away less than {self._cooldown} s ago")
        return _Verdict(min(wish.wanted, max(base * GROWTH, base + 2), self._highest), wish.reason, wish.message)

    def _waits_for_late(self) -> bool:
        """Replicas that take longer than usual no longer count as supply, but each of them makes the next addition wait longer: where none
        gets to serve, more would not either."""
        if not self._late or self._up is None:
            return False
        return (self._now - self._up).total_seconds() < self._horizon * (1 + self._late)

    def _wish(self) -> _Verdict | None:
        """More replicas, or why more would not help."""
        base, s = self._base, self._s
        if self.floor > base:
            return _Verdict(self.floor, Reason.FORECAST_DEMAND, f"{self.floor} replicas are forecast to be needed")
        enough = s.replicas and 2 * len(s.replicas) >= s.ready
        if enough and all(misses(r, self._slo, margin=MARGIN if self._unmet else 1.0) for r in s.replicas):
            reason, message = Reason.PREDICTED_MISS, f"all {s.ready} replicas miss a target at {s.load:.0f} requests in flight each"
        elif self._attainment_low():
            reason = Reason.ATTAINMENT_LOW
            target = self._slo.attainment_percent if self._slo else 0
            message = f"clients got {100 * (s.attainment or 0):.0f} % within the targets, {target} % are promised"
        else:
            return None
        if s.load <= 1 and not any(r.waiting for r in s.replicas) and not self._in_bursts():
            return _Verdict(base, Reason.SLO_UNATTAINABLE, f"{message}: with so little to do, more replicas would not help")
        more = max(self._sized() - s.ready - self._pending, 0 if self._pending else 1)
        return _Verdict(base + more, reason, message)

    def _sized(self) -> int:
        """Replicas for the requests in flight, by what one is known to carry, or carries now where all are overloaded; 0 while that is not
        known."""
        crowded = needed(self._s.replicas, self._s.in_flight, self._slo)
        if not self._capacity.concurrency or self._s.load <= self._capacity.concurrency:
            return crowded
        return max(crowded, ceil(self._s.in_flight / self._capacity.concurrency))

    def _in_bursts(self) -> bool:
        """Half of the requests meet the targets on every replica, so that one has what it takes; those that do not came all at once."""
        slo, replicas = self._slo, self._s.replicas
        if slo is None or not replicas:
            return False
        return all(
            is_measured(r, slo)
            and (slo.ttft_milliseconds is None or (r.ttft_p50_ms or 0.0) <= slo.ttft_milliseconds)
            and (slo.tpot_milliseconds is None or (r.tpot_p50_ms is not None and r.tpot_p50_ms <= slo.tpot_milliseconds))
            for r in replicas
        )

    def _attainment_low(self) -> bool:
        """Judged once the window has passed since the last addition: it still holds what was before it. A wish of which a part was granted
        stays until then."""
        s = self._s
        if self._slo is None or s.attainment is None or s.judged < MIN_JUDGED or (self._pending and not self._unmet):
            return False
        if self._up and (self._now - self._up).total_seconds() < s.window_seconds and not self._unmet:
            return False
        return 100 * s.attainment < self._slo.attainment_percent

    def _sleep(self) -> _Verdict | None:
        s = self._s
        if self.lowest > 0 or s.data not in (DataState.FRESH, DataState.ZERO) or s.in_flight or s.idle_seconds < self._idle_limit:
            return None
        if self._left(self._up) > 0:
            return None
        return _Verdict(0, Reason.IDLE, f"no request for {self._idle_limit} s")

    def _shrink(self) -> _Verdict | None:
        base, s = self._base, self._s
        if base <= max(1, self.lowest, self.floor) or self._unsettled:
            return None
        if s.data is DataState.PARTIAL:
            return _Verdict(base, Reason.HOLD_NO_DATA, "some replicas or gateways do not report: nothing is taken away")
        if s.ready < base:
            return None
        if self._promise_broken():
            return _Verdict(base, Reason.SCALE_DOWN_UNSAFE, "clients do not get what they are promised")
        if s.in_flight and not any(is_measured(r, self._slo) for r in s.replicas):
            return _Verdict(base, Reason.SCALE_DOWN_UNSAFE, "no replica has measured yet what its requests get")
        several = s.data is DataState.ZERO or all(is_measured(r, self._slo) for r in s.replicas)
        least = max(1, self.lowest, self.floor, min(base // GROWTH, base - GROWTH) if several else base - 1)
        lasting = [at_its_worst(r, s) for r in s.replicas]
        left, why = base, ""
        while left > least and not (why := unsafe_to_remove(lasting, s.ready, left - 1, self._slo)):
            left -= 1
        if left == base:
            return _Verdict(base, Reason.SCALE_DOWN_UNSAFE, why)
        if max(self._left(self._up), self._left(self._down)) > 0:
            return _Verdict(base, Reason.HOLD_COOLDOWN, f"the last move was less than {self._cooldown} s ago; {left} replica(s) would do")
        return _Verdict(left, Reason.LOAD_FELL, f"{left} replica(s) carry {s.in_flight} requests in flight with margin")

    def _promise_broken(self) -> bool:
        """Lately, or over the gateways' own window: bursts come again."""
        s = self._s
        if self._slo is None:
            return False
        lately = s.attainment if s.judged >= MIN_JUDGED else None
        return any(share is not None and 100 * share < self._slo.attainment_percent for share in (lately, s.lasting))

    def worth(self) -> Worth | None:
        """What a replica more or fewer is worth; None where reports do not allow a move."""
        return worth(self._s, self._slo, self._before.attained) if self._s.data in (DataState.FRESH, DataState.PARTIAL) else None

    def rests(self) -> bool:
        """Whether nothing was moved lately and nothing moves, so that one replica may be taken for others to gain."""
        return self.settled and self._base > max(1, self.lowest) and max(self._left(self._up), self._left(self._down)) <= 0

    def _left(self, moved: datetime | None) -> float:
        """Seconds of the cooldown that are left."""
        return self._cooldown - (self._now - moved).total_seconds() if moved else 0.0
