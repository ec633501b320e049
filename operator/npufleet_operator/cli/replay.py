"""`npufleet replay`: plan recorded inputs again, and show what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from npufleet_operator.cli.output import friendly
from npufleet_operator.core.plan import make_plan
from npufleet_operator.core.recording import digest, outline, parse
from npufleet_operator.errors import InputError, RecordingError

MAX_LINE_CHARS = 256 * 1024 * 1024


@click.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@friendly
def replay(log: Path, as_json: bool) -> None:
    """Plan every line of LOG again. Status 0 when all plans are as recorded, 3 when some differ."""
    plans, changed = 0, []
    for number, line in _lines(log):
        try:
            recording = parse(line)
        except RecordingError as error:
            raise InputError(f"{log}, line {number}: {error}") from error
        plan = make_plan(recording.observed, recording.now)
        plans += 1
        if digest(plan) != recording.digest:
            changed.append(_difference(number, recording.now.isoformat(), recording.observed.pool_name, recording.outline, outline(plan)))
    if not plans:
        raise InputError(f"{log}: no recorded plan in it: give a file that the operator's recorder wrote")
    if as_json:
        click.echo(json.dumps({"plans": plans, "different": len(changed), "differences": changed}, indent=2))
    else:
        for difference in changed:
            _show(difference)
        click.echo(f"{plans} plans, {len(changed)} differ from what was recorded")
    if changed:
        raise SystemExit(3)


def _lines(log: Path) -> Iterator[tuple[int, str]]:
    try:
        with log.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if len(line) > MAX_LINE_CHARS:
                    raise InputError(f"{log}, line {number}: longer than {MAX_LINE_CHARS} characters")
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{log}: {error}: give a file that the operator's recorder wrote") from error


def _difference(number: int, now: str, pool: str, before: Any, after: Any) -> dict[str, Any]:
    parts = {
        part: {
            "recorded": [entry for entry in before.get(part, []) if entry not in after.get(part, [])],
            "now": [entry for entry in after.get(part, []) if entry not in before.get(part, [])],
        }
        for part in dict.fromkeys((*before, *after))
        if sorted(before.get(part, [])) != sorted(after.get(part, []))
    }
    return {"line": number, "time": now, "pool": pool, "parts": parts}


def _show(difference: dict[str, Any]) -> None:
    click.echo(f"line {difference['line']}, {difference['time']}, pool {difference['pool']}:")
    if not difference["parts"]:
        click.echo("  only objects or status differ")
    for part, sides in difference["parts"].items():
        for entry in sides["recorded"]:
            click.echo(f"  - {part}: {entry}")
        for entry in sides["now"]:
            click.echo(f"  + {part}: {entry}")
