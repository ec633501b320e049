"""Writes the options of vLLM's own parser as a small JSON file, by which tests judge the arguments that the operator gives vLLM.

vLLM and all it needs take gigabytes and go into an environment of their own, in the project's cache; the parser is asked there, without a
device. One file per version: write another when a pool is to run an image with another vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

READER = """
import json
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms.current_platform = CpuPlatform()
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm")
serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
options = {}
positional = [(action.dest, action) for action in serve._actions if not action.option_strings]
for option, action in [*positional, *serve._option_string_actions.items()]:
    takes = {0: "nothing", None: "value", "?": "optional"}.get(action.nargs, "values")
    entry = options[option] = {"takes": takes}
    if takes != "nothing":
        entry["type"] = getattr(action.type, "__name__", "str") if action.type else "str"
        if action.choices:
            entry["choices"] = sorted(str(choice) for choice in action.choices)
print(json.dumps(options))
"""
"""Runs in the environment. Defaults of some options ask for the platform, and no device is here. Positional arguments are listed without
dashes."""


def environment(version: str) -> Path:
    """The Python of an environment with vLLM; made once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npufleet" / "environments"
    folder = cache / f"vllm-{version}"
    ready = folder / ".ready"
    if not ready.exists():
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        if uv is None:
            raise click.ClickException("uv is missing: make setup installs it")
        shutil.rmtree(folder, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        subprocess.run([uv, "pip", "install", "--python", str(folder / "bin" / "python"), f"vllm=={version}"], check=True)
        ready.touch()
    return folder / "bin" / "python"


def read_options(python: Path) -> dict[str, dict[str, object]]:
    """Each option of `vllm serve`: what it takes, of which type, among which choices."""
    asked = subprocess.run([python, "-c", READER], stdout=subprocess.PIPE, text=True, check=True)
    options: dict[str, dict[str, object]] = json.loads(asked.stdout.splitlines()[-1])
    return options


@click.command()
@click.argument("version")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(version: str, folder: Path) -> None:
    """Write FOLDER/VERSION.json for vLLM VERSION."""
    options = read_options(environment(version))
    lines = ",\n".join(f"  {json.dumps(option)}: {json.dumps(options[option])}" for option in sorted(options))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{version}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    click.echo(f"{folder / version}.json: {len(options)} options")


if __name__ == "__main__":
    main()
