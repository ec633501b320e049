"""A pool's loop ends when it is told to, whatever else happens at that moment."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import aiohttp

from npufleet_operator.shell.events import EventRecorder
from npufleet_operator.shell.mirror import Mirror
from npufleet_operator.shell.pool_task import PoolTask
from support.fleet import CONFIG
from support.kube_server import kube_server


async def test_a_task_that_is_woken_and_cancelled_at_once_ends() -> None:
    async with kube_server() as (_, client), aiohttp.ClientSession() as session:
        events = EventRecorder(client, lambda: datetime.now(UTC))
        pool = PoolTask("prod", client, Mirror(), session, events, lambda: CONFIG, time.monotonic, lambda: datetime.now(UTC))
        started = pool.last_cycle
        running = asyncio.create_task(pool.run())
        while pool.last_cycle == started:  # noqa: ASYNC110 - a cycle sets no event
            await asyncio.sleep(0.01)
        pool.wake()
        await asyncio.sleep(0)  # the wait for a wake-up is over, the task has not gone on yet
        running.cancel()
        done, _pending = await asyncio.wait([running], timeout=10)
        still_running = not done
        while not running.done():
            running.cancel()
            await asyncio.sleep(0.1)
        assert not still_running
        assert running.cancelled()
