"""`npufleet`: why the fleet is as it is, and what it would do."""

from __future__ import annotations

import click

from npufleet_operator.cli.explain import explain
from npufleet_operator.cli.model import model
from npufleet_operator.cli.replay import replay
from npufleet_operator.cli.simulate import simulate_command
from npufleet_operator.cli.top import top


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="npufleet")
def main() -> None:
    """Explain, watch, replay and simulate npufleet's decisions. Reads the cluster of KUBECONFIG with your own rights; changes nothing."""


main.add_command(explain)
main.add_command(top)
main.add_command(model)
main.add_command(replay)
main.add_command(simulate_command)

if __name__ == "__main__":
    main()
