"""What the command line says when it cannot start: one line, and exit code 1."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from npufleet_api.contract import EngineExit
from npufleet_pod.main import main
from support.pod_process import start_pod
from support.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def run(folder: Path, settings: dict[str, Any] | str) -> Result:
    path = folder / "engine.yaml"
    path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    (folder / "termination-log").write_text("")
    arguments = ["serve", "--settings", str(path), "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    return CliRunner().invoke(main, [*arguments, "--termination-log", str(folder / "termination-log")])


def damage(model: Path, change: str) -> None:
    if change == "config":
        (model / "config.json").write_text("{}")
    elif change == "tokenizer":
        (model / "tokenizer.json").write_text('{"version": "1.0"}')
    elif change == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif change == "template":
        fields = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": "{% for %}"}))
    elif change == "vocabulary":
        fields = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**fields, "vocab_size": 100}))


@pytest.mark.parametrize(
    ("change", "settings", "said", "code"),
    [
        ("", {"servedName": None}, "servedName: Input should be a valid string", EngineExit.SETTINGS),
        ("", {"modelPath": "/nowhere/models"}, "modelPath /nowhere/models: no such directory", EngineExit.MODEL),
        (
            "",
            {"device": "NPU"},
            "device: NPU needs torch_npu, which is not installed: use the Ascend image, or set device CPU",
            EngineExit.DEVICE,
        ),
        (
            "",
            {"tensorParallel": 5},
            "tensorParallel: 5 ranks, but a model with 4 attention heads can be cut into 4 at most: lower it",
            EngineExit.SETTINGS,
        ),
        ("", {"maxModelLength": 4096}, "maxModelLength: 4096 is beyond the model's max_position_embeddings 2048", EngineExit.SETTINGS),
        ("config", {}, "config.json: architectures: None names none", EngineExit.MODEL),
        ("tokenizer", {}, "tokenizer.json: not a tokenizer", EngineExit.MODEL),
        ("no tokenizer", {}, "tokenizer.json: no such file", EngineExit.MODEL),
        ("template", {}, "tokenizer_config.json: chat_template: ", EngineExit.MODEL),
        ("vocabulary", {}, "config.json's vocab_size is 100", EngineExit.MODEL),
    ],
)
def test_a_mistake_is_told_in_one_line_on_stderr_and_to_kubernetes(
    tmp_path: Path, change: str, settings: dict[str, Any], said: str, code: EngineExit
) -> None:
    model = write_tiny_model(tmp_path / "model")
    damage(model, change)
    result = run(tmp_path, {"modelPath": str(model), "servedName": "m", "device": "CPU", **settings})
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "termination-log").read_text() == result.stderr.rstrip("\n")


def test_a_port_that_is_taken_is_named(tmp_path: Path, pod: Any) -> None:
    port = pod.url.rsplit(":", 1)[1]
    (tmp_path / "engine.yaml").write_text("modelPath: /m\nservedName: m\n")
    result = CliRunner().invoke(main, ["serve", "--settings", str(tmp_path / "engine.yaml"), "--host", "127.0.0.1", "--port", port])
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1: Address already in use" in result.stderr


def test_weights_that_turn_out_damaged_while_loading_end_the_process_with_one_line(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (tmp_path / "termination-log").write_text("")
    with start_pod(model, tmp_path) as pod:
        assert pod.wait_end() == EngineExit.MODEL
        assert pod.stderr.count("\n") == 1
        assert f"{weights}: truncated, or not a safetensors file" in pod.stderr
        assert (tmp_path / "termination-log").read_text() == pod.stderr.rstrip("\n")


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(main, ["serve", "--help"])
    assert result.exit_code == 0
    assert "/etc/npufleet/engine.yaml" in result.output
