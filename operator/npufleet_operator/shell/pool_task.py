"""One pool's loop: observe, plan, apply; woken by events, and by a timer anyway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime

import aiohttp

from npufleet_api import MODEL_KIND, POOL_KIND
from npufleet_api.conditions import Reason
from npufleet_api.contract import COMPONENT_LABEL, POOL_LABEL
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.naming import gateway_child, slug
from npufleet_operator.core.objects.gateway import GATEWAY_COMPONENT
from npufleet_operator.core.observed import GatewayView, JobState, Observed, OperatorConfig, PodView, RivalPool
from npufleet_operator.core.plan import make_plan
from npufleet_operator.core.transitions import Transition, condition_transitions
from npufleet_operator.errors import ApiError
from npufleet_operator.shell import metrics
from npufleet_operator.shell.apply import Applier
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.engine_admin import EngineAdmin
from npufleet_operator.shell.events import EventRecorder, Subject
from npufleet_operator.shell.gateways import GatewayPoller
from npufleet_operator.shell.mirror import Mirror
from npufleet_operator.shell.parse import job_state
from npufleet_operator.shell.recorder import PlanRecorder
from npufleet_operator.shell.timeline import Timeline

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.05
"""Events come in bursts; one plan serves a burst."""
AGAIN_SECONDS = 0.5
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 8.0
"""Kept short: after an outage of the API server this is what a pool waits."""
WARNINGS = frozenset(
    {
        Reason.CLAMPED_BY_CAPACITY,
        Reason.CLAMPED_BY_CEILING,
        Reason.CLAMPED_BY_MAXIMUM,
        Reason.DRAIN_DEADLINE,
        Reason.HOLD_NO_DATA,
        Reason.RECLAIMED_FOR_GUARANTEE,
        Reason.WORTH_MORE_ELSEWHERE,
        Reason.REPLACED_FAILED,
        Reason.SLO_UNATTAINABLE,
    }
)


class PoolTask:
    """Owns every model that refers to the pool, whether the pool exists or not."""

    def __init__(
        self,
        name: str,
        client: KubeClient,
        mirror: Mirror,
        session: aiohttp.ClientSession,
        events: EventRecorder,
        config: Callable[[], OperatorConfig],
        monotonic: Callable[[], float],
        wall: Callable[[], datetime],
        recorder: PlanRecorder | None = None,
    ) -> None:
        """monotonic: seconds, for what must not end early. wall: UTC, for what is written."""
        self.name = name
        self.last_cycle = monotonic()
        self._mirror = mirror
        self._config = config
        self._events = events
        self._monotonic = monotonic
        self._wall = wall
        self._timeline = Timeline()
        self._recorder = recorder
        self._admin = EngineAdmin(session)
        self._gateways = GatewayPoller(session, name, monotonic)
        self._applier = Applier(client, mirror, self._admin, monotonic)
        self._woken = asyncio.Event()
        self._seen_models: set[tuple[str, str]] = set()
        self._label = slug(name)

    def wake(self) -> None:
        """Plan again soon."""
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            self._woken.clear()
            try:
                wait = await self._cycle()
                failures = 0
                metrics.CYCLES.labels(self.name, "done").inc()
                metrics.LAST_CYCLE.labels(self.name).set(self._wall().timestamp())
            except ApiError as error:
                failures += 1
                wait = self._back_off("failed", failures)
                logger.warning("cycle failed", extra={"pool": self.name, "error": str(error), "again_in_seconds": wait})
            except Exception:  # one pool's defect must not stop the others; it is logged, counted and tried again
                failures += 1
                wait = self._back_off("crashed", failures)
                logger.exception("cycle crashed", extra={"pool": self.name, "again_in_seconds": wait})
            if failures:
                await asyncio.sleep(FIRST_RETRY_SECONDS)
            self.last_cycle = self._monotonic()
            try:
                async with asyncio.timeout(wait):  # wait_for of Python 3.11 swallows a cancellation that comes with the wake-up
                    await self._woken.wait()
                await asyncio.sleep(SETTLE_SECONDS)
            except TimeoutError:
                continue

    def _back_off(self, result: str, failures: int) -> float:
        metrics.CYCLES.labels(self.name, result).inc()
        return min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * float(2 ** min(failures - 1, 10)))

    async def _cycle(self) -> float:
        began = self._monotonic()
        observed = await self._observe()
        started, now = self._monotonic(), self._wall()
        cpu_before = time.thread_time()
        observed = self._timeline.present(observed, now, started)
        plan = make_plan(observed, now)
        metrics.PLAN_CPU_SECONDS.labels(self.name).inc(time.thread_time() - cpu_before)
        planned = self._monotonic()
        metrics.PLAN_SECONDS.labels(self.name).observe(planned - started)
        if self._recorder:
            await self._recorder.write(observed, now, plan)
        transitions = condition_transitions(observed, plan)
        again = await self._applier.carry_out(self.name, plan)
        applied = self._monotonic()
        await self._publish(plan)
        for transition in transitions:
            await self._record(transition)
        stages = {"observe": started - began, "plan": planned - started, "apply": applied - planned, "publish": self._monotonic() - applied}
        for stage, seconds in stages.items():
            metrics.STAGE_SECONDS.labels(self.name, stage).observe(seconds)
        return min(AGAIN_SECONDS, plan.wake_after_seconds) if again else plan.wake_after_seconds

    async def _observe(self) -> Observed:
        pool = self._mirror.pools.get(self.name)
        models = tuple(model for model in self._mirror.models.values() if model.pool_name == self.name)
        owners = {model.uid for model in models}
        pods = [pod for pod in self._mirror.pods.values() if self._concerns(pod, owners, pool.spec if pool else None)]
        draining = [pod for pod in pods if pod.owner_uid in owners and pod.drain_started and not pod.terminating and not pod.finished]
        gateways = [pod for pod in self._mirror.pods.values() if self._is_gateway(pod)]
        fetching = [pod for pod in pods if pod.owner_uid in owners and pod.fetching and not pod.terminating]
        traffic, probes, fetches = await asyncio.gather(
            self._gateways.traffic(gateways), self._admin.probe(draining), self._admin.fetches(fetching)
        )
        return Observed(
            pool_name=self.name,
            pool=pool,
            models=models,
            pods=tuple(pods),
            nodes=tuple(self._mirror.nodes.values()),
            namespaces=dict(self._mirror.namespaces),
            probes=probes,
            traffic=traffic,
            gateway=self._gateway(),
            config=self._config(),
            fetches=fetches,
            jobs={
                **{
                    (namespace, name): job_state(child.body)
                    for (kind, namespace, name), child in self._mirror.children.items()
                    if kind == "Job" and child.owner_uid in owners
                },
                **{(namespace, name): JobState.FAILED for _, namespace, name in self._applier.refused_jobs},
            },
            refused=dict(self._applier.refused),
            rivals=tuple(
                RivalPool(other.name, other.created, other.spec.npus)
                for other in self._mirror.pools.values()
                if other.spec is not None and other.name != self.name
            ),
        )

    def _concerns(self, pod: PodView, owners: set[str], spec: InferencePoolSpec | None) -> bool:
        if pod.owner_uid in owners or (pod.owner_name and pod.labels.get(POOL_LABEL) == self._label):
            return True
        return spec is not None and spec.npus.resource_name in pod.requests

    def _is_gateway(self, pod: PodView) -> bool:
        return (
            pod.labels.get(COMPONENT_LABEL) == GATEWAY_COMPONENT
            and pod.labels.get(POOL_LABEL) == self._label
            and pod.namespace == self._config().namespace
        )

    def _gateway(self) -> GatewayView:
        child = self._mirror.children.get(("Deployment", self._config().namespace, gateway_child(self.name)))
        if child is None:
            return GatewayView()
        return GatewayView(exists=True, ready_replicas=int((child.body.get("status") or {}).get("readyReplicas", 0)))

    async def _publish(self, plan: Plan) -> None:
        if plan.pool_status:
            metrics.publish_pool(self.name, plan.pool_status)
        else:
            metrics.forget_pool(self.name)
        for key, status in plan.model_status.items():
            metrics.publish_model(*key, status)
        for key in self._seen_models - set(plan.model_status):
            metrics.forget_model(*key)
        self._seen_models = set(plan.model_status)
        for choice in plan.choices:
            name = "/".join(choice.model)
            logger.info(
                "decision", extra={"pool": self.name, "model": name, "decision": choice.reason.value, "explanation": choice.message}
            )
            metrics.DECISIONS.labels(self.name, choice.reason.value).inc()
            await self._record(Transition(choice.model, choice.reason.value, choice.message, choice.reason in WARNINGS))

    async def _record(self, transition: Transition) -> None:
        """An Event on the model, or on the pool."""
        if transition.model is not None:
            model = self._mirror.models.get(transition.model)
            subject = Subject(MODEL_KIND, model.namespace, model.name, model.uid) if model else None
        else:
            pool = self._mirror.pools.get(self.name)
            subject = Subject(POOL_KIND, "", pool.name, pool.uid) if pool else None
        if subject:
            await self._events.record(subject, transition.reason, transition.message, warning=transition.warning)
