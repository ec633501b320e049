"""`npufleet model` against a hub on loopback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from npufleet_operator.cli.model_needs import needs
from npufleet_operator.cli.npufleet import main as npufleet
from support.hub_server import Hub, serve_hub

QWEN72B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
FILES = {
    "config.json": json.dumps(QWEN72B).encode(),
    "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
    "model.safetensors": b"w" * 100_000,
    "LICENSE": b"Qwen",
}


async def run(*arguments: str) -> tuple[int, str]:
    """The command, in a thread: it has a loop of its own."""
    result = await asyncio.to_thread(CliRunner().invoke, npufleet, ["model", *arguments])
    return result.exit_code, result.output


def cached_weights(cache: Path) -> list[bytes]:
    """Weights of every published model."""
    return [path.read_bytes() for path in cache.glob("v1/models/*/*/model.safetensors")]


def test_a_model_of_72_billion_parameters_needs_four_npus_of_64_gb() -> None:
    found = needs(QWEN72B, "r", 145 * 10**9, 145 * 10**9, 32768, (64,), template=True, licence="LICENSE")
    # 80 layers, 8 KV heads of 128, K and V, 2 bytes each.
    assert found.kv_bytes_per_token == 80 * 8 * 128 * 2 * 2
    assert [fit.tensor for fit in found.fits if fit.fits] == [4, 8, 16]


async def test_inspect_reads_small_files_only() -> None:
    async with serve_hub(Hub(dict(FILES))) as hub:
        code, output = await run("inspect", "hf://org/tiny", "--endpoint", hub.url, "--json")
        assert code == 0, output
        found = json.loads(output)
        assert (found["architecture"], found["context"], found["chat_template"], found["licence"], found["weights_bytes"]) == (
            "Qwen2ForCausalLM",
            32768,
            True,
            "LICENSE",
            100_000,
        )
        assert not any("model.safetensors" in line for line in hub.requests)
        code, output = await run("inspect", "hf://org/tiny", "--endpoint", hub.url)
        assert code == 0
        assert "Qwen2ForCausalLM" in output


async def test_prefetch_fills_a_cache(tmp_path: Path) -> None:
    async with serve_hub(Hub(dict(FILES))) as hub:
        code, output = await run("prefetch", "hf://org/tiny", "--endpoint", hub.url, "--cache", str(tmp_path))
        assert code == 0, output
        assert f"hf://org/tiny@{hub.commit}" in output
    assert cached_weights(tmp_path) == [FILES["model.safetensors"]]


async def test_what_is_prefetched_with_credentials_is_for_one_namespace(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "token").write_text("hf_secret")
    arguments = ("prefetch", "hf://org/tiny", "--cache", str(tmp_path / "cache"), "--credentials", str(credentials))
    code, output = await run(*arguments)
    assert (code, "--namespace" in output) == (1, True)
    async with serve_hub(Hub(dict(FILES), token="hf_secret")) as hub:
        for namespace in ("team-a", "team-b"):
            code, output = await run(*arguments, "--endpoint", hub.url, "--namespace", namespace)
            assert code == 0, output
            assert "hf_secret" not in output
    assert len(cached_weights(tmp_path / "cache")) == 2


async def test_a_cache_of_another_user_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    code, output = await run("prefetch", "hf://org/tiny", "--cache", str(tmp_path))
    assert (code, "setpriv" in output) == (1, True)


@pytest.mark.parametrize(
    ("uri", "words"), [("hf://org/absent", "there is no such model"), ("nonsense", "unknown scheme"), ("pvc://a/b", "mounted, not fetched")]
)
async def test_what_cannot_be_inspected_is_said_in_one_line(uri: str, words: str) -> None:
    async with serve_hub(Hub(dict(FILES))) as hub:
        code, output = await run("inspect", uri, "--endpoint", hub.url)
    assert code == 1
    assert words in output
    assert len(output.strip().splitlines()) == 1
