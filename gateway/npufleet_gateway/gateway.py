"""The gateway put together: view, proxy, collection, report; and the ASGI application that serves them.

One port serves clients (the OpenAI routes), the kubelet (/health, /ready), Prometheus (/metrics) and the operator (/report), and nothing
else: every other path is a 404. An Ingress or HTTPRoute that opens the gateway to the outside should pass /v1/ only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from npufleet_api import GROUP, MODEL_KIND, MODEL_PLURAL, POOL_KIND, POOL_PLURAL, VERSION
from npufleet_api.accounting import Accounting
from npufleet_api.contract import HEALTH_PATH, METRICS_PATH, READY_PATH, REPORT_PATH
from npufleet_api.report import GatewayReport
from npufleet_gateway.access_log import AccessLog
from npufleet_gateway.admission import Admission
from npufleet_gateway.asgi import Receive, Scope, Send, send_error
from npufleet_gateway.balancer import Balancer
from npufleet_gateway.catalogue import get_model, list_models
from npufleet_gateway.collector import Collector
from npufleet_gateway.entrance import Entrance
from npufleet_gateway.errors import ApiError, internal_error, not_found, tls_required
from npufleet_gateway.exchange import Context
from npufleet_gateway.hedging import Hedges
from npufleet_gateway.hold import Holder
from npufleet_gateway.keys import ApiKey, KeyRing, RateLimits
from npufleet_gateway.kube import KubeClient, Resource
from npufleet_gateway.metrics import CONTENT_TYPE, Metrics, Sample
from npufleet_gateway.objects import pod_selector
from npufleet_gateway.policy import FellowStore, PoolStore, Tee
from npufleet_gateway.proxy import PROXIED_PATHS, Proxy
from npufleet_gateway.reflector import Reflector, ReflectorSettings
from npufleet_gateway.report import MonitorState, build_report
from npufleet_gateway.routing import ModelKey, RoutingTable
from npufleet_gateway.samples import samples
from npufleet_gateway.settings import GatewaySettings
from npufleet_gateway.slots import next_estimate, with_slack
from npufleet_gateway.upstream import Upstream, request_id_of
from npufleet_gateway.view import ClusterView

logger = logging.getLogger(__name__)

CLUSTER_PATHS = frozenset({HEALTH_PATH, READY_PATH, METRICS_PATH, REPORT_PATH})
"""Of the kubelet, Prometheus and the operator."""


class Gateway:
    """One gateway. `app` is its ASGI application, whose lifespan starts and stops everything."""

    def __init__(
        self,
        settings: GatewaySettings,
        kube: KubeClient | None,
        clock: Callable[[], float] = time.monotonic,
        reflector_settings: ReflectorSettings | None = None,
    ) -> None:
        self.settings = settings
        self.view = ClusterView(settings.pool)
        self.fellows = FellowStore(settings.pool, settings.name)
        self.balancer = Balancer(clock, lambda: self.fellows.gateways)
        self.metrics = Metrics(self._samples)
        self.accounting = Accounting(clock, settings.window_seconds, time.time, self.metrics.missed)
        self.collector = Collector(self.view, self.metrics, settings, clock, self.balancer.reported)
        self.pool = PoolStore(settings.pool)
        self.keys = KeyRing(settings.keys_dir, lambda: self.pool.classes)
        self.admission = Admission(clock, settings, self._slots, lambda: self.pool.classes)
        self.holder = Holder(self.view, settings)
        self.hedges = Hedges(settings.hedging) if settings.hedging is not None else None
        self._entrance = Entrance(self.keys, RateLimits(clock, lambda: self.fellows.gateways), lambda: self.pool.classes)
        self._estimates: dict[str, tuple[float | None, float]] = {}
        self.reflectors: tuple[Reflector, ...] = ()
        self._clock = clock
        self._kube = kube
        self._tasks: list[asyncio.Task[None]] = []
        self._proxy: Proxy | None = None
        self._context: Context | None = None
        if kube is not None:
            models = Resource(MODEL_KIND, f"/apis/{GROUP}/{VERSION}/{MODEL_PLURAL}")
            pods = Resource("Pod", "/api/v1/pods", pod_selector(settings.pool))
            pools = Resource(POOL_KIND, f"/apis/{GROUP}/{VERSION}/{POOL_PLURAL}")
            self.reflectors = (
                Reflector(kube, models, self.view.models, clock, reflector_settings),
                Reflector(kube, pods, Tee(self.view.pods, self.fellows), clock, reflector_settings),
                Reflector(kube, pools, self.pool, clock, reflector_settings),
            )
        self.view.on_table(self._forget_what_is_gone)
        self._pages = Starlette(
            routes=[
                Route(HEALTH_PATH, self._health),
                Route(READY_PATH, self._ready),
                Route(METRICS_PATH, self._metrics_page),
                Route(REPORT_PATH, self._report_page),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._get_model),
            ],
            exception_handlers={404: _unknown_url, 405: _unknown_url, ApiError: _api_error},
            lifespan=self._lifespan,
        )

    @property
    def ready(self) -> bool:
        """Whether new connections should come here."""
        return self.view.synced and self._context is not None and not self.leaving

    @property
    def leaving(self) -> bool:
        """Whether the gateway was told to leave."""
        return self._context is not None and self._context.leaving

    @property
    def failed_tasks(self) -> list[str]:
        """Background tasks that ended, which none should: the gateway then fails its liveness probe."""
        return [task.get_name() for task in self._tasks if task.done()]

    @property
    def live_requests(self) -> int:
        """Requests in flight."""
        return self._proxy.live if self._proxy is not None else 0

    def leave(self) -> None:
        """Turn unready and ask clients to reconnect elsewhere; go on serving."""
        if self._context is not None:
            self._context.leaving = True

    def report(self) -> GatewayReport:
        """The report of this moment. Raises ApiError (503) before the first view."""
        age = self._view_age_seconds()
        if age is None:
            raise ApiError(503, "service_unavailable", "no_view", "Models and pods were not listed yet: the API server was not reached.")
        return build_report(
            gateway=self.settings.name,
            pool=self.settings.pool,
            time_unix=time.time(),
            view_age_seconds=age,
            table=self.view.table,
            accounting=self.accounting,
            balancer=self.balancer,
            monitor=self._monitor_state,
            held=self.holder.held,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        http = scope["type"] == "http"
        if http and self.settings.tls_only and scope["scheme"] != "https" and scope["path"] not in CLUSTER_PATHS:
            error = tls_required(self.settings.tls_port)
            self.metrics.rejected.labels(str(error.status), error.cause).inc()
            await send_error(send, error, request_id_of(scope["headers"]))
        elif http and scope["method"] == "POST" and scope["path"] in PROXIED_PATHS and self._proxy is not None:
            await self._proxy(scope, receive, send)
        else:
            await self._pages(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        settings = self.settings
        upstream = Upstream(settings.connect_timeout_seconds, settings.upstream_idle_seconds)
        access_log = AccessLog() if settings.access_log else None
        self._context = Context(
            self.view,
            self.balancer,
            self.metrics,
            settings,
            self._clock,
            upstream,
            self._entrance,
            self.admission,
            self.holder,
            self.hedges,
            access_log,
        )
        await asyncio.to_thread(self.keys.load)
        self._proxy = Proxy(self._context, self.accounting)
        loops = {
            "collect-reports": self.collector.run(),
            "cut-off-stalled-clients": self._proxy.cut_off_stalled_clients(),
            "follow-slots": self.admission.run(),
            "follow-keys": self.keys.run(),
            **({"access-log": access_log.run()} if access_log is not None else {}),
            **{f"watch-{r.resource.kind}": r.run() for r in self.reflectors},
        }
        self._tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        for task in self._tasks:
            task.add_done_callback(_log_end)
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await upstream.close()
            if access_log is not None:
                await access_log.flush()
            if self._kube is not None:
                await self._kube.close()

    def _forget_what_is_gone(self, table: RoutingTable) -> None:
        keys = {route.model.key for route in table.routes}
        self.accounting.retain(keys)
        self.metrics.retain(keys)
        uids = {replica.pod_uid for route in table.routes for replica in route.replicas}
        self.balancer.retain(uids, keys)
        self.admission.retain(keys)
        if self.hedges is not None:
            self.hedges.retain(keys)
        self._estimates = {uid: estimate for uid, estimate in self._estimates.items() if uid in uids}

    def _slots(self, key: ModelKey) -> int:
        """This gateway's share of the requests that a model's ready replicas take at once."""
        route = self.view.table.find("/".join(key))
        total = sum(with_slack(self._estimate(replica.pod_uid)) for replica in route.ready) if route is not None else 0.0
        return max(1, int(total / self.fellows.gateways))

    def _estimate(self, pod_uid: str) -> float:
        """What a replica runs at once; each report counts once."""
        collected = self.collector.of(pod_uid)
        seen, estimate = self._estimates.get(pod_uid, (None, None))
        if estimate is None or collected.received != seen:
            engine = collected.report.engine if collected.report is not None else None
            estimate = next_estimate(engine, estimate, self.settings.replica_concurrency)
            self._estimates[pod_uid] = (collected.received, estimate)
        return estimate

    def _view_age_seconds(self) -> float | None:
        if not self.view.synced:
            return None
        ages = [reflector.age_seconds for reflector in self.reflectors]
        return max((age for age in ages if age is not None), default=0.0)

    def _monitor_state(self, pod_uid: str) -> MonitorState:
        collected = self.collector.of(pod_uid)
        return collected.report, self.collector.age_seconds(collected), collected.error

    def _samples(self) -> list[Sample]:
        return samples(
            self.view,
            self.keys,
            self.admission,
            self.holder,
            self.reflectors,
            self.accounting,
            self.balancer,
            self._view_age_seconds(),
            ready=self.ready,
        )

    async def _health(self, _: Request) -> Response:
        failed = self.failed_tasks
        return PlainTextResponse(f"ended: {', '.join(failed)}\n", 500) if failed else PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        if self.ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("leaving\n" if self.view.synced else "models and pods were not listed yet\n", 503)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def _report_page(self, _: Request) -> Response:
        return Response(self.report().model_dump_json(), media_type="application/json")

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse(list_models(self._table_for(request)))

    async def _get_model(self, request: Request) -> Response:
        return JSONResponse(get_model(self._table_for(request), request.path_params["name"]))

    def _table_for(self, request: Request) -> RoutingTable:
        """The models that the request's key may use. Raises ApiError (401)."""
        key = self._entrance.identify(request.scope["headers"])
        table = self.view.table
        return table if key is None else _allowed(table, key)


def _allowed(table: RoutingTable, key: ApiKey) -> RoutingTable:
    return RoutingTable(
        tuple(route for route in table.routes if key.allows(route)),
        {name: route for name, route in table.by_name.items() if key.allows(route)},
    )


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        logger.critical("%s ended", task.get_name(), exc_info=task.exception())


async def _unknown_url(request: Request, _: Exception) -> Response:
    return _answer(not_found(request.url.path))


async def _api_error(_: Request, error: Exception) -> Response:
    return _answer(error if isinstance(error, ApiError) else internal_error())


def _answer(error: ApiError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")
