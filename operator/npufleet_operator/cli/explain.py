"""`npufleet explain`: why a model or pool is as it is."""

from __future__ import annotations

import click

from npufleet_operator.cli.cluster import Access, cluster_options, default_namespace, read_model, read_pool, run
from npufleet_operator.cli.output import friendly
from npufleet_operator.cli.wording import explain_model, explain_pool


@click.group()
def explain() -> None:
    """Why is it at N? In words and numbers, from the live objects."""


@explain.command()
@click.argument("name")
@click.option("-n", "--namespace", default=None, help="Namespace; the default is the context's. NAME may be namespace/name.")
@cluster_options
@friendly
def model(name: str, namespace: str | None, kubeconfig: str | None, context: str | None) -> None:
    """Why AscendModel NAME runs as many replicas as it does."""
    prefix, slash, rest = name.partition("/")
    access = Access(kubeconfig, context, prefix if slash else namespace)
    wanted = rest if slash else name
    found, pool, pods = run(access, lambda client: read_model(client, default_namespace(access), wanted))
    click.echo(explain_model(found, pool, pods))


@explain.command()
@click.argument("name")
@cluster_options
@friendly
def pool(name: str, kubeconfig: str | None, context: str | None) -> None:
    """Who holds the NPUs of InferencePool NAME, and what changed last."""
    found, models = run(Access(kubeconfig, context), lambda client: read_pool(client, name))
    click.echo(explain_pool(found, models))
