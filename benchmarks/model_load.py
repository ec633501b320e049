"""How fast models are fetched: GB/s from a hub and from a bucket on loopback, and from the cache, beside what the disk itself takes.

    python -m benchmarks.model_load --json

The servers run in a process of their own and send a file, so that what is measured is the fetch: ranges, writing, reading back for the
checksum, publishing. `disk` is the same bytes written from memory and flushed, `sha256` the reading back alone: a fetch cannot be faster
than both together on one core. `phases_seconds` splits a fetch by what the fetch container tells of itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web

from npufleet_api.fetching import FetchSettings
from npufleet_fetch.checksums import sums_of
from npufleet_fetch.fetch import Places, fetch_model
from npufleet_fetch.meter import Meter

MIB = 1 << 20
COMMIT = "a" * 40
CONFIG = b"{}"
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class PhaseClock(Meter):
    """A meter that remembers when each phase began."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[str, float]] = [(self.phase.value, time.perf_counter())]

    def enter(self, phase: Any) -> None:
        """Begin a phase."""
        super().enter(phase)
        self.begun.append((phase.value, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        ends = [at for _, at in self.begun[1:]]
        return {name: round(end - at, 4) for (name, at), end in zip(self.begun, ends, strict=False)}


def serve(folder: Path, sha256: str, told: Connection) -> None:
    """A hub and a bucket over the files of `folder`, until killed."""

    async def info(_: web.Request) -> web.Response:
        size = (folder / "model.safetensors").stat().st_size
        lfs = {"sha256": sha256, "size": size, "pointerSize": 130}
        blob = hashlib.sha1(b"blob 2\0{}", usedforsecurity=False).hexdigest()
        siblings = [{"rfilename": "model.safetensors", "size": size, "lfs": lfs}, {"rfilename": "config.json", "size": 2, "blobId": blob}]
        return web.json_response({"id": "org/m", "sha": COMMIT, "siblings": siblings})

    files = sorted(folder.iterdir())

    async def send(request: web.Request) -> web.FileResponse:
        return web.FileResponse(folder / request.match_info["path"], chunk_size=MIB)

    async def listing(_: web.Request) -> web.Response:
        contents = "".join(
            f"<Contents><Key>m/{path.name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{path.stat().st_size}</Size></Contents>"
            for path in files
        )
        text = f'<ListBucketResult xmlns="{NAMESPACE}"><Name>models</Name><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>'
        return web.Response(text=text, content_type="application/xml")

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/api/models/org/m/revision/main", info)
        app.router.add_get(f"/org/m/resolve/{COMMIT}/{{path}}", send)
        app.router.add_get("/models", listing)
        app.router.add_get("/models/m/{path}", send)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def write_model(folder: Path, size: int) -> float:
    """The model's files; seconds that the disk took for them, flushed."""
    (folder / "config.json").write_bytes(CONFIG)
    block = os.urandom(4 * MIB)
    started = time.perf_counter()
    with (folder / "model.safetensors").open("wb") as file:
        for at in range(0, size, len(block)):
            file.write(block[: size - at])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


async def measure(endpoint: str, uri: str, cache: Path, size: int, pin: str = "") -> tuple[dict[str, Any], str]:
    """One fetch into `cache`: GB/s and phases, and the revision."""
    meter = PhaseClock()
    settings = FetchSettings(uri=uri, endpoint=endpoint, region="us-east-1")
    started = time.perf_counter()
    outcome = await fetch_model(settings, pin, Places(cache, cache / "none", cache / "current"), meter)
    seconds = time.perf_counter() - started
    figures = {
        "seconds": round(seconds, 4),
        "gb_per_second": round(size / seconds / 1e9, 3),
        "bytes_fetched": outcome.bytes_fetched,
        "phases_seconds": meter.seconds(),
    }
    return figures, outcome.revision


def run(size: int, parent: Path | None) -> dict[str, Any]:
    """All figures of one size."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        root = Path(name)
        folder = root / "source"
        folder.mkdir()
        disk = write_model(folder, size)
        started = time.perf_counter()
        sha256 = sums_of(folder / "model.safetensors").sha256
        hashing = time.perf_counter() - started
        told, tell = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(folder, sha256, tell), daemon=True)
        server.start()
        try:
            endpoint = f"http://127.0.0.1:{told.recv()}"
            found: dict[str, Any] = {}
            for kind, uri in (("hf", "hf://org/m"), ("s3", "s3://models/m")):
                cache = root / kind
                cache.mkdir()
                found[kind], revision = asyncio.run(measure(endpoint, uri, cache, size))
                found[f"{kind}_from_cache"], _ = asyncio.run(measure(endpoint, uri, cache, size, revision))
        finally:
            server.terminate()
            server.join()
    limits = {"disk_gb_per_second": round(size / disk / 1e9, 3), "sha256_gb_per_second": round(size / hashing / 1e9, 3)}
    return {"model_load": {"bytes": size, "cpus": os.cpu_count(), **limits, **found}}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="Size of the model.")
    parser.add_argument("--folder", type=Path, default=None, help="Folder on the disk to measure; the system's temporary one by default.")
    parser.add_argument("--json", action="store_true", help="One line of JSON.")
    options = parser.parse_args()
    figures = run(options.mib * MIB, options.folder)
    print(json.dumps(figures, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
