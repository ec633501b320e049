"""`npufleet-operator run`."""

from __future__ import annotations

import asyncio
import sys

import click
from pydantic import ValidationError

from npufleet_operator.logs import configure_logging
from npufleet_operator.run import run as run_operator
from npufleet_operator.settings import OperatorSettings


@click.group()
def main() -> None:
    """The npufleet operator."""


@main.command()
@click.option("--namespace", required=True, envvar="POD_NAMESPACE", help="The operator's own namespace; gateways run there.")
@click.option("--engine-image", default="", envvar="NPUFLEET_ENGINE_IMAGE", help="Image of engines where a pool names none.")
@click.option("--control-image", required=True, envvar="NPUFLEET_CONTROL_IMAGE", help="Image of gateways and monitors.")
@click.option("--image-pull-policy", default="IfNotPresent", envvar="NPUFLEET_IMAGE_PULL_POLICY")
@click.option("--gateway-service-account", default="npufleet-gateway", envvar="NPUFLEET_GATEWAY_SERVICE_ACCOUNT")
@click.option("--gateway-service-type", default="ClusterIP", envvar="NPUFLEET_GATEWAY_SERVICE_TYPE")
@click.option("--gateway-resources", default="{}", envvar="NPUFLEET_GATEWAY_RESOURCES", help="Resources of gateway pods, as JSON.")
@click.option("--image-pull-secrets", default="", envvar="NPUFLEET_IMAGE_PULL_SECRETS", help="Names of pull Secrets, comma-separated.")
@click.option("--npu-exporter-url", default="", envvar="NPUFLEET_NPU_EXPORTER_URL", help="Where monitors read the NPUs of $(HOST_IP).")
@click.option("--record-plans", default="", envvar="NPUFLEET_RECORD_PLANS", help="File for recorded plans, for `npufleet replay`.")
@click.option("--record-limit-mi", default="64", envvar="NPUFLEET_RECORD_LIMIT_MI", help="Size of recorded plans at most, in MiB.")
@click.option("--log-level", default="info", envvar="NPUFLEET_LOG_LEVEL", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", default="json", envvar="NPUFLEET_LOG_FORMAT", type=click.Choice(["json", "text"]))
@click.option("--port", default=9090, show_default=True, help="Port of /healthz, /readyz and /metrics.")
def run(image_pull_secrets: str, log_level: str, log_format: str, port: int, **options: str) -> None:
    """Reconcile InferencePools and AscendModels until stopped."""
    configure_logging(log_level, log_format)
    secrets = tuple(name.strip() for name in image_pull_secrets.split(",") if name.strip())
    try:
        settings = OperatorSettings.model_validate({**options, "image_pull_secrets": secrets})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        click.echo(f"--{'.'.join(map(str, first['loc'])).replace('_', '-')}: {first['msg']} (found {first['input']!r})", err=True)
        sys.exit(2)
    asyncio.run(run_operator(settings, port))


if __name__ == "__main__":
    main()
