"""Command line of the engine container."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from npufleet_api.contract import ADMIN_PORT, ENGINE_PORT, ENGINE_SETTINGS_FILE, SETTINGS_DIR, TERMINATION_MESSAGE_PATH
from npufleet_pod.errors import RankError, StartError, one_line

logger = logging.getLogger(__name__)

Command = TypeVar("Command", bound=Callable[..., None])


def _settings_option(text: str) -> Callable[[Command], Command]:
    default = Path(SETTINGS_DIR) / ENGINE_SETTINGS_FILE
    return click.option("--settings", "settings_path", type=click.Path(path_type=Path), default=default, show_default=True, help=text)


_log_level_option = click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)


@click.group()
def main() -> None:
    """The engine of an inference pod."""


@main.command()
@_settings_option("Settings file that the operator writes.")
@click.option("--host", default=None, help="Address to listen on; every address by default.")
@click.option("--port", type=click.IntRange(0, 65535), default=ENGINE_PORT, show_default=True, help="OpenAI port; 0 takes a free one.")
@click.option("--admin-port", type=click.IntRange(0, 65535), default=ADMIN_PORT, show_default=True, help="Admin port; 0 takes a free one.")
@_log_level_option
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder of a mounted Secret with a file for each API key; without it nobody is asked for one.",
)
@click.option(
    "--termination-log",
    type=click.Path(path_type=Path),
    default=Path(TERMINATION_MESSAGE_PATH),
    show_default=True,
    help="File that gets the reason of a failed start, if it exists.",
)
def serve(
    settings_path: Path,
    host: str | None,
    port: int,
    admin_port: int,
    log_level: str,
    api_keys: Path | None,
    termination_log: Path,
) -> None:
    """Serve the model of the settings file until SIGTERM."""
    started = time.monotonic()
    try:
        _serve(settings_path, host, port, admin_port, log_level, api_keys, started)
    except StartError as error:
        _give_up(one_line(str(error)), error.exit_code, termination_log)
    except RankError as error:
        _tell(f"engine ended: {one_line(str(error))}", termination_log)
        # Not through the interpreter's end: a thread may still wait for a rank that is gone.
        logging.shutdown()
        os._exit(1)
    except Exception as error:
        logger.exception("engine ended")
        _give_up(f"engine ended: {type(error).__name__}: {one_line(str(error))}: see the container's log", 1, termination_log)


@main.command()
@_settings_option("Settings file of the engine that is to be served; its calibrationPath is not read.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="File to write; replaced only by a complete one.")
@click.option("--text", type=click.Path(path_type=Path), default=None, help="Text, UTF-8, by which INT8 KV heads are chosen.")
@click.option("--int8-kv", is_flag=True, help="Also choose KV heads to be cached as INT8; implied by --text and Int8Heads.")
@click.option("--quick", is_flag=True, help="Fewer lengths, sizes and repeats: less exact, in a fraction of the time.")
@_log_level_option
def calibrate(settings_path: Path, output: Path, text: Path | None, int8_kv: bool, quick: bool, log_level: str) -> None:
    """Measure the settings' model on the device at hand, and write what serves it best: fusion thresholds, batch size, INT8 KV heads.

    Progress goes to stderr, the JSON log to stdout. The file is what calibrationPath, or a ConfigMap of calibrationRef, takes.
    """
    try:
        _calibrate(settings_path, output, text, int8_kv, quick, log_level)
    except StartError as error:
        click.echo(one_line(str(error)), err=True)
        sys.exit(error.exit_code)


def _calibrate(settings_path: Path, output: Path, text: Path | None, int8_kv: bool, quick: bool, log_level: str) -> None:
    from npufleet_api.precision import KvCacheDtype
    from npufleet_pod.calibrate.run import QUICK, Effort, Int8KvRequest, calibrate
    from npufleet_pod.server.logs import configure_logging
    from npufleet_pod.settings import load_settings

    configure_logging(log_level)
    settings = load_settings(settings_path, calibrated=False)
    precision = settings.precision
    if precision.kv_cache is KvCacheDtype.INT8_HEADS:
        # What is to be served with chosen heads needs them chosen, and until then they are in no type of their own.
        int8_kv = True
        precision = precision.model_copy(update={"kv_cache": KvCacheDtype.AUTO})
    settings = settings.model_copy(update={"calibration_path": None, "precision": precision})
    request = Int8KvRequest(text, quick) if int8_kv or text is not None else None
    calibrate(settings, output, QUICK if quick else Effort(), lambda line: click.echo(line, err=True), request)
    click.echo(f"written: {output}", err=True)


def _serve(
    settings_path: Path, host: str | None, port: int, admin_port: int, log_level: str, keys_folder: Path | None, started: float
) -> None:
    from npufleet_pod.engine.encoding import inspect_encoder
    from npufleet_pod.engine.model_files import inspect_model
    from npufleet_pod.model_hold import hold_model
    from npufleet_pod.preflight import check_node
    from npufleet_pod.server.api_keys import ApiKeys
    from npufleet_pod.server.chat_template import load_chat_template
    from npufleet_pod.server.logs import configure_logging
    from npufleet_pod.server.process import Sockets, bind, serve
    from npufleet_pod.settings import load_settings

    configure_logging(log_level)
    settings = load_settings(settings_path)
    check_node(settings)
    with contextlib.ExitStack() as stack:
        sockets = Sockets(stack.enter_context(bind(host, port)), stack.enter_context(bind(host, admin_port)))
        stack.enter_context(hold_model(Path(settings.model_path)))
        files = inspect_encoder(settings) or inspect_model(settings)
        template = load_chat_template(files.path)
        api_keys = None if keys_folder is None else ApiKeys(keys_folder)
        if api_keys is not None:
            api_keys.read()
        asyncio.run(serve(settings, files, template, sockets, started, api_keys))


def _give_up(message: str, exit_code: int, termination_log: Path) -> None:
    """Say why on stderr and where Kubernetes looks for it, and end."""
    _tell(message, termination_log)
    sys.exit(exit_code)


def _tell(message: str, termination_log: Path) -> None:
    click.echo(message, err=True)
    if termination_log.exists():
        with contextlib.suppress(OSError):
            termination_log.write_text(message[:4096])


if __name__ == "__main__":
    main()
