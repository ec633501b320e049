"""Clients that misbehave before they have asked for anything, and TLS with a certificate that is renewed."""

from __future__ import annotations

import asyncio
import io
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from gateway.support import eventually, free_port, loopback
from npufleet_gateway.errors import ConfigurationError
from npufleet_gateway.gateway import Gateway
from npufleet_gateway.listener import TlsServer
from npufleet_gateway.server import GatewayServer
from npufleet_gateway.settings import GatewaySettings
from support.certificate import write_certificate


async def said(port: int, *parts: bytes) -> bytes:
    """What the gateway answers to bytes that come one after the other, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ((), b""),
        ((b"\r\n",), b"HTTP/1.1 408"),
        ((b"POST /v1/completions HTTP/1.1\r\n", b"host: x\r\n"), b"HTTP/1.1 408"),
        ((b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /he"), b"HTTP/1.1 200"),
    ],
)
async def test_a_client_that_sends_no_whole_head_is_cut_off(parts: tuple[bytes, ...], answer: bytes) -> None:
    async with loopback(head_timeout_seconds=0.1) as pool:
        assert (await said(pool.port, *parts)).startswith(answer)


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        (CHAT + b"content-length: 16\r\n\r\n",),
        (CHAT + b"content-length: 16\r\n\r\n", b'{"mod'),
        (CHAT + b"transfer-encoding: chunked\r\n\r\n",),
        (CHAT + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 100_000,),
    ],
)
async def test_a_body_that_never_comes_is_answered_408(parts: tuple[bytes, ...]) -> None:
    async with loopback(body_timeout_seconds=0.1) as pool:
        engine = await pool.engine()
        assert (await said(pool.port, *parts)).startswith(b"HTTP/1.1 408")
        assert engine.seen == []


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -2\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"content-length : 2\r\n",
        b"".join(b"a%d: b\r\n" % number for number in range(20_000)),
    ],
)
async def test_a_head_that_is_ambiguous_wrong_or_a_bomb_reaches_no_replica(head: bytes) -> None:
    async with loopback() as pool:
        engine = await pool.engine()
        answer = await said(pool.port, CHAT + head + b"\r\n{}")
        assert answer == b"reset" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        assert engine.seen == []
        async with pool.post() as response:
            assert response.status == 200


async def test_a_wish_to_upgrade_is_answered_as_a_request_and_leaves_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with loopback() as pool:
        answer = await said(pool.port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert "pip install" not in caplog.text


async def test_ten_megabytes_pass_unchanged() -> None:
    async with loopback() as pool:
        engine = await pool.engine()
        body = b'{"model":"chat","prompt":"' + b"x" * 10_000_000 + b'"}'
        async with pool.session.post(f"{pool.url}/v1/completions", data=io.BytesIO(body)) as response:
            assert response.status == 200
        assert engine.bodies == [body]


async def test_a_head_without_end_is_refused() -> None:
    async with loopback() as pool:
        answer = await said(pool.port, b"GET /health HTTP/1.1\r\n", *[b"x: " + b"y" * 20_000 + b"\r\n"] * 5)
        assert answer == b"reset" or answer.startswith(b"HTTP/1.1 431")


async def test_a_body_that_takes_its_time_is_not_the_heads_business() -> None:
    async with loopback(head_timeout_seconds=0.1) as pool:
        await pool.engine()
        body = b'{"model":"chat"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        parts = [head, *(bytes([byte]) for byte in body)]
        assert (await said(pool.port, *parts)).startswith(b"HTTP/1.1 200")


async def name_at(port: int) -> str:
    """The subject that a new handshake shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).subject.rfc4514_string()


async def test_tls_is_served_beside_and_a_renewed_certificate_reaches_new_connections_only(tmp_path: Path) -> None:
    write_certificate(tmp_path, "first")
    port = free_port()
    async with loopback(tls_dir=tmp_path, tls_port=port) as pool:
        tls = pool.server._tls
        assert tls is not None
        await eventually(lambda: tls.started)
        await pool.engine()
        async with pool.session.post(f"https://127.0.0.1:{port}/v1/chat/completions", json={"model": "chat"}, ssl=False) as response:
            assert response.status == 200
        assert await name_at(port) == "CN=first"
        (tmp_path / "tls.crt").write_text("no certificate")
        await asyncio.to_thread(tls.renew)
        assert await name_at(port) == "CN=first"
        write_certificate(tmp_path, "second")
        await asyncio.to_thread(tls.renew)
        assert await name_at(port) == "CN=second"
        async with pool.session.get(f"https://127.0.0.1:{port}/health", ssl=False) as response:
            assert response.status == 200


def test_a_certificate_that_cannot_be_loaded_is_a_configuration_error(tmp_path: Path) -> None:
    gateway = Gateway(GatewaySettings("prod", "g"), kube=None)
    with pytest.raises(ConfigurationError, match=r"tls\.crt"):
        TlsServer(gateway, "127.0.0.1", 0, tmp_path)


async def test_with_tls_alone_the_plain_port_has_the_clusters_own_pages_and_nothing_for_clients(tmp_path: Path) -> None:
    write_certificate(tmp_path, "only")
    port = free_port()
    async with loopback(tls_dir=tmp_path, tls_port=port, tls_only=True) as pool:
        tls = pool.server._tls
        assert tls is not None
        await eventually(lambda: tls.started)
        engine = await pool.engine()
        for path in ("/health", "/ready", "/metrics", "/report"):
            async with pool.session.get(pool.url + path) as response:
                assert response.status == 200, path
        for path in ("/v1/chat/completions", "/tokenize", "/v1/models", "/nowhere"):
            async with pool.post(path=path) as response:
                assert response.status == 403
                error = (await response.json())["error"]
            assert (error["code"], str(port) in error["message"]) == ("tls_required", True)
        assert engine.seen == []
        async with pool.session.post(f"https://127.0.0.1:{port}/v1/chat/completions", json={"model": "chat"}, ssl=False) as response:
            assert response.status == 200
        async with pool.session.get(f"https://127.0.0.1:{port}/v1/models", ssl=False) as response:
            assert response.status == 200


def test_tls_alone_without_a_certificate_is_a_configuration_error() -> None:
    gateway = Gateway(GatewaySettings("prod", "g", tls_only=True), kube=None)
    with pytest.raises(ConfigurationError, match="--tls-dir"):
        GatewayServer(gateway, "127.0.0.1", 0)
