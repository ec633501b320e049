"""Command line of the monitor."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from npufleet_api.contract import ADMIN_PORT, MONITOR_DIR, MONITOR_PORT, MONITOR_SETTINGS_FILE
from npufleet_monitor.errors import SettingsError
from npufleet_monitor.monitor import Monitor, Sources
from npufleet_monitor.server import MonitorServer
from npufleet_monitor.settings import SettingsFile, read_identity
from npufleet_monitor.vllm_server import VllmAdminServer

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.group()
def main() -> None:
    """The monitoring sidecar of an npufleet inference pod."""


@main.command()
@click.option(
    "--settings",
    "path",
    default=f"{MONITOR_DIR}/{MONITOR_SETTINGS_FILE}",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Settings file; read again whenever it changes.",
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104  # it serves the cluster
@click.option("--port", default=MONITOR_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--vllm-url", default=None, help="Address of a vLLM, which has no admin port: the monitor then serves one for it, on --admin-port."
)
@click.option("--admin-port", default=ADMIN_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option("--log-level", default="INFO", show_default=True, type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]))
def serve(path: Path, host: str, port: int, vllm_url: str | None, admin_port: int, log_level: str) -> None:
    """Watch the engine beside this container. POD_NAME, POD_NAMESPACE and POD_UID say whose engine it is; NPU_EXPORTER_URL, where it
    is set, where the NPUs' figures are."""
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    try:
        monitor = Monitor(read_identity(os.environ), SettingsFile(path), Sources.from_environment(os.environ))
    except SettingsError as error:
        click.echo(f"npufleet-monitor: {error}", err=True)
        sys.exit(1)
    admin = VllmAdminServer(vllm_url, host, admin_port) if vllm_url else None
    server = MonitorServer(monitor, host, port, admin)
    server.run()
    sys.exit(0 if server.started and not server.failed else 1)
