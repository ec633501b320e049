from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npufleet_pod.errors import ModelError
from npufleet_pod.models.checkpoint import Checkpoint
from support.tiny_model import write_tiny_model

CPU = torch.device("cpu")
NORM = "model.norm.weight"


def read_norm(folder: Path, size: int = 64) -> torch.Tensor:
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        return checkpoint.tensor(NORM, (size,))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "sharded", shards=3)


def test_one_file_and_shards_hold_the_same_tensors(tiny_model: Path, sharded: Path) -> None:
    assert torch.equal(read_norm(tiny_model), read_norm(sharded))


def test_tensors_come_in_the_dtype_that_is_asked_for(tiny_model: Path) -> None:
    with Checkpoint(tiny_model, torch.bfloat16, CPU) as checkpoint:
        assert checkpoint.tensor(NORM, (64,)).dtype == torch.bfloat16


def rewrite(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    if change == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "garbage":
        path.write_bytes(b"\xff" * 4096)
    elif change == "gone":
        path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    else:
        tensors = load_file(path)
        if change == "missing":
            del tensors[NORM]
        elif change == "shape":
            tensors[NORM] = torch.zeros(63)
        elif change == "int8":
            tensors[NORM] = torch.zeros(64, dtype=torch.int8)
        save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("truncated", "model.safetensors: truncated, or not a safetensors file (.*): copy the file again"),
        ("empty", "model.safetensors: truncated, or not"),
        ("garbage", "model.safetensors: truncated, or not"),
        ("gone", r"no such file \(found 'pytorch_model.bin', which is not read\): copy the model's safetensors"),
        ("missing", "model.safetensors: tensor model.norm.weight is missing: copy the whole checkpoint"),
        ("shape", r"tensor model.norm.weight has shape \(63,\), config.json says \(64,\)"),
        ("int8", "tensor model.norm.weight is I8: use a checkpoint in BF16, F16, F32"),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path, change: str, said: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(ModelError, match=said) as caught:
        read_norm(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003.safetensors: no such file, though model.safetensors.index.json names it"):
        read_norm(sharded)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        (None, "weight_map is missing or empty"),
        ({}, "weight_map is missing or empty"),
        ({NORM: 1}, "weight_map: 1 is not a file name"),
        ({NORM: "../../etc/passwd"}, "is not a file name beside it"),
        ({"nothing": "model-00001-of-00003.safetensors"}, "tensor nothing is missing, though model.safetensors.index.json names it"),
    ],
    ids=str,
)
def test_a_bad_index_is_told(sharded: Path, weight_map: object, said: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=said):
        read_norm(sharded)
