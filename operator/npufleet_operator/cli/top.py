"""`npufleet top`: the pools' ledgers and their models as tables."""

from __future__ import annotations

import asyncio

import click

from npufleet_operator.cli.cluster import Access, Fleet, cluster_options, read_fleet, run
from npufleet_operator.cli.output import friendly
from npufleet_operator.cli.wording import ledger_table, models_table, pools_table
from npufleet_operator.shell.client import KubeClient


@click.command()
@click.option("-n", "--namespace", default="", help="Models of one namespace; the default is all.")
@click.option("--pool", "pool_name", default=None, help="One pool only.")
@click.option("-w", "--watch", is_flag=True, help="Again and again, until interrupted.")
@click.option("--interval", type=click.FloatRange(1, 3600), default=5.0, show_default=True, help="Seconds between two looks, with --watch.")
@cluster_options
@friendly
def top(namespace: str, pool_name: str | None, watch: bool, interval: float, kubeconfig: str | None, context: str | None) -> None:
    """Pools, their classes and their models."""

    async def look(client: KubeClient) -> None:
        while True:
            text = render(await read_fleet(client, namespace), pool_name)
            if watch:
                click.clear()
            click.echo(text)
            if not watch:
                return
            await asyncio.sleep(interval)

    run(Access(kubeconfig, context), look)


def render(fleet: Fleet, pool_name: str | None = None) -> str:
    """The tables, of one pool or of all."""
    pools = [pool for pool in fleet.pools if pool_name in (None, pool.name)]
    models = [model for model in fleet.models if pool_name in (None, model.pool_name)]
    if not pools and not models:
        return f"no InferencePool {pool_name!r}" if pool_name else "no InferencePool and no AscendModel"
    parts = [pools_table(pools)] if pools else []
    parts += [f"{pool.name}\n{ledger_table(pool)}" for pool in pools if pool.status.classes]
    if models:
        parts.append(models_table(models, with_pool=True))
    return "\n\n".join(parts)
