"""`npufleet simulate`: its JSON, its table, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from npufleet_operator.cli.npufleet import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mixed-load"
FILES = ["--pool", str(EXAMPLE / "pool.yaml"), "--models", str(EXAMPLE / "models.yaml")]
PROMISED = {
    "attainment_percent",
    "attainment_by_class",
    "utilisation_percent",
    "npu_hours",
    "moves",
    "reclaims",
    "lost_requests",
    "seconds_below_guarantee",
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_json_holds_what_is_promised_for_each_policy() -> None:
    done = invoke(*FILES, "--closed-loop", "20", "--minutes", "2", "--policy", "static", "--policy", "kpa", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["simulated"] is True
    assert list(document["policies"]) == ["static", "kpa"]
    for result in document["policies"].values():
        assert set(result) >= PROMISED
        assert result["lost_requests"] == 0
        assert set(result["attainment_by_class"]) == {"chat", "document", "code"}


def test_the_planners_own_policy_is_the_default_and_a_seed_repeats_it() -> None:
    first, again = (invoke(*FILES, "--closed-loop", "9", "--minutes", "1", "--seed", "4", "--json") for _ in range(2))
    assert list(json.loads(first.stdout)["policies"]) == ["npufleet"]
    assert first.stdout == again.stdout


def test_traces_of_several_models_are_followed(tmp_path: Path) -> None:
    mooncake = tmp_path / "talk.jsonl"
    mooncake.write_text('{"timestamp": 0, "input_length": 100, "output_length": 9, "hash_ids": []}\n' * 7, encoding="utf-8")
    azure = tmp_path / "a:b.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.0000000,50,5\n", encoding="utf-8")
    traces = ["--trace", f"{mooncake}:chatglm3-6b", "--trace", f"{azure}:default/qwen-14b"]
    done = invoke(*FILES, *traces, "--minutes", "1", "--policy", "static", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["policies"]["static"]
    assert result["requests"] == 8
    assert result["attainment_by_class"] == {"chat": 100.0, "code": 100.0}


def test_people_get_a_table() -> None:
    done = invoke(*FILES, "--closed-loop", "5", "--minutes", "1", "--policy", "static")
    head, row = done.stdout.splitlines()
    assert head.split() == [
        "POLICY", "ATTAINMENT", "CHAT", "DOCUMENT", "CODE", "UTILISATION", "NPU-HOURS", "MOVES", "RECLAIMS", "LOST", "BELOW",
    ]  # fmt: skip
    assert row.split()[0] == "static"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([*FILES], 1, "give either --trace FILE:MODEL (repeatable) or --closed-loop N"),
        ([*FILES, "--closed-loop", "0"], 2, "--closed-loop"),
        ([*FILES, "--closed-loop", "5", "--minutes", "0"], 2, "--minutes"),
        ([*FILES, "--closed-loop", "5", "--minutes", "nan"], 1, "--minutes nan: write a number"),
        ([*FILES, "--closed-loop", "5", "--policy", "magic"], 2, "--policy"),
        ([*FILES, "--trace", "nocolon"], 1, "--trace 'nocolon': write FILE:MODEL"),
        ([*FILES, "--trace", "nosuch.jsonl:chatglm3-6b"], 1, "nosuch.jsonl"),
        ([*FILES, "--trace", "t.jsonl:gpt"], 1, "model 'gpt' is unknown: choose one of default/chatglm3-6b"),
        (["--pool", "nosuch", "--models", "nosuch", "--closed-loop", "5"], 2, "--pool"),
        (["--pool", str(EXAMPLE / "models.yaml"), "--models", str(EXAMPLE / "models.yaml"), "--closed-loop", "5"], 1, "exactly one"),
        ([*FILES, "--closed-loop", "5", "--calibration", str(EXAMPLE / "pool.yaml")], 1, "calibration"),
    ],
)
def test_bad_input_ends_with_one_line_that_says_what_to_do(arguments: list[str], status: int, message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == status
    assert message in done.stderr
    assert "Traceback" not in done.output
