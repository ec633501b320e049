"""The benchmarks of precision on a tiny model: what they print, and that it fits together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def run(command: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{command}", "--threads", "1", "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_int8_heads_are_chosen_and_measured_on_other_text(tiny_model: Path) -> None:
    found = run("int8_heads", "--model", str(tiny_model), "--text-tokens", "300")["int8_heads"]
    assert found["text"]["tokens"] == 300
    assert found["calibration"]["divergence_percent"] <= found["calibration"]["limit_percent"]
    # A head of 16 elements takes 16 + 4 bytes instead of 32 in bfloat16 and 64 in float32.
    share = found["heads"] / found["all_heads"]
    assert found["memory_saved_percent"] == pytest.approx(100 * share * (1 - 20 / 32))
    assert found["memory_saved_percent_by_dtype"]["Float32"] == pytest.approx(100 * share * (1 - 20 / 64))
    assert found["perplexity"]["int8_heads"] / found["perplexity"]["float"] - 1 == pytest.approx(found["perplexity_loss_percent"] / 100)


def test_every_row_of_precision_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    made_for = {"architecture": "LlamaForCausalLM", "layers": 2, "hiddenSize": 64, "heads": 4, "kvHeads": 2, "headSize": 16}
    heads = {"layers": [[1], []], "perplexityLossPercent": 0.01, "limitPercent": 0.1}
    path = tmp_path / "calibration.yaml"
    path.write_text(yaml.safe_dump({"madeFor": {**made_for, "device": "cpu", "dtype": "Float32"}, "int8KvHeads": heads}))
    rows = run("precision", "--model", str(tiny_model), "--text-tokens", "300", "--heads", str(path))["rows"]
    assert rows["float32"]["perplexity_loss_percent"] == 0
    assert all(abs(row["perplexity_loss_percent"]) < 2 for row in rows.values())
    assert all(row["perplexity_loss_percent"] != 0 for name, row in rows.items() if name != "float32")
    assert rows["all linears int8"]["weights_mib"] < rows["feed-forward int8"]["weights_mib"] < rows["float32"]["weights_mib"]
    assert rows["kv int8, all heads"]["kv_bytes_per_token"] == 2 * 4 * 20
    assert rows["kv int8, chosen heads"]["kv_bytes_per_token"] == 2 * (3 * 64 + 20)
