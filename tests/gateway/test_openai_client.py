"""The official client against the gateway: what people point at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from aiohttp import web

from gateway.support import DONE, ROLE, Loopback, chunk, loopback, stream

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


def client(pool: Loopback) -> openai.AsyncOpenAI:
    """A client without retries, so that a test sees each answer."""
    return openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="k", max_retries=0)


async def test_models_chats_and_streams() -> None:
    async with loopback() as pool, client(pool) as api:
        engine = await pool.engine()
        assert [model.id async for model in api.models.list()] == ["chat"]
        answer = await api.chat.completions.create(model="team-a/chat", messages=MESSAGES)
        assert answer.choices[0].message.content == "hello"
        streamed = await api.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in streamed]) == "hello"
        assert all("authorization" not in seen for seen in engine.seen)


async def test_errors_are_the_clients_own_kinds() -> None:
    async with loopback() as pool, client(pool) as api:
        with pytest.raises(openai.NotFoundError) as unknown:
            await api.chat.completions.create(model="other", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.InternalServerError) as unavailable:
            await api.chat.completions.create(model="chat", messages=MESSAGES)
        assert unavailable.value.status_code == 503
        assert unavailable.value.code == "no_ready_replica"


async def test_a_stream_whose_replica_dies_raises_instead_of_ending_quietly() -> None:
    async def held(request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield ROLE + chunk("one")
            await asyncio.Event().wait()
            yield DONE

        return await stream(request, chunks())

    async with loopback() as pool, client(pool) as api:
        engine = await pool.engine(held)
        streamed = await api.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        parts = streamed.__aiter__()
        await anext(parts)
        assert (await anext(parts)).choices[0].delta.content == "one"
        await engine.stop()
        with pytest.raises(openai.APIError, match="ended the stream early"):
            await anext(parts)
