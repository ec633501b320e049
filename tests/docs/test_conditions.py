"""docs/conditions.md knows every condition and every reason, and none that do not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npufleet_api.conditions import ModelCondition, PoolCondition, Reason

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "conditions.md").read_text(encoding="utf-8")


def rows(section: str) -> dict[str, list[str]]:
    """First cell, without backquotes, to the other cells of every table row under a heading of level 2."""
    (_, _, rest) = TEXT.partition(f"\n## {section}\n")
    body = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^\| `([A-Za-z]+)` \|(.*)\|$", body, re.MULTILINE)
    names = [name for name, _ in found]
    assert len(names) == len(set(names)), f"twice in {section}: {sorted({n for n in names if names.count(n) > 1})}"
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def test_every_reason_is_documented_and_no_other() -> None:
    assert set(rows("Reasons")) == {reason.value for reason in Reason}


@pytest.mark.parametrize(
    ("section", "types"), [("Conditions of an AscendModel", ModelCondition), ("Conditions of an InferencePool", PoolCondition)]
)
def test_every_condition_is_documented_and_no_other(section: str, types: type[ModelCondition] | type[PoolCondition]) -> None:
    assert set(rows(section)) == {kind.value for kind in types}


def test_every_reason_has_a_meaning_and_a_remedy() -> None:
    for name, cells in rows("Reasons").items():
        assert len(cells) == 2, name
        assert all(cell.endswith(".") for cell in cells), f"{name}: a sentence each"
