"""Embeddings by the official client, against transformers on the same weights."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from npufleet_pod.engine.request import Pooling
from npufleet_pod.errors import ModelError
from npufleet_pod.server.pooling import load_pooling
from support.pod_process import PodProcess, start_pod
from support.tiny_model import write_tiny_model

INPUTS = [[5, 6, 7], list(range(3, 90)), [9], [11] * 40]
Vectors = list[list[float]]


@pytest.fixture(scope="module")
def mean_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """Pools by the mean, in chunks of 16 tokens."""
    folder = tmp_path_factory.mktemp("mean")
    model = write_tiny_model(folder / "model")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with start_pod(model, folder, max_num_batched_tokens=16, max_num_sequences=3) as pod:
        pod.wait_ready()
        yield pod


def expected(model: Path, pooling: Pooling) -> Vectors:
    import torch
    from transformers import AutoModel

    oracle = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    vectors = []
    with torch.inference_mode():
        for tokens in INPUTS:
            hidden = oracle(torch.tensor([tokens])).last_hidden_state[0]
            pooled = hidden.mean(0) if pooling is Pooling.MEAN else hidden[-1]
            vectors.append((pooled / pooled.norm()).tolist())
    return vectors


def embed(pod: PodProcess, given: Any, **fields: Any) -> Vectors:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=given, **fields)
        assert [one.index for one in answer.data] == list(range(len(answer.data)))
        return [one.embedding for one in answer.data]


def post(pod: PodProcess, **fields: Any) -> Any:
    return pod.http.post(f"{pod.url}/v1/embeddings", json={"model": "tiny", "input": "hello", **fields})


def close(one: Vectors, other: Vectors) -> None:
    for left, right in zip(one, other, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


def test_vectors_equal_transformers_by_the_last_token_unless_the_model_says_otherwise(pod: PodProcess, mean_pod: PodProcess) -> None:
    close(embed(pod, INPUTS), expected(pod.model_path, Pooling.LAST))
    close(embed(mean_pod, INPUTS), expected(mean_pod.model_path, Pooling.MEAN))
    # Nothing of a prompt may come from a cache.
    close(embed(mean_pod, INPUTS), expected(mean_pod.model_path, Pooling.MEAN))


def test_every_encoding_and_form_of_input_tells_the_same(pod: PodProcess) -> None:
    [plain] = post(pod, input="the hello").json()["data"]
    [packed] = post(pod, input=["the hello"], encoding_format="base64").json()["data"]
    raw = base64.b64decode(packed["embedding"])
    close([list(struct.unpack(f"<{len(raw) // 4}f", raw))], [plain["embedding"]])
    tokens = pod.http.post(f"{pod.url}/tokenize", json={"prompt": "the hello"}).json()["tokens"]
    answer = post(pod, input=tokens, dimensions=len(plain["embedding"])).json()
    close([answer["data"][0]["embedding"]], [plain["embedding"]])
    assert answer["usage"] == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    long = post(pod, input=[3] * 4000 + tokens, truncate_prompt_tokens=len(tokens)).json()
    close([long["data"][0]["embedding"]], [plain["embedding"]])
    assert sum(value * value for value in post(pod, normalize=False).json()["data"][0]["embedding"]) != pytest.approx(1)


def test_more_inputs_than_the_queue_holds_are_computed_in_turns(mean_pod: PodProcess) -> None:
    vectors = embed(mean_pod, [[5, 6, index] for index in range(3, 203)])
    assert len({tuple(vector) for vector in vectors}) == 200
    mean_pod.wait(lambda: mean_pod.metric("vllm:kv_cache_usage_perc") == 0, "free again")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [99999]}, "input"),
        ({"input": [5] * 4000}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"dimensions": 7}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_inputs_that_cannot_be_embedded_are_refused(pod: PodProcess, fields: dict[str, Any], param: str) -> None:
    answer = post(pod, **fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, Pooling.FIRST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        (None, Pooling.LAST),
    ],
)
def test_the_model_says_how_it_is_pooled(config: Any, pooling: Pooling, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert load_pooling(tmp_path, Pooling.LAST) is pooling


@pytest.mark.parametrize("config", [{}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, {"pooling_mode_cls_token": 7}])
def test_a_pooling_that_is_not_served_is_the_models_fault(config: Any, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="1_Pooling"):
        load_pooling(tmp_path, Pooling.LAST)
