"""Steady streaming clients, as a context: what they asked, and how each request ended."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

REQUEST_SECONDS = 60


@dataclass
class Outcomes:
    """How the requests ended."""

    complete: int = 0
    failures: list[str] = field(default_factory=list)
    """One line per request that did not end as it should."""
    replicas: Counter[str] = field(default_factory=Counter)
    """Complete requests by the replica that answered."""


class Traffic:
    """Each client sends one streaming chat after another on its own connection and never retries."""

    def __init__(self, address: str, model: str, clients: int, max_tokens: int) -> None:
        self._url = f"http://{address}/v1/chat/completions"
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": "tell me something"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._max_tokens = max_tokens
        self._clients = clients
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")
        self.outcomes = Outcomes()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def complete(self) -> int:
        """Requests that have ended well so far."""
        return self.outcomes.complete

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session) for _ in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._stop.is_set():
            try:
                problem, replica = await self._ask(session)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem, replica = f"{type(error).__name__}: {error}", ""
            if problem:
                self.outcomes.failures.append(problem)
                await asyncio.sleep(0.2)
            else:
                self.outcomes.complete += 1
                self.outcomes.replicas[replica] += 1

    async def _ask(self, session: aiohttp.ClientSession) -> tuple[str, str]:
        """What went wrong, or nothing; and the replica that answered."""
        tokens, done = 0, False
        async with session.post(self._url, json=self._body) as response:
            replica = response.headers.get("x-npufleet-replica", "")
            if response.status != 200:
                return f"status {response.status}: {(await response.text())[:200]}", replica
            async for line in response.content:
                text = line.decode().strip()
                if not text.startswith("data:"):
                    continue
                payload = text.removeprefix("data:").strip()
                if payload == "[DONE]":
                    done = True
                    continue
                event = json.loads(payload)
                if "error" in event:
                    return f"error event from {replica}: {event['error']}", replica
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if not done or tokens != self._max_tokens:
            return f"stream from {replica} ended after {tokens} of {self._max_tokens} tokens, [DONE] {done}", replica
        return "", replica
