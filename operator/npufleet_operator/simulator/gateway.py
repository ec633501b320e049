"""The simulated gateway: routes to the replica with the fewest outstanding requests, holds what none can take, and accounts as the real
one does, with the real one's code (`npufleet_api.accounting`, `npufleet_api.slo`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from npufleet_api.accounting import Accounting
from npufleet_api.contract import EngineState
from npufleet_api.report import (
    DataState,
    EngineFigures,
    GatewayReport,
    ModelTraffic,
    MonitorReport,
    ReplicaReport,
    Utilisation,
)
from npufleet_api.slo import Judgement, Outcome, SloTargets, judge
from npufleet_operator.core.observed import ModelKey, PodView
from npufleet_operator.simulator.constants import HOLD_SECONDS, MONITOR_WINDOW_SECONDS
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.replica import Replica, Totals
from npufleet_operator.simulator.request import Request
from npufleet_operator.simulator.scenario import SimulatedModel

Finished = Callable[[Request, Judgement], None]


@dataclass(slots=True)
class _Target:
    pod_uid: str
    replica: Replica
    outstanding: int = 0
    last_pick: int = 0


@dataclass(slots=True)
class _Route:
    model: SimulatedModel
    targets: SloTargets
    ready: dict[str, _Target] = field(default_factory=dict)
    known: dict[str, _Target] = field(default_factory=dict)
    """Those that ever took requests: a drain may be cancelled while its requests still run."""
    held: deque[Request] = field(default_factory=deque)
    in_flight: int = 0


@dataclass(slots=True)
class _Figures:
    """A replica's totals at the beginning of its window, for rates."""

    at: float
    totals: Totals


class SimulatedGateway:
    """One for the pool. `finished` hears of every end of a request and how it is judged; `epoch` is the Unix time of simulated second 0."""

    def __init__(self, clock: Clock, pool: str, models: tuple[SimulatedModel, ...], finished: Finished, epoch: float) -> None:
        self._clock = clock
        self._epoch = epoch
        self._pool = pool
        self._finished = finished
        self._picks = 0
        self._accounting = Accounting(lambda: clock.now, wall_clock=lambda: epoch + clock.now)
        self._routes = {model.key: _Route(model, targets(model)) for model in models}
        self._where: dict[int, tuple[_Route, _Target]] = {}
        self._figures: dict[str, deque[_Figures]] = {}

    def send(self, model: ModelKey, input_tokens: int, output_tokens: int, ended: Callable[[bool], None]) -> None:
        """A request arrives. `ended` is called at its end with whether it was refused for lack of capacity."""
        route = self._routes[model]

        def end(request: Request, outcome: Outcome) -> None:
            self._leave(request)
            route.in_flight -= 1
            exchange = request.exchange(self._clock.now)
            self._accounting.finished(tally, exchange)
            self._finished(request, judge(exchange, route.targets))
            ended(outcome is Outcome.OVERLOADED)

        request = Request(model, self._clock.now, input_tokens, output_tokens, end, self._retry)
        route.in_flight += 1
        workload_class = route.model.spec.workload_class
        tally = self._accounting.started(model, workload_class, route.targets, first_token=lambda: request.first_token)
        self._dispatch(route, request)

    def ready(self, model: ModelKey, pod_uid: str, replica: Replica) -> None:
        """A replica takes requests from now on; what was held goes first."""
        route = self._routes[model]
        route.ready[pod_uid] = route.known.setdefault(pod_uid, _Target(pod_uid, replica))
        held, route.held = route.held, deque()
        for request in held:
            if request.outcome is None:
                self._dispatch(route, request)

    def unready(self, model: ModelKey, pod_uid: str) -> None:
        """A replica takes no more requests."""
        self._routes[model].ready.pop(pod_uid, None)

    def forget(self, model: ModelKey, pod_uid: str) -> None:
        """A pod is gone."""
        self._routes[model].known.pop(pod_uid, None)
        self._figures.pop(pod_uid, None)

    def in_flight(self, model: ModelKey) -> int:
        """Requests of a model that have not ended."""
        return self._routes[model].in_flight

    def starved(self, model: ModelKey) -> bool:
        """Whether requests of a model wait: at the gateway, or at every ready replica."""
        route = self._routes[model]
        return bool(route.held) or (bool(route.ready) and all(target.replica.waiting > 0 for target in route.ready.values()))

    def _dispatch(self, route: _Route, request: Request) -> None:
        if not route.ready:
            route.held.append(request)
            self._clock.after(HOLD_SECONDS, lambda: self._give_up(route, request))
            return
        for target in sorted(route.ready.values(), key=lambda t: (t.outstanding, t.last_pick)):
            self._picks += 1
            target.last_pick = self._picks
            target.outstanding += 1
            self._where[id(request)] = (route, target)
            if target.replica.accept(request):
                return
            self._leave(request)
        request.end(Outcome.OVERLOADED)

    def _leave(self, request: Request) -> None:
        found = self._where.pop(id(request), None)
        if found is not None:
            found[1].outstanding -= 1

    def _retry(self, request: Request) -> None:
        """No byte has gone out: another replica gets the request."""
        self._leave(request)
        request.attempt += 1
        self._dispatch(self._routes[request.model], request)

    def _give_up(self, route: _Route, request: Request) -> None:
        if request.outcome is None and request in route.held:
            route.held.remove(request)
            request.end(Outcome.NO_REPLICA)

    def report(self, pods: list[PodView], replicas: dict[str, Replica], load_seconds: Callable[[str], float | None]) -> GatewayReport:
        """What `GET /report` would answer now."""
        now = self._clock.now
        by_model: dict[ModelKey, list[PodView]] = {key: [] for key in self._routes}
        for pod in pods:
            if (pod.namespace, pod.owner_name) in by_model:
                by_model[(pod.namespace, pod.owner_name)].append(pod)
        models = []
        for key, route in self._routes.items():
            traffic = self._accounting.summary(key)
            models.append(
                ModelTraffic(
                    namespace=key[0],
                    name=key[1],
                    served_name=route.model.spec.model.served_name or key[1],
                    workload_class=route.model.spec.workload_class,
                    window_seconds=traffic.window_seconds,
                    **traffic.figures(),
                    held=sum(request.outcome is None for request in route.held),
                    windows=self._accounting.windows(key),
                    last_request_age_seconds=self._accounting.last_request_age_seconds(key),
                    history=self._accounting.history(key),
                    replicas=[self._replica(route, pod, replicas.get(pod.uid), load_seconds(pod.uid)) for pod in by_model[key]],
                )
            )
        return GatewayReport(
            gateway=f"{self._pool}-gateway",
            pool=self._pool,
            time_unix=self._epoch + now,
            view_age_seconds=0,
            uptime_seconds=self._accounting.uptime_seconds,
            models=models,
        )

    def _replica(self, route: _Route, pod: PodView, replica: Replica | None, load_seconds: float | None) -> ReplicaReport:
        target = route.ready.get(pod.uid)
        report = None
        if replica is not None and pod.engine_started:
            report = self._monitor(route, pod, replica, load_seconds)
        return ReplicaReport(
            pod_name=pod.name,
            pod_uid=pod.uid,
            ready=target is not None,
            draining=pod.drain_started is not None or pod.terminating,
            in_flight=replica.outstanding if replica else 0,
            report=report,
            report_age_seconds=0 if report else None,
        )

    def _monitor(self, route: _Route, pod: PodView, replica: Replica, load_seconds: float | None) -> MonitorReport:
        now = self._clock.now
        before = self._since(pod.uid, replica)
        seconds = max(1e-9, now - before.at)
        window = replica.window.summary(now)
        totals = replica.totals
        state = EngineState.READY
        if load_seconds is None:
            state = EngineState.LOADING
        elif replica.draining:
            state = EngineState.DRAINING if replica.outstanding else EngineState.IDLE
        engine = EngineFigures(
            state=state,
            running=replica.running,
            waiting=replica.waiting,
            prompt_tokens_total=totals.prompt_tokens,
            generation_tokens_total=totals.generation_tokens,
            prompt_tokens_per_second=(totals.prompt_tokens - before.totals.prompt_tokens) / seconds,
            generation_tokens_per_second=(totals.generation_tokens - before.totals.generation_tokens) / seconds,
            ttft_p50_ms=window.ttft_p50_ms,
            ttft_p95_ms=window.ttft_p95_ms,
            tpot_p50_ms=window.tpot_p50_ms,
            tpot_p95_ms=window.tpot_p95_ms,
            load_seconds=load_seconds,
        )
        return MonitorReport(
            pod_name=pod.name,
            pod_namespace=pod.namespace,
            pod_uid=pod.uid,
            pool=self._pool,
            model_namespace=route.model.namespace,
            model_name=route.model.name,
            workload_class=route.model.spec.workload_class,
            time_unix=self._epoch + now,
            data=DataState.FRESH,
            engine=engine,
            engine_age_seconds=0,
            utilisation=Utilisation(
                compute_percent=min(100.0, 100 * (totals.compute_seconds - before.totals.compute_seconds) / seconds),
                kv_cache_percent=100 * replica.kv_share,
            ),
        )

    def _since(self, pod_uid: str, replica: Replica) -> _Figures:
        """The oldest totals that the monitor's window still holds; today's join them."""
        now, totals = self._clock.now, replica.totals
        kept = self._figures.setdefault(pod_uid, deque())
        while len(kept) > 1 and kept[1].at <= now - MONITOR_WINDOW_SECONDS:
            kept.popleft()
        kept.append(_Figures(now, Totals(totals.prompt_tokens, totals.generation_tokens, totals.busy_seconds, totals.compute_seconds)))
        return kept[0]


def targets(model: SimulatedModel) -> SloTargets:
    """The model's targets as the gateway reads them."""
    slo = model.spec.slo
    return SloTargets(slo.ttft_milliseconds, slo.tpot_milliseconds) if slo else SloTargets()
