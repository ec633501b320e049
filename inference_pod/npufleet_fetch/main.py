"""`npufleet-fetch`: the init container that brings a model's files, and the cache's own tools."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import click
import yaml
from aiohttp import web
from pydantic import ValidationError

from npufleet_api.contract import ADMIN_PORT, MODEL_DIR, SETTINGS_DIR, TERMINATION_MESSAGE_PATH
from npufleet_api.fetching import (
    CACHE_DIR,
    CREDENTIALS_DIR,
    CURRENT_LINK,
    FETCH_PATH,
    FETCH_SETTINGS_FILE,
    SOURCE_REVISION_ENV,
    FetchOutcome,
    FetchSettings,
)
from npufleet_fetch.cache import Cache
from npufleet_fetch.errors import FetchError, SourceRefusedError
from npufleet_fetch.fetch import Places, fetch_model, refused
from npufleet_fetch.meter import Meter

logger = logging.getLogger(__name__)

MAX_SETTINGS_BYTES = 1 << 20
TERMINATED = 143

_folder = click.Path(path_type=Path, file_okay=False)


@click.group()
def main() -> None:
    """Fetch models into a cache, and look after the cache."""


@main.command()
@click.option(
    "--settings", "settings_path", type=click.Path(path_type=Path), default=Path(SETTINGS_DIR) / FETCH_SETTINGS_FILE, show_default=True
)
@click.option("--cache", type=_folder, default=Path(CACHE_DIR), show_default=True, help="Folder of the cache.")
@click.option("--credentials", type=_folder, default=Path(CREDENTIALS_DIR), show_default=True, help="A mounted Secret.")
@click.option(
    "--link", type=click.Path(path_type=Path), default=Path(MODEL_DIR) / CURRENT_LINK, show_default=True, help="What to point at it."
)
@click.option("--only-cache", is_flag=True, help="Fill the cache; point nothing at the model.")
@click.option("--port", type=click.IntRange(0, 65535), default=ADMIN_PORT, show_default=True, help="Port that tells of the progress.")
@click.option("--termination-log", type=click.Path(path_type=Path), default=Path(TERMINATION_MESSAGE_PATH), show_default=True)
def run(settings_path: Path, cache: Path, credentials: Path, link: Path, only_cache: bool, port: int, termination_log: Path) -> None:
    """Fetch the model of the settings file, unless the cache has it."""
    configure_logging()
    places = Places(cache, credentials, None if only_cache else link)
    pin = os.environ.get(SOURCE_REVISION_ENV, "")
    try:
        outcome = asyncio.run(_run(load_fetch_settings(settings_path), pin, places, port))
    except FetchError as error:
        outcome = refused(error)
    except asyncio.CancelledError:
        logger.info("terminated; the next fetch goes on from here")
        sys.exit(TERMINATED)
    _tell(outcome, termination_log)
    if outcome.reason is not None:
        logger.error("not fetched", extra={"reason": outcome.reason.value, "error": outcome.message})
        sys.exit(1)
    logger.info("fetched", extra=outcome.model_dump(mode="json", exclude={"reason", "message"}))


@main.command()
@click.option("--cache", type=_folder, default=Path(CACHE_DIR), show_default=True, help="Folder of the cache.")
@click.option("--discard", is_flag=True, help="Take models that are not as they were published out of the cache.")
def verify(cache: Path, discard: bool) -> None:
    """Read every cached model back and compare it with its checksums."""
    store, bad = Cache(cache), 0
    for published, wrong in store.verify():
        bad += bool(wrong)
        state = f"{wrong} is not as it was published" if wrong else "as published"
        click.echo(f"{published.manifest.uri}@{published.manifest.revision}: {state}")
        if wrong and discard:
            store.discard(published)
    sys.exit(1 if bad else 0)


def load_fetch_settings(path: Path) -> FetchSettings:
    """Parse `fetch.yaml`. Raises SourceRefusedError."""
    try:
        with path.open("rb") as file:
            document = yaml.safe_load(file.read(MAX_SETTINGS_BYTES))
        return FetchSettings.model_validate(document)
    except (OSError, yaml.YAMLError, ValidationError, RecursionError) as error:
        reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else type(error).__name__
        raise SourceRefusedError(f"fetch settings {path}: {reason}: operator and engine image must be of one release") from error


def configure_logging() -> None:
    """One JSON object a line on stdout. Clients' own logs, which quote addresses, only from warnings on."""
    from pythonjsonlogger.json import JsonFormatter

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        JsonFormatter("{levelname}{name}{message}", style="{", rename_fields={"levelname": "level", "name": "logger"}, timestamp="time")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in ("aiohttp", "httpx2", "httpcore2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def _run(settings: FetchSettings, pin: str, places: Places, port: int) -> FetchOutcome:
    meter = Meter()
    task = asyncio.ensure_future(fetch_model(settings, pin, places, meter))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        await _serve_progress(stack, meter, port)
        try:
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _serve_progress(stack: contextlib.AsyncExitStack, meter: Meter, port: int) -> None:
    """Tell how far the fetch is. A port that is taken costs the figures, not the model."""

    async def progress(_: web.Request) -> web.Response:
        return web.Response(text=meter.progress().model_dump_json(by_alias=True, exclude_none=True), content_type="application/json")

    app = web.Application()
    app.router.add_get(FETCH_PATH, progress)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, port=port).start()
    except OSError as error:
        logger.warning("progress is not told", extra={"port": port, "error": error.strerror})


def _tell(outcome: FetchOutcome, termination_log: Path) -> None:
    if termination_log.exists():
        with contextlib.suppress(OSError):
            termination_log.write_text(outcome.model_dump_json(by_alias=True, exclude_defaults=True)[:4096])


if __name__ == "__main__":
    main()
