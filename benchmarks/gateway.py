"""What the gateway adds and carries on one core: `python -m benchmarks.gateway [--peers litellm,sglang-router,vllm-router] --json`.

The gateway runs as its own process on one core. Clients and an upstream that costs nothing run on the other, in Go
(`benchmarks/gateway_load`, built on first use), so that they are not what is measured. Peers get the same load in the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "benchmarks" / "gateway_load"
PEERS = ("litellm", "sglang-router", "vllm-router")
MODEL = "chat"
REPLICAS = 4
STREAMS_PER_SECOND = 100
CHUNKS = 32
CHUNK_MICROSECONDS = 10_000
"""100 streams a second of 32 chunks at this pace are 32 streams at once and 3,200 chunks a second."""
PACED_CLIENTS = 500
PACES_MICROSECONDS = (50_000, 40_000, 33_333, 25_000, 20_000, 16_667, 12_500, 10_000)
"""From 20 tokens a second for each client: 10,000 chunks a second, and on upwards until the gateway falls behind."""
KEPT_UP = 0.98
LATE_MS = 50.0
"""A gateway keeps up if it passes on this share of what is offered, 99 of 100 chunks within a token's time at 20 tokens a second."""
ROUNDS = 3
"""Latencies are those of the quietest round: what else the machine does only ever adds to them."""
HELD_STREAMS = 500


class BenchmarkError(Exception):
    """The benchmark cannot run here; the message says what is missing."""


@dataclass
class Cores:
    """Where things run. With one core everything shares it, and the figures are not what they say."""

    gateway: int
    load: int

    @classmethod
    def choose(cls) -> Cores:
        """The first two cores that this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[-1])


@dataclass
class Target:
    """Something that answers OpenAI requests. `pid` is the process whose memory counts, with its children."""

    url: str
    pid: int
    log: Path
    model: str = MODEL
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)


def build_load() -> Path:
    """The load generator, built where it is missing or its source has changed. Raises BenchmarkError without Go."""
    source = b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "npufleet"
    binary = cache / f"gateway_load-{hashlib.sha256(source).hexdigest()[:12]}"
    if not binary.exists():
        go = shutil.which("go")
        if go is None:
            raise BenchmarkError("Go is not on PATH: install Go 1.26 or later, the load generator is built with it")
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run([go, "build", "-o", str(binary), "."], cwd=SOURCE, check=True)
    return binary


class Load:
    """Runs the load generator's modes on the load's core."""

    def __init__(self, binary: Path, cores: Cores) -> None:
        self._binary = binary
        self._cores = cores

    async def run(self, target: Target | str, mode: str, **flags: object) -> dict[str, Any]:
        """One measurement."""
        process = await self.start(mode, target, **flags)
        out, _ = await process.communicate()
        return _checked(mode, out, process.returncode)

    async def start(self, mode: str, target: Target | str | None = None, **flags: object) -> asyncio.subprocess.Process:
        """A mode in the background."""
        arguments = [f"-{name.replace('_', '-')}={value}" for name, value in flags.items()]
        if target is not None:
            arguments.append(f"-url={target if isinstance(target, str) else target.url}")
            arguments.append(f"-model={MODEL if isinstance(target, str) else target.model}")
        return await asyncio.create_subprocess_exec(
            *("taskset", "-c", str(self._cores.load), str(self._binary), mode, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )


def _checked(mode: str, out: bytes, code: int | None) -> dict[str, Any]:
    if code != 0:
        raise BenchmarkError(f"the load generator's mode {mode} ended with {code}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


async def measure(load: Load, target: Target, direct: dict[str, Any], seconds: float) -> dict[str, Any]:
    """All figures of one target. `direct` is the open loop without anything in between."""
    await load.run(target, "requests", seconds=1)
    memory = await _memory(load, target)
    await load.run(target, "streams", seconds=1)
    opened = await _open_loop(load, target, seconds)
    requests = await _with_cpu(load, target, "requests", seconds=seconds)
    streams = await load.run(target, "streams", seconds=seconds)
    paced = await _paced(load, target, seconds)
    return {
        "added_ms": _added(opened, direct, "delay_ms"),
        "added_ttft_ms": _added(opened, direct, "ttft_ms"),
        "requests_s": round(requests["requests_s"]),
        "chunks_s": round(paced["chunks_s"]),
        "chunks_offered_s": round(paced["offered_chunks_s"]),
        "chunk_delay_ms": {name: round(value, 3) for name, value in paced["delay_ms"].items()},
        "unpaced_streams_s": round(streams["requests_s"]),
        "unpaced_chunks_s": round(streams["chunks_s"]),
        "cpu_us_per_request": round(requests["cpu_s"] / max(1, requests["done"]) * 1e6, 1),
        "cpu_us_per_chunk": round(paced["cpu_s"] / max(1, paced["chunks_in_all"]) * 1e6, 1),
        "memory_kb_per_stream": memory,
        "failed": opened["failed"] + requests["failed"] + streams["failed"] + paced["failed"],
        "error": opened["error"] or requests["error"] or streams["error"] or paced["error"],
    }


def _added(through: dict[str, Any], direct: dict[str, Any], what: str) -> dict[str, float | None]:
    if not through[what] or not direct[what]:
        return {"p50": None, "p99": None}
    return {share: round(through[what][share] - direct[what][share], 3) for share in ("p50", "p99")}


async def _open_loop(load: Load, target: Target | str, seconds: float) -> dict[str, Any]:
    """The quietest of some rounds at the fixed rate."""
    options = {"rate": STREAMS_PER_SECOND, "chunks": CHUNKS, "interval_us": CHUNK_MICROSECONDS, "seconds": seconds}
    rounds = [await load.run(target, "open", **options) for _ in range(ROUNDS)]
    return min(rounds, key=lambda found: (found["failed"], found["delay_ms"].get("p99", float("inf"))))


async def _with_cpu(load: Load, target: Target, mode: str, **flags: object) -> dict[str, Any]:
    """A measurement, and the processor time that the target took for all of it."""
    before = _cpu_seconds(target.pid)
    found = await load.run(target, mode, **flags)
    found["cpu_s"] = _cpu_seconds(target.pid) - before
    return found


async def _paced(load: Load, target: Target, seconds: float) -> dict[str, Any]:
    """The highest paced rate that was kept up with; where even the lowest was not, what came through of it."""
    kept: dict[str, Any] | None = None
    for pace in PACES_MICROSECONDS:
        found = await _with_cpu(load, target, "paced", clients=PACED_CLIENTS, interval_us=pace, seconds=seconds)
        late = found["delay_ms"].get("p99", LATE_MS) >= LATE_MS
        if found["failed"] or late or found["chunks_s"] < KEPT_UP * found["offered_chunks_s"]:
            return kept or found
        kept = found
    assert kept is not None
    return kept


async def _memory(load: Load, target: Target) -> float | None:
    """Growth of the resident memory for each stream that is held open."""
    before = _resident_kb(target.pid)
    process = await load.start("hold", target, clients=HELD_STREAMS)
    assert process.stdout is not None
    line = await process.stdout.readline()
    after = _resident_kb(target.pid)
    out, _ = await process.communicate(b"")
    if line.strip() != b"holding":
        return None
    _checked("hold", out, process.returncode)
    return round((after - before) / HELD_STREAMS, 1)


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process and its descendants so far: utime and stime of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text(encoding="utf-8").split()]
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_cpu_seconds(int(child)) for child in children)


def _resident_kb(pid: int) -> int:
    """Resident memory of a process and its descendants."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            total += int(line.split()[1])
    for task in Path(f"/proc/{pid}/task").iterdir():
        children = (task / "children").read_text(encoding="utf-8").split()
        total += sum(_resident_kb(int(child)) for child in children)
    return total


@contextlib.asynccontextmanager
async def _process(log: Path, cores: Cores, *command: str, env: dict[str, str] | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process group on the gateway's core, ended with the block."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *("taskset", "-c", str(cores.gateway), *command),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _until_answered(url: str, process: asyncio.subprocess.Process, log: Path, seconds: float) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        try:
            async with asyncio.timeout(seconds):
                while process.returncode is None:
                    try:
                        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                            if response.status == 200:
                                return
                    except (aiohttp.ClientError, TimeoutError, OSError):
                        pass
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pass
    tail = log.read_text(  # noqa: ASYNC240  # nothing else runs any more
        encoding="utf-8", errors="replace"
    )[-2000:]
    raise BenchmarkError(f"nothing answers at {url}; the end of its log:\n{tail}")


@contextlib.asynccontextmanager
async def npufleet(folder: Path, cores: Cores, upstream_port: int) -> AsyncIterator[Target]:
    """The gateway as it runs in a pod, with the view of an API server that knows one model and its replicas."""
    sys.path.insert(0, str(ROOT / "tests"))
    from gateway.api_server import MODELS, PODS, list_watch_server
    from gateway.support import free_port, model_object, pod_object

    port = free_port()
    log = folder / "npufleet.log"
    async with list_watch_server() as server:
        await server.put(MODELS, model_object(MODEL))
        for number in range(REPLICAS):
            await server.put(PODS, pod_object(f"r{number}", MODEL, ip=f"127.0.0.{number + 2}"))
        command = (sys.executable, "-c", "from npufleet_gateway.main import main; main()", "serve")
        options = {"pool": "prod", "host": "127.0.0.1", "port": port, "engine-port": upstream_port, "monitor-port": free_port()}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        environment = {"KUBECONFIG": str(server.kubeconfig(folder))}
        async with _process(log, cores, *command, *arguments, "--leave-seconds=0", "--grace-seconds=0", env=environment) as process:
            url = f"http://127.0.0.1:{port}"
            await _until_answered(url, process, log, 30)
            yield Target(url, process.pid, log)


@contextlib.asynccontextmanager
async def litellm(folder: Path, cores: Cores, upstream_port: int, program: tuple[str, ...]) -> AsyncIterator[Target]:
    """LiteLLM's proxy with one worker."""
    from gateway.support import free_port

    parameters = {"model": f"openai/{MODEL}", "api_key": "sk-benchmark", "api_base": f"http://127.0.0.2:{upstream_port}/v1"}
    config = {"model_list": [{"model_name": MODEL, "litellm_params": parameters}], "litellm_settings": {"telemetry": False}}
    path = folder / "litellm.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    log = folder / "litellm.log"
    command = (*program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
    async with _process(log, cores, *command, env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}) as process:
        url = f"http://127.0.0.1:{port}"
        await _until_answered(url, process, log, 120)
        yield Target(url, process.pid, log)


@contextlib.asynccontextmanager
async def router(folder: Path, cores: Cores, upstream_port: int, program: tuple[str, ...]) -> AsyncIterator[Target]:
    """SGLang's or vLLM's router: both take the same options."""
    from gateway.support import free_port

    port = free_port()
    log = folder / "router.log"
    workers = [f"http://127.0.0.{number + 2}:{upstream_port}" for number in range(REPLICAS)]
    command = [*program, "--worker-urls", *workers, "--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
    async with _process(log, cores, *command, "--prometheus-port", str(free_port())) as process:
        url = f"http://127.0.0.1:{port}"
        await _until_answered(url, process, log, 60)
        yield Target(url, process.pid, log)


def find_peer(name: str, paths: tuple[Path, ...]) -> tuple[str, ...] | None:
    """The command that starts a peer: its program, or Python with its module, in the folders given or on PATH."""
    where = os.pathsep.join([*map(str, paths), os.environ.get("PATH", "")])
    program = shutil.which(name, path=where)
    if program is not None:
        return (program,)
    if name == "sglang-router":
        for folder in where.split(os.pathsep):
            python = Path(folder) / "python"
            if python.exists() and any(Path(folder).parent.glob("lib/python3*/site-packages/sglang_router")):
                return (str(python), "-m", "sglang_router.launch_router")
    return None


async def run(peers: tuple[str, ...], paths: tuple[Path, ...], seconds: float) -> dict[str, Any]:
    """Everything that `--json` prints."""
    cores = Cores.choose()
    load = Load(build_load(), cores)
    upstream = await load.start("upstream", listen="0.0.0.0:0")
    try:
        assert upstream.stdout is not None
        port = int((await upstream.stdout.readline()).rpartition(b":")[2])
        at = f"http://127.0.0.2:{port}"
        direct = await _open_loop(load, at, seconds)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            async with npufleet(folder, cores, port) as target:
                found = await measure(load, target, direct, seconds)
            found["cores"] = {"gateway": cores.gateway, "load": cores.load}
            found["peers"] = {}
            for peer in peers:
                program = find_peer(peer, paths)
                if program is None:
                    found["peers"][peer] = {"installed": False}
                    continue
                start = litellm if peer == "litellm" else router
                try:
                    async with start(folder, cores, port, program) as target:
                        found["peers"][peer] = {"installed": True, **await measure(load, target, direct, seconds)}
                except BenchmarkError as error:
                    found["peers"][peer] = {"installed": True, "error": str(error)}
    finally:
        upstream.kill()
        await upstream.wait()
    return found


def _table(found: dict[str, Any]) -> str:
    rows = [f"{'':16}{'requests/s':>12}{'chunks/s':>12}{'added p50':>12}{'added p99':>12}{'KB/stream':>12}"]
    for name, one in {"npufleet": found, **found["peers"]}.items():
        if "requests_s" not in one:
            rows.append(f"{name:16}{one.get('error', 'not installed')}")
            continue
        added = one["added_ms"]
        rows.append(
            f"{name:16}{one['requests_s']:>12}{one['chunks_s']:>12}{added['p50']!s:>12}{added['p99']!s:>12}{one['memory_kb_per_stream']!s:>12}"
        )
    return "\n".join(rows)


def _peers(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(name for name in value.split(",") if name)
    for name in names:
        if name not in PEERS:
            raise click.BadParameter(f"{name}: choose among {', '.join(PEERS)}")
    return names


@click.command()
@click.option("--peers", default="", callback=_peers, help=f"Peers to compare with: {','.join(PEERS)}. Those not installed are skipped.")
@click.option("--peer-path", "paths", multiple=True, type=click.Path(path_type=Path), help="Folder with a peer's program; repeatable.")
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(0.5, 600), help="Length of each measurement.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(peers: tuple[str, ...], paths: tuple[Path, ...], seconds: float, as_json: bool) -> None:
    """Measure the gateway on one core, and peers beside it."""
    try:
        found = asyncio.run(run(peers, paths, seconds))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    print(json.dumps(found, indent=2) if as_json else _table(found))


if __name__ == "__main__":
    main()
