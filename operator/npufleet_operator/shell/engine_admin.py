"""The engine's admin port, as the operator uses it: state, drain, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp
from pydantic import ValidationError

from npufleet_api.contract import ADMIN_PORT, DRAIN_CANCEL_PATH, DRAIN_PATH, STATE_PATH, AdminState, DrainRequest
from npufleet_api.fetching import FETCH_PATH, FetchProgress
from npufleet_operator.core.observed import EngineProbe, PodView
from npufleet_operator.errors import AdminError
from npufleet_operator.shell.bounded import read_bounded

TIMEOUT = aiohttp.ClientTimeout(total=3)
MAX_ANSWER_BYTES = 64 * 1024


class EngineAdmin:
    """Calls are bounded in time and size; an engine that does not answer is unknown, not idle."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ADMIN_PORT) -> None:
        self._session = session
        self._port = port

    async def probe(self, pods: Iterable[PodView]) -> dict[str, EngineProbe]:
        """What each pod's engine says of itself, by pod UID."""
        reachable = [pod for pod in pods if pod.ip]
        answers = await asyncio.gather(*(self._probe(pod) for pod in reachable))
        return {pod.uid: answer for pod, answer in zip(reachable, answers, strict=True)}

    async def fetches(self, pods: Iterable[PodView]) -> dict[str, FetchProgress]:
        """How far each pod's fetch container is, by pod UID; pods that do not answer are left out."""
        reachable = [pod for pod in pods if pod.ip]
        answers = await asyncio.gather(*(self._fetch(pod) for pod in reachable))
        return {pod.uid: answer for pod, answer in zip(reachable, answers, strict=True) if answer is not None}

    async def _fetch(self, pod: PodView) -> FetchProgress | None:
        try:
            return FetchProgress.model_validate_json(await self._ask("GET", pod, FETCH_PATH))
        except (AdminError, ValidationError):
            return None

    async def drain(self, pod: PodView, deadline_seconds: float, reason: str) -> AdminState:
        """Ask the engine to drain; harmless when repeated. Raises AdminError."""
        body = DrainRequest(deadline_seconds=max(0.0, deadline_seconds), reason=reason)
        return await self._call("POST", pod, DRAIN_PATH, body.model_dump_json().encode())

    async def cancel(self, pod: PodView) -> AdminState:
        """Take a drain back. Raises AdminError."""
        return await self._call("POST", pod, DRAIN_CANCEL_PATH)

    async def _probe(self, pod: PodView) -> EngineProbe:
        try:
            state = await self._call("GET", pod, STATE_PATH)
        except AdminError:
            return EngineProbe(state=None)
        return EngineProbe(state.state, state.running, state.waiting, state.drain_deadline_seconds)

    async def _call(self, method: str, pod: PodView, path: str, body: bytes | None = None) -> AdminState:
        try:
            return AdminState.model_validate_json(await self._ask(method, pod, path, body))
        except ValidationError as error:
            raise AdminError(f"{method} {path} of pod {pod.name}: answer is no engine state") from error

    async def _ask(self, method: str, pod: PodView, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, f"http://{pod.host}:{self._port}{path}", data=body, headers=headers, timeout=TIMEOUT, allow_redirects=False
            ) as response:
                raw = await read_bounded(response, MAX_ANSWER_BYTES)
                if response.status != 200:
                    raise AdminError(f"{method} {path} of pod {pod.name}: status {response.status}")
            return raw
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AdminError(f"{method} {path} of pod {pod.name}: {type(error).__name__}: {error}") from error
