"""Vectors of BERT-type encoders from a real server equal transformers' on the same random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from npufleet_api.contract import EngineExit
from support.pod_process import PodProcess, start_pod

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "the", "cat", "sat", "on", "a", "mat", "##s", "##ing", "run"]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": len(WORDS)}
TEXTS = ["hello the cat", "the cats sat on a mat", "running", "hello " * 50]


def write_encoder(folder: Path) -> Any:
    """A random BERT with a WordPiece tokenizer, written to `folder`; returns transformers' model."""
    import transformers

    torch.manual_seed(3)
    config: Any = transformers.BertConfig
    model: Any = transformers.BertModel(config(**SIZES, max_position_embeddings=64))
    model.eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "bert"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return write_encoder(folder)


@pytest.fixture(scope="module")
def server(folder: Path, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    with start_pod(folder, tmp_path_factory.mktemp("pod"), max_num_sequences=3) as process:
        process.wait_ready()
        yield process


def expected(folder: Path, oracle: Any, text: str, pooling: str = "mean") -> list[float]:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    with torch.inference_mode():
        states = oracle(torch.tensor([ids])).last_hidden_state[0]
    vector = torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[0], dim=0)
    result: list[float] = vector.tolist()
    return result


def test_vectors_equal_transformers_alone_and_together(server: PodProcess, folder: Path, oracle: Any) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        together = client.embeddings.create(model="tiny", input=TEXTS * 10)
        assert len(together.data) == 40
        for index, text in enumerate(TEXTS):
            alone = client.embeddings.create(model="tiny", input=text)
            for one in (alone.data[0], together.data[index], together.data[index + 36]):
                assert one.embedding == pytest.approx(expected(folder, oracle, text), abs=1e-5)
        assert alone.usage.prompt_tokens == 52
    server.wait(lambda: server.state()["running"] == 0 and server.metric("vllm:kv_cache_usage_perc") == 0, "free")
    assert server.metric("vllm:request_success_total", finished_reason="length") > 40


def test_texts_are_bounded_by_the_models_positions(server: PodProcess) -> None:
    assert server.http.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 64
    for count, status in ((62, 200), (63, 400)):
        body: dict[str, Any] = {"model": "tiny", "input": "hello " * count}
        assert server.http.post(f"{server.url}/v1/embeddings", json=body).status_code == status
        cut = server.http.post(f"{server.url}/v1/embeddings", json={**body, "truncate_prompt_tokens": -1})
        assert cut.json()["usage"]["prompt_tokens"] == 64
    ids = [2, *[5] * 61, 3]
    whole, cut = (
        server.http.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": one, **more}).json()["data"][0]["embedding"]
        for one, more in (([2, 5, 5, 3], {}), (ids, {"truncate_prompt_tokens": 4}))
    )
    assert cut == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_encoder_writes_no_text(server: PodProcess, path: str) -> None:
    body = {"model": "tiny", "prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
    answer = server.http.post(f"{server.url}/v1/{path}", json=body)
    assert answer.status_code == 400
    assert "ask /v1/embeddings" in answer.json()["error"]["message"]


def test_the_models_own_pooling_is_taken(folder: Path, oracle: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (model / path.name).write_bytes(path.read_bytes())
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with start_pod(model, tmp_path) as pod:
        pod.wait_ready()
        answer = pod.http.post(f"{pod.url}/v1/embeddings", json={"model": "tiny", "input": TEXTS[1]}).json()
        assert answer["data"][0]["embedding"] == pytest.approx(expected(folder, oracle, TEXTS[1], "first"), abs=1e-5)
        pod.terminate()
        assert pod.wait_end() == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"tensor_parallel": 2}, "an encoder is served by one"), ({"max_model_length": 100}, "beyond the model's 64 positions")],
)
def test_settings_that_do_not_fit_an_encoder_are_told(
    folder: Path, oracle: Any, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with start_pod(folder, tmp_path, **settings) as pod:
        assert pod.wait_end() == EngineExit.SETTINGS
        assert said in pod.stderr
