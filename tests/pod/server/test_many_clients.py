"""Many clients at once, and many that leave in the middle of whatever they do."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from support.pod_process import PodProcess, start_pod

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 200
DISCONNECTS = 1000
AT_ONCE = 40


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    with start_pod(tiny_model, tmp_path_factory.mktemp("pod"), max_num_sequences=16) as process:
        process.wait_ready()
        yield process


async def test_200_clients_stream_at_once_without_an_error(server: PodProcess) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        together = asyncio.Barrier(STREAMS)

        async def stream(seed: int) -> int:
            await together.wait()
            chunks = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"hello {seed}"}],
                seed=seed,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            last = [chunk async for chunk in chunks][-1]
            return last.usage.completion_tokens if last.usage is not None else -1

        assert await asyncio.gather(*(stream(seed) for seed in range(STREAMS))) == [20] * STREAMS
    server.wait(lambda: is_idle(server), "idle")


async def test_1000_clients_that_leave_at_random_leave_nothing_behind(server: PodProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    choose = random.Random(7)  # noqa: S311 - repeatable, not secret
    limit = asyncio.Semaphore(AT_ONCE)

    async def leave(raw: bytes, cut: int, wait: float, abrupt: bool) -> None:
        async with limit:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw[:cut])
            await writer.drain()
            await asyncio.sleep(wait)
            if abrupt:
                writer.transport.abort()
            else:
                writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    def request() -> tuple[bytes, int, float, bool]:
        path, body = choose.choice(BODIES)
        fields = {**body, "stream": choose.random() < 0.6, "n": choose.choice([1, 1, 3])}
        content = json.dumps(fields).encode()
        raw = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path, len(content), content)
        cut = len(raw) if choose.random() < 0.8 else choose.randrange(1, len(raw))
        return raw, cut, choose.choice([0, 0.001, 0.01, 0.05, 0.2]), choose.random() < 0.5

    await asyncio.gather(*(leave(*request()) for _ in range(DISCONNECTS)))
    server.wait(lambda: is_idle(server), "idle")
    assert server.metric("vllm:request_success_total", finished_reason="abort") > AT_ONCE
    assert server.http.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}).status_code == 200
    loud = [line for line in server.logs() if line["level"] in ("WARNING", "ERROR", "CRITICAL")]
    # asyncio's own, where several choices are written in the turn of the loop in which a client resets the connection.
    assert [line for line in loud if line["message"] != "socket.send() raised exception."] == []
    assert server.stderr == ""


HELLO = [{"role": "user", "content": "hello " * 50}]
BODIES: list[tuple[bytes, dict[str, Any]]] = [
    (b"/v1/completions", {"model": "tiny", "prompt": [5] * 700, "max_tokens": 1000, "ignore_eos": True}),
    (b"/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "logprobs": 3}),
    (b"/v1/chat/completions", {"model": "tiny", "messages": HELLO, "max_tokens": 500, "ignore_eos": True}),
    (b"/v1/chat/completions", {"model": "tiny", "messages": HELLO, "max_tokens": 500, "response_format": {"type": "json_object"}}),
    (b"/v1/embeddings", {"model": "tiny", "input": [[7] * 900] * 20}),
]


def is_idle(server: PodProcess) -> bool:
    """Whether nothing runs, waits or holds a block."""
    state = server.state()
    return state["running"] == state["waiting"] == 0 and server.metric("vllm:kv_cache_usage_perc") == 0
