"""Asking a component whether it is healthy."""

from __future__ import annotations

import asyncio
import socket
import ssl
import urllib.error
import urllib.request

from devcluster.components import HttpProbe, Probe

_TIMEOUT_SECONDS = 2.0


def _http(probe: HttpProbe) -> bool:
    context: ssl.SSLContext | None = None
    if probe.url.startswith("https:"):
        context = ssl.create_default_context(cafile=None if probe.ca_file is None else str(probe.ca_file))
        if probe.ca_file is None:
            # Scheduler and controller manager make a certificate of their own at each start, on loopback only.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(probe.url, timeout=_TIMEOUT_SECONDS) as answer:
        return bool(answer.status == 200)


def _socket(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_SECONDS)
        connection.connect(path)
    return True


def _ask(probe: Probe) -> bool:
    try:
        return _http(probe) if isinstance(probe, HttpProbe) else _socket(probe.path)
    except (OSError, urllib.error.URLError):
        return False


async def healthy(probe: Probe) -> bool:
    """Whether the component behind `probe` answers well now; never raises for one that does not."""
    return await asyncio.to_thread(_ask, probe)
