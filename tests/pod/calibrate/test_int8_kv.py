"""The command chooses KV heads, on a text or on the model's own, and what it writes is served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from npufleet_api.calibration import Calibration
from npufleet_api.settings import EngineSettings
from npufleet_pod.calibrate.int8_kv import choose_kv_heads, read_windows
from npufleet_pod.engine.device import CpuDevice
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.errors import SettingsError
from npufleet_pod.tokenizer import load_tokenizer
from support.local_engine import generate, local_engine, request

README = Path(__file__).parents[3] / "README.md"


async def test_settings_that_ask_for_chosen_heads_get_them_chosen_and_served(tiny_model: Path, tmp_path: Path) -> None:
    output, settings = tmp_path / "calibration.yaml", tmp_path / "engine.yaml"
    document = {
        "modelPath": str(tiny_model),
        "servedName": "m",
        "device": "CPU",
        "cpuThreads": 1,
        "maxModelLength": 300,
        "maxNumBatchedTokens": 256,
        "precision": {"kvCache": "Int8Heads"},
        "calibrationPath": str(output),
    }
    settings.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "npufleet_pod.main", "calibrate", "--settings", str(settings), "--output", str(output), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)  # noqa: ASYNC221 - nothing else runs on this loop
    assert done.returncode == 0, done.stderr
    assert "int8 kv: the model writes 2 texts of 256 tokens" in done.stderr
    calibration = Calibration.model_validate(yaml.safe_load(output.read_text()))
    assert calibration.int8_kv_heads is not None
    assert calibration.fusion is not None
    assert calibration.int8_kv_heads.layers == [[0, 1], [0, 1]]
    async with local_engine(tiny_model, precision={"kv_cache": "Int8Heads"}, calibration_path=str(output)) as engine:
        (chosen,) = await generate(engine, request("a", range(3, 60), 8))
    async with local_engine(tiny_model, precision={"kv_cache": "Int8"}) as engine:
        assert await generate(engine, request("a", range(3, 60), 8)) == [chosen]


def test_heads_are_chosen_on_the_text_that_is_named(tiny_model: Path) -> None:
    torch.set_num_threads(1)
    settings = EngineSettings(model_path=str(tiny_model), served_name="m", device="CPU", max_model_length=64)
    told: list[str] = []
    heads = choose_kv_heads(inspect_model(settings), CpuDevice(), README, quick=True, tell=told.append)
    assert len(heads.layers) == 2
    assert abs(heads.perplexity_loss_percent) <= heads.limit_percent
    assert told[0].startswith("int8 kv: measuring 4 heads")


def test_a_text_is_read_from_its_beginning_in_pieces(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    pieces = read_windows(README, tokenizer, 3, 50)
    assert [len(piece) for piece in pieces] == [50, 50, 50]
    assert [token for piece in pieces for token in piece] == tokenizer.encode(README.read_text(), add_special_tokens=False)[:150]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory: name a readable text, or leave --text out"),
        (b"good \xff bad", "not UTF-8 at byte 5: convert it"),
        (b"", "fewer than two tokens: give more of it"),
    ],
    ids=["absent", "binary", "empty"],
)
def test_a_text_that_cannot_be_used_is_refused(content: bytes | None, said: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=said):
        read_windows(path, load_tokenizer(tiny_model), 3, 50)
