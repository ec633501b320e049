"""A pretend gateway: reports a steady load for every ready pod that it sees, in the form that the real one reports."""

from __future__ import annotations

import time

from aiohttp import web

from benchmarks.operator_scale.objects import GATEWAY_ADDRESS, GATEWAY_POD, POOL, TEAM
from npufleet_api.contract import GATEWAY_PORT, REPORT_PATH, EngineState
from npufleet_api.report import DataState, EngineFigures, GatewayReport, ModelTraffic, MonitorReport, Outcomes, ReplicaReport, Utilisation
from npufleet_operator.core.observed import PodView

IN_FLIGHT = 6
"""Requests of each replica: with half as many replicas the KV cache would be full, so nothing is taken away."""
KV_PERCENT = 60.0
LOAD_SECONDS = 40.0


class PretendGateway:
    """Answers `GET /report` for the pods that `pods` holds, by UID, each with the name and class of its model."""

    def __init__(self, classes: dict[str, str]) -> None:
        self.pods: dict[str, PodView] = {}
        self.reports = 0
        self._classes = classes
        self._started = time.time()

    async def start(self) -> web.AppRunner:
        """Listen on the address that the gateway's pod tells."""
        app = web.Application()
        app.router.add_get(REPORT_PATH, self._report)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, GATEWAY_ADDRESS, GATEWAY_PORT).start()
        return runner

    async def _report(self, request: web.Request) -> web.Response:
        self.reports += 1
        return web.Response(text=self.report(time.time()).model_dump_json(), content_type="application/json")

    def report(self, now: float) -> GatewayReport:
        """The steady load at one moment."""
        ready: dict[str, list[PodView]] = {name: [] for name in self._classes}
        for pod in sorted(self.pods.values(), key=lambda p: p.name):
            if pod.engine_ready and pod.owner_name in ready:
                ready[pod.owner_name].append(pod)
        return GatewayReport(
            gateway=GATEWAY_POD,
            pool=POOL,
            time_unix=now,
            view_age_seconds=0,
            uptime_seconds=max(0.0, now - self._started),
            models=[self._model(name, pods, now) for name, pods in ready.items()],
        )

    def _model(self, name: str, pods: list[PodView], now: float) -> ModelTraffic:
        requests = 100 * len(pods)
        return ModelTraffic(
            namespace=TEAM,
            name=name,
            served_name=name,
            workload_class=self._classes[name],
            window_seconds=300,
            outcomes=Outcomes(ok=requests),
            judged=requests,
            attained=requests,
            in_flight=IN_FLIGHT * len(pods),
            ttft_p50_ms=200,
            ttft_p95_ms=400,
            tpot_p50_ms=30,
            tpot_p95_ms=40,
            last_request_age_seconds=0 if pods else None,
            replicas=[self._replica(name, pod, now) for pod in pods],
        )

    def _replica(self, name: str, pod: PodView, now: float) -> ReplicaReport:
        engine = EngineFigures(
            state=EngineState.READY,
            running=IN_FLIGHT,
            generation_tokens_per_second=200,
            ttft_p50_ms=200,
            ttft_p95_ms=400,
            tpot_p50_ms=30,
            tpot_p95_ms=40,
            load_seconds=LOAD_SECONDS,
        )
        report = MonitorReport(
            pod_name=pod.name,
            pod_namespace=pod.namespace,
            pod_uid=pod.uid,
            pool=POOL,
            model_namespace=TEAM,
            model_name=name,
            workload_class=self._classes[name],
            time_unix=now,
            data=DataState.FRESH,
            engine=engine,
            engine_age_seconds=1,
            utilisation=Utilisation(compute_percent=50, memory_percent=80, kv_cache_percent=KV_PERCENT),
        )
        return ReplicaReport(
            pod_name=pod.name, pod_uid=pod.uid, ready=True, draining=False, in_flight=IN_FLIGHT, report=report, report_age_seconds=1
        )
