"""What clients get through the gateway, from real servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.support import DONE, ROLE, Loopback, chat, chunk, eventually, loopback, model_object, stream

MEBIBYTE = 1024 * 1024


@pytest.fixture
async def pool() -> AsyncIterator[Loopback]:
    async with loopback() as running:
        yield running


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The OpenAI error object of an answer."""
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


class Held:
    """An engine that streams one token and then waits until it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield ROLE + chunk("one")
            await self.release.wait()
            yield chunk("two") + DONE

        return await stream(request, chunks())


async def draining(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "draining"}}, status=503, headers={"x-npufleet-draining": "true", "retry-after": "1"})


async def test_a_streamed_chat_passes_through_unchanged(pool: Loopback) -> None:
    await pool.engine()
    async with pool.stream() as response:
        body = await response.read()
    assert response.status == 200
    assert response.content_type == "text/event-stream"
    assert body == ROLE + chunk("hel") + chunk("lo") + DONE
    await pool.settled()
    traffic = pool.traffic()
    assert traffic.outcomes.ok == traffic.judged == traffic.attained == 1
    assert traffic.ttft_p50_ms is not None
    assert traffic.tpot_p50_ms is not None


async def test_an_unstreamed_answer_passes_through_and_has_neither_ttft_nor_tpot(pool: Loopback) -> None:
    await pool.engine()
    async with pool.post() as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "hello"
        assert response.headers["content-length"] == str(len(await response.read()))
    await pool.settled()
    assert pool.traffic().outcomes.ok == 1
    assert pool.traffic().ttft_p50_ms is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"])
async def test_every_allowed_route_reaches_the_replica_with_its_body_unchanged(pool: Loopback, path: str) -> None:
    engine = await pool.engine()
    body = b'{ "model" : "team-a/chat",  "input": "\\u4f60" }'
    async with pool.session.post(pool.url + path, data=body, headers={"content-type": "application/json"}) as response:
        assert response.status == 200
        assert response.headers["x-npufleet-replica"] == "r0"
    assert engine.bodies == [body]
    assert engine.seen[0]["path"] == path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/drain"),
        ("GET", "/state"),
        ("PUT", "/v1/completions"),
        ("DELETE", "/v1/models/chat"),
        ("POST", "/v1/chat/../../drain"),
    ],
)
async def test_any_other_route_is_an_openai_404_and_reaches_no_replica(pool: Loopback, method: str, path: str) -> None:
    engine = await pool.engine()
    async with pool.session.request(method, pool.url + path, json={"model": "chat"}) as response:
        assert response.status == 404
        assert (await error_of(response))["code"] == "unknown_url"
    assert engine.seen == []


async def test_models_are_listed_and_found_by_both_names(pool: Loopback) -> None:
    async with pool.session.get(f"{pool.url}/v1/models") as response:
        listed = await response.json()
    assert [model["id"] for model in listed["data"]] == ["chat"]
    for name in ("chat", "team-a/chat"):
        async with pool.session.get(f"{pool.url}/v1/models/{name}") as response:
            assert (await response.json())["id"] == "chat"
    async with pool.session.get(f"{pool.url}/v1/models/other") as response:
        assert response.status == 404
        assert (await error_of(response))["code"] == "model_not_found"


async def test_an_unknown_model_is_a_404_and_its_name_no_metric_label(pool: Loopback) -> None:
    await pool.engine()
    async with pool.post({"model": "s3cret-name"}) as response:
        assert response.status == 404
        assert (await error_of(response))["code"] == "model_not_found"
    async with pool.session.get(f"{pool.url}/metrics") as response:
        text = await response.text()
    assert "s3cret-name" not in text
    assert 'npufleet_gateway_rejected_total{cause="model_not_found",status="404"} 1.0' in text


@pytest.mark.parametrize("pod", [{"ready": False}, {"draining": True}, {"deleting": True}])
async def test_no_ready_replica_is_a_503_that_says_in_which_state_they_are(pool: Loopback, pod: dict[str, Any]) -> None:
    engine = await pool.engine(**pod)
    async with pool.post() as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        error = await error_of(response)
    state = {"ready": "1 starting", "draining": "1 draining", "deleting": "1 terminating"}[next(iter(pod))]
    assert error["code"] == "no_ready_replica"
    assert state in error["message"]
    assert engine.seen == []
    await pool.settled()
    assert pool.traffic().outcomes.no_replica == 1
    assert (pool.traffic().judged, pool.traffic().attained) == (1, 0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"nonsense", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"3", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "must provide a model"),
        (b'{"model": null}', "model:"),
        (b'{"model": 3}', "model:"),
        (b'{"model": ""}', "model:"),
        (b'{"model": ["chat"]}', "model:"),
    ],
)
async def test_a_malformed_body_is_a_400_that_says_what_is_wrong(pool: Loopback, body: bytes, says: str) -> None:
    engine = await pool.engine()
    async with pool.session.post(f"{pool.url}/v1/completions", data=body) as response:
        assert response.status == 400
        error = await error_of(response)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert engine.seen == []


async def test_a_body_over_the_limit_is_a_413_and_one_at_the_limit_passes(pool: Loopback) -> None:
    engine = await pool.engine()
    limit = pool.gateway.settings.max_body_bytes
    frame = b'{"model":"chat","prompt":"%s"}'
    padding = limit - len(frame) + 2
    for extra, status in ((0, 200), (1, 413), (4 * MEBIBYTE, 413)):
        async with pool.session.post(f"{pool.url}/v1/completions", data=io.BytesIO(frame % (b"x" * (padding + extra)))) as response:
            assert response.status == status
            if status == 413:
                assert (await error_of(response))["code"] == "request_too_large"
    assert [len(body) for body in engine.bodies] == [limit]


async def test_credentials_and_hop_by_hop_headers_stay_at_the_gateway(pool: Loopback) -> None:
    engine = await pool.engine()
    headers = {
        "authorization": "Bearer secret",
        "api-key": "secret",
        "cookie": "a=secret",
        "connection": "keep-alive, x-private",
        "x-private": "secret",
        "x-other": "kept",
        "te": "trailers",
        "x-latin": "caf\xe9",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with pool.post(headers=headers) as response:
        assert response.status == 200
    (seen,) = engine.seen
    assert seen["x-other"] == "kept"
    assert seen["traceparent"] == headers["traceparent"]
    assert "secret" not in str(seen)
    assert "te" not in seen


@pytest.mark.parametrize(("sent", "kept"), [("req-1", True), (None, False), ("a" * 129, False), ("with space", False), ("caf\xe9", False)])
async def test_a_request_id_is_propagated_or_made(pool: Loopback, sent: str | None, kept: bool) -> None:
    engine = await pool.engine()
    async with pool.post(headers={"x-request-id": sent} if sent is not None else {}) as response:
        answered = response.headers.getall("x-request-id")
    assert len(answered) == 1
    assert engine.seen[0]["x-request-id"] == answered[0]
    assert (answered[0] == sent) is kept


async def test_requests_go_to_the_replica_with_the_fewest_outstanding(pool: Loopback) -> None:
    held = [Held() for _ in range(3)]
    engines = [await pool.engine(handler) for handler in held]
    async with contextlib.AsyncExitStack() as stack:
        for expected in (1, 2):
            for _ in range(3):
                response = await stack.enter_async_context(pool.stream())
                await response.content.readany()
            assert [engine.active for engine in engines] == [expected] * 3
        held[1].release.set()
        await eventually(lambda: pool.gateway.balancer.outstanding("pod-r1") == 0)
        response = await stack.enter_async_context(pool.stream())
        assert response.headers["x-npufleet-replica"] == "r1"
        for one in held:
            one.release.set()


async def test_a_replica_that_refuses_connections_is_passed_over_and_then_set_aside(pool: Loopback) -> None:
    await pool.engine(listening=False)
    alive = await pool.engine()
    for _ in range(6):
        async with pool.post() as response:
            assert response.status == 200
    assert len(alive.seen) == 6
    await pool.settled()
    traffic = pool.traffic()
    assert traffic.outcomes.ok == 6
    assert traffic.outcomes.failed == 0


async def test_a_draining_replica_sends_its_requests_elsewhere(pool: Loopback) -> None:
    leaving = await pool.engine(draining)
    alive = await pool.engine()
    for _ in range(4):
        async with pool.post() as response:
            assert response.status == 200
            assert "x-npufleet-draining" not in response.headers
    assert len(leaving.seen) <= 1
    assert len(alive.seen) == 4


async def test_a_stream_that_was_kept_waiting_by_a_replica_that_drains_goes_on_elsewhere(pool: Loopback) -> None:
    async def waited(request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b": waiting\n\n"
            await asyncio.sleep(0.01)
            yield b'data: {"error": {"message": "this replica is draining", "type": "t", "param": null, "code": "draining"}}\n\n'

        return await stream(request, chunks())

    leaving = await pool.engine(waited)
    await pool.engine()
    for _ in range(4):
        async with pool.stream() as response:
            body = await response.read()
        assert body.endswith(DONE)
        assert b"error" not in body
    assert len(leaving.seen) <= 1
    await pool.settled()
    assert pool.traffic().outcomes.ok == 4


async def test_when_all_replicas_drain_the_client_is_asked_to_come_back(pool: Loopback) -> None:
    engines = [await pool.engine(draining) for _ in range(2)]
    async with pool.post() as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        assert (await error_of(response))["code"] == "no_ready_replica"
    assert [len(engine.seen) for engine in engines] == [1, 1]
    await pool.settled()
    assert pool.traffic().outcomes.no_replica == 1


async def test_each_replica_is_tried_once_and_three_at_most(pool: Loopback) -> None:
    async def not_ready(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    engines = [await pool.engine(not_ready) for _ in range(5)]
    async with pool.post() as response:
        assert response.status == 503
    assert sorted(len(engine.seen) for engine in engines) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 501])
async def test_other_answers_are_the_clients_and_are_not_repeated(pool: Loopback, status: int) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status, headers={"retry-after": "7"})

    engines = [await pool.engine(answer) for _ in range(2)]
    async with pool.post() as response:
        assert response.status == status
        assert response.headers["retry-after"] == "7"
    assert sum(len(engine.seen) for engine in engines) == 1
    await pool.settled()
    outcomes = pool.traffic().outcomes
    found = "client_error" if status in (400, 404) else "overloaded" if status == 429 else "server_error"
    assert getattr(outcomes, found) == outcomes.total == 1


@pytest.mark.parametrize(
    "script",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"\x00\xff garbage \r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
        b"HTTP/1.1 700 What\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=[
        "reset",
        "half-a-body",
        "headers-of-a-stream",
        "bad-chunk",
        "garbage",
        "another-protocol",
        "two-lengths",
        "endless-header",
        "status-700",
        "upgrade",
    ],
)
async def test_a_replica_that_fails_before_its_first_byte_is_replaced(pool: Loopback, script: bytes) -> None:
    broken = await pool.raw_engine(script)
    await pool.engine()
    for _ in range(2):
        async with pool.stream() as response:
            assert response.status == 200
            assert (await response.read()).endswith(DONE)
    assert broken.connections >= 1
    await pool.settled()
    assert pool.traffic().outcomes.ok == 2


async def test_when_every_replica_fails_before_its_first_byte_the_client_gets_a_502(pool: Loopback) -> None:
    await pool.raw_engine(b"")
    await pool.engine(listening=False)
    async with pool.stream() as response:
        assert response.status == 502
        assert (await error_of(response))["code"] == "replica_failed"
    await pool.settled()
    assert pool.traffic().outcomes.server_error == 1


@pytest.mark.parametrize(("target_ms", "attained"), [(60_000, 1), (1, 0)])
async def test_a_stream_that_is_answered_without_one_attains_if_the_answer_came_within_the_ttft_target(
    pool: Loopback, target_ms: int, attained: int
) -> None:
    async def whole(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.json_response({})

    pool.models = [model_object(slo={"ttftMilliseconds": target_ms})]
    await pool.engine(whole)
    async with pool.stream() as response:
        assert response.content_type == "application/json"
    await pool.settled()
    assert (pool.traffic().judged, pool.traffic().attained) == (1, attained)


async def test_a_missed_ttft_counts_against_the_models_target(pool: Loopback) -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await chat(request)

    pool.models = [model_object(slo={"ttftMilliseconds": 1})]
    await pool.engine(late)
    async with pool.stream() as response:
        await response.read()
    await pool.settled()
    traffic = pool.traffic()
    assert (traffic.outcomes.ok, traffic.judged, traffic.attained) == (1, 1, 0)


async def test_a_replica_killed_in_mid_stream_ends_the_stream_with_an_error_event_and_is_not_repeated(pool: Loopback) -> None:
    held = Held()
    engine = await pool.engine(held)
    async with pool.stream() as response:
        assert await response.content.readany() == ROLE + chunk("one")
        other = await pool.engine()
        await engine.stop()
        rest = await response.read()
    event = json.loads(rest.removeprefix(b"data: "))
    assert event["error"]["code"] == "stream_interrupted"
    assert DONE not in rest
    assert other.seen == []
    await pool.settled()
    traffic = pool.traffic()
    assert traffic.outcomes.interrupted == traffic.judged == 1
    assert traffic.attained == 0


async def test_the_error_event_stands_on_its_own_after_half_an_event(pool: Loopback) -> None:
    half = chunk("one") + b'data: {"choices":[{"del'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    await pool.raw_engine(head + f"{len(half):x}\r\n".encode() + half + b"\r\n")
    async with pool.stream() as response:
        events = (await response.read()).split(b"\n\n")
    assert events[0] + b"\n\n" == chunk("one")
    assert json.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "stream_interrupted"


async def test_an_error_that_the_engine_reports_in_the_stream_counts_as_interrupted(pool: Loopback) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield chunk("one") + b'data: {"error": {"message": "out of memory"}}\n\n'

        return await stream(request, chunks())

    await pool.engine(fails)
    async with pool.stream() as response:
        assert b"out of memory" in await response.read()
    await pool.settled()
    assert pool.traffic().outcomes.interrupted == 1


async def test_a_large_answer_that_breaks_off_is_not_taken_for_complete(pool: Loopback) -> None:
    await pool.raw_engine(b"HTTP/1.1 200 OK\r\ncontent-length: 8000000\r\n\r\n" + b"x" * 3_000_000)
    with pytest.raises(aiohttp.ClientPayloadError):
        async with pool.post() as response:
            await response.read()
    await pool.settled()
    assert pool.traffic().outcomes.interrupted == 1


async def test_a_large_answer_passes_through(pool: Loopback) -> None:
    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 5 * MEBIBYTE, content_type="application/json")

    await pool.engine(large)
    async with pool.post() as response:
        assert len(await response.read()) == 5 * MEBIBYTE
        assert response.headers["content-length"] == str(5 * MEBIBYTE)


async def test_a_client_that_leaves_closes_the_upstream_at_once(pool: Loopback) -> None:
    engine = await pool.engine(Held())
    async with pool.stream() as response:
        await response.content.readany()
        assert engine.active == 1
        response.close()
    await eventually(lambda: engine.active == 0)
    await pool.settled()
    traffic = pool.traffic()
    assert traffic.outcomes.cancelled == 1
    assert traffic.judged == 0


async def test_a_client_that_leaves_before_the_first_byte_closes_the_upstream_too(pool: Loopback) -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    engine = await pool.engine(never)
    request = asyncio.ensure_future(pool.stream().__aenter__())
    await eventually(lambda: engine.active == 1)
    request.cancel()
    await eventually(lambda: engine.active == 0)
    await pool.settled()
    assert pool.traffic().outcomes.cancelled == 1


async def test_a_client_that_leaves_in_mid_body_reaches_no_replica(pool: Loopback) -> None:
    engine = await pool.engine()
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model":')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with pool.post() as response:
        assert response.status == 200
    assert len(engine.seen) == 1
    del reader


async def test_a_slow_reader_holds_its_own_stream_back_and_nobody_elses_memory(pool: Loopback) -> None:
    produced = 0
    total = 64 * MEBIBYTE

    async def flood(request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            nonlocal produced
            part = chunk("x" * 60_000)
            while produced < total:
                yield part
                produced += len(part)

        return await stream(request, chunks())

    await pool.engine(flood)
    slow = socket.create_connection(("127.0.0.1", pool.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"model": "chat", "stream": True}).encode()
    slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await eventually(lambda: produced > 0)
    while True:
        before = produced
        await asyncio.sleep(0.2)
        if produced == before:
            break
    assert produced < total / 2
    await pool.engine(chat)
    async with pool.post() as response:
        assert response.status == 200
    slow.close()
    await pool.settled()


async def test_a_client_that_stops_reading_is_cut_off() -> None:
    async with loopback(client_stall_seconds=0.2) as pool:

        async def flood(request: web.Request) -> web.StreamResponse:
            async def chunks() -> AsyncIterator[bytes]:
                while True:
                    yield chunk("x" * 60_000)

            return await stream(request, chunks())

        engine = await pool.engine(flood)
        stalled = socket.create_connection(("127.0.0.1", pool.port))
        body = json.dumps({"model": "chat", "stream": True}).encode()
        stalled.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await eventually(lambda: engine.active == 1)
        await eventually(lambda: engine.active == 0)
        await pool.settled()
        assert pool.traffic().outcomes.cancelled == 1
        stalled.close()


async def test_a_replica_that_goes_silent_is_given_up() -> None:
    async with loopback(upstream_idle_seconds=0.2) as pool:
        engine = await pool.engine(Held())
        async with pool.stream() as response:
            text = await response.read()
        assert b"stream_interrupted" in text
        await eventually(lambda: engine.active == 0)

        async def never(_: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            return web.Response()

        engine.handler = never
        async with pool.post() as response:
            assert response.status == 504
            assert (await error_of(response))["code"] == "replica_timeout"
        await pool.settled()
        outcomes = pool.traffic().outcomes
        assert (outcomes.interrupted, outcomes.timeout) == (1, 1)


async def test_a_client_that_stops_in_mid_body_is_answered_408() -> None:
    async with loopback(body_timeout_seconds=0.1) as pool:
        reader, writer = await asyncio.open_connection("127.0.0.1", pool.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model":')
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
        writer.close()
        await writer.wait_closed()


async def test_pooled_connections_are_reused(pool: Loopback) -> None:
    raw = await pool.raw_engine(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}", keep_alive=True)
    for _ in range(5):
        async with pool.post() as response:
            assert response.status == 200
    assert raw.connections == 1


async def test_a_deleted_models_remaining_pods_get_nothing(pool: Loopback) -> None:
    engine = await pool.engine()
    pool.models = []
    pool.publish()
    async with pool.post() as response:
        assert response.status == 404
    assert engine.seen == []


async def test_a_fault_of_the_gateway_is_an_openai_500(pool: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    await pool.engine()

    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(pool.gateway.balancer, "acquire", broken)
    async with pool.post() as response:
        assert response.status == 500
        assert (await error_of(response))["code"] == "internal_error"
    monkeypatch.undo()
    async with pool.post() as response:
        assert response.status == 200


async def replicas_of(pool: Loopback, body: dict[str, object], times: int, headers: dict[str, str] | None = None) -> set[str]:
    found = set()
    for _ in range(times):
        async with pool.post(body, headers=headers) as response:
            assert response.status == 200
            found.add(response.headers["x-npufleet-replica"])
    return found


async def test_a_conversation_stays_with_one_replica_and_others_spread(pool: Loopback) -> None:
    for _ in range(3):
        await pool.engine()
    turns = [{"role": "user", "content": "a long question " * 200}]
    first = await replicas_of(pool, {"model": "chat", "messages": turns}, 4)
    turns = [*turns, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and then?"}]
    assert len(first) == 1
    assert await replicas_of(pool, {"model": "chat", "messages": turns}, 4) == first
    assert len(await replicas_of(pool, {"model": "chat", "messages": []}, 6)) == 3


async def test_a_session_stays_with_one_replica_when_asked(pool: Loopback) -> None:
    for _ in range(3):
        await pool.engine()
    assert len(await replicas_of(pool, {"model": "chat", "messages": []}, 6, {"x-npufleet-session": "s1"})) == 1
    assert len(await replicas_of(pool, {"model": "chat", "messages": [], "prompt_cache_key": "s1"}, 6)) == 1


async def test_an_adapters_name_goes_to_its_model_as_it_is(pool: Loopback) -> None:
    engine = await pool.engine()
    async with pool.post({"model": "chat:sql", "messages": []}) as response:
        assert response.status == 200
    assert json.loads(engine.bodies[0])["model"] == "chat:sql"


async def test_a_stream_that_waits_past_its_target_is_a_miss_in_the_report_while_it_waits() -> None:
    go = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await go.wait()
        return await chat(request)

    async with loopback() as pool:
        pool.models = [model_object(slo={"ttftMilliseconds": 30})]
        await pool.engine(slow)
        waiting = asyncio.create_task(
            pool.session.post(f"{pool.url}/v1/chat/completions", json={"model": "chat", "messages": [], "stream": True})
        )
        await eventually(lambda: pool.traffic().judged == 1)
        traffic = pool.traffic()
        assert (traffic.attained, traffic.outcomes.total, traffic.in_flight) == (0, 0, 1)
        assert [(c.workload_class, c.judged) for c in traffic.classes] == [("chat", 1)]
        async with pool.session.get(f"{pool.url}/metrics") as response:
            page = await response.text()
        assert 'npufleet_gateway_slo_judged_total{model="chat",namespace="team-a",workload_class="chat"} 1.0' in page
        assert (
            'npufleet_gateway_slo_attainment_ratio{model="chat",namespace="team-a",window_seconds="60",workload_class="chat"} 0.0' in page
        )
        go.set()
        async with await waiting as answer:
            await answer.read()
        await pool.settled()
        assert (pool.traffic().judged, pool.traffic().outcomes.ok) == (1, 1)


async def test_the_usage_that_an_engine_tells_counts_in_the_history(pool: Loopback) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        text = {"message": {"content": '"completion_tokens": 9999'}}
        return web.json_response({"choices": [text], "usage": {"prompt_tokens": 12, "total_tokens": 17, "completion_tokens": 5}})

    await pool.engine(answer)
    async with pool.post() as response:
        assert response.status == 200
    await pool.settled()
    book = pool.gateway.accounting._books["team-a", "chat"]
    (stretch,) = book.history._stretches
    assert (stretch.arrivals, stretch.prompt_tokens, stretch.generated_tokens) == (1, 12, 5)


async def test_breakers_and_engine_totals_are_in_the_report(pool: Loopback) -> None:
    await pool.engine(listening=False)
    await pool.engine()
    for _ in range(2):
        async with pool.post() as response:
            assert response.status == 200
    traffic = pool.traffic()
    assert {replica.pod_name: replica.breaker for replica in traffic.replicas}["r1"] == "closed"
    assert {replica.pod_name: replica.breaker for replica in traffic.replicas}["r0"] in ("open", "half_open")
    assert (traffic.engines.replicas, traffic.engines.reporting) == (2, 0)
    assert traffic.last_request_age_seconds is not None
