"""Write the CRD YAML from the resource models: `python crds/generate.py [--check]`.

The chart carries the same files, since Helm installs CRDs from its own crds/ folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import yaml

from npufleet_api.crd import ascend_model_crd, inference_pool_crd

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (ROOT / "crds", ROOT / "charts" / "npufleet" / "crds")
HEADER = "# Generated from crds/npufleet_api by `make crds`.\n"


def render() -> dict[str, str]:
    """File name to YAML text, for both kinds."""
    return {
        f"{crd['metadata']['name']}.yaml": HEADER + yaml.safe_dump(crd, sort_keys=False, width=120, allow_unicode=True)
        for crd in (inference_pool_crd(), ascend_model_crd())
    }


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a file differs.")
def main(check: bool) -> None:
    """Write, or check, the CRD YAML."""
    stale: list[str] = []
    for folder in TARGETS:
        for name, text in render().items():
            path = folder / name
            if path.exists() and path.read_text(encoding="utf-8") == text:
                continue
            if check:
                stale.append(str(path.relative_to(ROOT)))
                continue
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            click.echo(f"wrote {path.relative_to(ROOT)}")
    if stale:
        click.echo(f"differ from the models: {', '.join(stale)}; run `make crds`", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
