"""Clients that people have, each in an environment of its own, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pod_process import PodProcess, start_pod
from support.tiny_model import write_tiny_model
from support.tool_environment import tool_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = Path(__file__).parent / "clients"
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """A server of its own: of a model that can call tools."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with start_pod(model, tmp_path_factory.mktemp("pod")) as process:
        process.wait_ready()
        yield process


def run(*command: str | Path, folder: Path, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def test_langchain_and_litellm_get_what_they_expect(server: PodProcess, tmp_path: Path) -> None:
    script = CLIENTS / "langchain_litellm_client.py"
    ended = run(tool_environment(CLIENTS / "langchain_litellm.txt") / "python", script, f"{server.url}/v1", "tiny", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    chain, lite = told["langchain"], told["litellm"]
    assert chain["whole"]
    assert chain["streamed"] == chain["whole"]
    assert chain["batch"] == [chain["whole"]] * 2
    assert chain["finish_reason"] in ("stop", "length")
    assert sum(chain["streamed_usage"]) == chain["usage"]
    assert chain["structured"]["name"] in ("Rome", "Oslo")
    assert [call["name"] for call in chain["calls"]] == ["weather"]
    assert chain["calls"][0]["args"]["city"] in ("Rome", "Oslo")
    assert chain["logprobs"] > 0
    assert lite["whole"]
    assert lite["streamed"] == lite["whole"]
    assert lite["completion"] == chain["completion"]
    assert lite["refused"] == 400
    assert lite["embedding"] == chain["embedding"] == 64


def test_schemathesis_finds_neither_a_server_error_nor_a_hang(server: PodProcess, tmp_path: Path) -> None:
    ended = run(
        tool_environment(CLIENTS / "schemathesis.txt") / "schemathesis",
        *("run", f"{server.url}/openapi.json", "--url", server.url, "--checks", "not_a_server_error", "--include-method", "POST"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "30", "--max-time", "30", "--request-timeout", "30", "--workers", "2"),
        *("--seed", "1", "--generation-database", "none", "--no-color"),
        folder=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    server.wait(lambda: server.state()["running"] == 0, "free")
    assert server.http.get(f"{server.url}/ready").status_code == 200


def test_guidellm_measures_without_an_error(server: PodProcess, tmp_path: Path) -> None:
    ended = run(
        tool_environment(CLIENTS / "guidellm.txt") / "guidellm",
        *("benchmark", "--target", server.url, "--model", "tiny", "--processor", str(server.model_path), "--disable-progress"),
        *("--rate-type", "throughput", "--max-requests", "50", "--data", "prompt_tokens=32,output_tokens=16"),
        *("--output-path", str(tmp_path / "out.json")),
        folder=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    [measured] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert measured["request_totals"] == {"successful": 50, "errored": 0, "incomplete": 0, "total": 50}
    assert all(request["output_tokens"] == 16 for request in measured["requests"]["successful"])
