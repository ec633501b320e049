"""The compiled CPU kernels against the references, on every instruction set that this CPU has; the others are skipped by name."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from npufleet_kernels import attention, int8, linear, linear_int8, native, rms_norm, rope, silu_mul
from npufleet_kernels.build import UNITS, compile_unit, find_compiler
from npufleet_kernels.errors import VariantMissingError
from npufleet_kernels.native import PackedLinear
from npufleet_kernels.paged import PagedStep
from npufleet_kernels.stack_cpu import PARTS, CpuStack, StackLayer, StackShape

EPSILON = 1e-5
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}
"""Of outputs of about unit size, against float64: bfloat16 rounds activations between the parts of a layer to 8 bits."""
DTYPES = sorted(TOLERANCE, key=str)


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    if name not in native.levels():
        pytest.skip(f"this CPU cannot run {name}: it has {', '.join(native.levels())}")
    native.choose(name)
    yield name
    native.choose()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 11, 12, 13, 25, 97])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (32, 2), (33, 17), (70, 64), (96, 257)])
def test_a_packed_product_is_that_of_the_reference(level: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1), random(outputs, seed=2)
    expected = linear.reference(x.double(), weight.double(), bias.double())
    found = native.pack(weight, bias=bias)(x, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)
    rounded = native.pack(weight, bias=bias)(x, torch.bfloat16)
    assert torch.equal(rounded, found.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 1), (64, 33), (70, 128)])
def test_int8_weights_are_multiplied_without_rounding_activations_further(
    level: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, seed=2)
    weight, scale = int8.quantise(random(outputs, inputs, seed=1))
    expected = linear_int8.reference(x.double(), weight, scale, bias)
    found = native.pack(weight, scale, bias, segments=2)(x, torch.float32)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize("columns", [1, 16, 37, 576])
def test_weights_are_quantised_as_by_the_reference(level: str, columns: int) -> None:
    weight = random(40, columns)
    weight[3] = 0
    weight[4] *= 1e-41
    weight[5] *= 1e30
    for found, expected in zip(native.quantise(weight), int8.quantise(weight), strict=True):
        assert torch.equal(found, expected)
    for broken in (float("nan"), float("inf"), float("-inf")):
        weight[7, columns // 2] = broken
        assert not native.quantise(weight)[1][7].isfinite()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_row_gets_the_same_bits_in_any_batch(level: str, kind: str) -> None:
    x, weight = random(100, 130), random(50, 130, seed=1)
    packed = native.pack(*int8.quantise(weight)) if kind == "int8" else native.pack(weight.to(getattr(torch, kind)))
    rows = x if kind == "float32" else x.to(torch.bfloat16)
    together = packed(rows, torch.float32)
    for start, end in ((0, 1), (7, 9), (3, 16), (20, 45), (0, 99)):
        assert torch.equal(packed(rows[start:end], torch.float32), together[start:end])


def test_the_first_of_the_greatest_is_taken_and_what_is_no_number_never(level: str) -> None:
    logits = random(5, 1003)
    logits[0, [40, 900]] = 50.0
    logits[1, 1002] = 60.0
    logits[2, 3] = float("nan")
    logits[2, 77] = 70.0
    logits[3] = float("-inf")
    logits[4] = float("nan")
    assert native.argmax(logits).tolist() == [40, 1002, 77, 0, 0]


class Model:
    """Weights of a small decoder, and its layers by the references in float64."""

    def __init__(
        self,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        size: int,
        quantised: bool = False,
        extras: bool = False,
        rotary: int | None = None,
    ) -> None:
        self.dtype, self.heads, self.kv_heads, self.size = dtype, heads, kv_heads, size
        self.hidden, self.inner, self.rotary = 40, 50, rotary or size
        self.quantised, self.extras = quantised, extras
        rows = (heads + 2 * kv_heads) * size
        self.layers = []
        for index in range(2):
            shapes = ((rows, self.hidden), (self.hidden, heads * size), (2 * self.inner, self.hidden), (self.hidden, self.inner))
            weights = [random(*shape, seed=index * 10 + i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
            biases = [random(shape[0], seed=index * 10 + 5 + i) / 4 if extras else None for i, shape in enumerate(shapes)]
            norms = [1 + random(n, seed=50 + i) / 8 for i, n in enumerate((self.hidden, self.hidden, size, size))]
            self.layers.append((weights, biases, norms))
        self.norm = 1 + random(self.hidden, seed=99) / 8

    def stack(self) -> CpuStack:
        def packed(weight: Tensor, bias: Tensor | None, segments: int = 1) -> PackedLinear:
            if self.quantised:
                return native.pack(*int8.quantise(weight), bias, segments)
            return native.pack(weight.to(self.dtype), None, bias, segments)

        layers = []
        for weights, biases, norms in self.layers:
            parts = [packed(weight, bias, 2 if i == 2 else 1) for i, (weight, bias) in enumerate(zip(weights, biases, strict=True))]
            query_norm, key_norm = (norms[2], norms[3]) if self.extras else (None, None)
            layers.append(StackLayer(norms[0], parts[0], query_norm, key_norm, parts[1], norms[1], parts[2], parts[3]))
        narrow = self.dtype is torch.bfloat16
        shape = StackShape(self.hidden, self.heads, self.kv_heads, self.size, self.inner, EPSILON, narrow)
        return CpuStack(shape, layers, self.norm)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] / 10000 ** (torch.arange(self.rotary // 2) / (self.rotary / 2))
        doubled = torch.cat((angles, angles), dim=-1)
        return doubled.cos(), doubled.sin()

    def _weight(self, weight: Tensor) -> Tensor:
        return int8.dequantise(*int8.quantise(weight)).double() if self.quantised else weight.to(self.dtype).double()

    def expected(self, hidden: Tensor, quantised_heads: int = 0) -> Tensor:
        """Of one sequence, whole."""
        x = hidden.double()
        cos, sin = (part.double() for part in self.rotation(torch.arange(len(hidden))))
        for weights, biases, norms in self.layers:
            wide = [self._weight(weight) for weight in weights]
            added = [None if bias is None else bias.double() for bias in biases]
            parts = linear.reference(rms_norm.reference(x, norms[0].double(), EPSILON)[0], wide[0], added[0]).view(len(x), -1, self.size)
            query, key, value = torch.split(parts, [self.heads, self.kv_heads, self.kv_heads], dim=1)
            if self.extras:
                query, key = (_norm_heads(part, norm.double()) for part, norm in ((query, norms[2]), (key, norms[3])))
            query, key = rope.reference(query, key, cos, sin)
            keys, values = key.transpose(0, 1).clone(), value.transpose(0, 1).clone()
            for side in (keys, values):
                if quantised_heads:
                    side[-quantised_heads:] = int8.dequantise(*int8.quantise(side[-quantised_heads:].float())).double()
            mixed = attention.full(query, [keys], [values], [len(x)], self.size**-0.5).reshape(len(x), -1)
            x = x + linear.reference(mixed, wide[1], added[1])
            gate_up = linear.reference(rms_norm.reference(x, norms[1].double(), EPSILON)[0], wide[2], added[2])
            x = x + linear.reference(silu_mul.reference(gate_up), wide[3], added[3])
        return rms_norm.reference(x, self.norm.double(), EPSILON)[0]


def _norm_heads(heads: Tensor, weight: Tensor) -> Tensor:
    return rms_norm.reference(heads.reshape(-1, heads.shape[-1]), weight, EPSILON)[0].view(heads.shape)


class Pages:
    """A cache of two layers whose sequences lie at any slots."""

    def __init__(self, model: Model, slots: int, int8_heads: int = 0) -> None:
        self.tensors: list[Tensor | None] = []
        floats = model.kv_heads - int8_heads
        for _ in model.layers:
            if floats:
                self.tensors += [torch.full((floats, slots, model.size), float("nan"), dtype=model.dtype) for _ in range(2)] + [None, None]
            if int8_heads:
                self.tensors += [torch.zeros((int8_heads, slots, model.size), dtype=torch.int8) for _ in range(2)]
                self.tensors += [torch.full((int8_heads, slots), float("nan")) for _ in range(2)]
        self.groups = [(floats > 0) + (int8_heads > 0)] * len(model.layers)

    def step(self, places: list[tuple[Tensor, int]]) -> PagedStep:
        """places: slots of all tokens of each sequence, and how many are new."""
        firsts = [int(slots[0]) if bool((slots.diff() == 1).all()) else -1 for slots, _ in places]
        scattered = [slots for (slots, _), first in zip(places, firsts, strict=True) if first < 0]
        new = torch.cat([slots[len(slots) - count :] for slots, count in places])
        lengths = [len(slots) for slots, _ in places]
        return PagedStep(self.tensors, self.groups, new, lengths, firsts, torch.cat(scattered) if scattered else new[:0])


def computed(model: Model, sequences: list[Tensor], int8_heads: int, chunks: list[list[int]], scatter: bool) -> list[Tensor]:
    """Each sequence's hidden states, computed in steps of so many tokens of each."""
    total = sum(len(one) for one in sequences)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(3)) if scatter else torch.arange(total)
    slots = list(torch.split(order, [len(one) for one in sequences]))
    pages, stack = Pages(model, total, int8_heads), model.stack()
    done, found = [0] * len(sequences), [[] for _ in sequences]  # type: list[int], list[list[Tensor]]
    for counts in chunks:
        rows = [sequence[start : start + count] for sequence, start, count in zip(sequences, done, counts, strict=True)]
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)])
        present = [index for index, count in enumerate(counts) if count]
        step = pages.step([(slots[index][: done[index] + counts[index]], counts[index]) for index in present])
        hidden = torch.cat(rows).contiguous()
        output = stack.forward(hidden, model.rotation(positions), [counts[index] for index in present], step)
        for index, part in enumerate(torch.split(output, counts)):
            found[index].append(part)
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 64), (4, 2, 80), (6, 2, 32), (8, 1, 128), (3, 3, 256), (4, 2, 6)])
@pytest.mark.parametrize("extras", [False, True])
def test_the_stack_computes_what_the_references_do(
    level: str, dtype: torch.dtype, heads: int, kv_heads: int, size: int, extras: bool
) -> None:
    model = Model(dtype, heads, kv_heads, size, extras=extras)
    hidden = random(70, model.hidden, dtype=dtype, seed=7)
    (found,) = computed(model, [hidden], 0, [[70]], scatter=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), model.expected(hidden), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8_heads", [0, 1, 2])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_pieces_batches_and_places_change_no_bit(level: str, dtype: torch.dtype, int8_heads: int, scatter: bool, quantised: bool) -> None:
    model = Model(dtype, 4, 2, 16, quantised=quantised)
    sequences = [random(count, model.hidden, dtype=dtype, seed=count) for count in (1, 63, 64, 65, 140)]
    whole = [computed(model, [one], int8_heads, [[len(one)]], scatter=False)[0] for one in sequences]
    chunks = [[1, 0, 30, 64, 100], [0, 62, 33, 1, 39], [0, 1, 1, 0, 1]]
    for found, alone in zip(computed(model, sequences, int8_heads, chunks, scatter), whole, strict=True):
        assert torch.equal(found, alone)
    if not int8_heads or dtype is torch.float32:
        expected = model.expected(sequences[-1], int8_heads)
        # Rounded keys and values move by a step where float32 and float64 fall on different sides of a half.
        tolerance = 2e-2 if int8_heads else TOLERANCE[dtype]
        torch.testing.assert_close(whole[-1].double(), expected, rtol=tolerance, atol=tolerance)


def test_only_the_first_part_of_a_head_may_be_rotated(level: str) -> None:
    model = Model(torch.float32, 4, 2, 16, rotary=8)
    hidden = random(9, model.hidden, seed=7)
    (found,) = computed(model, [hidden], 0, [[9]], scatter=False)
    torch.testing.assert_close(found.double(), model.expected(hidden), rtol=3e-5, atol=3e-5)


def test_numbers_of_threads_change_no_bit(level: str) -> None:
    model, before = Model(torch.float32, 4, 2, 16), torch.get_num_threads()
    sequences = [random(count, model.hidden, seed=count) for count in (3, 70)]
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(computed(model, sequences, 0, [[2, 69], [1, 1]], scatter=True))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_the_profile_has_every_part_and_is_forgotten_when_read() -> None:
    native.choose()
    model = Model(torch.float32, 4, 2, 16)
    pages, stack = Pages(model, 4), model.stack()
    step = pages.step([(torch.arange(4), 4)])
    stack.forward(random(4, model.hidden), model.rotation(torch.arange(4)), [4], step, profile=True)
    assert set(PARTS) == {name for name, seconds in stack.take_profile().items() if seconds > 0}
    assert set(stack.take_profile().values()) == {0.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lengths": [3]}, "4 new tokens of 3"),
        ({"first_slots": [6]}, "slots beyond"),
        ({"new_slots": torch.tensor([0, 1, 2, 8])}, "slot 8"),
        ({"first_slots": [-1]}, "slots are missing"),
        ({"groups": [1]}, "the cache has 1 layers, the model 2"),
        ({"tensors": [None] * 8}, "tensors are missing"),
    ],
    ids=str,
)
def test_a_step_that_does_not_fit_the_cache_is_refused(change: dict[str, object], said: str) -> None:
    native.choose()
    model = Model(torch.float32, 4, 2, 16)
    step = Pages(model, 8).step([(torch.arange(4), 4)])
    fields = {name: getattr(step, name) for name in PagedStep.__slots__} | change
    with pytest.raises(RuntimeError, match=said):
        model.stack().forward(random(4, model.hidden), model.rotation(torch.arange(4)), [4], PagedStep(**fields))


@pytest.mark.parametrize(("word", "said"), [("avx1024", "no choice"), ("avx2", None), ("reference", None)])
def test_the_environment_chooses(word: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_ENV, word)
    if said:
        with pytest.raises(VariantMissingError, match=said):
            native.available()
        return
    assert native.available() == (word != "reference")
    if word != "reference":
        assert native.choose() == word
    monkeypatch.delenv(native.ISA_ENV)
    assert native.choose() == native.levels()[-1]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed: instructions cannot be read")
@pytest.mark.parametrize(
    ("name", "forbidden", "present"),
    [
        ("step", ("%ymm", "%zmm", "%k1"), ("%xmm",)),
        ("pool", ("%ymm", "%zmm", "%k1"), ()),
        ("avx2", ("%zmm", "%k1", "{%k", "%ymm16", "%xmm16"), ("%ymm", "vfmadd")),
        ("avx512", ("vdpbf16ps", "vcvtne", "vpdpbusd", "tdp"), ("%zmm", "vfmadd")),
        ("avx512_bf16", ("vpdpbusd", "tdp"), ("vdpbf16ps",)),
    ],
)
def test_no_unit_has_instructions_beyond_its_level(name: str, forbidden: tuple[str, ...], present: tuple[str, ...], tmp_path: Path) -> None:
    (unit,) = (unit for unit in UNITS if unit.name == name)
    made = compile_unit(find_compiler(), unit, tmp_path)
    command = ["objdump", "-d", "--no-show-raw-insn", str(made)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [sign for sign in forbidden if sign in listing] == []
    assert [sign for sign in present if sign not in listing] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed: symbols cannot be read")
def test_units_of_an_instruction_set_share_no_function_with_others(tmp_path: Path) -> None:
    """The linker keeps one copy of a function that several units have: it could be the one with the widest instructions."""
    for unit in (unit for unit in UNITS if unit.source == "isa.cpp"):
        made = compile_unit(find_compiler(), unit, tmp_path)
        lines = subprocess.run(["nm", "--defined-only", str(made)], capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line for line in lines if line.split()[-2] in "WVu"] == []


def test_levels_are_the_units_that_are_compiled() -> None:
    assert list(native.LEVELS) == [unit.name for unit in UNITS if unit.source == "isa.cpp"]
