from __future__ import annotations

import logging

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from npufleet_pod.server.middleware import RequestContextMiddleware


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("a defect")


async def test_a_defect_is_an_error_object_with_the_request_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    app = RequestContextMiddleware(broken, replica="pod-0", model_header="m")
    transport = httpx.ASGITransport(app=app)
    with caplog.at_level(logging.INFO, logger="npufleet_pod"):
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            answer = await client.get("/v1/models", headers={"x-request-id": "abc"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "abc"
    failure, request = (record for record in caplog.records if record.name.startswith("npufleet_pod"))
    assert (failure.getMessage(), failure.__dict__["request_id"]) == ("request failed", "abc")
    assert failure.exc_info is not None
    assert request.__dict__["status"] == 500


async def test_probes_and_scrapes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fine(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(app=RequestContextMiddleware(fine, replica="p", model_header="m"))
    with caplog.at_level(logging.INFO, logger="npufleet_pod"):
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            for path in ("/health", "/ready", "/metrics", "/v1/models"):
                await client.get(path)
    assert [record.__dict__["path"] for record in caplog.records if record.name.startswith("npufleet_pod")] == ["/v1/models"]
