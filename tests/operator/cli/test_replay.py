"""`npufleet replay`: nothing differs for what this planner recorded, and what differs is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from npufleet_operator.cli.npufleet import main
from npufleet_operator.core.plan import make_plan
from npufleet_operator.core.recording import record
from support.fleet import Fleet, model_spec


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", *arguments])


def history() -> list[str]:
    fleet = Fleet()
    fleet.add_model("assistant", model_spec("chat", 2))
    lines = []
    for step in range(6):
        if step == 3:
            fleet.add_model("assistant", model_spec("chat", 1))
        observed = fleet.observe()
        lines.append(record(observed, fleet.now, make_plan(observed, fleet.now)))
        fleet.step()
    return lines


def written(folder: Path, lines: list[str]) -> str:
    path = folder / "plans.jsonl"
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


def test_what_was_recorded_is_planned_again_as_it_was(tmp_path: Path) -> None:
    done = invoke(written(tmp_path, history()))
    assert (done.exit_code, done.stdout) == (0, "6 plans, 0 differ from what was recorded\n")


def changed(lines: list[str]) -> list[str]:
    """The first plan as another planner would have made it: one replica fewer."""
    raw: dict[str, Any] = json.loads(lines[0])
    raw["digest"] = "sha256:other"
    raw["outline"]["creates"] = raw["outline"]["creates"][:1]
    raw["outline"]["desired"] = ["team/assistant 1"]
    return [json.dumps(raw), *lines[1:]]


def test_a_difference_is_shown_with_both_sides(tmp_path: Path) -> None:
    done = invoke(written(tmp_path, changed(history())))
    assert done.exit_code == 3
    assert "line 1, 2026-01-01T00:00:00+00:00, pool prod:" in done.stdout
    assert "  - desired: team/assistant 1\n  + desired: team/assistant 2\n" in done.stdout
    assert "  + creates: team/assistant-" in done.stdout
    assert done.stdout.endswith("6 plans, 1 differ from what was recorded\n")


def test_json_holds_the_differences(tmp_path: Path) -> None:
    done = invoke(written(tmp_path, changed(history())), "--json")
    document = json.loads(done.stdout)
    assert (document["plans"], document["different"]) == (6, 1)
    assert document["differences"][0]["parts"]["desired"] == {"recorded": ["team/assistant 1"], "now": ["team/assistant 2"]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "no recorded plan"), (["{}"], "line 1: version"), (["x"], "line 1: not JSON")],
    ids=["empty", "other", "junk"],
)
def test_a_log_that_is_none_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    done = invoke(written(tmp_path, lines))
    assert done.exit_code == 1
    assert message in done.stderr
