"""Bodies that come in pieces are read whole; those without end are cut."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from npufleet_operator.shell.bounded import read_bounded


async def test_pieces_are_put_together_and_a_long_body_is_cut_just_beyond_the_limit() -> None:
    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10):
            await response.write(b"abcde")
            await asyncio.sleep(0.005)
        return response

    app = web.Application()
    app.router.add_get("/", in_pieces)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url) as response:
                assert await read_bounded(response, 50) == b"abcde" * 10
            async with session.get(url) as response:
                assert await read_bounded(response, 12) == b"abcdeabcdeabc"
    finally:
        await runner.cleanup()
