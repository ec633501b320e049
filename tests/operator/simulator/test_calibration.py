"""Constants from measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npufleet_operator.errors import InputError
from npufleet_operator.simulator.calibration import load_calibration
from npufleet_operator.simulator.constants import DEVICES
from npufleet_operator.simulator.roofline import Roofline, decode, prefill
from npufleet_operator.simulator.shapes import SHAPES


def written(folder: Path, document: Any) -> Path:
    path = folder / "calibration.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_efficiencies_are_those_that_explain_the_measurements(tmp_path: Path) -> None:
    real = replace(DEVICES["910B3"], compute_efficiency=0.43, memory_efficiency=0.81, host_step_seconds=0.001)
    points = []
    for name, npus, sequences, context in (("llama2-13b", 1, 8, 8000), ("qwen2.5-72b", 8, 32, 60000), ("qwen-14b", 2, 16, 20000)):
        roofline = Roofline(real, SHAPES[name], npus)
        step, prompt = roofline.step_seconds(decode(sequences, context)), roofline.step_seconds(prefill(0, 4096))
        points.append(
            {
                "model": name, "npus": npus, "sequences": sequences, "context_tokens": context, "decode_step_ms": 1000 * step,
                "prompt_tokens": 4096, "prefill_ms": 1000 * prompt,
            }
        )  # fmt: skip
    document = {"device": "910B3", "constants": {"host_step_seconds": 0.001}, "measurements": points, "benchmark": "ignored"}
    device = load_calibration(written(tmp_path, document))
    assert device.compute_efficiency == pytest.approx(0.43)
    assert device.memory_efficiency == pytest.approx(0.81)
    assert device.host_step_seconds == 0.001


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "calibration"),
        ({}, "device"),
        ({"device": "H200"}, "device: 'H200' is unknown"),
        ({"device": "910B3", "constants": {"speed": 3}}, "constants.speed: unknown"),
        ({"device": "910B3", "constants": {"hbm_bytes": 0}}, "constants.hbm_bytes"),
        ({"device": "910B3", "measurements": [{"model": "gpt"}]}, "measurements.0.model: 'gpt' is unknown"),
        ({"device": "910B3", "measurements": [{"model": "qwen-14b", "decode_step_ms": -1}]}, "measurements.0.decode_step_ms"),
        ({"device": "910B3", "measurements": [{"model": "qwen-14b", "decode_step_ms": 0.001}]}, "measurements.0: 0.001 ms"),
    ],
)
def test_a_bad_calibration_is_refused_with_its_field(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_calibration(written(tmp_path, document))
    assert message in str(caught.value)
