"""The access log: what stands in it, and what does not."""

from __future__ import annotations

import asyncio
import io
import json
import threading

import pytest

from gateway.support import loopback
from npufleet_gateway import access_log
from npufleet_gateway.access_log import AccessLog


async def test_each_request_is_a_line_without_content_or_keys(capsys: pytest.CaptureFixture[str]) -> None:
    async with loopback(access_log=True) as pool:
        await pool.engine()
        headers = {"authorization": "Bearer sk-secret", "x-request-id": "one"}
        body = {"model": "chat", "messages": [{"role": "user", "content": "private"}], "stream": True}
        async with pool.post(body, headers=headers) as response:
            await response.read()
        async with pool.post({"model": "nobody"}) as response:
            assert response.status == 404
        await pool.settled()
    written = capsys.readouterr().out
    assert "private" not in written
    assert "sk-secret" not in written
    served, refused = map(json.loads, written.splitlines())
    assert served["request_id"] == "one"
    assert (served["model"], served["workload_class"], served["replica"]) == ("team-a/chat", "chat", "r0")
    assert (served["status"], served["outcome"], served["answer_tokens"], served["streamed"]) == (200, "ok", 2, True)
    assert served["ttft_ms"] <= served["duration_ms"]
    assert (refused["status"], refused["error"]) == (404, "model_not_found")


class _SlowAtFirst(io.StringIO):
    """Takes the first write only once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self._first = True

    def write(self, text: str) -> int:
        if self._first:
            self._first = False
            self.let.wait()
        return super().write(text)


async def test_the_last_flush_waits_for_one_that_was_cancelled_while_it_wrote() -> None:
    stream = _SlowAtFirst()
    log = AccessLog(stream)
    log.write(number=0)
    first = asyncio.create_task(log.flush())
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    log.write(number=1)
    last = asyncio.create_task(log.flush())
    await asyncio.sleep(0.05)
    stream.let.set()
    await last
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == [0, 1]
    assert log.dropped == 0


async def test_lines_that_nobody_takes_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "MAX_WAITING_LINES", 2)
    stream = io.StringIO()
    log = AccessLog(stream)
    for number in range(3):
        log.write(number=number, nothing=None)
    await log.flush()
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == [0, 1]
    stream.close()
    log.write(number=4)
    await log.flush()
    assert log.dropped == 2
