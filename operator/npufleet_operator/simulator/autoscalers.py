"""HPA and KPA by their documented algorithms, for comparison. Pure: a history in, a number of replicas out.

HPA: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ — sync every 15 s, tolerance 0.1, no wait on the way up,
300 s of stabilisation on the way down, at most twice as many or four more pods per 15 s. KPA: Knative Serving's autoscaler — ticks of 2
s, a stable window of 60 s, a panic window of 6 s, panic at twice what the ready pods hold, at most halved per tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor

HPA_SYNC_SECONDS = 15.0
HPA_TOLERANCE = 0.1
HPA_DOWN_STABILISATION_SECONDS = 300.0
HPA_UP_PODS = 4
HPA_UP_FACTOR = 2

KPA_TICK_SECONDS = 2.0
KPA_STABLE_SECONDS = 60.0
KPA_PANIC_SECONDS = 6.0
KPA_PANIC_THRESHOLD = 2.0
KPA_MAX_UP = 1000.0
KPA_MAX_DOWN = 2.0


def hpa_desired(current: int, metrics: Sequence[float], unready: int, target: float) -> int:
    """Desired replicas for an average value per pod.

    `metrics` are those of the ready pods, `unready` pods have none: they count as 0 on the way up, and as the target on the way down.
    Where that turns the direction round, or leaves the ratio within the tolerance, nothing changes.
    """
    if not metrics:
        return current
    ratio = sum(metrics) / len(metrics) / target
    if abs(ratio - 1) <= HPA_TOLERANCE and not unready:
        return current
    if not unready:
        return ceil(ratio * len(metrics))
    filled = list(metrics) + [0.0 if ratio > 1 else target] * unready
    adjusted = sum(filled) / len(filled) / target
    if abs(adjusted - 1) <= HPA_TOLERANCE or (ratio > 1) != (adjusted > 1):
        return current
    return ceil(adjusted * len(filled))


@dataclass(slots=True)
class Hpa:
    """One HorizontalPodAutoscaler: bounds, and what it recommended."""

    minimum: int
    maximum: int
    target: float
    recommended: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(self, now: float, current: int, metrics: Sequence[float], unready: int) -> int:
        """Replicas to ask for now."""
        desired = max(self.minimum, min(self.maximum, hpa_desired(current, metrics, unready, self.target)))
        self.recommended.append((now, desired))
        while self.recommended[0][0] < now - HPA_DOWN_STABILISATION_SECONDS:
            self.recommended.popleft()
        if desired < current:
            desired = min(current, max(value for _, value in self.recommended))
        fastest = max(current * HPA_UP_FACTOR, current + HPA_UP_PODS)
        return max(self.minimum, min(self.maximum, desired, fastest))


@dataclass(slots=True)
class Kpa:
    """One PodAutoscaler of Knative: bounds, samples of requests in flight, and its panic."""

    minimum: int
    maximum: int
    target: float
    samples: deque[tuple[float, float]] = field(default_factory=deque)
    panic_until: float | None = None
    panic_replicas: int = 0

    def decide(self, now: float, in_flight: float, ready: int) -> int:
        """Replicas to ask for now, with one more sample of all requests in flight."""
        self.samples.append((now, in_flight))
        while self.samples[0][0] <= now - KPA_STABLE_SECONDS:
            self.samples.popleft()
        stable = sum(value for _, value in self.samples) / len(self.samples)
        recent = [value for time, value in self.samples if time > now - KPA_PANIC_SECONDS]
        panic = sum(recent) / len(recent)
        pods = max(1, ready)
        up, down = ceil(KPA_MAX_UP * pods), floor(pods / KPA_MAX_DOWN)
        desired_stable = min(max(ceil(stable / self.target), down), up)
        desired_panic = min(max(ceil(panic / self.target), down), up)
        if ceil(panic / self.target) / pods >= KPA_PANIC_THRESHOLD:
            if self.panic_until is None:
                self.panic_replicas = 0
            self.panic_until = now + KPA_STABLE_SECONDS
        elif self.panic_until is not None and now >= self.panic_until:
            self.panic_until, self.panic_replicas = None, 0
        desired = desired_stable
        if self.panic_until is not None:
            self.panic_replicas = max(self.panic_replicas, desired_panic)
            desired = self.panic_replicas
        return max(self.minimum, min(self.maximum, desired))
