"""Recorded plans on disk: bounded, without repetition, and planned again as they were."""

from __future__ import annotations

from pathlib import Path

from npufleet_operator.core.plan import make_plan
from npufleet_operator.core.recording import digest, parse
from npufleet_operator.shell.recorder import PlanRecorder
from support.fleet import Fleet
from support.load import Load, elastic_spec, put_load


def fleet_of(load: int) -> Fleet:
    """One model with a load."""
    fleet = Fleet()
    fleet.add_model("tiny", elastic_spec())
    for _ in range(3):
        fleet.step()
    put_load(fleet, {"tiny": Load(load)})
    return fleet


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of each file, by name."""
    return {file.name: file.stat().st_size for file in folder.iterdir()}


async def test_a_recorded_plan_is_planned_again_as_it_was(tmp_path: Path) -> None:
    path, fleet = tmp_path / "plans.jsonl", fleet_of(35)
    observed, plan = fleet.observe(), fleet.plan()
    await PlanRecorder(path, 1 << 20).write(observed, fleet.now, plan)
    (line,) = path.read_text(encoding="utf-8").splitlines()
    recorded = parse(line)
    assert digest(make_plan(recorded.observed, recorded.now)) == recorded.digest == digest(plan)


async def test_a_plan_that_repeats_the_last_one_is_left_out(tmp_path: Path) -> None:
    path, fleet = tmp_path / "plans.jsonl", fleet_of(5)
    recorder = PlanRecorder(path, 1 << 20)
    for _ in range(3):
        await recorder.write(fleet.observe(), fleet.now, fleet.plan())
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1


async def test_both_files_together_keep_to_the_limit(tmp_path: Path) -> None:
    path, limit = tmp_path / "plans.jsonl", 64 * 1024
    recorder = PlanRecorder(path, limit)
    for load in range(20):
        fleet = fleet_of(load)
        await recorder.write(fleet.observe(), fleet.now, fleet.plan())
    sizes = sizes_in(tmp_path)
    assert sorted(sizes) == ["plans.jsonl", "plans.jsonl.1"]
    assert sum(sizes.values()) <= limit


async def test_a_plan_larger_than_the_limit_and_a_full_disk_stop_nobody(tmp_path: Path) -> None:
    fleet = fleet_of(5)
    await PlanRecorder(tmp_path / "plans.jsonl", 100).write(fleet.observe(), fleet.now, fleet.plan())
    await PlanRecorder(tmp_path / "missing" / "plans.jsonl", 1 << 20).write(fleet.observe(), fleet.now, fleet.plan())
    assert not sizes_in(tmp_path)
