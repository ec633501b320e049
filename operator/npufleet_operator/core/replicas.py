"""One model's replicas: which are current, which drain, which go, and how many are wanted.

The same steps serve scaling, rollout and node maintenance: a replica that is outdated (old revision, or on a node that is cordoned or lost)
is replaced first and drained then. Its NPUs stay charged until its pod is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from npufleet_api.conditions import Reason
from npufleet_api.contract import REVISION_LABEL, EngineState
from npufleet_api.model import Rollout
from npufleet_operator.core.actions import CancelDrain, DeletePod, DrainPod
from npufleet_operator.core.observed import EngineProbe, NodeView, PodView

UNREACHABLE = EngineProbe(state=None)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Pods of one model by what they are to it."""

    current: tuple[PodView, ...] = ()
    """Of the wanted revision, on a usable node, not draining."""
    outdated: tuple[PodView, ...] = ()
    """To be replaced, not draining yet."""
    draining: tuple[PodView, ...] = ()
    terminating: tuple[PodView, ...] = ()
    finished: tuple[PodView, ...] = ()

    @property
    def live(self) -> tuple[PodView, ...]:
        """Replicas that take new work, or will."""
        return self.current + self.outdated

    @property
    def ready(self) -> int:
        """Replicas that take new work now."""
        return sum(pod.engine_ready for pod in self.live)

    @property
    def leaving(self) -> int:
        """Replicas that drain or terminate."""
        return len(self.draining) + len(self.terminating)


def sort_replicas(pods: Sequence[PodView], revision: str, nodes: Mapping[str, NodeView]) -> Replicas:
    """Pods of one model, each in one group, by name within it."""
    groups: dict[str, list[PodView]] = {name: [] for name in ("current", "outdated", "draining", "terminating", "finished")}
    for pod in sorted(pods, key=lambda p: p.key):
        if pod.terminating:
            group = "terminating"
        elif pod.finished:
            group = "finished"
        elif pod.drain_started is not None:
            group = "draining"
        elif pod.labels.get(REVISION_LABEL) != revision or _node_lost(pod, nodes):
            group = "outdated"
        else:
            group = "current"
        groups[group].append(pod)
    return Replicas(**{name: tuple(members) for name, members in groups.items()})


def _node_lost(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    if not pod.node:
        return False
    node = nodes.get(pod.node)
    return node is None or not (node.ready and node.schedulable)


@dataclass(frozen=True, slots=True)
class Situation:
    """What the steps of one model depend on."""

    replicas: Replicas
    desired: int
    rollout: Rollout
    revision: str
    nodes: Mapping[str, NodeView]
    probes: Mapping[str, EngineProbe]
    load: Mapping[str, int]
    """Requests in flight, by pod UID."""
    now: datetime
    drain_seconds: float
    successor_fits: bool = True
    """Whether a replica of the wanted revision would find room in place of outdated ones: where it would not, none of them goes."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What one model needs before NPUs are handed out. `surge` is wanted only where there are spare NPUs."""

    missing: int = 0
    surge: int = 0
    drains: tuple[DrainPod, ...] = ()
    cancels: tuple[CancelDrain, ...] = ()
    deletes: tuple[DeletePod, ...] = ()


def steps(s: Situation) -> Steps:
    """The next steps. Doing them and observing again leads to a state that needs none."""
    cancels = _cancels(s)
    begun = wind_down(s, spared=frozenset(c.pod.uid for c in cancels))
    drains, deletes = list(begun.drains), list(begun.deletes)
    live = len(s.replicas.live) + len(cancels)
    recreated = s.rollout is Rollout.RECREATE and s.successor_fits
    if recreated and any(pod.labels.get(REVISION_LABEL) != s.revision for pod in s.replicas.outdated):
        return _recreate(s, drains, deletes, cancels)
    for pod in _surplus(s, live):
        _retire(s, pod, _why(s, pod, Reason.SCALED_DOWN), drains, deletes)
    missing = 0 if s.rollout is Rollout.RECREATE and _predecessors_leave(s) else max(0, s.desired - live)
    surge = int(bool(s.replicas.outdated) and not missing and live <= s.desired and len(s.replicas.current) < s.desired)
    return Steps(missing, surge, tuple(drains), tuple(cancels), tuple(deletes))


def wind_down(s: Situation, spared: frozenset[str] = frozenset()) -> Steps:
    """Only what has begun: drains go on (except those of the `spared` UIDs), failed pods go. Nothing new is drained or wanted."""
    if not s.replicas.finished and not s.replicas.draining:
        return Steps()
    deletes = [DeletePod(pod, Reason.REPLACED_FAILED) for pod in s.replicas.finished]
    drains: list[DrainPod] = []
    for pod in s.replicas.draining:
        if pod.uid in spared:
            continue
        step = _go_on_draining(s, pod)
        if isinstance(step, DeletePod):
            deletes.append(step)
        elif step is not None:
            drains.append(step)
    return Steps(drains=tuple(drains), deletes=tuple(deletes))


def retire(s: Situation, pods: Sequence[PodView], reason: Reason) -> Steps:
    """These replicas go, for `reason`."""
    drains: list[DrainPod] = []
    deletes: list[DeletePod] = []
    for pod in pods:
        _retire(s, pod, reason, drains, deletes)
    return Steps(drains=tuple(drains), deletes=tuple(replace(step, reason=reason) for step in deletes))


def spare(s: Situation, short: int) -> tuple[CancelDrain, ...]:
    """Replicas that still drain for a claim which is no more, up to what the model is `short` of."""
    return tuple(CancelDrain(pod) for pod in _cancellable(s, Reason.RECLAIMED_FOR_GUARANTEE)[: max(0, short)])


def replace_in_place(s: Situation, *, room_elsewhere: bool = False) -> Steps:
    """Without spare NPUs, one outdated replica goes first: never the only one that serves, and one at a time.

    One that serves on a cordoned node frees nothing that a successor could take, so it stays, unless there is `room_elsewhere` and only
    the class's ceiling keeps the successor waiting.
    """
    if not s.successor_fits or s.replicas.leaving or any(not pod.engine_ready for pod in s.replicas.current):
        return Steps()
    useful = [pod for pod in s.replicas.outdated if room_elsewhere or not pod.engine_ready or not _node_lost(pod, s.nodes)]
    candidates = sorted(useful, key=lambda pod: _victim_order(s, pod))
    if not candidates or (candidates[0].engine_ready and s.replicas.ready < 2):
        return Steps()
    drains: list[DrainPod] = []
    deletes: list[DeletePod] = []
    _retire(s, candidates[0], _why(s, candidates[0], Reason.ROLLOUT_REPLACE), drains, deletes)
    return Steps(drains=tuple(drains), deletes=tuple(deletes))


def _predecessors_leave(s: Situation) -> bool:
    return any(pod.labels.get(REVISION_LABEL) != s.revision for pod in s.replicas.draining + s.replicas.terminating)


def _recreate(s: Situation, drains: list[DrainPod], deletes: list[DeletePod], cancels: list[CancelDrain]) -> Steps:
    for pod in s.replicas.outdated:
        _retire(s, pod, _why(s, pod, Reason.ROLLOUT_REPLACE), drains, deletes)
    return Steps(0, 0, tuple(drains), tuple(cancels), tuple(deletes))


def _surplus(s: Situation, live: int) -> list[PodView]:
    """Replicas that can go now. An outdated one goes once enough others serve; where none is outdated, what is too many goes."""
    excess = live - s.desired
    if excess <= 0:
        return []
    ordered = sorted(s.replicas.live, key=lambda pod: _victim_order(s, pod))
    ready = s.replicas.ready
    chosen: list[PodView] = []
    outdated = {pod.uid for pod in s.replicas.outdated}
    for pod in ordered:
        if len(chosen) >= excess:
            break
        if pod.engine_ready and outdated and ready - 1 < s.desired:
            continue
        if not pod.engine_ready and outdated and pod.uid not in outdated:
            continue
        chosen.append(pod)
        ready -= int(pod.engine_ready)
    return chosen


def _victim_order(s: Situation, pod: PodView) -> tuple[bool, bool, int, float, str]:
    """Outdated before current, not ready before ready, least loaded, newest, by name."""
    outdated = pod.labels.get(REVISION_LABEL) != s.revision or _node_lost(pod, s.nodes)
    return (not outdated, pod.engine_ready, s.load.get(pod.uid, 0), -pod.created.timestamp(), pod.name)


def _why(s: Situation, pod: PodView, default: Reason) -> Reason:
    if pod.labels.get(REVISION_LABEL) != s.revision:
        return Reason.ROLLOUT_REPLACE
    return Reason.NODE_MAINTENANCE if _node_lost(pod, s.nodes) else default


def _retire(s: Situation, pod: PodView, reason: Reason, drains: list[DrainPod], deletes: list[DeletePod]) -> None:
    """Drain what may serve; delete at once what never got to serve."""
    if pod.engine_ready or pod.engine_started:
        drains.append(DrainPod(pod, reason, s.now, s.drain_seconds))
    else:
        deletes.append(DeletePod(pod, Reason.REMOVED_UNSERVED))


def _go_on_draining(s: Situation, pod: PodView) -> DrainPod | DeletePod | None:
    started = pod.drain_started or s.now
    left = min(s.drain_seconds, s.drain_seconds - (s.now - started).total_seconds())
    probe = s.probes.get(pod.uid, UNREACHABLE)
    if probe.state in (EngineState.IDLE, EngineState.LOADING):
        return DeletePod(pod, Reason.DRAIN_COMPLETED)
    if left <= 0:
        return DeletePod(pod, Reason.DRAIN_DEADLINE)
    if not pod.engine_started:
        return DeletePod(pod, Reason.REMOVED_UNSERVED)
    if probe.state is EngineState.DRAINING:
        return None
    # An engine that could not be heard may have been told: then its earlier deadline holds, and must not be made shorter by a guess.
    return DrainPod(pod, _reason(pod.drain_reason), started, left if probe.state is not None else s.drain_seconds)


def _cancels(s: Situation) -> list[CancelDrain]:
    """Replicas that were drained for scale-down and are wanted again."""
    short = s.desired - len(s.replicas.live)
    return [CancelDrain(pod) for pod in _cancellable(s, Reason.SCALED_DOWN)[: max(0, short)]]


def _cancellable(s: Situation, reason: Reason) -> list[PodView]:
    """Replicas whose drain can be taken back: the busiest first, they hold the warmest cache."""
    if not s.replicas.draining:
        return []
    candidates = [
        pod
        for pod in s.replicas.draining
        if pod.drain_reason == reason
        and pod.labels.get(REVISION_LABEL) == s.revision
        and not _node_lost(pod, s.nodes)
        and s.probes.get(pod.uid, UNREACHABLE).state in (EngineState.DRAINING, EngineState.IDLE)
    ]
    return sorted(candidates, key=lambda pod: (-s.load.get(pod.uid, 0), pod.name))


def _reason(text: str) -> Reason:
    try:
        return Reason(text)
    except ValueError:
        return Reason.SCALED_DOWN
