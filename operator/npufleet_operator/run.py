"""The operator's process: mirror, watches, pool tasks, watchdog and endpoints, each owned and awaited."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from npufleet_api.contract import MANAGED_BY, MANAGED_BY_LABEL, OPERATOR_PORT
from npufleet_operator.collector import spare_plans_the_collector
from npufleet_operator.core.observed import OperatorConfig
from npufleet_operator.errors import ApiError
from npufleet_operator.handlers import watch
from npufleet_operator.settings import OperatorSettings
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.crd_check import check_crds
from npufleet_operator.shell.events import EventRecorder
from npufleet_operator.shell.kinds import CHILDREN, DEPLOYMENT, MODEL, NAMESPACE, NODE, POD, POOL
from npufleet_operator.shell.mirror import Mirror
from npufleet_operator.shell.optional_kinds import OptionalKinds
from npufleet_operator.shell.pool_task import PoolTask
from npufleet_operator.shell.recorder import PlanRecorder
from npufleet_operator.shell.supervisor import Supervisor
from npufleet_operator.shell.watchdog import Watchdog, Watched
from npufleet_operator.shell.web import build_app

logger = logging.getLogger(__name__)

PRIME_RETRY_SECONDS = 2.0
OURS = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
MEBIBYTE = 1024 * 1024


def watched_kinds() -> tuple[Watched, ...]:
    """Pools and models first, so that the pods which follow find their owners. Of other kinds only owned objects are watched."""
    return (
        Watched(NAMESPACE),
        Watched(POOL),
        Watched(MODEL),
        Watched(NODE),
        Watched(POD),
        *(Watched(kind, label_selector=OURS) for kind in CHILDREN),
        Watched(DEPLOYMENT, label_selector=OURS),
    )


async def run(settings: OperatorSettings, port: int = OPERATOR_PORT) -> None:
    """Until SIGTERM or SIGINT."""
    stop, watching, primed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await KubeClient.connect())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        mirror = Mirror()
        watched = watched_kinds()
        optional = OptionalKinds(client, mirror, OURS)
        watchdog = Watchdog(client, mirror, watched, optional.present)

        def wall() -> datetime:
            return datetime.now(UTC)

        events = EventRecorder(client, wall)
        fixed = settings.config()
        recorder = PlanRecorder(Path(settings.record_plans), settings.record_limit_mi * MEBIBYTE) if settings.record_plans else None

        def config() -> OperatorConfig:
            return replace(fixed, optional_kinds=optional.names)

        def make_task(name: str) -> PoolTask:
            return PoolTask(name, client, mirror, session, events, config, time.monotonic, wall, recorder)

        supervisor = Supervisor(mirror, make_task, time.monotonic)

        def problems() -> list[str]:
            stuck = [f"pool task {name} hangs" for name in supervisor.stuck()]
            return stuck + [f"watch of {kind} is silent" for kind in watchdog.silent()]

        runner = web.AppRunner(build_app(problems, primed.is_set), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, port=port).start()
        if not await _prime(client, watchdog, optional, stop):
            return
        primed.set()
        spare_plans_the_collector()
        logger.info("started", extra={"namespace": settings.namespace, "pools": len(mirror.pools), "models": len(mirror.models)})
        watches = watch(mirror, watchdog, (*watched, *optional.watched), stop, watching)
        await _until_stopped(
            stop, {"watches": watches, "pools": supervisor.run(), "watchdog": watchdog.run(), "optional-kinds": optional.run()}
        )
    logger.info("stopped")


async def _prime(client: KubeClient, watchdog: Watchdog, optional: OptionalKinds, stop: asyncio.Event) -> bool:
    """Nothing is planned before everything was listed once. False when asked to stop meanwhile."""
    while not stop.is_set():
        try:
            await optional.refresh()
            await watchdog.prime()
            await check_crds(client)
        except ApiError as error:
            logger.warning("waiting for the API server", extra={"error": str(error)})
            try:
                async with asyncio.timeout(PRIME_RETRY_SECONDS):
                    await stop.wait()
            except TimeoutError:
                continue
        else:
            return True
    return False


async def _until_stopped(stop: asyncio.Event, loops: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """The first of these tasks to end, ends all; an error ends the process with it."""
    tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
    await asyncio.wait([*tasks, stopping := asyncio.create_task(stop.wait(), name="stop")], return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception()]
    stop.set()
    for task in (*tasks, stopping):
        task.cancel()
    await asyncio.gather(*tasks, stopping, return_exceptions=True)
    for task in failed:
        task.result()
