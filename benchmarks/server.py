"""What the engine's server costs: `python -m benchmarks.server [--streams 32] [--seconds 3] --json`.

The server runs as a process of its own with an engine that computes nothing: its tokens are made at a pace, or at once. `wire_ms` is what
stands between a token's being made and its reaching a client over loopback, both read off the one monotonic clock. `requests_s` is a closed
loop of unstreamed requests of one token. `memory_kb_per_stream` is what each open stream adds to the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.changes import Change
from npufleet_pod.engine.loaded import LoadedEngine
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.request import SampledToken
from npufleet_pod.engine.scheduler import SchedulerLimits, SchedulerPolicy
from npufleet_pod.engine.step import Step
from npufleet_pod.server.chat_template import load_chat_template
from npufleet_pod.server.process import Sockets, bind, serve

ROOT = Path(__file__).resolve().parents[1]
LETTER_TOKEN = 70
"""A token of the tiny model whose text is a letter: each makes an event of its own."""
START_SECONDS = 600
STREAM_TOKENS = 64
PACE_SECONDS = 0.02
LOOPS = 16


class EmptyRunner:
    """Makes tokens at a pace instead of computing them, and notes when."""

    def __init__(self, pace_seconds: float, made: dict[str, list[float]]) -> None:
        self._pace = pace_seconds
        self._made = made

    def prepare(self, step: Step, changes: Sequence[Change]) -> Step:
        """Nothing."""
        return step

    def compute(self, step: Step) -> dict[str, SampledToken]:
        """A token for each request that gets one."""
        if self._pace and step.samples:
            time.sleep(self._pace)
        now = time.monotonic()
        for name in step.samples:
            self._made.setdefault(name, []).append(now)
        return {name: SampledToken(LETTER_TOKEN) for name in step.samples}


def run_server(model: Path, port: int, pace_seconds: float, times: Path) -> None:
    """Serve with an engine that computes nothing until SIGTERM; then write when each request's tokens were made."""
    settings = EngineSettings.model_validate(
        {"model_path": str(model), "served_name": "tiny", "device": "CPU", "shutdown": {"accept_seconds": 0}}
    )
    files, made = inspect_model(settings), dict[str, list[float]]()
    limits = SchedulerLimits(
        max_num_sequences=4096,
        max_num_batched_tokens=65536,
        max_queued_requests=4096,
        max_model_length=2048,
        kv_blocks=65536,
        kv_block_tokens=32,
    )

    def load(keep_going: Callable[[], bool]) -> LoadedEngine:
        runner, decode = EmptyRunner(pace_seconds, made), files.tokenizer.decode
        return LoadedEngine(runner, limits, frozenset(), decode, policy=SchedulerPolicy(steps_in_flight=2), prefix_cache=False)

    logging.getLogger().setLevel(logging.ERROR)
    with bind("127.0.0.1", port) as openai, bind("127.0.0.1", 0) as admin:
        asyncio.run(serve(settings, files, load_chat_template(files.path), Sockets(openai, admin), time.monotonic(), load=load))
    times.write_text(json.dumps(made))


class Connection:
    """One HTTP connection, as thin as can be: what the client does must not be what is measured."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def ask(self, body: dict[str, Any]) -> None:
        """Send a completion request."""
        content = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, **body}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        self.writer.write(head + content)
        status = await self.reader.readline()
        if b" 200 " not in status:
            raise click.ClickException(f"the server answered {status.decode().strip()}")

    async def whole(self, body: dict[str, Any]) -> None:
        """One unstreamed request."""
        await self.ask(body)
        length = 0
        while (line := await self.reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        await self.reader.readexactly(length)

    async def stream(self, body: dict[str, Any]) -> tuple[str, list[float]]:
        """(id of the answer, when each of its tokens arrived)."""
        await self.ask({**body, "stream": True})
        arrived, answer = [], ""
        while (line := await self.reader.readline()).strip() != b"data: [DONE]":
            if b'"text":"' in line and b'"text":""' not in line:
                arrived.append(time.monotonic())
                answer = answer or json.loads(line.removeprefix(b"data: "))["id"]
            if not line:
                raise click.ClickException("the server ended a stream early")
        return answer, arrived


@contextlib.asynccontextmanager
async def started(command: Sequence[str], port: int) -> AsyncIterator[int]:
    """The process id of a server that has become ready; it has ended when the context is left."""
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = asyncio.create_task(process.stderr.read() if process.stderr is not None else asyncio.sleep(0, b""))
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                if process.returncode is not None:
                    raise click.ClickException(f"{command[0]} ended: {(await errors).decode(errors='replace')[-500:]}")
                with contextlib.suppress(OSError, click.ClickException):
                    async with Connection(port) as connection:
                        await connection.whole({"prompt": [5], "max_tokens": 1})
                        break
                await asyncio.sleep(0.2)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await errors


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def resident_kb(pid: int) -> float:
    """Memory of a process and its children, shared pages counted once."""
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == pid]
    own = [line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
    return float(own[0].split()[1]) + sum(resident_kb(child) for child in children)


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


async def requests_per_second(port: int, seconds: float) -> float:
    """Answers of one token in a closed loop."""
    done, until = 0, time.monotonic() + seconds

    async def loop() -> None:
        nonlocal done
        async with Connection(port) as connection:
            while time.monotonic() < until:
                await connection.whole({"prompt": [5], "max_tokens": 1})
                done += 1

    begun = time.monotonic()
    await asyncio.gather(*(loop() for _ in range(LOOPS)))
    return done / (time.monotonic() - begun)


async def memory_per_stream(port: int, pid: int, streams: int) -> float:
    """KiB that each of `streams` open streams adds; connections and code that the first of them need are there before."""
    async with Connection(port) as first:
        await first.stream({"prompt": [5], "max_tokens": 8})
    before = resident_kb(pid)
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(port)) for _ in range(streams)]
        await asyncio.gather(*(one.ask({"prompt": [5], "max_tokens": 1500, "stream": True}) for one in connections))
        return (resident_kb(pid) - before) / streams


def own_command(model: Path, port: int, pace_seconds: float, times: Path) -> list[str]:
    """This module as a server."""
    return [sys.executable, "-m", "benchmarks.server", "--serve", str(model), str(port), str(pace_seconds), str(times)]


async def measure(model: Path, folder: Path, streams: int, seconds: float) -> dict[str, Any]:
    """The empty engine's figures."""
    port, times = free_port(), folder / "times.json"
    async with started(own_command(model, port, PACE_SECONDS, times), port), contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(port)) for _ in range(streams)]
        arrived = await asyncio.gather(*(one.stream({"prompt": [5], "max_tokens": STREAM_TOKENS}) for one in connections))
    made: dict[str, list[float]] = json.loads(times.read_text())
    delays = [1000 * (there - then) for answer, tokens in arrived for there, then in zip(tokens, made[f"{answer}-0"], strict=True)]
    port = free_port()
    async with started(own_command(model, port, 0, times), port) as pid:
        rate = await requests_per_second(port, seconds)
    port = free_port()
    async with started(own_command(model, port, PACE_SECONDS, times), port) as pid:
        memory = await memory_per_stream(port, pid, 8 * streams)
    return {
        "wire_ms": {name: round(float(np.percentile(delays, share)), 3) for name, share in (("p50", 50), ("p99", 99))},
        "tokens": len(delays),
        "requests_s": round(rate, 1),
        "memory_kb_per_stream": round(memory, 1),
    }


@click.command(help=__doc__)
@click.option(
    "--streams", default=32, show_default=True, type=click.IntRange(1, 512), help="Streams at once; eight times as many for memory."
)
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(0.1, 600), help="Length of the closed loop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--serve", "server", nargs=4, type=str, hidden=True, help="The server's side.")
def main(streams: int, seconds: float, as_json: bool, server: tuple[str, str, str, str] | None) -> None:
    """Command line."""
    if server is not None:
        run_server(Path(server[0]), int(server[1]), float(server[2]), Path(server[3]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = [sys.executable, str(ROOT / "tests" / "support" / "tiny_model.py"), str(folder / "tiny")]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = {"streams": streams, "empty_engine": asyncio.run(measure(folder / "tiny", folder, streams, seconds))}
    if as_json:
        click.echo(json.dumps(result))
        return
    for part, figures in result.items():
        click.echo(f"{part}: {figures}")


if __name__ == "__main__":
    main()
