"""Whatever clients send, they get an answer below 500 for it, and replicas see only what is a request for one of their models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.support import Loopback, eventually, loopback
from npufleet_gateway.errors import ApiError
from npufleet_gateway.proxy import parse_head

KEYS = st.text(max_size=12) | st.sampled_from(["model", "stream"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/models", "/report", "/x"])
HEADER = st.tuples(st.from_regex(r"[a-z][-a-z0-9]{0,12}", fullmatch=True), st.binary(max_size=20))


@given(st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_body_is_parsed_or_refused_with_a_400(body: bytes) -> None:
    try:
        head = parse_head(body)
    except ApiError as error:
        refused = error
    else:
        assert json.loads(body)["model"] == head.model
        return
    assert refused.status == 400
    assert json.loads(refused.body())["error"]["message"]


@given(JSON, st.text(min_size=1, max_size=40))
def test_the_model_is_found_wherever_it_stands_and_the_last_one_counts(value: Any, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    other = json.dumps(value)
    text = f'{{"messages": {other}, "model": "first", "x": {other}, "model": {json.dumps(name)}}}'
    assert parse_head(text.encode()).model == name


async def raw_exchange(pool: Loopback, sent: bytes) -> bytes:
    """Send bytes, close our side, and read what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.port)
    writer.write(sent)
    await writer.drain()
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_any_bytes_on_the_socket_leave_the_gateway_serving() -> None:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(PATHS, st.lists(HEADER, max_size=4), st.binary(max_size=100), st.booleans()), min_size=8, max_size=8))
    def examples(requests: list[tuple[str, list[tuple[str, bytes]], bytes, bool]]) -> None:
        collected.extend(requests)

    collected: list[tuple[str, list[tuple[str, bytes]], bytes, bool]] = []
    examples()

    async def send_all() -> None:
        async with loopback() as pool:
            await pool.engine()
            for path, headers, body, honest in collected:
                lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
                length = f"content-length: {len(body)}\r\n".encode() if honest else b""
                sent = f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode() + lines + length + b"connection: close\r\n\r\n" + body
                answer = await raw_exchange(pool, sent)
                for status in answer.split(b"HTTP/1.1 ")[1:]:
                    assert int(status[:3]) < 500, (sent, answer)
            async with pool.post() as response:
                assert response.status == 200
            await eventually(lambda: pool.gateway.live_requests == 0)

    asyncio.run(send_all())
