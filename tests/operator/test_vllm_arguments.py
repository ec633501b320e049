"""What an AscendModel asks for, as vLLM's own parser takes it; and what vLLM cannot do, refused with field and remedy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_api.conditions import Reason
from npufleet_api.model import AscendModelSpec, EngineOverrides, EngineProfile
from npufleet_api.pool import Device
from npufleet_operator.core.vllm_arguments import ALLOWED, FIELDS, WITHOUT_EFFECT, vllm_arguments, vllm_refusal
from support.fleet import Fleet, is_quiet, model_spec, pool_spec

IMAGE = "registry.example.com/vllm-ascend:1"
OPTION_FILES = sorted((Path(__file__).parent / "vllm_options").glob("*.json"))
VALUES: dict[str, str] = {
    "--additional-config": '{"ascend_scheduler_config": {}}',
    "--gpu-memory-utilization": "0.9",
    "--limit-mm-per-prompt": '{"image": 2}',
    "--long-prefill-token-threshold": "512",
    "--max-logprobs": "20",
    "--override-generation-config": '{"temperature": 0.5}',
    "--quantization": "ascend",
    "--reasoning-parser": "qwen3",
    "--seed": "7",
    "--tool-call-parser": "hermes",
}


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser(options: Path) -> Parser:
    """A parser as strict as vLLM's about names, numbers of values, whole numbers, numbers and choices."""
    built = Parser(allow_abbrev=False, add_help=False)
    types: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
    for option, entry in json.loads(options.read_text(encoding="utf-8")).items():
        if entry["takes"] == "nothing":
            built.add_argument(option, action="store_true", dest=option)
            continue
        nargs = {"value": None, "optional": "?", "values": "+"}[entry["takes"]]
        kind = types.get(entry["type"], str)
        named = {} if not option.startswith("-") else {"dest": option}
        built.add_argument(option, nargs=nargs, type=kind, choices=[kind(c) for c in entry.get("choices", ())] or None, **named)
    return built


def vllm(**changes: Any) -> AscendModelSpec:
    runtime = {"name": "VLLMAscend", **changes.pop("runtime", {})}
    return model_spec(runtime=runtime, **changes)


def parsed(spec: AscendModelSpec, options: Path) -> dict[str, Any]:
    return vars(parser(options).parse_args(list(vllm_arguments("team", "tiny", spec))))


def test_there_is_a_list_of_options() -> None:
    assert OPTION_FILES


@pytest.mark.parametrize("options", OPTION_FILES, ids=lambda path: path.stem)
class TestVllmsOwnParser:
    @pytest.mark.parametrize("profile", list(EngineProfile))
    def test_takes_every_profile(self, options: Path, profile: EngineProfile) -> None:
        found = parsed(vllm(engine={"profile": profile}, parallelism={"tensor": 4, "pipeline": 2}), options)
        assert found["model_tag"] == "/models"
        assert found["--served-model-name"] == ["tiny", "team/tiny"]
        assert (found["--tensor-parallel-size"], found["--pipeline-parallel-size"], found["--block-size"]) == (4, 2, 128)
        assert (found["--dtype"], found["--kv-cache-dtype"], found["--port"]) == ("auto", "auto", 8000)
        assert found["--enable-prefix-caching"]
        assert not found["--no-enable-prefix-caching"]

    @pytest.mark.parametrize(
        ("engine", "option", "value"),
        [
            ({"dtype": "BFloat16"}, "--dtype", "bfloat16"),
            ({"dtype": "Float16"}, "--dtype", "float16"),
            ({"dtype": "Float32"}, "--dtype", "float32"),
            ({"maxModelLength": 4096}, "--max-model-len", 4096),
            ({"maxNumSequences": 7}, "--max-num-seqs", 7),
            ({"maxNumBatchedTokens": 2048}, "--max-num-batched-tokens", 2048),
            ({"prefixCache": False}, "--no-enable-prefix-caching", True),
            ({"prefixCache": True}, "--enable-prefix-caching", True),
            ({"chunkedPrefill": True}, "--enable-chunked-prefill", True),
            ({"chunkedPrefill": False, "maxModelLength": 4096}, "--no-enable-chunked-prefill", True),
            ({"asynchronousExecution": True}, "--async-scheduling", True),
            ({"asynchronousExecution": False}, "--no-async-scheduling", True),
            ({"toolFormat": "Hermes"}, "--tool-call-parser", "hermes"),
            ({"toolFormat": "Llama"}, "--tool-call-parser", "llama3_json"),
            ({"toolFormat": "Llama"}, "--enable-auto-tool-choice", True),
            ({"toolFormat": "Auto"}, "--enable-auto-tool-choice", False),
        ],
    )
    def test_takes_each_field(self, options: Path, engine: dict[str, Any], option: str, value: object) -> None:
        spec = vllm(engine=engine)
        assert vllm_refusal(spec, Device.NPU) == ""
        assert str(parsed(spec, options)[option]) == str(value)

    def test_takes_every_allowed_argument_and_knows_those_that_fields_say(self, options: Path) -> None:
        for option, check in ALLOWED.items():
            assert (check is not None) == (option in VALUES)
        spec = vllm(runtime={"args": [f"{option}={VALUES[option]}" if option in VALUES else option for option in ALLOWED]})
        assert vllm_refusal(spec, Device.NPU) == ""
        found = parsed(spec, options)
        for option in ALLOWED:
            assert str(found[option]) == VALUES.get(option, "True")
        assert FIELDS.keys() <= json.loads(options.read_text(encoding="utf-8")).keys()

    def test_refuses_what_it_does_not_know(self, options: Path) -> None:
        for wrong in ("--no-such-option", "--dtype=float8", "--max-num-seqs=many", "--enforce-eager=1"):
            with pytest.raises(ValueError, match=r"unrecognized|invalid|ignored explicit"):
                parser(options).parse_args(["/models", wrong])


def test_both_names_reach_vllm_once() -> None:
    arguments = vllm_arguments("team", "tiny", vllm(model={"uri": "pvc://x", "servedName": "team/tiny"}))
    assert arguments.count("team/tiny") == 1


def test_a_fetched_model_is_read_where_it_was_fetched_to() -> None:
    assert vllm_arguments("team", "tiny", vllm(model={"uri": "hf://Qwen/Qwen3-8B"}))[0] == "/models/current"


REFUSED = [
    ({"engine": {"blockSize": 16}}, "spec.engine.blockSize", "set it to 128"),
    ({"engine": {"maxQueuedRequests": 9}}, "spec.engine.maxQueuedRequests", "queueSeconds"),
    ({"engine": {"calibrationRef": {"name": "c"}}}, "spec.engine.calibrationRef", "Native"),
    ({"engine": {"hostCacheMi": 64}}, "spec.engine.hostCacheMi", "remove it"),
    ({"engine": {"hostCacheMi": 0, "diskCacheMi": 64}}, "spec.engine.diskCacheMi", "remove it"),
    ({"engine": {"precision": {"kvCache": "Int8"}}}, "spec.engine.precision.kvCache", "remove it"),
    ({"engine": {"precision": {"feedForward": "Int8"}}}, "spec.engine.precision.feedForward", "--quantization=ascend"),
    ({"engine": {"precision": {"layers": [{"first": 0, "last": 1}]}}}, "spec.engine.precision.layers", "remove it"),
    ({"engine": {"chunkedPrefill": False}}, "spec.engine.chunkedPrefill", "maxModelLength to at most 16384"),
    ({"engine": {"chunkedPrefill": False, "maxModelLength": 20000}}, "spec.engine.chunkedPrefill", "at most 16384"),
    ({"engine": {"maxNumBatchedTokens": 16}}, "spec.engine.maxNumBatchedTokens", "raise it to 64"),
    ({"model": {"uri": "hf://a/b", "files": ["*Q4_K_M.gguf"]}}, "spec.model.files", "safetensors"),
    ({"runtime": {"args": ["seed=1"]}}, "'seed=1'", "write --NAME"),
    ({"runtime": {"args": ["--seed"]}}, "'--seed'", "--seed=VALUE"),
    ({"runtime": {"args": ["--seed=-1"]}}, "'--seed=-1'", "whole number from 0"),
    ({"runtime": {"args": ["--seed=1", "--seed=2"]}}, "'--seed=2'", "remove one"),
    ({"runtime": {"args": ["--enforce-eager=1"]}}, "'--enforce-eager=1'", "write --enforce-eager alone"),
    ({"runtime": {"args": ["--gpu-memory-utilization=1.5"]}}, "--gpu-memory-utilization=1.5", "up to 1"),
    ({"runtime": {"args": ["--quantization=../x"]}}, "--quantization=../x", "takes a name"),
    ({"runtime": {"args": ["--additional-config=[]"]}}, "--additional-config=[]", "JSON object"),
    ({"runtime": {"args": ["--trust-remote-code"]}}, "'--trust-remote-code'", "choose among --additional-config"),
    ({"runtime": {"args": ["--tensor-parallel-size=2"]}}, "--tensor-parallel-size=2", "spec.parallelism.tensor"),
    ({"runtime": {"args": ["--no-enable-prefix-caching"]}}, "--no-enable-prefix-caching", "spec.engine.prefixCache"),
    ({"runtime": {"args": ["--tool-call-parser=hermes"]}}, "spec.runtime.args", "both or neither"),
    (
        {"engine": {"toolFormat": "Hermes"}, "runtime": {"args": ["--tool-call-parser=hermes"]}},
        "spec.engine.toolFormat",
        "remove one of them",
    ),
]


@pytest.mark.parametrize(("changes", "named", "remedy"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_vllm_cannot_do_is_refused_with_a_condition(changes: dict[str, Any], named: str, remedy: str) -> None:
    fleet = Fleet(pool=pool_spec(podTemplate={"allowedImages": [IMAGE]}))
    fleet.add_model("tiny", vllm(**changes))
    assert is_quiet(fleet.step())
    status, reason, message = fleet.condition("tiny", "Accepted")
    assert (status, reason) == ("False", Reason.RUNTIME_UNABLE)
    assert named in message
    assert remedy in message


@pytest.mark.parametrize(
    ("allowed", "image", "says"),
    [
        ([], None, "ask its owner to add one"),
        ([], IMAGE, "ask its owner to add one"),
        ([IMAGE], "other:1", f"set it to one of: {IMAGE}"),
        ([IMAGE, "other:1"], None, "there are several images"),
    ],
)
def test_only_images_of_the_pool_are_run(allowed: list[str], image: str | None, says: str) -> None:
    fleet = Fleet(pool=pool_spec(podTemplate={"allowedImages": allowed}))
    fleet.add_model("tiny", vllm(runtime={"image": image} if image else {}))
    assert is_quiet(fleet.step())
    status, reason, message = fleet.condition("tiny", "Accepted")
    assert (status, reason) == ("False", Reason.IMAGE_NOT_ALLOWED)
    assert says in message


def test_a_pool_without_npus_does_not_run_vllm() -> None:
    assert "set it to Native" in vllm_refusal(vllm(), Device.CPU)


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_field_that_tunes_the_native_engine_only_is_named(field: str) -> None:
    alias = EngineOverrides.model_fields[field].alias
    values = {"preemption": "Conservative", "schedulingPolicy": "ThroughputOptimised", "continuousMemory": False}
    fleet = Fleet(pool=pool_spec(podTemplate={"allowedImages": [IMAGE]}))
    fleet.add_model("tiny", vllm(engine={alias: values.get(str(alias), 2)}))
    fleet.settle()
    assert fleet.condition("tiny", "Ready")[0] == "True"
    status, _, message = fleet.condition("tiny", "NotYetEffective")
    assert status == "True"
    assert f"engine.{alias}" in message


def test_every_field_of_engine_is_mapped_refused_or_named() -> None:
    mapped = {
        "profile", "dtype", "max_model_length", "max_num_sequences", "max_num_batched_tokens", "chunked_prefill",
        "asynchronous_execution", "tool_format", "prefix_cache",
    }  # fmt: skip
    refused = {"precision", "calibration_ref", "max_queued_requests", "block_size", "host_cache_mi", "disk_cache_mi"}
    assert mapped | refused | set(WITHOUT_EFFECT) == set(EngineOverrides.model_fields)


@given(st.lists(st.one_of(st.text(max_size=40), st.sampled_from(sorted(ALLOWED)).map(lambda o: f"{o}={VALUES.get(o, '1')}")), max_size=4))
def test_arguments_that_are_taken_are_allowed_options(args: list[str]) -> None:
    spec = vllm(runtime={"args": args})
    if not vllm_refusal(spec, Device.NPU):
        assert {argument.partition("=")[0] for argument in args} <= ALLOWED.keys()
