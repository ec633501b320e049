"""The command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
from pydantic import ValidationError

from devcluster import cluster as clusters
from devcluster import lifecycle
from devcluster.errors import ConfigError, DevclusterError
from devcluster.paths import Layout
from devcluster.settings import NpuSettings, describe, load


class _Group(click.Group):
    """Turns this package's errors into one message and status 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DevclusterError as error:
            raise click.ClickException(str(error)) from error


_NAME = click.option("--name", default="dev", show_default=True, envvar="DEVCLUSTER_NAME", help="Which cluster.")


@click.group(cls=_Group)
def main() -> None:
    """A real one-node Kubernetes as host processes, with pretend NPUs. For development and demos."""


@main.command()
@_NAME
@click.option("--npus", type=int, help="Number of cards.  [default: 8]")
@click.option("--npu-resource", help="Resource name of the cards.  [default: huawei.com/Ascend910]")
@click.option("--npu-unit", type=int, help="Cards that are only given out together.  [default: 1]")
@click.option("--npu-chip", help="Chip name in the node's label.  [default: 910B3]")
@click.option(
    "--checkout",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Folder that containers of the development image see.  [default: the git checkout around here]",
)
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    type=click.Path(exists=True, resolve_path=True, path_type=Path),
    help="One more path they see, read-only (repeatable).",
)
def up(
    name: str,
    npus: int | None,
    npu_resource: str | None,
    npu_unit: int | None,
    npu_chip: str | None,
    checkout: Path | None,
    mounts: tuple[Path, ...],
) -> None:
    """Bring the cluster up, or repair it; ends when its node is Ready."""
    given = {"count": npus, "resource_name": npu_resource, "unit": npu_unit, "chip_name": npu_chip}
    changes = {key: value for key, value in given.items() if value is not None}
    layout = Layout.of(name)
    before = load(layout).npu if layout.config.exists() else NpuSettings()
    try:
        npu = NpuSettings.model_validate({**before.model_dump(), **changes})
    except ValidationError as error:
        raise click.UsageError(f"the NPUs cannot be had: {describe(error)}") from error
    cluster = lifecycle.up(name, npu, checkout=checkout, mounts=mounts)
    click.echo(f"export KUBECONFIG={cluster.kubeconfig}")
    click.echo(f"export PATH={cluster.kubectl.parent}:$PATH")


@main.command()
@_NAME
@click.option("--keep-data", is_flag=True, help="Keep the data directory; the next `up` resumes.")
def down(name: str, keep_data: bool) -> None:
    """End the cluster and remove every trace of it; works after any crash."""
    lifecycle.down(name, keep_data=keep_data)


@main.command()
@_NAME
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str, as_json: bool) -> None:
    """Show the cluster's processes; status 1 when one is not healthy."""
    processes = clusters.get(name).processes()
    if as_json:
        click.echo(json.dumps({"name": name, "processes": [process.model_dump() for process in processes]}, indent=1))
    else:
        for process in processes:
            state = "healthy" if process.healthy else "stopped" if process.stopped else "NOT HEALTHY"
            click.echo(f"{process.name:26}{process.pid or '-':>8}  {state}  restarts {process.restarts}")
    if not all(process.healthy for process in processes):
        sys.exit(1)


@main.command()
@_NAME
@click.option("--path", is_flag=True, help="Print where the file is, not what it says.")
def kubeconfig(name: str, path: bool) -> None:
    """Print the administrator's kubeconfig."""
    file = clusters.get(name).kubeconfig
    click.echo(str(file) if path else file.read_text(), nl=path)


@main.command("load-image")
@_NAME
@click.argument("archives", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def load_image(name: str, archives: tuple[Path, ...]) -> None:
    """Import image archives (OCI or `docker save`) into the node."""
    for archive in archives:
        for line in clusters.get(name).load_image(archive):
            click.echo(line)


@main.command()
@_NAME
@click.argument("program", type=click.Choice(["kubectl", "helm"]))
def which(name: str, program: str) -> None:
    """Print where kubectl or helm for this cluster is; helm is built on first use."""
    cluster = clusters.get(name)
    click.echo(str(cluster.helm() if program == "helm" else cluster.kubectl))


@main.command()
@_NAME
@click.argument("component")
@click.option("--follow", "-f", is_flag=True, help="Go on printing.")
@click.option("--lines", "-n", type=click.IntRange(0), default=100, show_default=True)
def logs(name: str, component: str, follow: bool, lines: int) -> None:
    """Print the end of a process's log; `supervisor` is one of them."""
    file = clusters.get(name).layout.log / f"{component}.log"
    if not file.exists():
        known = ", ".join(sorted(other.stem for other in file.parent.glob("*.log")))
        raise ConfigError(f"no log of {component!r}; there are {known}")
    os.execvp("tail", ["tail", f"--lines={lines}", *(["--follow=name"] if follow else []), str(file)])  # noqa: S606 -- no shell is wanted


def _component_command(action: str, text: str) -> None:
    @main.command(action, help=text)
    @_NAME
    @click.argument("component")
    def command(name: str, component: str) -> None:
        getattr(clusters.get(name), action)(component)


_component_command("kill", "SIGKILL a component; it is restarted.")
_component_command("stop", "Stop a component until `start`.")
_component_command("start", "Start a stopped component.")
_component_command("restart", "Stop a component in an orderly way and start it again.")


@main.group()
def npu() -> None:
    """Look at the pretend NPUs and change them."""


@npu.command("list")
@_NAME
def npu_list(name: str) -> None:
    """Show every card."""
    cluster = clusters.get(name)
    failed = cluster.npu_state().failed
    for card in range(cluster.settings.npu.count):
        click.echo(f"{card:3}  {'failed' if card in failed else 'healthy'}")


@npu.command("fail")
@_NAME
@click.argument("cards", nargs=-1, required=True, type=int)
def npu_fail(name: str, cards: tuple[int, ...]) -> None:
    """Let cards fail: allocatable falls, capacity stays."""
    for card in cards:
        clusters.get(name).npu_fail(card)


@npu.command("heal")
@_NAME
@click.argument("cards", nargs=-1, required=True, type=int)
def npu_heal(name: str, cards: tuple[int, ...]) -> None:
    """Let cards be healthy again."""
    for card in cards:
        clusters.get(name).npu_heal(card)


@npu.command("set")
@_NAME
@click.argument("card", type=int)
@click.argument("metric")
@click.argument("value", type=float)
def npu_set(name: str, card: int, metric: str, value: float) -> None:
    """Let the npu-exporter show VALUE for METRIC of CARD."""
    clusters.get(name).npu_set(card, metric, value)


@main.group()
def nodes() -> None:
    """Look at the cluster's nodes; add fake ones for tests of scale."""


@nodes.command("list")
@_NAME
def nodes_list(name: str) -> None:
    """Show every node."""
    click.echo(clusters.get(name).run_kubectl("get", "nodes", "-o", "wide"), nl=False)


@nodes.command("add")
@_NAME
@click.option("--fake", "count", type=click.IntRange(1, 5000), required=True, help="How many fake nodes.")
@click.option("--npus", type=click.IntRange(0, 64), default=8, show_default=True, help="Cards of each.")
@click.option("--taint/--no-taint", default=True, help="Keep pods away that do not tolerate fake nodes.  [default: on]")
def nodes_add(name: str, count: int, npus: int, taint: bool) -> None:
    """Add nodes that kwok plays: the API server, scheduler and controllers are real, their pods never run."""
    clusters.get(name).add_fake_nodes(count, npus, tainted=taint)


@nodes.command("remove")
@_NAME
@click.option("--fake", is_flag=True, required=True, help="Remove all fake nodes.")
def nodes_remove(name: str, fake: bool) -> None:
    """Remove fake nodes."""
    clusters.get(name).remove_fake_nodes()
