"""What `npufleet-pod calibrate` writes is parsed within bounds."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from npufleet_api.calibration import Calibration

MADE_FOR = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "hiddenSize": 64,
    "heads": 4,
    "kvHeads": 2,
    "headSize": 16,
    "device": "Ascend910B3",
    "dtype": "BFloat16",
}


def test_every_part_but_what_it_was_made_for_may_be_left_out() -> None:
    calibration = Calibration.model_validate({"madeFor": MADE_FOR})
    assert (calibration.fusion, calibration.batch, calibration.int8_kv_heads) == (None, None, None)


def test_the_whole_file_comes_back_as_written() -> None:
    document = {
        "madeFor": {**MADE_FOR, "tensorParallel": 2},
        "fusion": {
            "fullTokens": 300,
            "twoPhaseTokens": 4000,
            "points": [{"strategy": "Full", "tokens": 128, "newTokens": 128, "milliseconds": 0.5}],
        },
        "batch": {"maxNumSequences": 96, "points": [{"sequences": 32, "tokensPerSecond": 900.5}]},
        "int8KvHeads": {"layers": [[0], [0, 1]], "perplexityLossPercent": -0.01, "limitPercent": 0.1},
    }
    assert Calibration.model_validate(document).model_dump(mode="json", by_alias=True) == document


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fusion": {"fullTokens": 3000, "twoPhaseTokens": 2048}}, "fullTokens: 3000 is above twoPhaseTokens 2048"),
        ({"fusion": {"fullTokens": 0}}, "fusion.fullTokens"),
        ({"batch": {"maxNumSequences": 5000}}, "batch.maxNumSequences"),
        ({"batch": {"maxNumSequences": 5, "points": [{"sequences": 1, "tokensPerSecond": float("nan")}]}}, "tokensPerSecond"),
        ({"int8KvHeads": {"layers": [[1, 1]], "perplexityLossPercent": 0, "limitPercent": 1}}, "does not list each head once"),
        ({"int8KvHeads": {"layers": [[-1]], "perplexityLossPercent": 0, "limitPercent": 1}}, "int8KvHeads.layers.0.0"),
        ({"madeFor": {**MADE_FOR, "layers": 0}}, "madeFor.layers"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Calibration.model_validate({"madeFor": MADE_FOR, **change})
