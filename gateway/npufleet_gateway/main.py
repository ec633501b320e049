"""Command line of the gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import sys
from pathlib import Path

import click
import uvloop

from npufleet_api.contract import ENGINE_PORT, GATEWAY_PORT, GATEWAY_TLS_PORT, MONITOR_PORT, POD_NAME_ENV
from npufleet_gateway.errors import ConfigurationError
from npufleet_gateway.gateway import Gateway
from npufleet_gateway.hedging import HedgePolicy
from npufleet_gateway.kube import KubeClient, kubernetes_configuration
from npufleet_gateway.server import GatewayServer
from npufleet_gateway.settings import GatewaySettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.group()
def main() -> None:
    """The gateway of an npufleet pool."""


@main.command()
@click.option("--pool", required=True, help="Name of the InferencePool whose models are served.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104  # it serves the cluster
@click.option("--port", default=GATEWAY_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option("--engine-port", default=ENGINE_PORT, show_default=True, type=click.IntRange(1, 65535), help="Port of the engines.")
@click.option("--monitor-port", default=MONITOR_PORT, show_default=True, type=click.IntRange(1, 65535), help="Port of the monitors.")
@click.option("--window-seconds", default=300.0, show_default=True, type=click.FloatRange(10, 86400), help="Window of the SLO accounting.")
@click.option(
    "--upstream-idle-seconds", default=600.0, show_default=True, type=click.FloatRange(1, 86400), help="Longest silence of a replica."
)
@click.option(
    "--replica-concurrency",
    default=256,
    show_default=True,
    type=click.IntRange(1, 65536),
    help="Requests that a replica runs at once, until its reports show better.",
)
@click.option("--queue-seconds", default=30.0, show_default=True, type=click.FloatRange(0.01, 3600), help="Longest wait for a slot.")
@click.option(
    "--hold-seconds", default=300.0, show_default=True, type=click.FloatRange(0, 3600), help="Longest wait for a model's first replica."
)
@click.option("--keys-dir", type=click.Path(path_type=Path), help="Folder of API keys: a mounted Secret. Without it none are asked for.")
@click.option("--tls-dir", type=click.Path(path_type=Path), help="Folder with tls.crt and tls.key: TLS is then served on --tls-port too.")
@click.option("--tls-port", default=GATEWAY_TLS_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option("--tls-only", is_flag=True, help="Serve clients on --tls-port alone: --port then has probes, metrics and the report.")
@click.option(
    "--hedge-budget-percent",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 100),
    help="Share of a model's streams that may be sent to a second replica when their answer is late; 0 sends none.",
)
@click.option(
    "--hedge-delay-percentile",
    default=95.0,
    show_default=True,
    type=click.FloatRange(1, 100),
    help="A stream is late after this percentile of the times to a first byte.",
)
@click.option("--access-log/--no-access-log", default=True, show_default=True, help="A line of JSON on standard output for each request.")
@click.option("--leave-seconds", default=5.0, show_default=True, type=click.FloatRange(0, 600), help="Serving on, unready, after SIGTERM.")
@click.option("--grace-seconds", default=120.0, show_default=True, type=click.FloatRange(0, 86400), help="For what then still runs.")
@click.option("--log-level", default="INFO", show_default=True, type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]))
def serve(
    pool: str,
    host: str,
    port: int,
    engine_port: int,
    monitor_port: int,
    window_seconds: float,
    upstream_idle_seconds: float,
    replica_concurrency: int,
    queue_seconds: float,
    hold_seconds: float,
    keys_dir: Path | None,
    tls_dir: Path | None,
    tls_port: int,
    tls_only: bool,
    hedge_budget_percent: float,
    hedge_delay_percentile: float,
    access_log: bool,
    leave_seconds: float,
    grace_seconds: float,
    log_level: str,
) -> None:
    """Serve a pool's models. The API server is reached as KUBECONFIG says where it is set, else by the pod's service account."""
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    settings = GatewaySettings(
        pool=pool,
        name=os.environ.get(POD_NAME_ENV) or platform.node() or "gateway",
        engine_port=engine_port,
        monitor_port=monitor_port,
        window_seconds=window_seconds,
        upstream_idle_seconds=upstream_idle_seconds,
        replica_concurrency=replica_concurrency,
        queue_seconds=queue_seconds,
        hold_seconds=hold_seconds,
        keys_dir=keys_dir,
        tls_dir=tls_dir,
        tls_port=tls_port,
        tls_only=tls_only,
        hedging=HedgePolicy(hedge_delay_percentile, hedge_budget_percent) if hedge_budget_percent else None,
        access_log=access_log,
        leave_seconds=leave_seconds,
        grace_seconds=grace_seconds,
    )
    try:
        started = run(settings, host, port)
    except ConfigurationError as error:
        click.echo(f"npufleet-gateway: {error}", err=True)
        sys.exit(1)
    sys.exit(0 if started else 1)


def run(settings: GatewaySettings, host: str, port: int) -> bool:
    """Serve until told to stop. False if the server could not start. Raises ConfigurationError."""

    async def serving() -> bool:
        gateway = Gateway(settings, KubeClient(await kubernetes_configuration()))
        server = GatewayServer(gateway, host, port)
        await server.serve()
        return server.started

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serving())
