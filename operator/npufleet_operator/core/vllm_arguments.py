"""What an AscendModel asks for, as arguments of `vllm serve`; and what vLLM under vllm-ascend has no equal to.

Options are those of vLLM's own parser: tests hold them to its list in tests/operator/vllm_options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from npufleet_api.contract import ENGINE_PORT
from npufleet_api.model import AscendModelSpec, BlockSize, Dtype, EngineOverrides, ToolCallFormat
from npufleet_api.pool import Device
from npufleet_api.precision import KvCacheDtype, PrecisionOverrides, WeightDtype
from npufleet_api.profiles import step_limits
from npufleet_operator.core.objects.source import model_dir

BLOCK_SIZE = BlockSize.TOKENS_128
"""Tokens of a block of vllm-ascend's KV cache: its attention kernels know pages of 128."""

DTYPES: Mapping[Dtype, str] = {
    Dtype.AUTO: "auto",
    Dtype.FLOAT32: "float32",
    Dtype.BFLOAT16: "bfloat16",
    Dtype.FLOAT16: "float16",
}
TOOL_PARSERS: Mapping[ToolCallFormat, str] = {ToolCallFormat.HERMES: "hermes", ToolCallFormat.LLAMA: "llama3_json"}
"""vLLM reads no format off a chat template: Auto leaves its parsing of calls off."""

WITHOUT_EFFECT = ("preemption", "scheduling_policy", "starvation_steps", "pipeline_depth", "continuous_memory", "fusion_level")
"""Fields of `engine` that tune the native engine only: what is answered is the same without them."""

ARGUMENT = re.compile(r"(--[a-z][a-z0-9-]*)(?:=(.+))?", re.DOTALL)


def _integer(low: int, high: int) -> Callable[[str], str]:
    def check(value: str) -> str:
        right = value.isascii() and value.isdigit() and low <= int(value) <= high
        return "" if right else f"takes a whole number from {low} to {high}"

    return check


def _share(value: str) -> str:
    return "" if re.fullmatch(r"0?\.[0-9]{1,6}|1(\.0{1,6})?", value) and float(value) > 0 else "takes a number above 0, up to 1"


def _name(value: str) -> str:
    return "" if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value) else "takes a name of letters, digits, '_', '-' and '.'"


def _json_object(value: str) -> str:
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = None
    return "" if isinstance(read, dict) else "takes a JSON object"


ALLOWED: Mapping[str, Callable[[str], str] | None] = {
    "--additional-config": _json_object,
    "--enable-auto-tool-choice": None,
    "--enable-expert-parallel": None,
    "--enforce-eager": None,
    "--gpu-memory-utilization": _share,
    "--limit-mm-per-prompt": _json_object,
    "--long-prefill-token-threshold": _integer(1, 1048576),
    "--max-logprobs": _integer(0, 1024),
    "--override-generation-config": _json_object,
    "--quantization": _name,
    "--reasoning-parser": _name,
    "--seed": _integer(0, 2**63 - 1),
    "--tool-call-parser": _name,
}
"""Options of `runtime.args`, and what is wrong with a value; None: the option takes none. None of them names a path, an address or code,
and none says what a field of the resource says."""

FIELDS: Mapping[str, str] = {
    "--block-size": "spec.engine.blockSize",
    "--data-parallel-size": "spec.scaling",
    "--dtype": "spec.engine.dtype",
    "--enable-chunked-prefill": "spec.engine.chunkedPrefill",
    "--enable-prefix-caching": "spec.engine.prefixCache",
    "--kv-cache-dtype": "spec.engine.precision.kvCache",
    "--max-model-len": "spec.engine.maxModelLength",
    "--max-num-batched-tokens": "spec.engine.maxNumBatchedTokens",
    "--max-num-seqs": "spec.engine.maxNumSequences",
    "--model": "spec.model.uri",
    "--pipeline-parallel-size": "spec.parallelism.pipeline",
    "--revision": "spec.model.revision",
    "--served-model-name": "spec.model.servedName",
    "--tensor-parallel-size": "spec.parallelism.tensor",
}
"""Options that are not allowed since a field says it."""


def vllm_arguments(namespace: str, name: str, spec: AscendModelSpec) -> tuple[str, ...]:
    """What follows `vllm serve` for a model that `vllm_refusal` takes. An option and its value are one argument, save names."""
    engine = spec.engine
    sequences, tokens = step_limits(engine)
    served = spec.model.served_name or name
    names = dict.fromkeys((served, f"{namespace}/{name}"))
    arguments = [
        model_dir(spec),
        "--host=0.0.0.0",
        f"--port={ENGINE_PORT}",
        "--served-model-name",
        *names,
        f"--dtype={DTYPES[engine.dtype or Dtype.AUTO]}",
        "--kv-cache-dtype=auto",
        f"--block-size={int(BLOCK_SIZE)}",
        f"--tensor-parallel-size={spec.parallelism.tensor}",
        f"--pipeline-parallel-size={spec.parallelism.pipeline}",
        f"--max-num-seqs={sequences}",
        f"--max-num-batched-tokens={tokens}",
        "--no-enable-prefix-caching" if engine.prefix_cache is False else "--enable-prefix-caching",
    ]
    if engine.max_model_length is not None:
        arguments.append(f"--max-model-len={engine.max_model_length}")
    # A profile's own choice is not passed on: without chunks vLLM takes no prompt that is longer than a step.
    if engine.chunked_prefill is not None:
        arguments.append("--enable-chunked-prefill" if engine.chunked_prefill else "--no-enable-chunked-prefill")
    if engine.asynchronous_execution is not None:
        arguments.append("--async-scheduling" if engine.asynchronous_execution else "--no-async-scheduling")
    if engine.tool_format is not None and engine.tool_format in TOOL_PARSERS:
        arguments += ["--enable-auto-tool-choice", f"--tool-call-parser={TOOL_PARSERS[engine.tool_format]}"]
    return (*arguments, *spec.runtime.args)


def vllm_refusal(spec: AscendModelSpec, device: Device) -> str:
    """Field, value and remedy of the first thing that vLLM cannot do as the model asks; empty where there is none."""
    if device is not Device.NPU:
        return f"spec.runtime.name: VLLMAscend needs NPUs, and the pool's podTemplate.device is {device}; set it to Native"
    if any(pattern.lower().endswith(".gguf") for pattern in spec.model.files):
        return "spec.model.files: vllm-ascend reads no GGUF; name safetensors, or set spec.runtime.name to Native"
    return _unknown_setting(spec.engine) or _wrong_batch(spec.engine) or _wrong_precision(spec.engine.precision) or _wrong_arguments(spec)


def fields_without_effect(spec: AscendModelSpec) -> list[str]:
    """Fields that are set and that tune the native engine only."""
    fields = EngineOverrides.model_fields
    return [f"engine.{fields[name].alias} (VLLMAscend tunes itself)" for name in WITHOUT_EFFECT if getattr(spec.engine, name) is not None]


def _unknown_setting(engine: EngineOverrides) -> str:
    if engine.block_size not in (None, BLOCK_SIZE):
        return f"spec.engine.blockSize: {int(engine.block_size)} is no block of vllm-ascend; remove it, or set it to {int(BLOCK_SIZE)}"
    if engine.max_queued_requests is not None:
        return (
            f"spec.engine.maxQueuedRequests: vLLM cannot bound its queue, {engine.max_queued_requests} asks for that; remove it, "
            "the gateway's queueSeconds bounds how long requests wait"
        )
    if engine.calibration_ref is not None:
        return "spec.engine.calibrationRef: vLLM reads no calibration of npufleet; remove it, or set spec.runtime.name to Native"
    for field, value in (("hostCacheMi", engine.host_cache_mi), ("diskCacheMi", engine.disk_cache_mi)):
        if value:
            return f"spec.engine.{field}: {value} asks for a tier of KV that VLLMAscend does not set up; remove it, or choose Native"
    return ""


def _wrong_batch(engine: EngineOverrides) -> str:
    sequences, tokens = step_limits(engine)
    if tokens < sequences:
        return (
            f"spec.engine.maxNumBatchedTokens: {tokens} is below maxNumSequences {sequences}, and vLLM refuses to start so; "
            f"raise it to {sequences} or lower maxNumSequences"
        )
    if engine.chunked_prefill is False and (engine.max_model_length is None or engine.max_model_length > tokens):
        return (
            f"spec.engine.chunkedPrefill: without chunks vLLM takes no prompt that is longer than a step of {tokens} tokens; remove it, or "
            f"set maxModelLength to at most {tokens}"
        )
    return ""


def _wrong_precision(precision: PrecisionOverrides | None) -> str:
    if precision is None:
        return ""
    if precision.kv_cache not in (None, KvCacheDtype.AUTO):
        return (
            f"spec.engine.precision.kvCache: vllm-ascend keeps KV as {precision.kv_cache} only where the checkpoint was quantised for it; "
            "remove it, or set spec.runtime.name to Native"
        )
    by_role = {"attention": precision.attention, "feedForward": precision.feed_forward, "output": precision.output}
    wrong = next((role for role, dtype in by_role.items() if dtype not in (None, WeightDtype.AUTO)), "layers" if precision.layers else "")
    if wrong:
        return (
            f"spec.engine.precision.{wrong}: vLLM has one type for all weights; remove it and set spec.engine.dtype, or serve a checkpoint "
            "that was quantised with ModelSlim with runtime.args --quantization=ascend"
        )
    return ""


def _wrong_arguments(spec: AscendModelSpec) -> str:
    seen: set[str] = set()
    for argument in spec.runtime.args:
        found = ARGUMENT.fullmatch(argument)
        option, value = (found[1], found[2]) if found else ("", None)
        if wrong := _wrong_argument(option, value, seen):
            return f"spec.runtime.args: {argument!r} {wrong}"
        seen.add(option)
    if "--tool-call-parser" in seen and spec.engine.tool_format in TOOL_PARSERS:
        return f"spec.runtime.args: --tool-call-parser says what spec.engine.toolFormat {spec.engine.tool_format} says; remove one of them"
    if ("--tool-call-parser" in seen) != ("--enable-auto-tool-choice" in seen) and spec.engine.tool_format not in TOOL_PARSERS:
        return "spec.runtime.args: vLLM takes --enable-auto-tool-choice and --tool-call-parser=NAME together only; write both or neither"
    return ""


def _wrong_argument(option: str, value: str | None, seen: set[str]) -> str:
    if not option:
        return "is no option; write --NAME or --NAME=VALUE"
    if field := FIELDS.get(option.replace("--no-", "--", 1)):
        return f"is said by {field}; set that instead"
    if option not in ALLOWED:
        return f"is none of the options that models may set; choose among {', '.join(ALLOWED)}"
    if option in seen:
        return "is there twice; remove one"
    check = ALLOWED[option]
    if check is None:
        return "" if value is None else f"has a value; write {option} alone"
    if value is None:
        return f"has no value; write {option}=VALUE"
    return check(value)
