"""What clients get through the gateway, from real servers on loopback."""

from __future__ import annotations

from gateway.support import DONE, chunk, loopback


async def test_a_streamed_chat_passes_through_unchanged() -> None:
    async with loopback() as pool:
        await pool.engine()
        async with pool.stream() as response:
            body = await response.read()
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert body.endswith(chunk("hel") + chunk("lo") + DONE)
        await pool.settled()
        traffic = pool.traffic()
    assert traffic.outcomes.ok == 1
    assert traffic.judged == traffic.attained == 1
    assert traffic.ttft_p50_ms is not None
    assert traffic.tpot_p50_ms is not None


async def test_an_unstreamed_answer_passes_through_with_its_length() -> None:
    async with loopback() as pool:
        await pool.engine()
        async with pool.post() as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == "hello"
            assert response.headers["content-length"]
        await pool.settled()
        assert pool.traffic().outcomes.ok == 1
