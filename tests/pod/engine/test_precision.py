"""The whole engine with types by role: a request's tokens are its own with any of them, and settings that cannot be served are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from npufleet_api.model import Dtype
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.limits import memory_limits
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.resources import cpu_model
from npufleet_pod.errors import SettingsError
from support.local_engine import Recorder, generate, local_engine, request
from support.tiny_model import write_tiny_model
from support.tiny_model_gguf import write_gguf

pytestmark = pytest.mark.slow

COUNT = 16
MIB = 2**20
_random = random.Random(4)  # noqa: S311 - prompts of a test


def _tokens(count: int) -> list[int]:
    return [_random.randrange(3, 270) for _ in range(count)]


SYSTEM = _tokens(70)
PROMPTS = [SYSTEM + _tokens(5), SYSTEM + _tokens(1), SYSTEM[:48], _tokens(1), _tokens(130), _tokens(16)]

PLANS: dict[str, dict[str, str]] = {
    "int8 kv": {"kv_cache": "Int8"},
    "int8 kv of some heads": {"kv_cache": "Int8Heads"},
    "int8 weights": {"attention": "Int8", "feed_forward": "Int8", "output": "Int8"},
    "all of it": {"attention": "Int8", "feed_forward": "Int8", "kv_cache": "Int8Heads"},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "deep, whole layers": {"pipeline_depth": 4, "fusion_level": 3},
    "one sequence at a time, no prefix cache": {"max_num_sequences": 1, "prefix_cache": False},
    "chunks of 17, scattered memory": {"max_num_batched_tokens": 17, "continuous_memory": False, "block_size": 16},
    "little memory, small steps": {"kv_blocks": 14, "block_size": 16, "max_num_batched_tokens": 20, "starvation_steps": 3},
    "large blocks": {"block_size": 128},
}


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny model: one of two heads in the first layer, the other one in the second."""
    path = tmp_path_factory.mktemp("calibration") / "calibration.yaml"
    path.write_text(yaml.safe_dump(document([[1], [0]])))
    return path


def document(layers: list[list[int]] | None, **made_for: object) -> dict[str, Any]:
    shapes = {"architecture": "LlamaForCausalLM", "layers": 2, "hiddenSize": 64, "heads": 4, "kvHeads": 2, "headSize": 16}
    whole: dict[str, Any] = {"madeFor": {**shapes, "device": cpu_model(), "dtype": "Float32", **made_for}}
    if layers is not None:
        whole["int8KvHeads"] = {"layers": layers, "perplexityLossPercent": 0.02, "limitPercent": 0.1}
    return whole


def precise(name: str, calibration: Path) -> dict[str, Any]:
    return {"precision": PLANS[name], "calibration_path": str(calibration), "max_num_batched_tokens": 256}


_alone: dict[str, list[list[int]]] = {}


async def alone(name: str, model: Path, calibration: Path) -> list[list[int]]:
    """Each request's tokens when nothing else runs."""
    if name not in _alone:
        async with local_engine(model, **precise(name, calibration), pipeline_depth=1, prefix_cache=False) as engine:
            _alone[name] = [(await generate(engine, request(str(index), prompt, COUNT)))[0] for index, prompt in enumerate(PROMPTS)]
    return _alone[name]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", PLANS)
async def test_tokens_do_not_depend_on_what_they_are_computed_with(
    name: str, configuration: str, tiny_model: Path, calibration: Path
) -> None:
    expected = await alone(name, tiny_model, calibration)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "answers that are all the same prove nothing"
    async with local_engine(tiny_model, **{**precise(name, calibration), **CONFIGURATIONS[configuration]}) as engine:
        assert await generate(engine, *(request(str(index), prompt, COUNT) for index, prompt in enumerate(PROMPTS))) == expected


async def test_int8_pages_survive_traffic_between_the_tiers(tiny_model: Path, calibration: Path, tmp_path: Path) -> None:
    name = "int8 kv of some heads"
    expected = await alone(name, tiny_model, calibration)
    many: dict[str, Any] = {"kv_blocks": 20, "block_size": 16, "disk_cache_path": str(tmp_path / "kv")}
    async with local_engine(tiny_model, Recorder(), **precise(name, calibration), **many, host_cache_mi=1, disk_cache_mi=4) as engine:
        for turn in range(3):
            fillers = [request(f"filler {turn}.{index}", [index + 3] * 200, 2) for index in range(18)]
            requests = [request(f"{turn}.{index}", prompt, COUNT) for index, prompt in enumerate(PROMPTS)]
            assert (await generate(engine, *requests, *fillers))[: len(PROMPTS)] == expected
        moved = engine.residency()
    assert moved.stored > 0
    assert moved.loaded > 0
    assert moved.spilled > 0


async def test_int8_kv_is_in_effect_and_changes_little(tiny_model: Path) -> None:
    answers = []
    for plan in ({}, {"kv_cache": "Int8"}):
        async with local_engine(tiny_model, precision=plan) as engine:
            answers.append(await generate(engine, *(request(str(index), prompt, COUNT) for index, prompt in enumerate(PROMPTS))))
    float_answers, int8_answers = answers
    same = sum(one == two for left, right in zip(float_answers, int8_answers, strict=True) for one, two in zip(left, right, strict=True))
    assert same >= 0.7 * COUNT * len(PROMPTS)


async def test_a_gguf_file_is_served_with_int8_weights_and_kv(tiny_model: Path, tmp_path: Path) -> None:
    plan = {"attention": "Int8", "feed_forward": "Int8", "kv_cache": "Int8"}
    answers = []
    for model in (tiny_model, write_gguf(tiny_model, tmp_path / "gguf", "F32")):
        async with local_engine(model, precision=plan) as engine:
            answers.append(await generate(engine, *(request(str(index), prompt, COUNT) for index, prompt in enumerate(PROMPTS))))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3ForCausalLM"])
async def test_other_families_are_served_in_mixed_types(architecture: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, architecture=architecture, config={"head_dim": 16})
    plan = {"attention": "BFloat16", "feed_forward": "Int8", "output": "Float32", "kv_cache": "Int8"}
    requests = [request(str(index), prompt, COUNT) for index, prompt in enumerate(PROMPTS)]
    async with local_engine(model) as engine:
        exact = await generate(engine, *requests)
    async with local_engine(model, precision=plan, dtype="BFloat16") as engine:
        mixed = await generate(engine, *requests)
    assert sum(one[0] == two[0] for one, two in zip(exact, mixed, strict=True)) >= len(PROMPTS) - 1


def parsed(model: Path, **fields: Any) -> EngineSettings:
    return EngineSettings.model_validate({"model_path": str(model), "served_name": "m", "device": "CPU", **fields})


@pytest.mark.parametrize(
    ("dtype", "plan", "bytes_per_token"),
    [
        ("Float32", {}, 2 * 4 * 16 * 4),
        ("BFloat16", {}, 2 * 4 * 16 * 2),
        ("Float32", {"attention": "BFloat16"}, 2 * 4 * 16 * 2),
        ("Float32", {"kv_cache": "Int8"}, 2 * 4 * (16 + 4)),
        ("BFloat16", {"kv_cache": "Int8Heads"}, 2 * (2 * 16 * 2 + 2 * (16 + 4))),
    ],
    ids=str,
)
def test_memory_is_counted_as_the_cache_takes_it(
    dtype: str, plan: dict[str, str], bytes_per_token: int, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text(yaml.safe_dump(document([[1], [0]], dtype=dtype)))
    chosen = parsed(tiny_model, dtype=dtype, precision=plan, calibration_path=str(path), block_size=64, max_num_sequences=4096)
    files = inspect_model(chosen)
    free = 100 * MIB
    enough = memory_limits(chosen, files, free).kv_blocks
    twice = memory_limits(chosen, files, free, 2 * bytes_per_token).kv_blocks
    assert enough == memory_limits(chosen, files, free, bytes_per_token).kv_blocks
    assert enough > twice
    roomy = chosen.model_copy(update={"max_num_sequences": 1, "host_cache_mi": 1})
    loaded = load_engine(roomy, files, lambda: True)
    try:
        assert loaded.tiers.host is not None
        assert loaded.tiers.host.page_bytes == 64 * bytes_per_token
        assert files.dtype is Dtype(dtype)
    finally:
        loaded.tiers.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"calibrationPath .*: No such file or directory: mount the calibration there"),
        ("madeFor: [", "not YAML: .*: run npufleet-pod calibrate again"),
        ("madeFor: {layers: 2}", "madeFor.*: run npufleet-pod calibrate again"),
        (
            document(None),
            "Int8Heads needs a calibration that chose heads: run npufleet-pod calibrate and set calibrationPath, or choose Int8",
        ),
        (document([[0]]), "int8KvHeads has 1 layers, the model 2"),
        (document([[0], [7]]), "int8KvHeads names head 7, the model has 2"),
    ],
    ids=["absent", "not yaml", "incomplete", "no heads", "layers", "heads"],
)
def test_a_calibration_that_cannot_be_used_is_refused_with_the_remedy(content: object, said: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    if content is not None:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(SettingsError, match=said):
        inspect_model(parsed(tiny_model, precision={"kv_cache": "Int8Heads"}, calibration_path=str(path)))
