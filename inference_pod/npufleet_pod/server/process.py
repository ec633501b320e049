"""The process: binds, loads, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from npufleet_api.contract import POD_NAME_ENV, EngineState
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.encoding import EncoderFiles, load_encoder_engine
from npufleet_pod.engine.engine import Engine
from npufleet_pod.engine.loaded import LoadedEngine
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.errors import DrainDeadlineError, HandedBackError, StartError
from npufleet_pod.server.admin import create_admin_app
from npufleet_pod.server.api_keys import ApiKeys
from npufleet_pod.server.chat_template import ChatTemplate
from npufleet_pod.server.grammars import GrammarCompiler
from npufleet_pod.server.lifecycle import Lifecycle
from npufleet_pod.server.metrics import EngineMetrics
from npufleet_pod.server.openai import create_openai_app
from npufleet_pod.server.serving import Serving
from npufleet_pod.server.tracing import open_tracing

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than HTTP clients keep idle connections (aiohttp 15 s, nginx 60 s), so that it is they who close."""
CLOSE_SECONDS = 5
"""Time that open connections get to end once the replica is idle."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The listening sockets."""

    openai: socket.socket
    admin: socket.socket


def bind(host: str | None, port: int) -> socket.socket:
    """Listen on `port` of `host`; None: of every address, IPv6 where the kernel has it. Raises StartError."""
    try:
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=2048)
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
        return socket.create_server(("", port), backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(f"port {port} of {host or 'every address'}: {reason}: stop what holds it, or choose another port") from error


async def serve(
    settings: EngineSettings,
    files: ModelFiles | EncoderFiles,
    template: ChatTemplate,
    sockets: Sockets,
    started: float,
    api_keys: ApiKeys | None = None,
    load: Callable[[Callable[[], bool]], LoadedEngine] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT has been obeyed. started: time.monotonic() of the process's begin. Raises what ends the engine.

    load: makes the engine, as `Engine` takes it; None: as `files` say.
    """
    metrics = EngineMetrics(settings.served_name)

    def load_files(keep_going: Callable[[], bool]) -> LoadedEngine:
        if isinstance(files, EncoderFiles):
            return load_encoder_engine(settings, files, keep_going)
        return load_engine(settings, files, keep_going)

    engine = Engine(load or load_files, metrics, settings.seed)

    def end_all() -> None:
        engine.abort_all(DrainDeadlineError("the replica's drain ran out of time: send the request again"))

    def hand_back() -> None:
        engine.hand_back(HandedBackError("this replica is draining and has not begun the request: send it to another one"))

    lifecycle = Lifecycle(engine.snapshot, hand_back, end_all)
    metrics.watch(engine.snapshot, lambda: lifecycle.state, engine.stall_ratio)
    replica = os.environ.get(POD_NAME_ENV) or socket.gethostname()
    grammars = GrammarCompiler(files.tokenizer, files.config.vocab_size, files.config.eos_token_ids)
    tracing = open_tracing(settings.served_name, replica)
    created = int(time.time())
    serving = Serving(settings, files, template, engine, lifecycle, metrics, grammars, replica, created, None, api_keys, tracing)
    stop = asyncio.Event()
    with _signals(stop):
        engine.start()
        following = [] if api_keys is None else [asyncio.create_task(api_keys.follow())]
        try:
            async with _listen(create_openai_app(serving), sockets.openai), _listen(create_admin_app(serving), sockets.admin):
                logger.info("listening", extra={"port": sockets.openai.getsockname()[1], "admin_port": sockets.admin.getsockname()[1]})
                await _live(serving, stop, started)
        finally:
            lifecycle.close()
            grammars.close()
            await _cancel(*following)
            await engine.stop()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _live(serving: Serving, stop: asyncio.Event, started: float) -> None:
    """Load, serve, and once told to end, drain. Raises what ends the engine before that."""
    told = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(serving.engine.wait_ended())
    loading = asyncio.create_task(_load(serving, started))
    try:
        await asyncio.wait({told, ended, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            await asyncio.wait({told, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            await ended
        draining = asyncio.create_task(_shut_down(serving))
        try:
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await ended
            await draining
        finally:
            await _cancel(draining)
    finally:
        await _cancel(told, ended, loading)


async def _load(serving: Serving, started: float) -> None:
    if serving.encodes:
        loaded = await serving.engine.wait_ready()
    else:
        _, loaded = await asyncio.gather(serving.grammars.warm(), serving.engine.wait_ready())
    serving.loaded_limits = loaded.limits
    seconds = time.monotonic() - started
    host = loaded.tiers.host
    host_blocks = 0 if host is None else host.slots * loaded.limits.kv_page_blocks
    serving.metrics.loaded(loaded.limits, seconds, prefix_cache=loaded.prefix_cache, host_blocks=host_blocks)
    serving.lifecycle.loaded()
    logger.info("ready", extra={"load_seconds": round(seconds, 3), "model": serving.settings.served_name})


async def _shut_down(serving: Serving) -> None:
    """After SIGTERM: keep accepting while endpoints change, then drain. A drain that has begun goes on; an idle replica ends at once."""
    lifecycle, shutdown = serving.lifecycle, serving.settings.shutdown
    lifecycle.terminate()
    logger.info("terminating", extra={"state": lifecycle.state.value})
    if lifecycle.state is EngineState.READY:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(shutdown.accept_seconds):
                await lifecycle.wait_until(EngineState.DRAINING, EngineState.IDLE)
    lifecycle.drain(shutdown.drain_seconds)
    try:
        async with asyncio.timeout(shutdown.drain_seconds + CLOSE_SECONDS):
            await lifecycle.wait_until(EngineState.IDLE)
        logger.info("drained")
    except TimeoutError:
        # At the deadline every generation is ended, but a client that does not read still holds its connection.
        logger.warning("clients do not take their answers", extra={"running": lifecycle.admin_state().running})


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at SIGTERM and SIGINT; a repeated one changes nothing."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: when to end is the lifecycle's to say."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's handlers alone."""
        yield


@contextlib.asynccontextmanager
async def _listen(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on `listener` while the context is open; then let open connections end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http="httptools",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
