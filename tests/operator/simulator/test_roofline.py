"""The roofline: what it says of known figures, and what holds for every shape and load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_operator.errors import InputError
from npufleet_operator.simulator.constants import DEVICES
from npufleet_operator.simulator.roofline import Roofline, decode, prefill
from npufleet_operator.simulator.shapes import SHAPES, Shape, shape_from_config

DEVICE = DEVICES["910B3"]

rooflines = st.builds(
    Roofline, st.sampled_from(list(DEVICES.values())), st.sampled_from(list(SHAPES.values())), st.sampled_from([1, 2, 4, 8])
)


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("chatglm3-6b", 6.2, 28),
        ("llama2-13b", 13.0, 800),
        ("qwen-14b", 14.2, 800),
        ("qwen2.5-72b", 72.7, 320),
        ("smollm2-135m", 0.135, 22.5),
    ],
)
def test_shapes_have_the_parameters_that_their_names_promise(name: str, billions: float, kv_kib: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert SHAPES[name].kv_bytes_per_token / 1024 == pytest.approx(kv_kib)


def test_a_decode_step_reads_weights_and_context_once() -> None:
    """By hand: 2 bytes for each of 12.85e9 parameters, and 819200 bytes for each of 4096 tokens, at 60 % of 1.6 TB/s; and the starts."""
    roofline = Roofline(DEVICE, SHAPES["llama2-13b"], 1)
    read = 2 * SHAPES["llama2-13b"].step_parameters + 819200 * 4096
    starts = 40 * (5 * 5e-6 + 6 * 2e-6) + 200e-6
    assert roofline.step_seconds(decode(1, 4096)) == pytest.approx(read / (0.6 * 1.6e12) + starts)


def test_a_long_prompt_is_bound_by_compute() -> None:
    """By hand: 2 operations a parameter and token, and 4·heads·128·layers a pair, at 70 % of 313e12; and the starts."""
    shape = SHAPES["qwen-14b"]
    operations = 2 * shape.step_parameters * 4096 + 4 * 40 * 128 * 40 * (4096 * 4097 / 2)
    starts = 40 * (5 * 5e-6 + 6 * 2e-6) + 200e-6
    assert Roofline(DEVICE, shape, 1).step_seconds(prefill(0, 4096)) == pytest.approx(operations / (0.7 * 313e12) + starts)


@given(rooflines, st.integers(1, 256), st.integers(0, 200_000), st.integers(1, 1000))
def test_more_context_never_makes_a_step_shorter(roofline: Roofline, sequences: int, context: int, more: int) -> None:
    assert roofline.step_seconds(decode(sequences, context + more)) >= roofline.step_seconds(decode(sequences, context))


@given(rooflines, st.integers(1, 255), st.integers(0, 200_000))
def test_another_sequence_never_makes_a_step_shorter(roofline: Roofline, sequences: int, context: int) -> None:
    assert roofline.step_seconds(decode(sequences + 1, context)) >= roofline.step_seconds(decode(sequences, context))


@given(rooflines, st.integers(0, 30_000), st.integers(1, 8000), st.integers(1, 8000))
def test_a_prompt_in_chunks_takes_the_same_operations_and_never_less_time(roofline: Roofline, start: int, first: int, second: int) -> None:
    whole = roofline.compute_seconds(prefill(start, first + second))
    parts = roofline.compute_seconds(prefill(start, first)) + roofline.compute_seconds(prefill(start + first, second))
    assert parts == pytest.approx(whole)
    stepped = roofline.step_seconds(prefill(start, first)) + roofline.step_seconds(prefill(start + first, second))
    assert stepped >= roofline.step_seconds(prefill(start, first + second))


@given(st.sampled_from(list(SHAPES.values())), st.integers(1, 128), st.integers(0, 100_000))
def test_a_faster_device_is_never_slower(shape: Shape, sequences: int, context: int) -> None:
    fast = Roofline(replace(DEVICE, fp16_flops=2 * DEVICE.fp16_flops, hbm_bytes_per_second=2 * DEVICE.hbm_bytes_per_second), shape, 1)
    work = decode(sequences, context)
    assert fast.step_seconds(work) <= Roofline(DEVICE, shape, 1).step_seconds(work)


@given(st.sampled_from(list(SHAPES.values())), st.sampled_from([1, 2, 4]))
def test_more_npus_hold_more_tokens(shape: Shape, npus: int) -> None:
    assert Roofline(DEVICE, shape, 2 * npus).kv_tokens > Roofline(DEVICE, shape, npus).kv_tokens


@given(rooflines, st.floats(0.005, 0.5), st.floats(1, 4000), st.floats(2, 1000), st.integers(1, 256))
def test_as_many_sequences_as_meet_the_target_and_not_one_more(
    r: Roofline, target: float, prompt: float, answer: float, limit: int
) -> None:
    most = r.sequences_within(target, prompt, answer, limit)
    fits = r.sequences_that_fit(prompt + answer, limit)
    assert 1 <= most <= max(1, fits)
    assert most == 1 or r.tpot_seconds(most, prompt, answer) <= target
    assert most >= fits or r.tpot_seconds(most + 1, prompt, answer) > target


@given(rooflines, st.floats(1, 4000), st.floats(2, 1000), st.integers(1, 256))
def test_nothing_is_faster_than_the_peak(r: Roofline, prompt: float, answer: float, limit: int) -> None:
    sequences = max(1, r.sequences_that_fit(prompt + answer, limit))
    real = sequences / (answer * r.tpot_seconds(sequences, prompt, answer))
    assert real <= r.peak_requests_per_second(prompt, answer, limit) * (1 + 1e-9)


def test_a_config_gives_its_shape() -> None:
    text = (
        '{"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, '
        '"vocab_size": 152064, "torch_dtype": "bfloat16"}'
    )
    assert shape_from_config(text, "here") == SHAPES["qwen2.5-7b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"hidden_size": 1}', "num_hidden_layers"),
        ('{"num_hidden_layers": -1}', "num_hidden_layers"),
        ("[" * 10**5, "not JSON"),
    ],
    ids=["truncated", "missing", "negative", "deep"],
)
def test_a_config_that_says_no_shape_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"here: .*{message}"):
        shape_from_config(text, "here")
