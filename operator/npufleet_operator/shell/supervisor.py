"""Runs one task per pool that exists or that a model refers to, and says whether they are alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from npufleet_operator.shell.mirror import ALL_POOLS, Mirror
from npufleet_operator.shell.pool_task import PoolTask

logger = logging.getLogger(__name__)

STUCK_SECONDS = 180.0
"""Longer than any bounded cycle: a task that is silent for so long hangs."""


class Supervisor:
    """Starts and ends pool tasks as pools and models come and go."""

    def __init__(self, mirror: Mirror, make_task: Callable[[str], PoolTask], monotonic: Callable[[], float]) -> None:
        self._mirror = mirror
        self._make_task = make_task
        self._monotonic = monotonic
        self._tasks: dict[str, tuple[PoolTask, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._pending: set[str] = set()
        self._ending_since: float | None = None
        mirror.subscribe(self._on_change)

    def _on_change(self, pool: str) -> None:
        self._pending.add(pool)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. A pool task that fails ends the process: a restart is cheaper than a pool that nobody plans."""
        try:
            self._changed.set()
            self._pending.add(ALL_POOLS)
            while True:
                changed = asyncio.create_task(self._changed.wait())
                running = [task for _, task in self._tasks.values()]
                try:
                    await asyncio.wait([changed, *running], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                for _, task in self._tasks.values():
                    if task.done():
                        task.result()
                self._changed.clear()
                pending, self._pending = self._pending, set()
                await self._adjust()
                for name, (pool, _) in self._tasks.items():
                    if name in pending or ALL_POOLS in pending:
                        pool.wake()
        finally:
            await self._end(list(self._tasks))

    async def _adjust(self) -> None:
        wanted = set(self._mirror.pools) | {model.pool_name for model in self._mirror.models.values() if model.pool_name}
        wanted |= {child.pool for child in self._mirror.children.values() if child.pool}
        for name in sorted(wanted - set(self._tasks)):
            pool = self._make_task(name)
            self._tasks[name] = (pool, asyncio.create_task(pool.run(), name=f"pool-{name}"))
            logger.info("pool task started", extra={"pool": name})
        await self._end([name for name in self._tasks if name not in wanted])

    async def _end(self, names: list[str]) -> None:
        ended = [self._tasks.pop(name)[1] for name in names]
        for task in ended:
            task.cancel()
        self._ending_since = self._monotonic()
        await asyncio.gather(*ended, return_exceptions=True)
        self._ending_since = None

    def stuck(self) -> list[str]:
        """Pools whose task has not finished a cycle for long; and the end of tasks, where that hangs."""
        now = self._monotonic()
        hanging = sorted(name for name, (pool, _) in self._tasks.items() if now - pool.last_cycle > STUCK_SECONDS)
        ending = self._ending_since is not None and now - self._ending_since > STUCK_SECONDS
        return [*hanging, *(["that is being ended"] if ending else [])]
