"""The command measures a real model, writes what serving takes, and says what is wrong in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from npufleet_api.calibration import Calibration
from npufleet_api.contract import EngineExit
from npufleet_pod.calibrate.turns import MORE, in_turns
from npufleet_pod.engine.fusion import ORDER
from npufleet_pod.engine.resources import cpu_model
from support.pod_process import start_pod


def run(folder: Path, model: Path, *options: str, output: Path | None = None, **settings: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "engine.yaml"
    document = {"modelPath": str(model), "servedName": "m", "device": "CPU", "cpuThreads": 1, "maxNumBatchedTokens": 256, **settings}
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "npufleet_pod.main", "calibrate", "--settings", str(path)]
    arguments = ["--output", str(output or folder / "calibration.yaml"), *options]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def calibrated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("calibrated")
    # A calibration that is not there yet is no reason not to make one.
    done = run(folder, tiny_model, "--quick", maxModelLength=600, calibrationPath=str(folder / "calibration.yaml"))
    return folder / "calibration.yaml", done


def test_everything_measured_is_in_the_file_beside_what_was_chosen(
    calibrated: tuple[Path, subprocess.CompletedProcess[str]], tiny_model: Path
) -> None:
    path, done = calibrated
    assert done.returncode == 0, done.stderr
    calibration = Calibration.model_validate(yaml.safe_load(path.read_text()))
    made = calibration.made_for
    assert (made.architecture, made.layers, made.heads, made.device) == ("LlamaForCausalLM", 2, 4, cpu_model())
    assert calibration.fusion is not None
    assert calibration.batch is not None
    measured = {(point.strategy, point.tokens, point.new_tokens) for point in calibration.fusion.points}
    lengths = (64, 256, 512)
    assert measured == {(one.value, length, new) for one in ORDER for length in lengths for new in (1, min(length, 256))}
    sizes = [point.sequences for point in calibration.batch.points]
    assert calibration.batch.max_num_sequences in sizes
    assert {1, 32, 64, 96, 128} <= set(sizes)
    assert oct(path.stat().st_mode)[-3:] == "644"
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


def test_progress_is_for_people_and_the_log_for_machines(calibrated: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    path, done = calibrated
    lines = done.stderr.splitlines()
    assert lines[0].startswith("loading ")
    assert lines[-1] == f"written: {path}"
    assert any(line.startswith("attention: 256 tokens, prompt of 256, TwoPhase: ") for line in lines)
    assert any(line.startswith("batch: 64 sequences: ") for line in lines)
    logged = [json.loads(line) for line in done.stdout.splitlines()]
    assert "calibrated" in [line["message"] for line in logged]


def test_serving_takes_what_was_measured(
    calibrated: tuple[Path, subprocess.CompletedProcess[str]], tiny_model: Path, tmp_path: Path
) -> None:
    path, _ = calibrated
    document = yaml.safe_load(path.read_text())
    document["fusion"].update(fullTokens=7, twoPhaseTokens=9)
    changed = tmp_path / "calibration.yaml"
    changed.write_text(yaml.safe_dump(document))
    with start_pod(tiny_model, tmp_path, calibration_path=str(changed), profile="HighConcurrencyChat") as pod:
        pod.wait_ready()
        loaded = next(line for line in pod.logs() if line["message"] == "model loaded")
        measured = next(line for line in pod.logs() if line["message"] == "step measured")
    assert loaded["fusion_thresholds"] == {"full_tokens": 7, "two_phase_tokens": 9}
    assert measured["sequences"] == document["batch"]["maxNumSequences"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 30}, "madeFor.layers: 30, but 2 is served"),
        ({"dtype": "BFloat16"}, "madeFor.dtype: 'BFloat16', but 'Float32' is served"),
        ({"device": "Ascend910B3"}, "madeFor.device: 'Ascend910B3', but "),
        ({"tensorParallel": 2}, "madeFor.tensorParallel: 2, but 1 is served"),
    ],
)
def test_what_was_made_for_something_else_is_refused_with_the_remedy(
    change: dict[str, Any], said: str, calibrated: tuple[Path, subprocess.CompletedProcess[str]], tiny_model: Path, tmp_path: Path
) -> None:
    document = yaml.safe_load(calibrated[0].read_text())
    document["madeFor"].update(change)
    changed = tmp_path / "calibration.yaml"
    changed.write_text(yaml.safe_dump(document))
    with start_pod(tiny_model, tmp_path, calibration_path=str(changed)) as pod:
        assert pod.wait_end() == EngineExit.SETTINGS
        assert said in pod.stderr
        assert "run npufleet-pod calibrate for this model on this device, or unset calibrationPath" in pod.stderr
        assert pod.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "settings", "code", "said"),
    [
        ("nowhere/calibration.yaml", {}, EngineExit.SETTINGS, "nowhere/calibration.yaml: No such file or directory: name a file in a"),
        (".", {}, EngineExit.SETTINGS, "is a directory: name a file in it"),
        ("c.yaml", {"device": "NPU"}, EngineExit.DEVICE, "device: NPU needs torch_npu, which is not installed"),
        ("c.yaml", {"modelPath": "/nowhere"}, EngineExit.MODEL, "modelPath /nowhere: no such directory"),
        ("c.yaml", {"maxNumSeqs": 3}, EngineExit.SETTINGS, "maxNumSeqs: no such field"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(
    output: str, settings: dict[str, Any], code: int, said: str, tiny_model: Path, tmp_path: Path
) -> None:
    done = run(tmp_path, tiny_model, output=tmp_path / output, **settings)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine.yaml"]


def test_a_file_that_stood_there_is_left_alone_by_a_failure(tiny_model: Path, tmp_path: Path) -> None:
    before = tmp_path / "calibration.yaml"
    before.write_text("what was there")
    broken = tmp_path / "model"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:5000] if file.suffix == ".safetensors" else file.read_bytes())
    done = run(tmp_path, broken)
    assert done.returncode == EngineExit.MODEL
    assert before.read_text() == "what was there"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["calibration.yaml", "engine.yaml", "model"]


def test_short_work_is_repeated_more_often_and_long_work_as_often_as_asked() -> None:
    now = [0.0]

    def takes(seconds: float) -> float:
        now[0] += seconds
        return seconds

    work = {"a": lambda: takes(0.001), "b": lambda: takes(0.002)}
    short = in_turns(work, 3, lambda: now[0])
    assert [len(results) for results in short.values()] == [3 * MORE] * 2
    long = in_turns({"a": lambda: takes(5.0)}, 3, lambda: now[0])
    assert long == {"a": [5.0] * 3}
