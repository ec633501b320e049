"""Every call of an NPU operator in the code base, found by reading it, against torch_npu's schemas and meta functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import npufleet_kernels.npu.operators
import npufleet_pod
from npufleet_kernels.npu import fused_attention, operators

ROOT = Path(__file__).parents[3]
PACKAGES = ("kernels", "inference_pod")
BF16, F32, I8, I32 = torch.bfloat16, torch.float32, torch.int8, torch.int32


@dataclass(frozen=True, slots=True)
class Call:
    """torch.ops.npu.NAME(...) or torch_npu.NAME(...), where it stands."""

    name: str
    file: str
    line: int
    positional: int
    keywords: tuple[str, ...]


def calls() -> list[Call]:
    return [call for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")) for call in _calls_in(file)]


def _calls_in(file: Path) -> Iterator[Call]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and (name := _operator(node.func)) is not None:
            assert not any(isinstance(one, ast.Starred) for one in node.args), f"{file}:{node.lineno}: * hides what is passed"
            assert all(one.arg for one in node.keywords), f"{file}:{node.lineno}: ** hides what is passed"
            where = str(file.relative_to(ROOT))
            yield Call(name, where, node.lineno, len(node.args), tuple(one.arg for one in node.keywords if one.arg))


def _operator(function: ast.expr) -> str | None:
    text = ast.unparse(function)
    for prefix in ("torch.ops.npu.", "torch.ops.atb.", "torch_npu."):
        if text.startswith(prefix):
            return text.removeprefix(prefix).split(".")[0]
    return None


CALLS = calls()
NAMES = sorted({call.name for call in CALLS})


def test_operators_are_called_by_the_wrapper_alone() -> None:
    assert {call.file for call in CALLS} == {"kernels/npufleet_kernels/npu/operators.py", "kernels/npufleet_kernels/npu/fused_attention.py"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.name}:{call.line}")
def test_arguments_are_those_of_the_schema(call: Call) -> None:
    operator = getattr(torch.ops.npu, call.name)
    reasons = [reason for overload in operator.overloads() if (reason := _mismatch(getattr(operator, overload)._schema, call))]
    assert len(reasons) < len(operator.overloads()), f"{call.file}:{call.line}: {'; '.join(reasons)}"


def _mismatch(schema: torch.FunctionSchema, call: Call) -> str:
    arguments = schema.arguments
    by_place = [one.name for one in arguments if not one.kwarg_only]
    names = {one.name for one in arguments}
    if call.positional > len(by_place):
        return f"takes {len(by_place)} by place"
    if unknown := set(call.keywords) - names:
        return f"has no {', '.join(sorted(unknown))}"
    given = {*by_place[: call.positional], *call.keywords}
    missing = [one.name for one in arguments if not one.has_default_value() and one.name not in given]
    return f"misses {', '.join(missing)}" if missing else ""


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


T, HIDDEN, HEADS, KV_HEADS, SIZE, PAGES, B = 514, 8192, 64, 8, 128, 64, 3
PAGED = (meta(PAGES, 128, KV_HEADS, SIZE), meta(PAGES, 128, KV_HEADS, SIZE), meta(B, 8, dtype=I32))

META_CALLS: dict[str, list[tuple[Callable[[], object], object]]] = {
    "npu_rms_norm": [(lambda: operators.rms_norm(meta(T, HIDDEN), meta(HIDDEN), 1e-5), (BF16, T, HIDDEN))],
    "npu_add_rms_norm": [
        (lambda: operators.add_rms_norm(meta(T, HIDDEN), meta(T, HIDDEN), meta(HIDDEN), 1e-5)[1], (BF16, T, HIDDEN)),
    ],
    "npu_layer_norm_eval": [(lambda: operators.layer_norm(meta(T, HIDDEN), meta(HIDDEN), meta(HIDDEN), 1e-5), (BF16, T, HIDDEN))],
    "npu_add_layer_norm": [
        (lambda: operators.add_layer_norm(meta(T, HIDDEN), meta(T, HIDDEN), meta(HIDDEN), meta(HIDDEN), 1e-5), (BF16, T, HIDDEN)),
    ],
    "npu_apply_rotary_pos_emb": [
        (
            lambda: operators.rotate(meta(T, HEADS, SIZE), meta(T, KV_HEADS, SIZE), meta(T, SIZE), meta(T, SIZE))[1],
            (BF16, T, KV_HEADS, SIZE),
        ),
    ],
    "npu_swiglu": [(lambda: operators.swiglu(meta(T, 2 * 29568)), (BF16, T, 29568))],
    "npu_gelu": [(lambda: operators.gelu(meta(T, HIDDEN), True), (BF16, T, HIDDEN))],
    "npu_scatter_pa_kv_cache": [
        (lambda: operators.write_kv_pages(meta(T, KV_HEADS, SIZE), meta(T, KV_HEADS, SIZE), *PAGED[:2], meta(T, dtype=I32)), None),
    ],
    "npu_dynamic_quant": [(lambda: operators.dynamic_quantise(meta(T, HIDDEN))[1], (F32, T))],
    "npu_quant_matmul": [
        (
            lambda: operators.quantised_matmul(
                meta(T, HIDDEN, dtype=I8), meta(T, dtype=F32), meta(1024, HIDDEN, dtype=I8), meta(1024, dtype=F32), BF16
            ),
            (BF16, T, 1024),
        ),
    ],
    "npu_weight_quant_batchmatmul": [
        (
            lambda: operators.weight_quantised_matmul(meta(T, HIDDEN), meta(1024, HIDDEN, dtype=I8), meta(1024, dtype=F32), meta(1024)),
            (BF16, T, 1024),
        ),
    ],
    "npu_mm_all_reduce_base": [(lambda: operators.matmul_all_reduce(meta(T, HIDDEN), meta(1024, HIDDEN), "group", 8), (BF16, T, 1024))],
    "npu_top_k_top_p": [
        (lambda: operators.filter_top_k_top_p(meta(B, 152064), meta(B), meta(B, dtype=I32)), (BF16, B, 152064)),
    ],
    "npu_format_cast": [(lambda: operators.to_tiles(meta(1024, HIDDEN)), (BF16, 1024, HIDDEN))],
    "npu_fused_infer_attention_score_v2": [
        (
            lambda: fused_attention.paged_tnd(meta(T, HEADS, SIZE), *PAGED, [512, 1, 1], [512, 700, 129], 0.1),
            (BF16, T, HEADS, SIZE),
        ),
        (
            lambda: fused_attention.dense_tnd(
                meta(T, HEADS, SIZE), meta(T, KV_HEADS, SIZE), meta(T, KV_HEADS, SIZE), [512, 1, 1], [512, 1, 1], 0.1, False
            ),
            (BF16, T, HEADS, SIZE),
        ),
        (
            lambda: fused_attention.paged_bsnd(meta(B, 1, HEADS, SIZE), *PAGED, [512, 700, 129], 0.1),
            (BF16, B, 1, HEADS, SIZE),
        ),
        (
            lambda: fused_attention.paged_int8_decode(
                meta(B, HEADS, SIZE),
                PAGED[0].to(I8),
                meta(B, KV_HEADS, 1024, dtype=F32),
                PAGED[1].to(I8),
                meta(B, KV_HEADS, 1024, dtype=F32),
                PAGED[2],
                [512, 700, 129],
                0.1,
            ),
            (BF16, B, HEADS, SIZE),
        ),
    ],
}
"""A call of the wrapper, at a 72B model's sizes, for every operator in the code base: what it gives, as type and shape."""


def test_every_operator_in_the_code_base_has_a_call_on_meta_tensors() -> None:
    assert sorted(META_CALLS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_meta_function_answers_as_the_wrapper_says(name: str) -> None:
    for call, expected in META_CALLS[name]:
        answer = call()
        if expected is None:
            assert answer is None
        else:
            assert isinstance(answer, torch.Tensor)
            assert (answer.dtype, *answer.shape) == expected


def test_calls_are_found_in_any_form(tmp_path: Path) -> None:
    file = ROOT / "kernels" / "npufleet_kernels" / "npu" / "operators.py"
    assert Path(npufleet_kernels.npu.operators.__file__) == file
    assert npufleet_pod.__file__ is not None
    found = _operator(ast.parse("torch.ops.npu.npu_swiglu.default(x)").body[0].value.func)  # type: ignore[attr-defined] # an expression
    assert found == "npu_swiglu"
    assert _operator(ast.parse("torch_npu.npu_swiglu(x)").body[0].value.func) == "npu_swiglu"  # type: ignore[attr-defined] # the same
    assert _operator(ast.parse("torch.nn.functional.silu(x)").body[0].value.func) is None  # type: ignore[attr-defined] # the same
